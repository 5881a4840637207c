"""How far clients go from the model they received, and from one another."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flatfed.core.types import Count
from flatfed.diagnostics.subject import Subject, Tick, silent


def flatness_distance(models: Tensor) -> float:
    """mean_i ‖x_i − x̄‖² of some clients' models [C, P]; a common shift does not matter."""
    return float((models - models.mean(0)).square().sum(-1).mean())


def drift(subject: Subject, *, clients: Count | None = 10, tick: Tick = silent) -> dict[str, Any]:
    """One more round from the present state, without keeping it.

    `client_drift` is the mean over clients and steps k = 1 … K of ‖x_{i,k} − x‖², `drift_by_step` that over
    the clients which take so many steps.
    """
    members = subject.some_clients(clients)
    origin = subject.received["model"]
    squared: dict[int, list[float]] = {}
    of_clients: dict[int, list[float]] = {client: [] for client in members}
    last: dict[int, Tensor] = {}

    def visit(trained: list[int], step: int, points: Tensor) -> None:
        last.update(zip(trained, points - origin, strict=True))
        for client in trained:
            if step > 0:
                distance = float(last[client].square().sum())
                squared.setdefault(step, []).append(distance)
                of_clients[client].append(distance)

    subject.local_models(members, visit, tick)
    return {
        "flatness_distance": flatness_distance(torch.stack([last[client] for client in members])),
        "client_drift": sum(_mean(each) for each in of_clients.values()) / len(members),
        "steps": sorted(squared),
        "drift_by_step": [_mean(squared[step]) for step in sorted(squared)],
    }


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)
