"""The loss around a model along filter-normalised random directions."""

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.flat import Layout
from flatfed.core.types import Count, Points, Positive, Seed
from flatfed.data.samples import Samples
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, part_of, silent, ticked
from flatfed.runs.statistics import finite_values

KINDS = {"train": "training loss", "test": "test loss"}
HOVER = "a %{y:.3g}, b %{x:.3g}<br>loss %{z:.4g}<extra></extra>"


def random_directions(size: int, count: int, seed: int) -> Tensor:
    """Orthogonal Gaussian directions [count, P]; they depend on the seed and the size alone."""
    generators = [random.torch_generator(seed, "surface", number) for number in range(count)]
    directions = torch.stack([torch.randn(size, generator=own, dtype=torch.float64) for own in generators])
    for number in range(1, count):
        for earlier in directions[:number]:
            directions[number] -= (directions[number] @ earlier) / (earlier @ earlier) * earlier
    return directions


def filter_normalised(layout: Layout, direction: Tensor, model: Tensor) -> Tensor:
    """A direction whose every filter (slice along the outputs) is as long as the model's.

    Parameters with fewer than two dimensions, biases and normalisation scales, do not move.
    """
    pieces = []
    moves, weights = layout.views(direction), layout.views(model)
    for entry in layout.entries:
        own, weight = moves[entry.name], weights[entry.name]
        if own.dim() < 2:
            pieces.append(torch.zeros_like(own))
            continue
        over = tuple(range(1, own.dim()))
        lengths = torch.linalg.vector_norm(own, dim=over, keepdim=True)
        pieces.append(own * torch.linalg.vector_norm(weight, dim=over, keepdim=True) / (lengths + 1e-10))
    return layout.pack(pieces)


def losses_on_plane(
    subject: Subject, origin: Tensor, first: Tensor, second: Tensor, a: Sequence[float], b: Sequence[float],
    samples: Samples, tick: Tick = silent,
) -> list[list[float]]:  # fmt: skip
    """losses[i][j] at origin + a[i] first + b[j] second."""
    return [
        [subject.evaluate(origin + along * first + across * second, samples)["loss"] for across in b]
        for along in ticked(a, tick)
    ]


def grid_summary(losses: Iterable[Iterable[Any]]) -> str:
    """The range of the training loss on a grid."""
    finite = finite_values(loss for row in losses for loss in row)
    low, high = min(finite, default=None), max(finite, default=None)
    return f"training loss {figures.brief(low)} … {figures.brief(high)} on {len(finite)} points"


def show(measured: figures.Measurements) -> figures.Content:
    """For each method the training loss in 3-D and the test loss as a map, and cuts through all of them.

    All figures of a kind have one scale. The test losses are maps because a browser has only so many 3-D
    pictures at a time.
    """
    methods = measured["surface"]
    content = []
    for kind, name in KINDS.items():
        scale = _scale(methods, kind)
        # A surface along one direction is only in the cut.
        drawn = [method for method in methods if len(method.first["b"]) > 1 and _losses(method, kind)]
        content += [_picture(method, kind, *scale) for method in drawn]
        cuts = [_cut(method, kind) for method in methods if _losses(method, kind)]
        file, title = f"surface-cut-{kind}", f"{name.capitalize()} along the first direction"
        note = "The model moved by a times a random direction, the same for all methods under one seed."
        content.append(figures.chart(file, title, cuts, "a", name, note, titled=False, decades=math.inf))
    return sorted(content, key=lambda figure: math.inf if figure.method is None else figure.method)


def _losses(method: figures.MethodResults, kind: str) -> list[float]:
    return finite_values(loss for row in method.first.get(kind) or [] for loss in row)


def _scale(methods: Sequence[figures.MethodResults], kind: str) -> tuple[float, float]:
    """Up to the 95th percentile: a few corners may be far up, and the bottoms are to be compared."""
    losses = [loss for method in methods for loss in _losses(method, kind)] or [0.0]
    return min(losses), statistics.quantiles(losses, n=20)[-1] if len(losses) > 1 else max(losses)


def _picture(method: figures.MethodResults, kind: str, low: float, high: float) -> figures.Figure:
    a, b, losses = (method.first[key] for key in ("a", "b", kind))
    layout: dict[str, Any] = figures.axes("b", "a")
    if kind == "train":
        name, shape = "surface", "surface"
        style: dict[str, Any] = {"cmin": low, "cmax": high, "showscale": False}
        layout = {"scene": {**layout, "zaxis": {"range": [low, high]}}}
    else:
        name, shape = "surface-test", "contour"
        levels = {"coloring": "fill", "start": low, "end": high, "size": (high - low) / 15 or 1.0}
        style = {"contours": levels, "autocontour": False}
    trace = figures.heights(shape, b, a, losses, name=method.label, hovertemplate=HOVER, **style)
    name, title = f"{name}-{method.number}", f"{method.label}: {KINDS[kind]}"
    return figures.Figure(name, title, [trace], layout, "", ("b", "a", KINDS[kind]), method.number)


def _cut(method: figures.MethodResults, kind: str) -> figures.Trace:
    """The losses along the first direction, where b is nearest to 0."""
    b = method.first["b"]
    middle = min(range(len(b)), key=lambda index: abs(b[index]))
    return figures.line(method, method.first["a"], [row[middle] for row in method.first[kind]])


@diagnostic("surfaces", lambda result: grid_summary(result["train"]), show)
def surface(
    subject: Subject,
    *,
    points: Points = 21,
    extent: Positive = 1.0,
    dimensions: Literal[1, 2] = 2,
    samples: Count | None = 1000,
    seed: Seed = 0,
    tick: Tick = silent,
) -> dict[str, Any]:
    """The training and test loss at x + a d₁ + b d₂, `points` in each direction over ±`extent`.

    The papers' pictures have 51 points and all samples. `dimensions=1` stays on d₁ (b = 0). Use one seed for
    all methods that are compared.
    """
    model, layout = subject.model, subject.plan.layout
    raw = random_directions(len(model), 2, seed).to(model)
    first, second = (filter_normalised(layout, direction, model) for direction in raw)
    a = torch.linspace(-extent, extent, points).tolist()
    b = a if dimensions == 2 else [0.0]
    train, test = subject.training_data(samples), subject.test_data(samples)
    plane = (subject, model, first, second, a, b)
    on_train = losses_on_plane(*plane, train, part_of(tick, 0, 0.5 if test else 1))
    on_test = losses_on_plane(*plane, test, part_of(tick, 0.5, 1)) if test else None
    return {"a": a, "b": b, "train": on_train, "test": on_test, "seed": seed}
