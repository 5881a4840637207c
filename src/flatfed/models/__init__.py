"""Plain modules by name: each is a function of the input shape, the number of classes and options.

To add one, put a file into this folder with such a function under `@register`.
"""

import functools
import importlib
import inspect
import pkgutil
from collections.abc import Callable, Sequence
from typing import Annotated, Any, TypeVar, cast

from pydantic import ConfigDict, Field, ValidationError, validate_call
from torch import nn

from flatfed.core.errors import FlatfedError, first_line, one_line
from flatfed.core.types import Count

MODELS: dict[str, Callable[..., nn.Module]] = {}

Layers = Annotated[Count, Field(le=1000)]
ModelFunction = TypeVar("ModelFunction", bound=Callable[..., nn.Module])


def register(build: ModelFunction) -> ModelFunction:
    """List a function of (input_shape, classes, options…) in `MODELS` under its own name."""
    if build.__name__ in MODELS:
        raise ValueError(f"model {build.__name__!r} is already registered; choose another name")
    MODELS[build.__name__] = checked(build)
    return cast(ModelFunction, MODELS[build.__name__])


def checked(build: ModelFunction) -> ModelFunction:
    """What a function that makes a model is called with is checked against its annotations."""
    signature = inspect.signature(build)
    validated = validate_call(config=ConfigDict(arbitrary_types_allowed=True))(build)

    @functools.wraps(build)
    def construct(*positional: Any, **named: Any) -> nn.Module:
        try:
            return validated(**{**signature.bind_partial(*positional).arguments, **named})
        except ValidationError as error:
            raise FlatfedError(one_line(error, signature.parameters)) from None
        except FlatfedError:
            raise
        except (RuntimeError, TypeError, ValueError) as error:  # what torch says to sizes that it cannot have
            raise FlatfedError(f"the model cannot be built: {first_line(error)}") from None

    return cast(ModelFunction, construct)


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
