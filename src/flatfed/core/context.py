"""What parts are given to work with: gradients, and what is known on a client and on the server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

from flatfed.core.flat import Layout
from flatfed.core.state import Dimensions, State

Carry = dict[str, Tensor]
"""What a part remembers from step to step inside one round."""
Stepped = tuple[Tensor, Carry]
"""A direction, and what is remembered after it."""


class Oracle(Protocol):
    """The gradient of one local step's batch, at any point, with the same random draws every time."""

    def __call__(self, point: Tensor) -> Tensor:
        """A new tensor every time, which the caller may overwrite."""
        ...

    def shifted(
        self, point: Tensor, shift: Callable[..., Tensor], parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradients for the point and for the parameters of a map applied to the batch's inputs."""
        ...

    def on_samples(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        """The gradient on samples other than the client's own, ready for the model: inputs [B, …]."""
        ...


@dataclass(frozen=True)
class ClientContext:
    """What a part may know during a client's round."""

    round: int
    received: State
    """The broadcast: "model", where local training starts, and the server vectors that travel down."""
    client: State
    rates: Sequence[float]
    """The step sizes η_0 … η_{K−1} of this round."""
    layout: Layout
    input_shape: tuple[int, ...]
    full_gradient: Callable[[], Tensor]
    """The gradient over all of the client's data at the received model, without weight decay."""
    displacement: Tensor
    """The local model minus the received one; overwritten at every step, so clone it to keep it."""
    radius_factor: float = 1.0
    """What the radii of perturbations are multiplied by in this round."""

    @property
    def origin(self) -> Tensor:
        """The received model."""
        return self.received["model"]

    @property
    def total_rate(self) -> float:
        """Σ η_k, which turns a displacement into a mean gradient."""
        return sum(self.rates)


@dataclass(frozen=True)
class MergeContext:
    """What a part may know about the participants when their uploads are merged."""

    round: int
    fraction: float
    """The participants' share of the population's weight: S/N when all clients weigh the same."""
    total_rate: float
    """The mean of the participants' Σ η_k."""
    radius_factor: float = 1.0
    """What the radii of perturbations were multiplied by in this round."""


@dataclass(frozen=True)
class ServerContext:
    """What a server task may know."""

    round: int
    """Rounds finished so far."""
    seed: int
    dimensions: Dimensions
    total_rate: float
    """Σ η_k of a typical client in the next round."""
    loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The loss of a flat model [P] on inputs and targets, differentiable as often as needed."""


class TaskStep(NamedTuple):
    """One step of a server task: the vectors that it changed, what to record, and how far along it is."""

    server: dict[str, Tensor]
    record: dict[str, float] = {}
    done: int = 1
    total: int = 1
    publishes: bool = False
    """Whether the vectors that are sent once are now complete and go out to all clients."""


class Finish(NamedTuple):
    """What a client keeps and what it uploads at the end of a round, by name."""

    client: dict[str, Tensor] = {}
    upload: dict[str, Tensor] = {}


class Affine(NamedTuple):
    """d ↦ scale · d + spring · (y − x) − pull, constant during a round: what most corrections are."""

    scale: float = 1.0
    spring: float = 0.0
    pull: Tensor | None = None

    def __call__(self, direction: Tensor, displacement: Tensor) -> Tensor:
        if self.scale != 1:
            direction = self.scale * direction
        if self.spring:
            direction = direction.add(displacement, alpha=self.spring)
        return direction if self.pull is None else direction - self.pull

    def then(self, after: Affine) -> Affine:
        """This map followed by another, as one map."""
        pull = self.pull if self.pull is None or after.scale == 1 else after.scale * self.pull
        if pull is not None and after.pull is not None:
            pull = pull + after.pull
        return Affine(
            self.scale * after.scale,
            self.spring * after.scale + after.spring,
            after.pull if pull is None else pull,
        )
