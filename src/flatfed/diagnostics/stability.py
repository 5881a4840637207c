"""How much a change of the clients changes the training.

Local-update stability: how far apart clients end up that start from one model. Global-update stability: how
far two trainings drift apart whose sets of clients differ in one client. Everything else is the same in both,
the first weights, the participants' numbers and every unchanged client's random streams, so all of the
difference is due to the replaced client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import FlatfedError
from flatfed.core.sampling import batches, cohort
from flatfed.core.types import Count
from flatfed.data.federation import Federation, LoadedFederation, Pool, PooledFederation, Samples
from flatfed.diagnostics.subject import Subject, Tick, silent
from flatfed.diagnostics.theory import gradient_bound, most_steps, stability_bound
from flatfed.training.loop import Progress, train

MEMORY = 2**29
"""Bytes of local models kept at a time; the probe looks at fewer steps of larger models."""


def largest_distance(models: Tensor) -> float:
    """max ‖x_i − x_j‖ over pairs of models [C, P]."""
    return float(torch.cdist(models, models, compute_mode="donot_use_mm_for_euclid_dist").max())


def local_stability(
    subject: Subject, *, clients: Count | None = 10, points: Count = 50, tick: Tick = silent
) -> dict[str, Any]:
    """The largest distance between two clients' models after k local steps of the next round.

    At most `points` values of k.
    """
    members = subject.some_clients(clients)
    sizes = [len(subject.federation.client(client)) for client in members]
    # Up to where everybody still trains.
    steps = min(
        len(batches(subject.settings, size, subject.round, client))
        for client, size in zip(members, sizes, strict=True)
    )
    room = MEMORY // (len(members) * len(subject.model) * subject.model.element_size())
    looked_at = _spread(steps, max(2, min(points, room)))
    models: dict[int, dict[int, Tensor]] = {step: {} for step in looked_at}

    def visit(trained: list[int], step: int, at: Tensor) -> None:
        if step in models:
            models[step].update(zip(trained, at.clone(), strict=True))

    subject.local_models(members, visit, tick)
    return {
        "steps": looked_at,
        "discrepancy": [largest_distance(torch.stack(list(models[step].values()))) for step in looked_at],
    }


def with_client_replaced(federation: Federation, client: int, by: int) -> Federation:
    """A neighbouring federation: one client's data are those of another."""
    if isinstance(federation, PooledFederation):
        rows = [federation.rows(by if number == client else number) for number in range(len(federation))]
        pool = Pool("clients", federation.inputs, federation.targets, rows)
        return PooledFederation(pool, federation.test, federation.transform, federation.classes)

    def load(number: int) -> Samples:
        own = federation.client(by if number == client else number)
        return own.batch(torch.arange(len(own), device=own.inputs.device))

    made = LoadedFederation(len(federation), load, federation.test)
    made.transform = federation.transform
    return made


def discrepancies(first: Sequence[Tensor], second: Sequence[Tensor]) -> list[float]:
    """‖x_t − x'_t‖ for two sequences of models."""
    return [float(torch.linalg.vector_norm(one - other)) for one, other in zip(first, second, strict=True)]


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

    As many `rounds` as the run asked for unless given, looked at in at most `points` of them. The replaced
    clients are drawn from the first round's participants, so that a difference arises at once; each gets
    the data of a random other client. `discrepancy` is the largest over the replacements. `bound` is the
    elementary bound of `flatfed.diagnostics.theory` where there is one.
    """
    settings = subject.settings
    rounds = settings.rounds if rounds is None else rounds
    looked_at = [at for at in _spread(rounds, points) if at > 0]
    population = len(subject.federation)
    if population < 2:
        raise FlatfedError("global_stability: it takes at least two clients, one to replace and one to take")
    generator = random.numpy_generator(settings.seed, "replaced clients")
    first = cohort(settings, population, 0)
    replaced = generator.permutation(first)[:replacements].tolist()
    pairs = [(old, int((old + generator.integers(1, population)) % population)) for old in replaced]
    options = {**settings.model_dump(), "rounds": rounds, "evaluate_every": rounds}
    trainings = 1 + len(pairs)

    def models(number: int, federation: Federation) -> list[Tensor]:
        kept: list[Tensor] = []

        def look(now: Progress) -> None:
            if now.round in looked_at:
                kept.append(now.server["model"].clone())
            tick((number + now.round / rounds) / trainings)

        plan = subject.engine.plan
        train(
            subject.engine.model,
            federation,
            subject.algorithm,
            loss=plan.loss,
            metrics=plan.metrics,
            callbacks=[look],
            **options,
        )
        return kept

    base = models(0, subject.federation)
    found = [
        discrepancies(base, models(number, with_client_replaced(subject.federation, old, new)))
        for number, (old, new) in enumerate(pairs, start=1)
    ]
    bounds = None
    if bound:
        every = stability_bound(
            subject.algorithm, settings, most_steps(subject), gradient_bound(subject), rounds
        )
        bounds = None if every is None else [every[at - 1] for at in looked_at]
    return {
        "rounds": looked_at,
        "discrepancy": [max(values) for values in zip(*found, strict=True)],
        "replacements": found,
        "replaced": [{"client": old, "by": new} for old, new in pairs],
        "bound": bounds,
    }


def _spread(last: int, count: int) -> list[int]:
    """At most `count` numbers from 0 to `last`, both included, evenly spread."""
    parts = max(1, min(count, last + 1) - 1)
    return sorted({math.ceil(last * part / parts) for part in range(parts + 1)})
