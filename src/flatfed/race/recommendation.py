"""What a recommendation says: the methods of the final runs, what they reached and what they cost."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedWarning
from flatfed.core.settings import Training
from flatfed.race.effort import Effort
from flatfed.runs.halving import Method, Tuned, Values
from flatfed.runs.ranking import Interval, difference, interval
from flatfed.runs.setting import PlannedRun
from flatfed.runs.train import train
from flatfed.training.loop import Progress


@dataclass(frozen=True)
class Costs:
    """What a method takes of a participant, from one round."""

    bytes_down: float
    bytes_up: float
    client_bytes: int
    """That a client keeps from round to round."""
    gradients_per_step: int

    @property
    def traffic(self) -> float:
        return self.bytes_down + self.bytes_up

    @property
    def traffic_text(self) -> str:
        return f"{self.traffic:,.0f} bytes for each participant of a round"

    @classmethod
    def measured(cls, method: Method) -> Costs:
        """Also tries whether the method can train the task at all."""
        run, setting = method.planned(method.first_values), method.setting
        seen: list[Progress] = []
        training = run.training.replaced(rounds=1, lr=run.algorithm.optimizer.step_sizes.low, lr_warmup=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FlatfedWarning)
            task = setting.task_of(setting.seed)
            train(task, run.algorithm, training, run.execution, callbacks=[seen.append], progress=False)
        (now,) = seen
        kept = sum(now.dimensions.length(vector) for vector in run.algorithm.client_vectors)
        members = now.record["participants"]
        return cls(
            now.record["bytes_down"] / members,
            now.record["bytes_up"] / members,
            4 * kept,
            run.algorithm.gradient_evaluations,
        )


@dataclass(frozen=True)
class Finalist:
    """A method with its settings, and its runs under seeds that tuning did not see."""

    method: Method
    values: Values
    runs: Sequence[PlannedRun]
    validation: Sequence[float]
    """By seed."""
    test: Sequence[float]
    """By seed; empty where the task has no test samples."""
    diverged: int
    costs: Costs
    gradients: int
    bytes: int

    @property
    def label(self) -> str:
        return self.method.label

    @property
    def complete(self) -> bool:
        return self.diverged == 0

    @property
    def algorithm(self) -> Algorithm:
        return self.runs[0].algorithm

    @property
    def training(self) -> Training:
        return self.runs[0].training


@dataclass(frozen=True)
class Recommendation:
    """What came out, the best first."""

    ranking: Sequence[Finalist]
    tuned: Sequence[Tuned]
    effort: Effort
    warm_start: Sequence[str]
    """The race's tasks that the methods and their first settings come from."""
    left_out: Mapping[str, str]
    """Methods that were not tried, and why."""
    judged_on: str
    """test or validation: the samples of the intervals."""
    samples: int
    """How many those are."""
    folder: Path

    @property
    def best(self) -> Finalist:
        return self.ranking[0]

    @property
    def algorithm(self) -> Algorithm:
        return self.best.algorithm

    @property
    def training(self) -> Training:
        return self.best.training

    def scores(self, one: Finalist) -> Sequence[float]:
        return one.test if self.judged_on == "test" else one.validation

    def interval(self, one: Finalist) -> Interval | None:
        return interval(self.scores(one), self.samples) if one.complete else None

    def behind(self, one: Finalist) -> Interval | None:
        """How far the best is ahead of it."""
        if not one.complete or one is self.best:
            return None
        return difference(self.scores(self.best), self.scores(one), self.samples)

    @property
    def alike(self) -> list[str]:
        """What cannot be told apart from the best."""
        return [label for label, gap in self._gaps if gap.low <= 0 <= gap.high]

    @property
    def ahead(self) -> list[str]:
        """What is better than the best on test samples, which do not choose."""
        return [label for label, gap in self._gaps if gap.high < 0]

    @property
    def _gaps(self) -> list[tuple[str, Interval]]:
        return [(one.label, gap) for one in self.ranking if (gap := self.behind(one)) is not None]

    @property
    def damaged(self) -> list[str]:
        """Why configurations were left out in tuning, whose folders are damaged."""
        tried = (candidate for one in self.tuned for candidate in one.candidates)
        return [candidate.note for candidate in tried if candidate.state == "left out"]

    @property
    def config(self) -> dict[str, Any]:
        """The best method's, as its first run's folder records it."""
        return dict(self.best.runs[0].config)
