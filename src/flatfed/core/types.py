"""Numbers with a range, checked wherever a user can write one."""

import math
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).tiny)
"""The normal numbers of single precision; smaller ones count as zero in training."""


def plain(value: Any) -> Any:
    """numpy's numbers are as good as Python's, and there is one zero."""
    value = value.item() if isinstance(value, np.integer | np.floating) else value
    return 0.0 if isinstance(value, float) and value == 0 else value


def _number(value: Any) -> Any:
    """A number that single precision can hold; only what cannot be one is left to pydantic."""
    value = plain(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise PydanticCustomError("number", "input should be a number")
    if LARGEST < abs(value) < math.inf:
        raise PydanticCustomError("large", "beyond single precision; use at most 3.4e38")
    if 0 < abs(value) < SMALLEST:
        raise PydanticCustomError("small", "too small for single precision; use at least 1.2e-38")
    return value


Real = Annotated[float, BeforeValidator(_number), Field(strict=True, allow_inf_nan=False)]
NonNegative = Annotated[Real, Field(ge=0)]
Positive = Annotated[Real, Field(gt=0)]
Share = Annotated[Real, Field(ge=0, le=1)]
"""Between 0 and 1, both included."""
Decay = Annotated[Real, Field(ge=0, lt=1)]
"""A momentum's decay: 1 would never forget."""
PositiveShare = Annotated[Real, Field(gt=0, le=1)]
SomeShare = Annotated[Real, Field(gt=0, lt=1)]
"""Neither nothing nor everything."""
Whole = Annotated[int, BeforeValidator(plain), Field(strict=True, lt=2**63)]
Count = Annotated[Whole, Field(ge=1)]
Points = Annotated[Count, Field(le=1001)]
"""In each direction of a picture: more take days and show no more."""
Seed = Annotated[Whole, Field(ge=0)]


@dataclass(frozen=True)
class Range:
    """Beside an option's type: where its value is sought when it is tuned, and on which scale.

    "decay" is for momenta: logarithmic in 1 − value, so that 0.9 and 0.99 are as far apart as 0 and 0.9.
    """

    low: float
    high: float
    scale: Literal["linear", "log", "decay"] = "log"

    def value(self, share: float) -> float:
        """The value at a share of the range, in three digits, which a person can read and write again."""
        if self.scale == "linear":
            return float(f"{self.low + share * (self.high - self.low):.3g}")
        if self.scale == "log":
            return float(f"{self.low * (self.high / self.low) ** share:.3g}")
        rest = float(f"{(1 - self.low) * ((1 - self.high) / (1 - self.low)) ** share:.3g}")
        return float(f"{1 - rest:.6g}")

    def share(self, value: float) -> float:
        """Where a value lies: from 0 to 1, which values outside are cut to."""
        inside = min(max(value, self.low), self.high)
        if self.scale == "linear":
            return (inside - self.low) / (self.high - self.low)
        if self.scale == "log":
            return math.log(inside / self.low) / math.log(self.high / self.low)
        return math.log((1 - inside) / (1 - self.low)) / math.log((1 - self.high) / (1 - self.low))


def tuned_range(annotation: Any) -> Range | None:
    """The range that an annotated type carries, if it does."""
    return next((item for item in getattr(annotation, "__metadata__", ()) if isinstance(item, Range)), None)
