"""The registry of models, and what models of images share."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
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


def with_classifier(
    features: Sequence[nn.Module], input_shape: Sequence[int], hidden: Sequence[int], classes: int
) -> nn.Sequential:
    """Convolutional layers followed by linear ones: hidden layers of the given sizes, then the classes."""
    layers: list[nn.Module] = [*features, nn.Flatten()]
    before = flat_size(features, input_shape)
    for after in hidden:
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, classes))


def flat_size(features: Sequence[nn.Module], input_shape: Sequence[int]) -> int:
    """How many numbers the convolutional layers make of one image, without computing them."""
    try:
        on_meta = copy.deepcopy(nn.Sequential(*features)).to("meta")
        return int(on_meta(torch.empty(1, *input_shape, device="meta")).numel())
    except (RuntimeError, ValueError):
        raise FlatfedError(
            f"input_shape = {list(input_shape)}: the images are too small for this model; "
            "use larger images or a smaller model"
        ) from None
