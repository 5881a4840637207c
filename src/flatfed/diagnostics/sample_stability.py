"""Sample stability: how far two trainings drift apart whose data differ in one sample of one client.

FedSWA's generalisation bound rests on it, as FedSAGD's does on a replaced client (`global_stability`).
"""

from typing import Any

import torch

from flatfed.core import random
from flatfed.core.errors import FlatfedError
from flatfed.core.sampling import cohort
from flatfed.core.tree import joined, rows
from flatfed.core.types import Count
from flatfed.data.federation import Federation, LoadedFederation, PooledFederation
from flatfed.data.pool import Pool
from flatfed.data.samples import Samples
from flatfed.diagnostics import figures
from flatfed.diagnostics.global_stability import trained_apart
from flatfed.diagnostics.local_stability import evenly_spaced
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent

Place = tuple[int, int]
"""A client and the position of one of its samples."""


def with_sample_replaced(federation: Federation, old: Place, new: Place) -> Federation:
    """A neighbouring federation: one sample of one client is that of another."""
    (client, position), (other, other_position) = old, new
    if isinstance(federation, PooledFederation):
        owned = [federation.rows(number) for number in range(len(federation))]
        owned[client] = owned[client].clone()
        owned[client][position] = owned[other][other_position]
        pool = Pool("clients", federation.inputs, federation.targets, owned)
        return PooledFederation(pool, federation.test, federation.transform, federation.classes)

    def load(number: int) -> Samples:
        own = federation.client(number).whole()
        if number != client:
            return own
        by = federation.client(other)
        sample = by.batch(torch.tensor([other_position], device=by.device))
        before, after = rows(own, slice(0, position)), rows(own, slice(position + 1, None))
        return joined([before, sample, after])

    neighbour = LoadedFederation(len(federation), load, federation.test)
    neighbour.transform = federation.transform
    return neighbour


def summary(result: figures.Result) -> str:
    return f"{figures.brief(result['discrepancy'][-1])} apart after {result['rounds'][-1]} rounds"


def show(measured: figures.Measurements) -> figures.Content:
    lines = [method.mean_line("rounds", "discrepancy") for method in measured["sample_stability"]]
    note = "Two trainings that differ in one sample; the largest distance over the replacements tried."
    name, labels = "sample_stability", ("rounds", "distance of the models")
    return [figures.chart(name, "Stability to one sample", lines, *labels, note)]


@diagnostic("stability", summary, show)
def sample_stability(
    subject: Subject,
    *,
    rounds: Count | None = None,
    replacements: Count = 3,
    points: Count = 50,
    tick: Tick = silent,
) -> dict[str, Any]:
    """Trains anew from the first weights, and again for each of some samples replaced by another client's.

    For as many `rounds` as the run was to have unless given; models are compared in at most `points` of them.
    The samples are drawn from the first round's participants.
    """
    settings, federation = subject.training, subject.federation
    rounds, population = settings.rounds if rounds is None else rounds, len(subject.federation)
    if population < 2:
        raise FlatfedError("sample_stability: it takes at least two clients, one to replace and one to take")
    generator = random.numpy_generator(settings.seed, "replaced samples")
    changed = generator.permutation(cohort(settings, population, 0))[:replacements].tolist()
    pairs: list[tuple[Place, Place]] = []
    for client in changed:
        other = int((client + generator.integers(1, population)) % population)
        positions = (int(generator.integers(len(federation.client(number)))) for number in (client, other))
        old, new = zip((client, other), positions, strict=True)
        pairs.append((old, new))
    compared = [at for at in evenly_spaced(rounds, points) if at > 0]
    neighbours = [with_sample_replaced(federation, old, new) for old, new in pairs]
    by_replacement = trained_apart(subject, neighbours, compared, tick)
    return {
        "rounds": compared,
        "discrepancy": [max(values) for values in zip(*by_replacement, strict=True)],
        "replacements": by_replacement,
        "replaced": [{"sample": list(old), "by": list(new)} for old, new in pairs],
    }
