"""What a part is: the seven questions about a round that an algorithm answers, each with a neutral answer.

All algebra is written for `[..., P]`: the last axis is parameters, a leading client axis is optional. The
same code then runs one client in place or a whole cohort as a matrix. Parts keep nothing on themselves:
state goes in and comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from pydantic import ConfigDict
from torch import Tensor

from flatfed.core.errors import FlatfedError
from flatfed.core.flat import Layout, all_finite
from flatfed.core.state import Dimensions, State, Vector

Carry = dict[str, Tensor]


class Oracle(Protocol):
    """The gradient of one local step's batch, at any point, with the same random draws every time."""

    def __call__(self, point: Tensor) -> Tensor:
        """A new tensor every time, which is the caller's."""
        ...

    def shifted(
        self, point: Tensor, shift: Callable[..., Tensor], parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradients for the point and for the parameters of a map applied to the batch's inputs."""
        ...

    def elsewhere(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient on samples that are not the client's own, ready for the model: inputs [B, …]."""
        ...


@dataclass(frozen=True)
class ClientContext:
    """What a part may know during a client's round."""

    round: int
    received: State
    """The broadcast: "model" (where local training starts) and the vectors that parts asked for."""
    client: State
    rates: Sequence[float]
    """The step sizes η_0 … η_{K−1} of this round."""
    layout: Layout
    input_shape: tuple[int, ...]
    full_gradient: Callable[[], Tensor]
    """The gradient over all of the client's data at the received model, without weight decay."""
    moved: Tensor
    """The local model less the received one; it is overwritten at each step, so clone it to keep it."""

    @property
    def origin(self) -> Tensor:
        return self.received["model"]

    @property
    def total_rate(self) -> float:
        """Σ η_k, which turns a displacement into a mean gradient."""
        return sum(self.rates)


@dataclass(frozen=True)
class Cohort:
    """What a part may know about the participants when their uploads are merged."""

    round: int
    fraction: float
    """The participants' share of the population's weight: S/N when all clients weigh the same."""
    total_rate: float
    """The mean of the participants' Σ η_k."""


@dataclass(frozen=True)
class ServerContext:
    """What a part may know while the server works by itself."""

    round: int
    """Rounds finished so far."""
    seed: int
    dimensions: Dimensions
    total_rate: float
    """Σ η_k of a typical client in the round that comes next."""
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The loss of a flat model [P] on inputs and targets, differentiable as often as needed."""


class Work(NamedTuple):
    """A piece of the server's own work: the vectors that it changed, what to record, and how far it is."""

    server: dict[str, Tensor]
    record: dict[str, float] = {}
    done: int = 1
    total: int = 1
    sends: bool = False
    """Whether the vectors that are sent once are made with it, and go to all clients."""


class Finish(NamedTuple):
    """What a client keeps and what it sends, by name."""

    client: dict[str, Tensor] = {}
    upload: dict[str, Tensor] = {}


class Affine(NamedTuple):
    """d ↦ scale · d + spring · (y − x) − pull, with constants for the round: what most corrections are."""

    scale: float = 1.0
    spring: float = 0.0
    pull: Tensor | None = None

    def __call__(self, direction: Tensor, moved: Tensor) -> Tensor:
        if self.scale != 1:
            direction = self.scale * direction
        if self.spring:
            direction = direction.add(moved, alpha=self.spring)
        return direction if self.pull is None else direction - self.pull

    def then(self, after: Affine) -> Affine:
        """Both, as one."""
        pull = self.pull if self.pull is None or after.scale == 1 else after.scale * self.pull
        if pull is not None and after.pull is not None:
            pull = pull + after.pull
        return Affine(
            self.scale * after.scale,
            self.spring * after.scale + after.spring,
            after.pull if pull is None else pull,
        )


class Part:
    """One ingredient. Everything has a neutral default, so a part overrides only what it is about."""

    slot: ClassVar[str]
    # An option that a part does not know is refused; a part may hold another.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", arbitrary_types_allowed=True)
    needs_float_inputs: ClassVar[bool] = False
    needs_classes: ClassVar[bool] = False
    """Whether targets must be class labels."""
    works_alone: ClassVar[bool] = False
    """Whether the server has work of its own to do, in `before_round` or `refine`."""
    first_used_hint: ClassVar[str] = ""
    """How to have an earlier `first_used`: the end of a sentence."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def reads_displacement(self) -> bool:
        """Whether it takes the mean displacement, divided by the step sizes, for a mean direction."""
        return False

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        return ()

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        return ()

    @property
    def receives(self) -> tuple[str, ...]:
        """The server vectors that must travel down with the model."""
        return ()

    @property
    def needs(self) -> tuple[str, ...]:
        """The server vectors of other parts that it reads on the server."""
        return ()

    @property
    def uploads(self) -> tuple[str, ...]:
        """The vectors that travel up with the displacement."""
        return ()

    @property
    def alters_displacement(self) -> bool:
        """Whether its `finish` replaces the uploaded displacement."""
        return False

    @property
    def full_gradients(self) -> int:
        """Passes over all of a client's data in each round."""
        return 0

    @property
    def first_used(self) -> int:
        """The first round, counted from 1, in which it makes a difference."""
        return 1

    def begin(self, context: ClientContext) -> Carry:
        """What the part remembers from step to step inside one round."""
        return {}

    def finish(self, context: ClientContext, carry: Carry, moved: Tensor) -> Finish:
        return Finish()

    def merge(self, server: State, mean: State, cohort: Cohort) -> dict[str, Tensor]:
        """The part's server vectors after the round, from the mean uploads."""
        return {}

    def before_round(self, server: State, context: ServerContext) -> Iterator[Work]:
        """What the server does by itself before a round, in pieces; a run may be stopped between them.

        What is left to do must follow from the server's vectors, so that it goes on where it stopped.
        """
        return iter(())

    def refine(self, server: State, context: ServerContext) -> dict[str, Tensor]:
        """What the server changes by itself at the end of a round, after its rule."""
        return {}


class Start(Part):
    """Where does local training begin? Here: at the global model."""

    slot = "start"

    def start(self, server: State) -> Tensor:
        """The point that is broadcast; computed on the server, so a look-ahead costs no traffic."""
        return server["model"]


class Gradient(Part):
    """Which gradient drives the step? Here: the one at the local model."""

    slot = "gradient"

    @property
    def evaluations(self) -> int:
        """Forward and backward passes in each local step."""
        return 1

    def constant_shift(self, context: ClientContext) -> Tensor | None:
        """How far from the local model gradients are taken, where that does not change during the round."""
        return None

    def gradient(
        self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry
    ) -> tuple[Tensor, Carry]:
        """The gradient for the step; `point` is the local model, shifted if there is a `constant_shift`."""
        return oracle(point), carry


class Correction(Part):
    """Which direction is taken? Corrections form a pipeline; here: the gradient's own.

    A part says which affine map it is for the round, if it is one, else it overrides `direction`. The last
    affine maps of the pipeline are folded into one, which costs a step one pass over the model.
    """

    slot = "correct"
    decays_gradient: ClassVar[bool] = False
    """Whether weight decay belongs to the gradient that this part accumulates."""

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        """What it does to the direction of every step, from what it knew when the round began."""
        return Affine()

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> tuple[Tensor, Carry]:
        """The direction after this part; the local model is `context.origin + context.moved`."""
        return self.affine(context, carry)(direction, context.moved), carry

    def shift(self, server: State) -> Tensor | None:
        """What the merged state adds to the new model, beyond the server's rule."""
        return None


class Schedule(Part):
    """Which local step sizes? Here: constant within a round."""

    slot = "schedule"

    def rates(self, rate: float, steps: int) -> list[float]:
        return [rate] * steps


class Server(Part):
    """How is the global model updated? Here: by the mean displacement, and whatever corrections add."""

    slot = "server"

    def update(
        self, server: State, displacement: Tensor, shift: Tensor | None, cohort: Cohort
    ) -> dict[str, Tensor]:
        """The new "model" and the rule's own vectors."""
        return {"model": plus_shift(server["model"] + displacement, shift)}


class Synthetic(Part):
    """What stands for the clients' data on the server, and then with everybody? Here: nothing."""

    slot = "synthetic"


class Compressor(Part):
    """What goes up the wire? Here: the vectors as they are.

    One that `remembers` keeps a vector on each client for every upload: `target` is what is encoded given
    that memory, `memory` what is kept after it was sent. One that `estimates` keeps the mean upload of the
    whole population on the server, and the participants only bring it up to date.
    """

    slot = "compress"
    remembers: ClassVar[bool] = False
    estimates: ClassVar[bool] = False

    def encode(self, vector: Tensor, generator: torch.Generator) -> bytes:
        """A vector [P] as the bytes that travel; draws come from the generator alone."""
        # As bytes first, because numpy does not know every dtype.
        return vector.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def decode(self, payload: bytes, size: int, dtype: torch.dtype) -> Tensor:
        """The vector [size] that the receiver sees; a payload that cannot be right is refused."""
        expected = size * dtype.itemsize
        if len(payload) != expected:
            raise FlatfedError(
                f"payload: {len(payload)} bytes where {expected} belong; it was cut or damaged"
            )
        vector = torch.frombuffer(bytearray(payload), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        if not all_finite(vector):
            raise FlatfedError("payload: it holds numbers that are not finite; it was damaged")
        return vector

    def target(self, vector: Tensor, memory: Tensor) -> Tensor:
        return vector

    def memory(self, target: Tensor, decoded: Tensor, memory: Tensor) -> Tensor:
        return memory

    def estimate(self, estimate: Tensor, mean: Tensor, cohort: Cohort) -> Tensor:
        return mean


SLOTS: dict[str, type[Part]] = {
    kind.slot: kind for kind in (Start, Gradient, Correction, Schedule, Server, Synthetic, Compressor)
}


NEUTRAL = "none"
"""What a slot's neutral part is called in config files."""


def plus_shift(model: Tensor, shift: Tensor | None) -> Tensor:
    return model if shift is None else model + shift


def part_name(part: Part | type[Part]) -> str:
    """The snake_case name by which a part is called in config files."""
    kind = part if isinstance(part, type) else type(part)
    return "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__).lstrip("_")


def describe_part(part: Part) -> dict[str, Any]:
    if type(part) is SLOTS[part.slot]:
        return {"part": NEUTRAL}
    names: list[str] = [item.name for item in fields(part)] if is_dataclass(part) else []
    described: dict[str, Any] = {"part": part_name(part)}
    for name in names:
        value = getattr(part, name)
        described[name] = describe_part(value) if isinstance(value, Part) else value
    return described
