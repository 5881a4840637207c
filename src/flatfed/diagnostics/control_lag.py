"""How far what clients remember of their gradients lies behind: control variates and dual variables."""

import statistics
from typing import Any

import torch
from torch import Tensor

from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.parts.correct import ControlVariate, DynamicRegulariser, MomentumControlVariate


def remembered_gradient(subject: Subject, client: int) -> Tensor | None:
    """What a client takes for its gradient; None if it remembers none."""
    for kind in (ControlVariate, MomentumControlVariate):
        if any(isinstance(part, kind) for part in subject.algorithm.corrections):
            return _of_client(subject, kind, client, "control")
    for part in subject.algorithm.corrections:
        if isinstance(part, DynamicRegulariser):
            return -part.weight * _of_client(subject, DynamicRegulariser, client, "dual")
    return None


def _of_client(subject: Subject, kind: type[Any], client: int, name: str) -> Tensor:
    member = next(member for member in subject.algorithm.members if isinstance(member.part, kind))
    return subject.clients.read(client, subject.received["model"])[member.client[name]]


def summary(result: figures.Result) -> str:
    if not result["clients"]:
        return "clients remember no gradients"
    return f"{figures.brief(result['lag'])}, {figures.brief(result['relative'])} of the squared gradients"


def show(measured: figures.Measurements) -> figures.Content:
    columns = {
        "lag": figures.column(figures.significant, "lag"),
        "relative": figures.column(figures.significant, "relative"),
    }
    note = "Mean over clients of ‖c_i − ∇F_i(x)‖², also as a share of the mean of ‖∇F_i(x)‖²."
    title = "Lag of control variates and duals"
    return [figures.method_table("control-lag", title, measured["control_lag"], columns, note)]


@diagnostic("stability", summary, show)
def control_lag(subject: Subject, *, clients: Count | None = 10, tick: Tick = silent) -> dict[str, Any]:
    """C = mean ‖c_i − ∇F_i(x)‖² of control variates c_i, or of −α h_i of dual variables, at the global model.

    For a client that has not taken part yet, c_i = 0. Theorems mean it at the optimum, which is not known.
    """
    lags: list[float] = []
    sizes: list[float] = []
    for client in ticked(subject.some_clients(clients), tick):
        kept = remembered_gradient(subject, client)
        if kept is None:
            return {"lag": None, "relative": None, "clients": []}
        gradient = subject.gradient(subject.model, subject.data(client))
        lags.append(float((kept - gradient).square().sum()))
        sizes.append(float(torch.linalg.vector_norm(gradient).square()))
    lag, size = statistics.fmean(lags), statistics.fmean(sizes)
    return {
        "lag": lag,
        "relative": lag / size if size else None,
        "clients": [{"lag": value} for value in lags],
    }
