"""Which of several methods is better, and what cannot be said: intervals, differences and mean ranks.

An accuracy under some seeds is uncertain because there are few seeds and because the samples it was measured
on are some of many. Intervals draw both again: the mean over seeds from Student's t with the deviation
between them, since drawing three seeds with replacement would cover the truth in three of four cases only,
and the samples by bootstrap, which for an accuracy is a binomial draw.

Ranks are compared by Friedman's test over blocks (a task, or a task under a seed) and Nemenyi's critical
difference (Demšar, JMLR 2006).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

LEVEL = 0.95
DRAWS = 20_000


@dataclass(frozen=True)
class Interval:
    """A mean, and where the truth lies with 95 %."""

    mean: float
    low: float
    high: float

    def text(self, digits: int = 1, scale: float = 100) -> str:
        low, high = (f"{scale * value:.{digits}f}" for value in (self.low, self.high))
        return f"{scale * self.mean:.{digits}f} [{low}, {high}]"


def interval(accuracies: Sequence[float], samples: int) -> Interval:
    """Of the mean accuracy over seeds, measured on so many samples."""
    generator = np.random.default_rng(0)
    share = min(max(statistics.fmean(accuracies), 0.0), 1.0)
    noise = generator.binomial(samples, share, DRAWS) / samples - share
    unbounded = _interval(accuracies, noise, generator)
    return Interval(unbounded.mean, max(unbounded.low, 0.0), min(unbounded.high, 1.0))


def difference(one: Sequence[float], other: Sequence[float], samples: int) -> Interval:
    """Of the mean of `one` minus `other` under the same seeds in the same order.

    The two are taken to be wrong on samples independently of each other, which makes the interval rather too
    wide: methods agree on most samples.
    """
    generator = np.random.default_rng(0)
    noise = np.zeros(DRAWS)
    for accuracies, sign in ((one, 1), (other, -1)):
        share = min(max(statistics.fmean(accuracies), 0.0), 1.0)
        noise += sign * (generator.binomial(samples, share, DRAWS) / samples - share)
    return _interval([left - right for left, right in zip(one, other, strict=True)], noise, generator)


def _interval(
    values: Sequence[float], noise: NDArray[np.float64], generator: np.random.Generator
) -> Interval:
    mean, seeds = statistics.fmean(values), len(values)
    draws = mean + noise
    if seeds > 1:
        spread = statistics.stdev(values) / math.sqrt(seeds)
        draws = draws + spread * generator.standard_t(seeds - 1, DRAWS)
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(mean, float(low), float(high))


@dataclass(frozen=True)
class Ranks:
    """Mean ranks over blocks, 1 for the best, and how far two must be apart to be told apart."""

    means: Mapping[str, float]
    """By method, the best first."""
    blocks: int
    critical_difference: float
    p_value: float
    """Of Friedman's test: that all methods are alike."""

    @property
    def alike(self) -> list[tuple[str, ...]]:
        """The largest groups of neighbours that cannot be told apart, of two or more."""
        names, groups = list(self.means), list[tuple[str, ...]]()
        for first, name in enumerate(names):
            close = [
                other
                for other in names[first:]
                if self.means[other] - self.means[name] <= self.critical_difference
            ]
            inside = groups and set(close) <= set(groups[-1])
            if len(close) > 1 and not inside:
                groups.append(tuple(close))
        return groups


def ranks(scores: Mapping[str, Sequence[float | None]]) -> Ranks:
    """From every method's score in each block, the larger the better; None, for a failure, is the worst."""
    names = list(scores)
    values = np.array(
        [[-math.inf if score is None else score for score in scores[name]] for name in names], dtype=float
    )
    methods, blocks = values.shape
    table = np.apply_along_axis(stats.rankdata, 0, -values)
    means = table.mean(axis=1)
    order = np.argsort(means, kind="stable")
    spread = float(((means - (methods + 1) / 2) ** 2).sum())
    friedman = 12 * blocks / (methods * (methods + 1)) * spread
    # Nemenyi: the studentized range at infinitely many degrees of freedom.
    quantile = float(stats.studentized_range.ppf(LEVEL, methods, math.inf)) / math.sqrt(2)
    return Ranks(
        means={names[place]: float(means[place]) for place in order},
        blocks=blocks,
        critical_difference=quantile * math.sqrt(methods * (methods + 1) / (6 * blocks)),
        p_value=float(stats.chi2.sf(friedman, methods - 1)),
    )
