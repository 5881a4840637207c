"""Margins of the perturbed model and the complexity of its layers, which FedSAM's generalisation bound is
about."""

import copy
import math
import statistics
from typing import Any

import torch
from torch import Tensor, nn

from flatfed.core.errors import FlatfedError
from flatfed.core.flat import load_buffers, load_vector, unit
from flatfed.core.outputs import logits_of
from flatfed.core.tree import call, first_leaf, rows
from flatfed.core.types import Count, Positive, SomeShare
from flatfed.data.samples import Samples
from flatfed.diagnostics import figures
from flatfed.diagnostics.constants import examined_sizes
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import GRADIENT_SLICE, Subject, Tick, silent, ticked
from flatfed.theory.margins import LayerNorms, margin_bound

GRID = [number / 20 for number in range(21)]
LARGEST = 1e30
"""Products of longer norms are not finite."""
DOUBT = 0.01
"""ζ of the bound, which holds with probability 1 − ζ."""


def margins_of(subject: Subject, vector: Tensor, samples: Samples) -> Tensor:
    """o[Y] − max_{j≠Y} o[j] of the softmax outputs, [n]."""
    module = copy.deepcopy(subject.task.model).to(vector.device).eval()
    load_vector(module, subject.plan.layout, vector)
    load_buffers(module, subject.buffers)
    pieces = []
    for start in range(0, len(first_leaf(samples)), GRADIENT_SLICE):
        inputs, targets = rows(samples, slice(start, start + GRADIENT_SLICE))
        with torch.no_grad():
            outputs = logits_of(call(module, subject.federation.transform.evaluate(inputs)), "margin")
        if outputs.dim() != 2 or not isinstance(targets, Tensor) or targets.shape != outputs.shape[:1]:
            raise FlatfedError(
                "margin: it is about one class label for each sample; this task has other targets"
            )
        shares, labels = outputs.softmax(1), targets.long()[:, None]
        others = shares.scatter(1, labels, -1.0).amax(1)
        pieces.append(shares.gather(1, labels).squeeze(1) - others)
    return torch.cat(pieces)


def margin_loss(margins: Tensor) -> list[float]:
    """The share of samples with a margin of at most γ, for each γ of GRID."""
    return [float((margins <= margin).double().mean()) for margin in GRID]


def dense_layers(subject: Subject) -> tuple[list[dict[str, Any]], list[str]]:
    """The norms of the dense layers' weights, and the names of other tensors with two or more dimensions."""
    views = subject.plan.layout.views(subject.model)
    modules = dict(subject.task.model.named_modules())
    dense, others = [], []
    for name, weight in views.items():
        owner = modules.get(name.rpartition(".")[0])
        if isinstance(owner, nn.Linear) and weight.dim() == 2:
            norms = {
                "spectral": float(torch.linalg.matrix_norm(weight, 2)),
                "frobenius": float(weight.norm()),
            }
            dense.append({"name": name, "outputs": len(weight), **norms})
        elif weight.dim() >= 2:
            others.append(name)
    return dense, others


def summary(result: figures.Result) -> str:
    at = result["margins"].index(0.5)
    words = f"margin loss at γ = 0.5 {figures.brief(result['loss'][at])}, at the unperturbed model "
    words += figures.brief(result["unperturbed"][at])
    if result["complexity"] is not None:
        complexity, bound = figures.brief(result["complexity"]), figures.brief(result["log10_bound"])
        words += f"; complexity Q {complexity}, log₁₀ of the bound {bound}"
    return words


def show(measured: figures.Measurements) -> figures.Content:
    methods = measured["margin"]
    lines = [method.mean_line("margins", "loss") for method in methods]
    columns = {
        "Q as printed": figures.column(figures.significant, "complexity"),
        "Q₂": figures.column(figures.significant, "squared_complexity"),
        "log₁₀ of the bound": figures.column(figures.significant, "log10_bound"),
    }
    note = "Q = Π‖W‖ Σ‖W‖_F²/‖W‖ and Q₂ = Π‖W‖² Σ(‖W‖_F/‖W‖)² of the dense layers; the bound is on a share."
    left_out = dict.fromkeys(name for method in methods for name in method.first["excluded"])
    if left_out:
        note += f" Left out, though they belong to the model: {', '.join(left_out)}."
    return [
        figures.chart("margin", "Margin loss of the perturbed model", lines, "margin", "share of samples"),
        figures.method_table("complexity", "Spectral complexity", methods, columns, note),
    ]


@diagnostic("generalisation", summary, show)
def margin(
    subject: Subject,
    *,
    radius: Positive | None = None,
    margin: SomeShare = 0.5,
    clients: Count | None = 10,
    tick: Tick = silent,
) -> dict[str, Any]:
    """Shares of samples with small margins after each client's own ascent step, and the norms of layers.

    The margin is that of softmax outputs, the ascent step ρ u(∇F_i); at γ = 0 the share is the error rate.
    The `radius` is that of the algorithm unless given, or 0.1. The bound is FedSAM's Theorem 3.5 with its
    constants at the `margin`.
    """
    radius = radius or getattr(subject.algorithm.gradient, "radius", None) or 0.1
    perturbed, plain, largest = [], [], 0.0
    members = subject.some_clients(clients)
    for client in ticked(members, tick):
        data = subject.data(client)
        point = subject.model + radius * unit(subject.gradient(subject.model, data))
        perturbed.append(margin_loss(margins_of(subject, point, data)))
        plain.append(margin_loss(margins_of(subject, subject.model, data)))
        inputs = first_leaf(subject.federation.transform.evaluate(data[0]))
        largest = max(largest, float(inputs.flatten(1).double().norm(dim=1).max()))
    layers, others = dense_layers(subject)
    return {
        "radius": radius,
        "margins": GRID,
        "loss": [statistics.fmean(values) for values in zip(*perturbed, strict=True)],
        "unperturbed": [statistics.fmean(values) for values in zip(*plain, strict=True)],
        "layers": layers,
        "excluded": others,
        "largest_input": largest,
        **_complexity(subject, layers, largest, margin),
    }


def _complexity(
    subject: Subject, layers: list[dict[str, Any]], largest: float, margin: float
) -> dict[str, float | None]:
    if not layers or not all(0 < layer["spectral"] < LARGEST for layer in layers):
        return {"complexity": None, "squared_complexity": None, "log10_bound": None}
    spectral, frobenius = ([layer[name] for layer in layers] for name in ("spectral", "frobenius"))
    norms, population = LayerNorms(spectral, frobenius), len(subject.federation)
    samples = statistics.fmean(examined_sizes(subject))
    bound = margin_bound(
        norms,
        width=max(layer["outputs"] for layer in layers),
        largest_input=largest,
        margin=margin,
        samples=max(samples, 2.0),
        clients=population,
        doubt=DOUBT,
    )
    explicit = bound.terms["with constants"]
    return {
        "complexity": norms.complexity,
        "squared_complexity": norms.squared_complexity,
        "log10_bound": math.log10(explicit) if explicit > 0 else None,
    }
