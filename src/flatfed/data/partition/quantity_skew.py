"""Size skew alone: clients differ in how much data they hold, not in what it looks like.

Rule: every client gets `minimum` samples; the rest is shared by p ~ Dirichlet(concentration * 1) over
clients; who gets which sample is random. The quantity skew of NIID-Bench, which draws p again until
every client has enough; setting the minimum aside first needs no second draw and cannot fail.

Sizes: unequal. Duplicates: none. Unused: none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from flatfed.data.partition.base import (
    STRICT,
    Concentration,
    Indices,
    Partition,
    PositiveCount,
    apportion,
    check_minimum,
    collect,
    read_classes,
)


@dataclass(frozen=True, config=STRICT)
class QuantitySkew(Partition):
    """Dirichlet client sizes above a minimum, random labels."""

    concentration: Concentration
    minimum: PositiveCount = 1

    def split(self, labels: NDArray[Any], clients: int, generator: np.random.Generator) -> list[Indices]:
        classes = read_classes(labels, clients)
        check_minimum(self.minimum, clients, classes.samples)
        rest = classes.samples - self.minimum * clients
        shares = generator.dirichlet(np.full(clients, self.concentration))
        sizes = self.minimum + apportion(shares, rest, generator)
        owners = np.repeat(np.arange(clients), sizes)
        return collect(generator.permutation(classes.samples), owners, clients)
