"""Where local training begins."""

from __future__ import annotations

from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.context import MergeContext
from flatfed.core.flat import unit
from flatfed.core.part import Start, StepBound
from flatfed.core.state import Reads, State, Vector
from flatfed.core.types import NonNegative, Share
from flatfed.parts.server import Momentum


@dataclass(frozen=True)
class LookAhead(Start):
    """φ = x + λ m: the model moved along the server's momentum. The server sends φ, so nothing is added."""

    weight: Share

    @property
    def reads(self) -> tuple[Reads, ...]:
        return (Reads(Momentum, "momentum"),)

    @property
    def step_bound(self) -> StepBound:
        return StepBound()

    def start(self, server: State) -> Tensor:
        return server["model"] + self.weight * server["momentum"]


@dataclass(frozen=True)
class PerturbedStart(Start):
    """x̃ = x − ρ u(Δ̄) with the Δ̄ of the round before: against the way the model came, so uphill."""

    radius: NonNegative

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        return (Vector("last_displacement"),)

    @property
    def step_bound(self) -> StepBound:
        return StepBound()

    def start(self, server: State) -> Tensor:
        return server["model"] - self.radius * unit(server["last_displacement"])

    def merge(self, server: State, mean: State, context: MergeContext) -> dict[str, Tensor]:
        return {"last_displacement": mean["displacement"]}
