"""Local-update stability: how far apart clients end up that start from one model."""

import math
from typing import Any

import torch
from torch import Tensor

from flatfed.core.sampling import local_steps
from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.constants import gradient_bound
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent
from flatfed.theory.stability import local_bound

MEMORY = 2**29
"""Bytes of local models kept at a time; of larger models fewer steps are kept."""


def evenly_spaced(last: int, count: int) -> list[int]:
    """At most `count` numbers from 0 to `last`, both included."""
    parts = max(1, min(count, last + 1) - 1)
    return sorted({math.ceil(last * part / parts) for part in range(parts + 1)})


def summary(result: figures.Result) -> str:
    return f"{figures.brief(result['discrepancy'][-1])} apart after {result['steps'][-1]} steps"


def show(measured: figures.Measurements) -> figures.Content:
    methods = measured["local_stability"]
    lines = [method.mean_line("steps", "discrepancy") for method in methods]
    bounds = [
        figures.bound_line(method, method.first["steps"], method.first["bound"])
        for method in methods
        if method.first.get("bound")
    ]
    note = "The largest distance between two clients' models, all trained from the same global model."
    if bounds:
        note += " Dotted: the bound."
    name, labels = "local_stability", ("local step", "distance of the models")
    decades = math.inf if bounds else 0  # they may be far above what happens
    return [figures.chart(name, "Local stability", lines + bounds, *labels, note, decades=decades)]


@diagnostic("stability", summary, show, cheap=True)
def local_stability(
    subject: Subject,
    *,
    clients: Count | None = 10,
    points: Count = 50,
    bound: bool = True,
    tick: Tick = silent,
) -> dict[str, Any]:
    """The largest distance between two clients' models after k local steps of the next round.

    At most `points` values of k. `bound` is that of `flatfed.theory.stability` where there is one.
    """
    members = subject.some_clients(clients)
    # As long as all of them still train.
    sizes = [len(subject.federation.client(client)) for client in members]
    steps = min(local_steps(subject.training, size) for size in sizes)
    room = MEMORY // (len(members) * len(subject.model) * subject.model.element_size())
    looked_at = evenly_spaced(steps, max(2, min(points, room)))
    models: dict[int, dict[int, Tensor]] = {step: {} for step in looked_at}

    def visit(client: int, step: int, model: Tensor) -> None:
        if step in models:
            models[step][client] = model.clone()

    subject.local_models(members, visit, tick)
    stacked = (torch.stack(list(models[step].values())) for step in looked_at)
    distances = (torch.cdist(at, at, compute_mode="donot_use_mm_for_euclid_dist") for at in stacked)
    bounds = None
    if bound:
        longest, settings = gradient_bound(subject), subject.training
        # All that clients have in common cancels, so the round's step size is all that matters.
        bounds = local_bound(subject.algorithm, settings, steps, longest, subject.round)
    return {
        "steps": looked_at,
        "discrepancy": [float(pairs.max()) for pairs in distances],
        "bound": bounds and [bounds[at] for at in looked_at],
    }
