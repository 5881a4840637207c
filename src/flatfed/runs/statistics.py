"""Statistics over the rounds of a run, over the seeds of a method and over its clients.

A history has one mapping per round: its "round", counted from 1, and the numbers of that round. Not every
round has every number, since tests are made now and then. Values that are not finite numbers, as diverged
runs and damaged files have them, count as missing.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flatfed.training.evaluation import ClientSpread
from flatfed.training.loop import History

ACCURACY = "test_accuracy"
VALIDATION = "validation_accuracy"
MEGABYTE = 1e6


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def finite_values(values: Iterable[Any]) -> list[float]:
    return [number for value in values if (number := finite(value)) is not None]


def mean(values: Iterable[Any]) -> float | None:
    """The mean of the finite numbers among the values; None if there are none."""
    numbers = finite_values(values)
    return statistics.fmean(numbers) if numbers else None


# -- over the rounds of a run -----------------------------------------------------------------------------


def by_round(history: History, key: str = ACCURACY) -> dict[int, float]:
    """A quantity in the rounds that have it."""
    return {line["round"]: value for line in history if (value := finite(line.get(key))) is not None}


def last(history: History, key: str = ACCURACY) -> float | None:
    """The value recorded last; None if it is not finite, even if an earlier one is."""
    return finite(next((line[key] for line in reversed(history) if key in line), None))


def best(history: History, key: str = ACCURACY) -> float | None:
    """The largest value of all rounds."""
    return max(by_round(history, key).values(), default=None)


def at_best(history: History, judge: str = VALIDATION, key: str = ACCURACY) -> float | None:
    """The value in the first round in which the judge is largest."""
    values, judged = by_round(history, key), by_round(history, judge)
    both = [number for number in values if number in judged]
    return values[max(both, key=lambda number: judged[number])] if both else None


def first_round_reaching(history: History, target: float, key: str = ACCURACY) -> int | None:
    """The first round with at least the target; None if no round has it."""
    return next((number for number, value in by_round(history, key).items() if value >= target), None)


def total(history: History, *keys: str) -> float:
    """The sum of some costs (bytes, gradients, seconds) over all rounds."""
    return sum(value for key in keys for value in by_round(history, key).values())


def running_total(history: History, *keys: str) -> dict[int, float]:
    """The sum of some costs from the first round up to each round."""
    sums, so_far = {}, 0.0
    for line in history:
        so_far += sum(finite(line.get(key)) or 0.0 for key in keys)
        sums[line["round"]] = so_far
    return sums


def tail(history: History, key: str = ACCURACY) -> list[float]:
    """The values of the last fifth of the rounds."""
    return [value for number, value in by_round(history, key).items() if number > 0.8 * len(history)]


def within(history: History, limit: float, *costs: str, key: str = ACCURACY) -> float | None:
    """The last value that was reached before some costs together went over a limit."""
    spent = running_total(history, *costs)
    values = [value for number, value in by_round(history, key).items() if spent[number] <= limit]
    return values[-1] if values else None


# -- over the seeds of a method ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation between them, which is NaN for a single seed."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    @classmethod
    def of_finite(cls, values: Iterable[Any]) -> Spread | None:
        """Over the seeds whose value is a finite number; None if there are none."""
        numbers = finite_values(values)
        return cls.of(numbers) if numbers else None

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        mean = f"{self.mean * scale:,.{digits}f}"
        return mean if math.isnan(self.deviation) else f"{mean} ± {self.deviation * scale:,.{digits}f}"


@dataclass(frozen=True)
class Curve:
    """A quantity over rounds: the mean over seeds and the deviation between them, None for a single seed."""

    rounds: list[int]
    mean: list[float]
    deviation: list[float] | None

    @classmethod
    def of(cls, seeds: Sequence[Mapping[int, float]]) -> Curve:
        """Over the rounds in which every seed has a value."""
        rounds = [number for number in (seeds[0] if seeds else {}) if all(number in seed for seed in seeds)]
        if not rounds:
            return cls([], [], None)
        values = np.array([[seed[number] for number in rounds] for seed in seeds])
        deviation = values.std(axis=0, ddof=1).tolist() if len(seeds) > 1 else None
        return cls(rounds, values.mean(axis=0).tolist(), deviation)

    @property
    def means(self) -> dict[int, float]:
        """The mean by round."""
        return dict(zip(self.rounds, self.mean, strict=True))

    @property
    def end(self) -> Spread | None:
        """The mean and the deviation in the last round."""
        if not self.rounds:
            return None
        return Spread(self.mean[-1], self.deviation[-1] if self.deviation else math.nan)


@dataclass(frozen=True)
class ClientRow:
    """The accuracy over clients, over all seeds."""

    mean: Spread
    deviation: Spread
    chance: float
    """The deviation that chance alone would give."""

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, ClientSpread]], name: str) -> ClientRow | None:
        """On the clients' "train" or "test" data; None if a run lacks them."""
        spreads = [run[name] for run in runs if name in run]
        if not spreads or len(spreads) < len(runs):
            return None
        return cls(
            mean=Spread.of(spread.mean for spread in spreads),
            deviation=Spread.of(spread.deviation for spread in spreads),
            chance=statistics.fmean(spread.chance for spread in spreads),
        )

    @property
    def deviation_text(self) -> str:
        return f"{self.deviation.text(1, 100)} ({100 * self.chance:.1f})"
