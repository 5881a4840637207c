"""The loss around the global model, in the plane nearest to the models that clients train from it."""

from typing import Any

import torch
from torch import Tensor

from flatfed.core.errors import FlatfedError
from flatfed.core.types import Count, Points
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, part_of, silent
from flatfed.diagnostics.surface import grid_summary, losses_on_plane
from flatfed.runs.statistics import finite_values


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


def show(measured: figures.Measurements) -> figures.Content:
    content = []
    for method in measured["plane"]:
        result, points = method.first, method.first["points"]
        if not finite_values(loss for row in result["loss"] for loss in row):
            continue
        losses = zip(*result["loss"], strict=True)  # plotly has a row for each y
        contour = figures.heights("contour", result["x"], result["y"], losses, name="loss")
        contour |= {"contours": {"coloring": "fill"}, "ncontours": 16}
        contour["hovertemplate"] = "%{x:.3g}, %{y:.3g}<br>loss %{z:.4g}<extra></extra>"
        labels = [point["label"] for point in points]
        x, y, own = ([point.get(key) for point in points] for key in ("x", "y", "loss"))
        marks = figures.line(method, x, y, name="models", mode="markers+text", meta={"points": True})
        # Clients may lie on top of each other, so only the global model is named in the picture.
        marks |= {"text": [label if label == "global" else "" for label in labels], "hovertext": labels}
        marks |= {"hoverinfo": "text", "textposition": "top center", "cliponaxis": False}
        marks["customdata"] = figures.rounded(own)
        name, title = f"plane-{method.number}", f"{method.label}: loss between models"
        layout, columns = figures.axes("", ""), ("series", "x", "y", "loss")
        content.append(figures.Figure(name, title, [contour, marks], layout, "", columns, method.number))
    return content


@diagnostic("planes", lambda result: grid_summary(result["loss"]), show)
def plane(
    subject: Subject,
    *,
    clients: Count | None = 10,
    points: Points = 21,
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

    def visit(client: int, _: int, model: Tensor) -> None:
        last[client] = model

    subject.local_models(members, visit, part_of(tick, 0, 0.3))
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
    losses = losses_on_plane(subject, origin, first, second, x, y, data, part_of(tick, 0.3, 1))
    return {"x": x, "y": y, "loss": losses, "points": marks}
