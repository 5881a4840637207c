"""The loss around a model: on filter-normalised random directions, between two models, among the clients."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import FlatfedError
from flatfed.core.flat import Layout
from flatfed.core.state import State
from flatfed.core.types import Count, Positive, Seed
from flatfed.data.federation import Samples
from flatfed.diagnostics.subject import Subject, Tick, silent
from flatfed.runs.folder import RunFolder


def random_directions(size: int, count: int, seed: int) -> Tensor:
    """Orthogonal Gaussian directions [count, P]; they depend on the seed and the size alone."""
    directions = torch.stack(
        [
            torch.randn(size, generator=random.torch_generator(seed, "surface", number), dtype=torch.float64)
            for number in range(count)
        ]
    )
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
    rows = []
    for number, along in enumerate(a):
        rows.append(
            [subject.evaluate(origin + along * first + across * second, samples)["loss"] for across in b]
        )
        tick((number + 1) / len(a))
    return rows


def surface(
    subject: Subject,
    *,
    points: Count = 21,
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
    model, layout = subject.model, subject.engine.plan.layout
    raw = random_directions(len(model), 2, seed).to(model)
    first, second = (filter_normalised(layout, direction, model) for direction in raw)
    a = torch.linspace(-extent, extent, points).tolist()
    b = a if dimensions == 2 else [0.0]
    train, test = subject.training_data(samples), subject.test_data(samples)
    share = 0.5 if test else 1.0

    def losses(data: Samples, done: float) -> list[list[float]]:
        return losses_on_plane(
            subject, model, first, second, a, b, data, lambda now: tick(done + share * now)
        )

    return {
        "a": a,
        "b": b,
        "train": losses(train, 0.0),
        "test": losses(test, 0.5) if test else None,
        "seed": seed,
    }


def between(
    subject: Subject,
    end: Tensor,
    end_buffers: State,
    position: Sequence[float],
    samples: int | None = None,
    tick: Tick = silent,
) -> dict[str, Any]:
    """Losses on the straight line from the subject's model (position 0) to another (position 1).

    Running statistics are interpolated like the model.
    """
    train, test = subject.training_data(samples), subject.test_data(samples)
    on_train, on_test = [], []
    for number, place in enumerate(position):
        model = torch.lerp(subject.model, end, place)
        buffers = {
            name: torch.lerp(value, end_buffers[name], place) if value.is_floating_point() else value
            for name, value in subject.buffers.items()
        }
        on_train.append(subject.engine.evaluate(model, buffers, train))
        on_test.append(subject.engine.evaluate(model, buffers, test) if test else {})
        tick((number + 1) / len(position))
    return {
        "position": list(position),
        "train_loss": [found["loss"] for found in on_train],
        "test_loss": [found["loss"] for found in on_test] if test else None,
        "test_accuracy": [found["accuracy"] for found in on_test] if "accuracy" in on_test[0] else None,
    }


def line(
    subject: Subject,
    *,
    other: str = "",
    points: Count = 21,
    beyond: Positive = 0.25,
    samples: Count | None = 2000,
    tick: Tick = silent,
) -> dict[str, Any]:
    """Losses on the straight line to the model of another run, whose folder is `other`.

    The line goes on `beyond` both ends. For models without a run folder there is `between`.
    """
    if not other:
        raise FlatfedError("line: needs the other run's folder; give --set other=RUN")
    last = RunFolder.existing(Path(other)).last_checkpoint()
    end = last.server["model"].to(subject.model)
    if len(end) != len(subject.model):
        raise FlatfedError(
            f"other = {other!r}: its model has {len(end):,} parameters, this one "
            f"{len(subject.model):,}; only equal models can be joined"
        )
    end_buffers = {name: value.to(subject.model.device) for name, value in last.buffers.items()}
    if _shapes(end_buffers) != _shapes(subject.buffers):
        raise FlatfedError(f"other = {other!r}: its model has other buffers; only equal models can be joined")
    position = torch.linspace(-beyond, 1 + beyond, points).tolist()
    return {"other": other, **between(subject, end, end_buffers, position, samples, tick)}


def _shapes(buffers: State) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in buffers.items()}


def widest_plane(displacements: Tensor) -> Tensor:
    """Two orthonormal directions [2, P] that hold as much of some displacements [C, P] as two can."""
    if not bool(torch.isfinite(displacements).all()):
        raise FlatfedError("plane: the clients' models are not finite; lower the run's lr and run it again")
    gram = displacements.double() @ displacements.double().T
    values, vectors = torch.linalg.eigh(gram)
    directions = vectors[:, -2:].T.flip(0).to(displacements) @ displacements
    if len(directions) < 2 or bool((values[-2:] <= 1e-10 * values[-1]).any()):
        raise FlatfedError("plane: it takes at least two clients that moved in different directions")
    return directions / torch.linalg.vector_norm(directions, dim=1, keepdim=True)


def plane(
    subject: Subject,
    *,
    clients: Count | None = 10,
    points: Count = 21,
    samples: Count | None = 1000,
    tick: Tick = silent,
) -> dict[str, Any]:
    """The training loss on the plane through the global model that is nearest to the clients' models.

    The clients train one round from it; x and y are distances along the plane's two directions. A client's
    mark is the foot of its model on the plane, its loss that of the model itself.
    """
    members = subject.some_clients(clients)
    origin = subject.received["model"]
    last: dict[int, Tensor] = {}

    def visit(trained: list[int], step: int, at: Tensor) -> None:
        last.update(zip(trained, at.clone(), strict=True))

    subject.local_models(members, visit, lambda share: tick(0.3 * share))
    moved = torch.stack([last[client] - origin for client in members])
    directions = widest_plane(moved)
    feet = moved @ directions.T  # [C, 2]
    data = subject.training_data(samples)
    marks = [{"label": "global", "x": 0.0, "y": 0.0, "loss": subject.evaluate(origin, data)["loss"]}]
    for client, (across, up) in zip(members, feet.tolist(), strict=True):
        loss = subject.evaluate(last[client], data)["loss"]
        marks.append({"label": f"client {client}", "x": across, "y": up, "loss": loss})

    def axis(places: Tensor) -> list[float]:
        low, high = min(0.0, float(places.min())), max(0.0, float(places.max()))
        margin = 0.25 * (high - low)
        return torch.linspace(low - margin, high + margin, points).tolist()

    x, y = axis(feet[:, 0]), axis(feet[:, 1])
    first, second = directions
    losses = losses_on_plane(
        subject, origin, first, second, x, y, data, lambda share: tick(0.3 + 0.7 * share)
    )
    return {"x": x, "y": y, "loss": losses, "points": marks}
