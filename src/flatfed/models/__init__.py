"""Plain modules by name: each is a function of the input shape, the number of classes and options.

To add one, put a file into this folder with such a function under `@register`.
"""

import importlib
import pkgutil
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import nn

from flatfed.core.errors import FlatfedError

MODELS: dict[str, Callable[..., nn.Module]] = {}

ModelFunction = TypeVar("ModelFunction", bound=Callable[..., nn.Module])


def register(build: ModelFunction) -> ModelFunction:
    """List a function of (input_shape, classes, options…) in `MODELS` under its own name."""
    if build.__name__ in MODELS:
        raise ValueError(f"model {build.__name__!r} is already registered; choose another name")
    MODELS[build.__name__] = build
    return build


def image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """The input shape as (channels, height, width)."""
    if len(input_shape) != 3:
        raise FlatfedError(
            f"input_shape = {list(input_shape)}: this model takes images [channels, height, width]; "
            "choose another model or reshape the inputs"
        )
    channels, height, width = input_shape
    return channels, height, width


for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
