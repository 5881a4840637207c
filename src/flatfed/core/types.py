"""Numbers with a range, checked wherever a user can write one."""

from typing import Annotated, Any

import numpy as np
from pydantic import BeforeValidator, Field


def _plain(number: Any) -> Any:
    """numpy's integers are as good as Python's."""
    return int(number) if isinstance(number, np.integer) else number


Real = Annotated[float, Field(strict=True, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(strict=True, gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(strict=True, ge=0, le=1, allow_inf_nan=False)]
"""Between 0 and 1, both included."""
Decay = Annotated[float, Field(strict=True, ge=0, lt=1, allow_inf_nan=False)]
"""A momentum's decay: 1 would never forget."""
PositiveShare = Annotated[float, Field(strict=True, gt=0, le=1, allow_inf_nan=False)]
Count = Annotated[int, BeforeValidator(_plain), Field(strict=True, ge=1)]
Seed = Annotated[int, BeforeValidator(_plain), Field(strict=True, ge=0)]
