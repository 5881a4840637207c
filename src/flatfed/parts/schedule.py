"""Local step sizes within a round."""

from pydantic.dataclasses import dataclass

from flatfed.core.part import Schedule
from flatfed.parts import ranges


@dataclass(frozen=True)
class LinearDecay(Schedule):
    """η_k = η [(1 − k/K) + ρ k/K]: from η towards ρη, starting again every round."""

    final: ranges.FinalRate

    def rates(self, rate: float, steps: int) -> list[float]:
        return [rate * ((1 - k / steps) + self.final * k / steps) for k in range(steps)]
