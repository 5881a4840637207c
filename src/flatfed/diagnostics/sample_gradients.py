"""How long single samples' gradients are, and how far from their client's."""

import math
import statistics
from typing import Any

import torch

from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.constants import sample_gradients as gradients_of
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.runs.statistics import finite_values


def summary(result: figures.Result) -> str:
    norms = finite_values(result["norms"])
    middle, longest = (statistics.median(norms), max(norms)) if norms else (None, None)
    deviation = figures.brief(result["deviation"])
    return f"median {figures.brief(middle)}, longest {figures.brief(longest)}, deviation {deviation}"


def show(measured: figures.Measurements) -> figures.Content:
    methods = measured["sample_gradients"]
    norms = {
        method.number: finite_values(norm for result in method.results for norm in result["norms"])
        for method in methods
    }
    boxes = [figures.box(method, norms[method.number]) for method in methods if norms[method.number]]
    columns = {
        "longest": lambda method: figures.significant(max(norms[method.number], default=None)),
        "deviation": figures.column(figures.significant, "deviation"),
    }
    name, title = "sample-gradients", "Gradients of single samples"
    return [
        figures.method_table(name, title, methods, columns),
        figures.box_chart(name, title, boxes, "norm", "Quantiles over samples of several clients."),
    ]


@diagnostic("generalisation", summary, show)
def sample_gradients(
    subject: Subject, *, clients: Count | None = 10, samples: Count = 20, tick: Tick = silent
) -> dict[str, Any]:
    """The norms of the gradients of some `samples` of each of some clients, at the global model.

    `deviation` is the root mean square distance to the gradient of all of the client's samples.
    """
    norms: list[float] = []
    squares: list[float] = []
    for client in ticked(subject.some_clients(clients), tick):
        alone = gradients_of(subject, subject.model, client, samples)
        whole = subject.gradient(subject.model, subject.data(client))
        norms += torch.linalg.vector_norm(alone, dim=1).tolist()
        squares += (alone - whole).square().sum(1).tolist()
    return {"norms": norms, "deviation": math.sqrt(statistics.fmean(squares))}
