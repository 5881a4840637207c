"""Named vectors: what the server and the clients remember between rounds.

A part declares its vectors with `Vector` and reads those of another part with `Reads`. In a composition every
vector has a key of its own, the owning part's name and the vector's, so two parts may both keep a "momentum".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from flatfed.core.part import Part

State = Mapping[str, Tensor]
Vectors = dict[str, Tensor]
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
    broadcast: bool = False
    """Whether a server vector travels down to the participants."""
    sent_once: bool = False
    """Whether it never changes once it is made, so that it travels to every client only then."""


@dataclass(frozen=True)
class Reads:
    """A server vector of another part, and which part that must be.

    The reader gets it under the same name. A composition without that part is refused, even if another part
    keeps a vector of the same name: it would mean something else.
    """

    owner: type[Part]
    name: str
    broadcast: bool = False
    """Whether it is read on the clients, so that it must travel down."""


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


def initial_state(vectors: Iterable[Vector], dimensions: Dimensions, model: Tensor) -> Vectors:
    return {
        vector.name: model.clone()
        if vector.initial == "model"
        else model.new_full((dimensions.length(vector),), vector.initial)
        for vector in vectors
    }
