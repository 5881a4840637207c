"""Where local training begins."""

from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.context import MergeContext
from flatfed.core.flat import unit
from flatfed.core.part import Start
from flatfed.core.state import Reads, State, Vector, Vectors
from flatfed.core.types import Share
from flatfed.parts import ranges
from flatfed.parts.server import LateAverage, Momentum


@dataclass(frozen=True)
class LookAhead(Start):
    """φ = x + λ m: the model moved along the server's momentum. The server sends φ, so nothing is added."""

    weight: Share

    reads = (Reads(Momentum, "momentum"),)

    def start(self, server: State) -> Tensor:
        return server["model"] + self.weight * server["momentum"]


@dataclass(frozen=True)
class PerturbedLookAhead(LookAhead):
    """φ − ρ u(m): the look-ahead, and an ascent against the momentum, in the one vector that is sent."""

    radius: ranges.Radius

    def start(self, server: State) -> Tensor:
        return super().start(server) - self.radius * unit(server["momentum"])


@dataclass(frozen=True)
class PerturbedStart(Start):
    """x̃ = x − ρ u(Δ̄) with the Δ̄ of the round before: against the way the model came, so uphill."""

    radius: ranges.Radius

    server_vectors = (Vector("last_displacement"),)

    def start(self, server: State) -> Tensor:
        return server["model"] - self.radius * unit(server["last_displacement"])

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        return {"last_displacement": mean["displacement"]}


@dataclass(frozen=True)
class Unaveraged(Start):
    """The model that the server's rule made, where the server keeps an average of late ones as the model."""

    reads = (Reads(LateAverage, "unaveraged"),)

    def start(self, server: State) -> Tensor:
        return server["unaveraged"]
