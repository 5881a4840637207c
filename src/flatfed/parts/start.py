"""Where local training begins."""

from __future__ import annotations

from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.part import Start
from flatfed.core.state import State
from flatfed.core.types import Share


@dataclass(frozen=True)
class LookAhead(Start):
    """φ = x + λ m: the model moved along the server's momentum. The server sends φ, so nothing is added."""

    weight: Share

    @property
    def needs(self) -> tuple[str, ...]:
        return ("momentum",)

    def start(self, server: State) -> Tensor:
        return server["model"] + self.weight * server["momentum"]
