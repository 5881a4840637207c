"""Size skew alone: clients differ in how much data they hold, not in what it looks like.

Rule: every client gets `minimum` samples; the rest is shared by p ~ Dirichlet(concentration * 1) over
clients; who gets which sample is random. NIID-Bench's quantity skew draws p again until every client has
enough; setting the minimum aside first needs no second draw and cannot fail.

Sizes: unequal. Duplicates: none. Unused: none.
"""

import numpy as np
from numpy.random import Generator

from flatfed.data.partition.base import (
    Assignment,
    Classes,
    Concentration,
    Partition,
    PositiveCount,
    apportion,
    register,
)


@register("quantity_skew")
class QuantitySkew(Partition):
    """Dirichlet client sizes above a minimum, random labels."""

    concentration: Concentration
    minimum: PositiveCount = 1

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_minimum(self.minimum, clients)
        rest = classes.samples - self.minimum * clients
        shares = generator.dirichlet(np.full(clients, self.concentration))
        sizes = self.minimum + apportion(shares, rest, generator)
        return generator.permutation(classes.samples), np.repeat(np.arange(clients), sizes)
