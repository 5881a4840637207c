"""Named vectors: what a server and a client remember between rounds.

A part declares its vectors with `Vector`; the engine keeps them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
from torch import Tensor

State = Mapping[str, Tensor]
Size = Literal["model", "inputs", "inputs_squared", "channels", "classes", "one"]


@dataclass(frozen=True)
class Vector:
    """A named vector that a part keeps on the server or on every client.

    Its length is `count` times what `size` stands for, and `per_class` times the number of classes.
    `initial` is its value before the first use; "model" means the model at that moment: on the server the
    first model, on a client the model it receives the first time it takes part.
    """

    name: str
    size: Size = "model"
    initial: float | Literal["model"] = 0.0
    count: int = 1
    per_class: bool = False
    sent_once: bool = False
    """Whether it never changes once it is made, so that it travels to every client only then."""


@dataclass(frozen=True)
class Dimensions:
    """The lengths that a declared size stands for."""

    parameters: int
    input_shape: tuple[int, ...]
    classes: int = 0
    """The model's outputs, where targets are class labels."""

    @property
    def inputs(self) -> int:
        return int(np.prod(self.input_shape))

    def length(self, vector: Vector) -> int:
        lengths: dict[Size, int] = {
            "model": self.parameters,
            "inputs": self.inputs,
            "inputs_squared": self.inputs**2,
            "channels": self.input_shape[0] if self.input_shape else 1,
            "classes": self.classes,
            "one": 1,
        }
        return vector.count * (self.classes if vector.per_class else 1) * lengths[vector.size]


def initial_state(vectors: Iterable[Vector], dimensions: Dimensions, model: Tensor) -> dict[str, Tensor]:
    return {
        vector.name: model.clone()
        if vector.initial == "model"
        else model.new_full((dimensions.length(vector),), vector.initial)
        for vector in vectors
    }
