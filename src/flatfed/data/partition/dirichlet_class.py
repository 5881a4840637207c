"""Label and size skew by a Dirichlet cut of every class.

Rule: for each class draw shares p ~ Dirichlet(concentration * 1) over clients and cut the shuffled
class by the running sum of p. Clients that already hold samples / clients or more get no share of the
next class. The whole is drawn again until every client has `minimum` samples. The cut is Yurochkin et
al.'s; the cap and the minimum of 10 are NIID-Bench's, which rounds the cuts down where this scheme
rounds them without bias.

Sizes: unequal. Duplicates: none. Unused: none.

Drawing again cannot succeed when the concentration is small and clients are many, so it stops after
`redraws` attempts, or at once when so many clients are short that success is out of the question. Then
the attempt with the fewest missing samples is topped up: every client above the minimum gives in
proportion to its surplus, of all its classes alike, and the clients below the minimum receive exactly
what they lack, in runs of few classes so that they stay skewed.
"""

from typing import Annotated

import numpy as np
from numpy.random import Generator
from pydantic import Field

from flatfed.data.partition.base import (
    Assignment,
    Classes,
    Concentration,
    Indices,
    Partition,
    PositiveCount,
    apportion,
    register,
)

# With k clients below the minimum on average, an attempt without any succeeds about once in exp(k).
MAX_SHORT_CLIENTS = 10


@register("dirichlet_class")
class DirichletClass(Partition):
    """Every class cut over the clients by Dirichlet shares, with a smallest client size."""

    concentration: Concentration
    minimum: PositiveCount = 10
    redraws: Annotated[int, Field(ge=0)] = 100

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_minimum(self.minimum, clients)
        holdings = self._draw_holdings(classes.counts, clients, generator)
        # One entry per sample, ordered by client and then class.
        owners = np.repeat(np.arange(clients), holdings.sum(axis=1))
        held_class = np.repeat(np.tile(np.arange(classes.count), clients), holdings.ravel())
        owners = _top_up(owners, clients, self.minimum)
        return classes.shuffled(generator), owners[np.argsort(held_class, kind="stable")]

    def _draw_holdings(self, counts: Indices, clients: int, generator: Generator) -> Indices:
        """Samples per client and class of the first sufficient attempt, or of the best one."""
        best = _cut(counts, clients, self.concentration, generator)
        for _ in range(self.redraws):
            lacking = self._lacking(best)
            if not 0 < np.count_nonzero(lacking) <= MAX_SHORT_CLIENTS:
                break
            holdings = _cut(counts, clients, self.concentration, generator)
            if self._lacking(holdings).sum() < lacking.sum():
                best = holdings
        return best

    def _lacking(self, holdings: Indices) -> Indices:
        """The number of samples by which each client misses the minimum."""
        return np.asarray(np.maximum(self.minimum - holdings.sum(axis=1), 0))


def _cut(counts: Indices, clients: int, concentration: float, generator: Generator) -> Indices:
    """One attempt: the samples of each class that each client gets, [clients, classes]."""
    holdings = np.zeros((clients, len(counts)), np.int64)
    sizes = np.zeros(clients, np.int64)
    for column, count in enumerate(counts):
        # A Dirichlet vector with some entries struck out and the rest rescaled is a Dirichlet vector
        # over the rest. Drawing that directly is the same rule and cannot divide by a vanished sum.
        below_average = np.flatnonzero(sizes * clients < counts.sum())
        shares = generator.dirichlet(np.full(len(below_average), concentration))
        holdings[below_average, column] = apportion(shares, count, generator)
        sizes += holdings[:, column]
    return holdings


def _top_up(owners: Indices, clients: int, minimum: int) -> Indices:
    """Move samples from clients above the minimum to those below; `owners` is sorted by client."""
    sizes = np.bincount(owners, minlength=clients)
    lacking = np.maximum(minimum - sizes, 0)
    surplus = np.maximum(sizes - minimum, 0)
    if not lacking.any():
        return owners
    # Differences of rounded-down running sums are whole numbers that add up exactly.
    gives = np.diff(np.cumsum(surplus) * lacking.sum() // surplus.sum(), prepend=0)
    position = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rate, size = gives[owners], sizes[owners]
    # The same rounding picks `rate` of `size` positions at even distances, hence from all classes alike.
    moved = (position + 1) * rate // size > position * rate // size
    topped_up = owners.copy()
    topped_up[moved] = np.repeat(np.arange(clients), lacking)
    return topped_up
