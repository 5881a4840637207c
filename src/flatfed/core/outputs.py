"""What losses and metrics make of a model's outputs, which may be more than one tensor."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flatfed.core.tree import children


def judged(function: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Any:
    """A loss or a metric of outputs and targets as they are; torch's own take tensors and get the logits."""
    if not isinstance(outputs, Tensor) or not isinstance(targets, Tensor):
        plain: Any = function.func if isinstance(function, functools.partial) else function
        owner = plain if inspect.isroutine(plain) else type(plain)
        if str(owner.__module__).startswith("torch.nn."):
            name = getattr(plain, "__name__", type(plain).__name__)
            if not isinstance(targets, Tensor):
                raise TypeError(
                    f"{name} takes one tensor of targets, and they are {_kind(targets)}; give a loss of your "
                    "own, a function of (outputs, targets)"
                )
            outputs = logits_of(outputs, name)
    return function(outputs, targets)


def logits_of(outputs: Any, name: str = "accuracy") -> Tensor:
    """The one tensor that a classifier's outputs are about: they themselves, or their "logits"."""
    if isinstance(outputs, Tensor):
        return outputs
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if not isinstance(logits, Tensor):
        raise TypeError(
            f"{name} takes one tensor, and the model returns {_kind(outputs)} without logits; give a loss "
            "and metrics of your own, functions of (outputs, targets)"
        )
    return logits


def _kind(value: Any) -> str:
    """A container in a few words."""
    parts = children(value) or []
    names = [repr(place.strip(".[]'")) for place, _ in parts]
    inside = f"{len(parts)} parts" if type(value) in (tuple, list) else ", ".join(names)
    return f"a {type(value).__name__}" + (f" of {inside}" if parts else "")


def ignored_label(function: Callable[..., Any]) -> int | None:
    """The label that a loss or metric leaves out of its mean: the `ignore_index` that it has, if any."""
    label = getattr(function, "ignore_index", None)
    if label is None and not hasattr(function, "forward"):
        try:
            parameter = inspect.signature(function).parameters.get("ignore_index")
        except (TypeError, ValueError):
            return None  # a builtin without a signature
        label = None if parameter is None else parameter.default
    return label if isinstance(label, int) else None
