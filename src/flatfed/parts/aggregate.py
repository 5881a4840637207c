"""How many uploads become one: rules that a few clients with wrong or extreme uploads cannot lead astray."""

import math
from fractions import Fraction
from typing import Annotated

import torch
from pydantic import Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.part import Aggregator, UploadRows
from flatfed.core.types import Real


@dataclass(frozen=True)
class TrimmedMean(Aggregator):
    """Coordinate by coordinate the mean of what is left without the f smallest and the f largest values.

    f = ⌊share · S⌋ of the S participants at either end, so a share close to 1/2 gives the median. The values
    that are left count by their clients' weights. The order of the clients does not matter.
    """

    share: Annotated[Real, Field(ge=0, lt=0.5)] = 0.1
    streams = False

    def combine(self, rows: UploadRows) -> Tensor:
        clients = len(rows.weights)
        # The decimal as written: the product of floats would make 28 of 0.29 · 100.
        trimmed = math.floor(Fraction(str(self.share)) * clients)
        kept = slice(trimmed, clients - trimmed)

        def mean(block: Tensor) -> Tensor:
            values, order = block.sort(dim=0, stable=True)
            weights = rows.weights[order[kept]]
            return (values[kept] * weights).sum(0) / weights.sum(0)

        return torch.cat([mean(block) for block in rows.blocks()])
