"""What a theorem says in numbers: its value, the conditions it rests on, and how far it can be trusted."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Label = Literal["bound", "as printed", "order"]
"""A "bound" follows from its assumptions and is true if the constants are suprema. "As printed": the
constants are printed, but a named step of the proof fails, so it is no guarantee. Of an "order" the
constants are hidden, and only shapes compare."""


@dataclass(frozen=True)
class Setting:
    """The numbers that most theorems are about, in the symbols that the papers share."""

    N: int = 1
    """Clients."""
    S: int = 1
    """Participants of a round."""
    K: int = 1
    """Local steps."""
    T: int = 1
    """Rounds."""
    eta: float = 0.0
    """The local step size η."""
    eta_g: float = 1.0
    """The server's step size."""
    rho: float = 0.0
    """The radius of perturbations."""
    L: float = 0.0
    """Smoothness: the largest curvature of a client's loss."""
    noise: float = 0.0
    """σ_l², the variance of what the paper takes for noise: of gradients, or of unit gradients."""
    spread: float = 0.0
    """σ_g², how far clients' gradients are from the global one, squared."""
    F0: float = 0.0
    """F(x_0) − inf F."""


@dataclass(frozen=True)
class Condition:
    text: str
    holds: bool


@dataclass(frozen=True)
class Statement:
    """A theorem or a lemma at some constants."""

    name: str
    value: float
    label: Label
    conditions: tuple[Condition, ...] = ()
    terms: Mapping[str, float] = field(default_factory=dict)
    """What the value is the sum of, or intermediate constants."""
    corrected: float | None = None
    """The value that follows from the paper's own lemmas where the printed line does not."""
    remark: str = ""

    @property
    def holds(self) -> bool:
        """Whether all of its conditions do."""
        return all(condition.holds for condition in self.conditions)


def at_most(what: str, value: float, limit: float) -> Condition:
    return Condition(f"{what} = {value:.3g} ≤ {limit:.3g}", value <= limit * (1 + 1e-12))


def positive(what: str, value: float) -> Condition:
    return Condition(f"{what} = {value:.3g} > 0", value > 0)


def ratio(numerator: float, denominator: float) -> float:
    """Infinite where a condition on the denominator fails."""
    return numerator / denominator if denominator > 0 else math.inf


def total(parts: Iterable[float]) -> float:
    return math.fsum(parts)


def saturated(formula: Callable[[], float]) -> float:
    """The value of a formula that may exceed the largest float."""
    try:
        return formula()
    except OverflowError:
        return math.inf
