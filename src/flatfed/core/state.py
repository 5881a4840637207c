"""Named vectors: what the server and the clients remember between rounds.

A part declares its vectors with `Vector` and reads those of another part with `Reads`. In a composition every
vector has a key of its own, the owning part's name and the vector's, so two parts may both keep a "momentum".
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from flatfed.core.errors import FlatfedError

if TYPE_CHECKING:
    from flatfed.core.part import Part

MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
"""In bytes."""
State = Mapping[str, Tensor]
Vectors = dict[str, Tensor]
Size = Literal["model", "inputs", "inputs_squared", "channels", "classes", "tensors", "one"]


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
    tensors: int = 1
    """The model's trainable parameters, counted as tensors."""

    @property
    def inputs(self) -> int:
        return math.prod(self.input_shape)

    def length(self, vector: Vector) -> int:
        """Refuses what this machine's memory cannot hold even once."""
        lengths: dict[Size, int] = {
            "model": self.parameters,
            "inputs": self.inputs,
            "inputs_squared": self.inputs**2,
            "channels": self.input_shape[0] if self.input_shape else 1,
            "classes": self.classes,
            "tensors": self.tensors,
            "one": 1,
        }
        length = vector.count * (self.classes if vector.per_class else 1) * lengths[vector.size]
        if 4 * length > MEMORY:
            raise FlatfedError(
                f"{vector.name}: {length:.3g} numbers are more than this machine's memory holds; lower the "
                "option of the algorithm that asks for them, or use a smaller model or smaller inputs"
            )
        return length


def initial_state(vectors: Iterable[Vector], dimensions: Dimensions, model: Tensor) -> Vectors:
    return {
        vector.name: model.clone()
        if vector.initial == "model"
        else model.new_full((dimensions.length(vector),), vector.initial)
        for vector in vectors
    }


def check_like(state: State, expected: State, where: str) -> None:
    """Refuses a stored state by the name of the first vector that is not as expected."""
    for name in expected:
        if name not in state:
            raise FlatfedError(f"{where}: it lacks {name!r}; it is of another algorithm or damaged")
    for name, vector in state.items():
        if name not in expected:
            raise FlatfedError(f"{where}: {name!r} does not belong there; it is of another algorithm")
        kind, known = (vector.shape, vector.dtype), (expected[name].shape, expected[name].dtype)
        if kind != known:
            raise FlatfedError(
                f"{where}: {name!r} is {list(kind[0])} {kind[1]} where {list(known[0])} {known[1]} belongs; "
                "it is of another model or algorithm"
            )


def owned(vectors: State, *given: State) -> Vectors:
    """The vectors, copied where they share memory with one before them or with what was given.

    A part may hand back what it was given; two vectors of a state must not change together.
    """

    def memory(vector: Tensor) -> int:
        return vector.untyped_storage().data_ptr()

    taken = {memory(vector) for state in given for vector in state.values()}
    own = {}
    for key, vector in vectors.items():
        own[key] = vector.clone() if memory(vector) in taken else vector
        taken.add(memory(own[key]))
    return own
