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

from __future__ import annotations

from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import Field
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

# With k short clients on average, all are served about once in exp(k) attempts.
HOPELESSLY_MANY_SHORT = 10


@dataclass(frozen=True, config=STRICT)
class DirichletClass(Partition):
    """Every class cut over the clients by Dirichlet shares, with a smallest client size."""

    concentration: Concentration
    minimum: PositiveCount = 10
    redraws: Annotated[int, Field(ge=0)] = 100

    def split(self, labels: NDArray[Any], clients: int, generator: np.random.Generator) -> list[Indices]:
        classes = read_classes(labels, clients)
        check_minimum(self.minimum, clients, classes.samples)
        holdings = self._draw_holdings(classes.counts, clients, generator)
        # One entry per sample, ordered by client and then class.
        owners = np.repeat(np.arange(clients), holdings.sum(axis=1))
        held_class = np.repeat(np.tile(np.arange(classes.count), clients), holdings.ravel())
        owners = _top_up(owners, clients, self.minimum)
        return collect(classes.shuffled(generator), owners[np.argsort(held_class, kind="stable")], clients)

    def _draw_holdings(self, counts: Indices, clients: int, generator: np.random.Generator) -> Indices:
        """Samples per client and class of the first sufficient attempt, or of the best one."""
        best = _cut(counts, clients, self.concentration, generator)
        for _ in range(self.redraws):
            lacking = self._lacking(best)
            if not 0 < np.count_nonzero(lacking) <= HOPELESSLY_MANY_SHORT:
                break
            holdings = _cut(counts, clients, self.concentration, generator)
            if self._lacking(holdings).sum() < lacking.sum():
                best = holdings
        return best

    def _lacking(self, holdings: Indices) -> Indices:
        """Samples that each client is short of the minimum."""
        lacking: Indices = np.maximum(self.minimum - holdings.sum(axis=1), 0)
        return lacking


def _cut(counts: Indices, clients: int, concentration: float, generator: np.random.Generator) -> Indices:
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
    place = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rate, size = gives[owners], sizes[owners]
    # The same device picks `rate` of `size` places at even distances, hence from all classes alike.
    given = (place + 1) * rate // size > place * rate // size
    topped_up = owners.copy()
    topped_up[given] = np.repeat(np.arange(clients), lacking)
    return topped_up
