"""What the race's results say about one task, and about all tasks together."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from flatfed.race.results import Result
from flatfed.runs.ranking import Interval, Ranks, difference, interval, ranks

Measure = Literal["test_accuracy", "test_at_gradients", "test_at_bytes"]
Column = Measure | Literal["test_tail"]
MEASURES: Mapping[Measure, str] = {
    "test_accuracy": "rounds",
    "test_at_gradients": "gradients",
    "test_at_bytes": "bytes",
}
"""What methods are compared at as much of as FedAvg's whole run takes."""
BASELINE = "fedavg"


@dataclass(frozen=True)
class Standing:
    """A method on a task: its final runs, by seed."""

    method: str
    final: Sequence[Result]
    tuning: Sequence[Result]

    @property
    def seeds(self) -> list[int]:
        return [row.seed for row in self.final]

    @property
    def diverged(self) -> int:
        return sum(row.state == "diverged" for row in self.final)

    def scores(self, measure: Column = "test_accuracy") -> list[float] | None:
        """By seed; None if one of them has none."""
        values = [getattr(row, measure) for row in self.final]
        return None if not values or None in values else values

    def mean(self, measure: Column = "test_accuracy") -> float | None:
        values = self.scores(measure)
        return None if values is None else statistics.fmean(values)

    def interval(self, measure: Measure = "test_accuracy") -> Interval | None:
        values = self.scores(measure)
        return None if values is None else interval(values, self.samples)

    @property
    def samples(self) -> int:
        """Of the test set."""
        return next((row.test_samples for row in self.final if row.test_samples), 1)

    def ahead_of(self, other: Standing, measure: Measure = "test_accuracy") -> Interval | None:
        """The difference under the seeds that both have."""
        own, its = ({row.seed: getattr(row, measure) for row in one.final} for one in (self, other))
        seeds = [seed for seed in own if seed in its]
        left, right = ([values[seed] for seed in seeds] for values in (own, its))
        if not seeds or None in left + right:
            return None
        return difference(left, right, self.samples)

    @property
    def seconds(self) -> float:
        return sum(row.seconds for row in (*self.tuning, *self.final))


@dataclass(frozen=True)
class TaskStandings:
    """All methods on a task, the best first; those with a seed missing or diverged come last."""

    task: str
    standings: Sequence[Standing]

    @classmethod
    def of(cls, task: str, rows: Iterable[Result]) -> TaskStandings:
        by_method: dict[str, list[Result]] = {}
        for row in rows:
            if row.task == task and row.phase != "screening":
                by_method.setdefault(row.method, []).append(row)
        standings = []
        for method, own in by_method.items():
            final = sorted((row for row in own if row.phase == "final"), key=lambda row: row.seed)
            standings.append(Standing(method, final, [row for row in own if row.phase == "tuning"]))
        most = max((len(one.final) for one in standings), default=0)

        def order(one: Standing) -> tuple[bool, bool, float]:
            mean = one.mean()
            return len(one.final) < most, mean is None, -(mean or 0.0)

        return cls(task, sorted(standings, key=order))

    def __getitem__(self, method: str) -> Standing:
        return next(one for one in self.standings if one.method == method)

    @property
    def methods(self) -> list[str]:
        return [one.method for one in self.standings]

    @property
    def seeds(self) -> int:
        """How many the methods that got furthest have."""
        return max((len(one.final) for one in self.standings), default=0)

    @property
    def complete(self) -> list[Standing]:
        """Methods that were run under all of them, whether they diverged or not."""
        return [one for one in self.standings if len(one.final) == self.seeds]

    def best(self, measure: Measure = "test_accuracy") -> Standing | None:
        """Of the tuned methods."""
        tuned = [one for one in self.complete if one.tuning]
        means = {one.method: mean for one in tuned if (mean := one.mean(measure)) is not None}
        return self[max(means, key=lambda method: means[method])] if means else None

    def as_good_as_best(self, measure: Measure = "test_accuracy") -> list[str]:
        """The tuned methods that cannot be told apart from the best one, which is among them."""
        best = self.best(measure)
        if best is None:
            return []
        close = []
        for one in (one for one in self.complete if one.tuning):
            ahead = best.ahead_of(one, measure)
            if one is best or (ahead is not None and ahead.low <= 0):
                close.append(one.method)
        return close


def all_standings(rows: Sequence[Result], tasks: Iterable[str]) -> list[TaskStandings]:
    """Of the tasks that have results, in the order given."""
    there = {row.task for row in rows}
    return [TaskStandings.of(task, rows) for task in tasks if task in there]


def common_methods(tasks: Sequence[TaskStandings]) -> list[str]:
    """Tuned methods that were run under all seeds on every one of some tasks."""
    complete = [{one.method for one in task.complete if one.tuning} for task in tasks]
    return (
        [method for method in tasks[0].methods if all(method in names for names in complete)] if tasks else []
    )


def ranked(tasks: Sequence[TaskStandings]) -> list[TaskStandings]:
    """The tasks on which at least half as many methods have run as on any."""
    most = max((len(task.complete) for task in tasks), default=0)
    return [task for task in tasks if 2 * len(task.complete) >= most]


def rank_methods(
    tasks: Sequence[TaskStandings], measure: Measure = "test_accuracy", by_seed: bool = False
) -> Ranks | None:
    """Over tasks, or over every task under every seed; None unless two methods have run on all of them."""
    methods = common_methods(tasks)
    if len(methods) < 2:
        return None
    scores: dict[str, list[float | None]] = {}
    for method in methods:
        values: list[float | None] = []
        for task in tasks:
            own = task[method]
            values += [getattr(row, measure) for row in own.final] if by_seed else [own.mean(measure)]
        scores[method] = values
    return ranks(scores)
