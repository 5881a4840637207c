"""How far clients move away from the model they received, and from one another."""

import math
import statistics
from typing import Any

import torch
from torch import Tensor

from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent


def flatness_distance(models: Tensor) -> float:
    """mean_i ‖x_i − x̄‖² of some clients' models [C, P]; a common shift does not matter."""
    return float((models - models.mean(0)).square().sum(-1).mean())


def summary(result: figures.Result) -> str:
    return (
        f"flatness distance {figures.brief(result['flatness_distance'])}, "
        f"client drift {figures.brief(result['client_drift'])}"
    )


def show(measured: figures.Measurements) -> figures.Content:
    methods = measured["drift"]
    columns = {
        "flatness distance": figures.column(figures.significant, "flatness_distance"),
        "client drift": figures.column(figures.significant, "client_drift"),
    }
    lines = [method.mean_line("steps", "drift_by_step") for method in methods]
    return [
        figures.method_table("drift", "Drift", methods, columns),
        figures.chart("drift", "Client drift during a round", lines, "local step", "drift"),
    ]


@diagnostic("stability", summary, show, cheap=True)
def drift(subject: Subject, *, clients: Count | None = 10, tick: Tick = silent) -> dict[str, Any]:
    """One more round from the present state, without keeping it.

    `client_drift` is the mean over clients and steps k = 1 … K of ‖x_{i,k} − x‖²; `drift_by_step` is the mean
    over the clients that take at least k steps, and `distance_by_step` that of ‖x_{i,k} − x‖.
    """
    members = subject.some_clients(clients)
    origin = subject.received["model"]
    by_step: dict[int, list[float]] = {}
    by_client: dict[int, list[float]] = {client: [] for client in members}
    last: dict[int, Tensor] = {}

    def visit(client: int, step: int, model: Tensor) -> None:
        last[client] = model - origin
        if step > 0:
            distance = float(last[client].square().sum())
            by_step.setdefault(step, []).append(distance)
            by_client[client].append(distance)

    subject.local_models(members, visit, tick)
    return {
        "flatness_distance": flatness_distance(torch.stack([last[client] for client in members])),
        "client_drift": statistics.fmean([statistics.fmean(distances) for distances in by_client.values()]),
        "steps": sorted(by_step),
        "drift_by_step": [statistics.fmean(by_step[step]) for step in sorted(by_step)],
        "distance_by_step": [statistics.fmean(map(math.sqrt, by_step[step])) for step in sorted(by_step)],
    }
