"""Where local training begins."""

from __future__ import annotations

from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.part import Start, StepBound
from flatfed.core.state import Reads, State
from flatfed.core.types import Share
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
