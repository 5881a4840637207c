"""Metrics: means over samples, and those that only all outputs together give (F1, AUC, perplexity)."""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from flatfed.core.errors import USER_ERRORS, FlatfedError, first_line, shown
from flatfed.core.tree import first_leaf, map_tree


@runtime_checkable
class Streaming(Protocol):
    """A metric that looks at one batch after the other, such as those of torchmetrics."""

    def reset(self) -> Any: ...

    def update(self, outputs: Any, targets: Any, /) -> Any: ...

    def compute(self) -> Any: ...


Metric = Callable[[Any, Any], Any] | Streaming
"""A function whose means over batches are averaged, or a metric that sees all of them."""


class Whole:
    """The metric that a function of all outputs and all targets is; it keeps them until all are there."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        if not callable(function):
            raise FlatfedError(f"whole({shown(function)}): give a function of (outputs, targets)")
        self.function = function
        self._batches: list[tuple[Any, Any]] = []

    def reset(self) -> None:
        self._batches = []

    def update(self, outputs: Any, targets: Any) -> None:
        self._batches.append((outputs, targets))

    def compute(self) -> Any:
        outputs, targets = zip(*self._batches, strict=True)
        samples = [len(first_leaf(batch)) for batch in targets]

        def joined(*leaves: Any) -> Any:
            """What is not one row a sample, such as a mean over the batch, has no meaning for all of them."""
            by_sample = all(
                isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == count
                for leaf, count in zip(leaves, samples, strict=True)
            )
            return torch.cat(leaves) if by_sample else None

        return self.function(map_tree(joined, *outputs), map_tree(joined, *targets))


def whole(function: Callable[[Any, Any], Any]) -> Whole:
    """A metric that is a function of all outputs and all targets, and not a mean over samples."""
    return Whole(function)


def is_streaming(metric: Metric) -> bool:
    return isinstance(metric, Streaming) and not isinstance(metric, type)


class Measured(NamedTuple):
    """What one batch says about a model."""

    sums: Tensor
    """The loss and the metrics that are means, each times what the batch weighs in it."""
    weights: Tensor
    outputs: Any = None
    """As the model returned them, where a metric wants to see all."""
    targets: Any = None


class Measurement:
    """Adds up what the batches say, in their order."""

    def __init__(self, metrics: Mapping[str, Metric]) -> None:
        self.names = ["loss", *metrics]
        # Copies: the task's own stay as they are, and several evaluations may go on at once.
        self.streaming: dict[str, Streaming] = {}
        for name, metric in metrics.items():
            if isinstance(metric, Streaming) and is_streaming(metric):
                with named_errors(name, "copied and reset"):
                    self.streaming[name] = copy.deepcopy(metric)
                    self.streaming[name].reset()
        self.sums = self.weights = torch.zeros(len(self.names) - len(self.streaming), dtype=torch.float64)

    def add(self, batch: Measured) -> None:
        self.sums, self.weights = self.sums + batch.sums, self.weights + batch.weights
        for name, metric in self.streaming.items():
            with named_errors(name, evaluated_on(batch.targets)):
                metric.update(batch.outputs, batch.targets)

    def numbers(self) -> dict[str, float]:
        means = iter((self.sums / self.weights).tolist())
        numbers = {}
        for name in self.names:
            if name in self.streaming:
                with named_errors(name, evaluated_on(None)):
                    numbers[name] = float(one_number(name, self.streaming[name].compute()))
            else:
                numbers[name] = next(means)
        return numbers


def one_number(name: str, value: Any) -> Tensor:
    number = torch.as_tensor(value)
    if number.numel() != 1:
        raise FlatfedError(f"{name}: it must return one number, not {shown(value)}")
    if number.is_complex():
        raise FlatfedError(f"{name}: it must return a real number, not {shown(value)}")
    return number.double().cpu().reshape(())


def evaluated_on(samples: Any) -> str:
    """What a function is asked for with these samples, or with all of them."""
    return f"evaluated on {'all' if samples is None else len(first_leaf(samples))} samples"


@contextmanager
def named_errors(name: str, what: str) -> Iterator[None]:
    """Whatever a user's functions raise, says which cannot be `what`; the cause stays attached."""
    try:
        yield
    except FlatfedError:
        raise
    except USER_ERRORS as error:
        raise FlatfedError(f"{name}: it cannot be {what} ({first_line(error)})") from error
