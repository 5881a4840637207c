"""Global-update stability: how far two trainings drift apart whose sets of clients differ in one client.

Everything else is the same in both, the first weights, the participants' numbers and the random streams of
all unchanged clients, so the whole difference is due to the replaced client.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import FlatfedError
from flatfed.core.sampling import cohort
from flatfed.core.types import Count
from flatfed.data.federation import Federation, LoadedFederation, PooledFederation
from flatfed.data.pool import Pool
from flatfed.data.samples import Samples
from flatfed.diagnostics import figures
from flatfed.diagnostics.constants import gradient_bound, most_steps
from flatfed.diagnostics.local_stability import evenly_spaced
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent
from flatfed.theory.stability import stability_bound
from flatfed.training.loop import Progress


def with_client_replaced(federation: Federation, client: int, by: int) -> Federation:
    """A neighbouring federation: one client's data are those of another."""
    if isinstance(federation, PooledFederation):
        rows = [federation.rows(by if number == client else number) for number in range(len(federation))]
        pool = Pool("clients", federation.inputs, federation.targets, rows)
        return PooledFederation(pool, federation.test, federation.transform, federation.classes)

    def load(number: int) -> Samples:
        own = federation.client(by if number == client else number)
        return own.whole()

    neighbour = LoadedFederation(len(federation), load, federation.test)
    neighbour.transform = federation.transform
    return neighbour


def trained_apart(
    subject: Subject, neighbours: Sequence[Federation], compared: Sequence[int], tick: Tick
) -> list[list[float]]:
    """How far the training on each neighbouring federation is from the subject's own, after some rounds."""

    def models(number: int, federation: Federation) -> list[Tensor]:
        kept: list[Tensor] = []

        def keep(progress: Progress) -> None:
            if progress.round in compared:
                kept.append(progress.server["model"].clone())
            tick((number + progress.round / compared[-1]) / (1 + len(neighbours)))

        subject.train_again(federation, compared[-1], keep)
        return kept

    base, distances = models(0, subject.federation), []
    for number, neighbour in enumerate(neighbours, start=1):
        apart = (one - other for one, other in zip(base, models(number, neighbour), strict=True))
        distances.append([float(torch.linalg.vector_norm(difference)) for difference in apart])
    return distances


def summary(result: figures.Result) -> str:
    return f"{figures.brief(result['discrepancy'][-1])} apart after {result['rounds'][-1]} rounds"


def show(measured: figures.Measurements) -> figures.Content:
    methods = measured["global_stability"]
    lines = [method.mean_line("rounds", "discrepancy") for method in methods]
    bounds = [
        figures.bound_line(method, method.first["rounds"], method.first["bound"])
        for method in methods
        if method.first.get("bound")
    ]
    note = (
        "Two trainings that differ in one client, who has another's data in one of them; the largest "
        f"distance over the replacements tried.{' Dotted: the bound.' if bounds else ''}"
    )
    decades = math.inf if bounds else 0  # they may be far above what happens
    name, labels = "global_stability", ("rounds", "distance of the models")
    return [figures.chart(name, "Global stability", lines + bounds, *labels, note, decades=decades)]


@diagnostic("stability", summary, show)
def global_stability(
    subject: Subject,
    *,
    rounds: Count | None = None,
    replacements: Count = 3,
    points: Count = 50,
    bound: bool = True,
    tick: Tick = silent,
) -> dict[str, Any]:
    """Trains anew from the first weights, and again for each of some replaced clients.

    For as many `rounds` as the run was to have unless given; models are compared in at most `points` of them.
    The replaced clients are drawn from the first round's participants, so that a difference arises at once;
    each gets the data of a random other client. `discrepancy` is the largest over the replacements, `bound`
    the bound of `flatfed.theory.stability` where there is one.
    """
    settings = subject.training
    rounds = settings.rounds if rounds is None else rounds
    compared = [at for at in evenly_spaced(rounds, points) if at > 0]
    population = len(subject.federation)
    if population < 2:
        raise FlatfedError("global_stability: it takes at least two clients, one to replace and one to take")
    generator = random.numpy_generator(settings.seed, "replaced clients")
    replaced = generator.permutation(cohort(settings, population, 0))[:replacements].tolist()
    pairs = [(old, int((old + generator.integers(1, population)) % population)) for old in replaced]

    neighbours = [with_client_replaced(subject.federation, old, new) for old, new in pairs]
    by_replacement = trained_apart(subject, neighbours, compared, tick)
    bounds = None
    if bound:
        longest, steps = gradient_bound(subject), most_steps(subject)
        bounds = stability_bound(subject.algorithm, settings, steps, longest, rounds)
    return {
        "rounds": compared,
        "discrepancy": [max(values) for values in zip(*by_replacement, strict=True)],
        "replacements": by_replacement,
        "replaced": [{"client": old, "by": new} for old, new in pairs],
        "bound": bounds and [bounds[at - 1] for at in compared],
    }
