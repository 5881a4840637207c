"""The loss between two models."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatfed.core.errors import FlatfedError
from flatfed.core.state import State
from flatfed.core.types import Count, Points, Positive
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import OtherRun, diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import finite, finite_values


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
    for place in ticked(position, tick):
        model = torch.lerp(subject.model, end, place)
        buffers = {
            name: torch.lerp(value, end_buffers[name], place) if value.is_floating_point() else value
            for name, value in subject.buffers.items()
        }
        on_train.append(subject.evaluate(model, train, buffers))
        on_test.append(subject.evaluate(model, test, buffers) if test else {})
    return {
        "position": list(position),
        "train_loss": [numbers["loss"] for numbers in on_train],
        "test_loss": [numbers["loss"] for numbers in on_test] if test else None,
        "test_accuracy": [numbers["accuracy"] for numbers in on_test] if "accuracy" in on_test[0] else None,
    }


def summary(result: figures.Result) -> str:
    highest = max(finite_values(result["train_loss"]), default=None)
    return f"largest training loss on the way {figures.brief(highest)}"


def show(measured: figures.Measurements) -> figures.Content:
    content = []
    for key, quantity, unit, scale in (
        ("train_loss", "Training loss", "train loss", 1),
        ("test_accuracy", "Test accuracy", "test accuracy (%)", 100),
    ):
        traces = []
        for method in measured["line"]:
            result = method.first
            if result.get(key):
                values = [value if finite(value) is None else scale * value for value in result[key]]
                name = f"{method.label} → {Path(result['other']).name}"
                traces.append(figures.line(method, result["position"], values, name=name))
        title, columns = f"{quantity} on the way to another model", ("models", "position", unit)
        layout = figures.axes("position: 0 this model, 1 the other", "")
        content.append(figures.Figure(f"line-{key}", title, traces, layout, "", columns))
    return content


@diagnostic("planes", summary, show)
def line(
    subject: Subject,
    *,
    other: OtherRun = "",
    points: Points = 21,
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
    theirs, own = (
        {name: value.shape for name, value in state.items()} for state in (end_buffers, subject.buffers)
    )
    if theirs != own:
        raise FlatfedError(f"other = {other!r}: its model has other buffers; only equal models can be joined")
    position = torch.linspace(-beyond, 1 + beyond, points).tolist()
    return {"other": other, **between(subject, end, end_buffers, position, samples, tick)}
