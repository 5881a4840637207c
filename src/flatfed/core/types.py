"""Numbers with a range, checked wherever a user can write one."""

import math
from typing import Annotated, Any

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
Seed = Annotated[Whole, Field(ge=0)]
