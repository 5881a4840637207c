"""What flatness has to do with it: diagnostics of the race's final models against their test accuracies."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

from flatfed.diagnostics.hessian import products, top_eigenvalues
from flatfed.diagnostics.sharpness import one_step_sharpness
from flatfed.diagnostics.subject import inspect_folder
from flatfed.race.entries import Entry
from flatfed.race.results import Measured, Result
from flatfed.race.runner import TaskRace
from flatfed.race.standings import TaskStandings
from flatfed.runs.environment import source_commit

SAMPLES = 1000
RADIUS = 0.1
DIAGNOSTICS = {
    "sharpness": "sharpness of the global loss (radius 0.1)",
    "top_eigenvalue": "largest eigenvalue of the Hessian",
    "gradient_norm": "length of the global loss's gradient",
    "flatness_distance": "flatness distance",
    "client_drift": "client drift",
    "update_norm": "length of the global update",
    "train_loss": "loss of clients while they train",
    "gap": "accuracy on training samples minus test accuracy",
}
"""What is recorded of a final run, and what it is called."""


def measure(race: TaskRace, entry: Entry, row: Result) -> Measured | None:
    """The flatness of a final run; None if its folder is not on this machine."""
    method = race.method(entry)
    run = race.final_run(method, method.values_of(row.values), row.seed)
    if not run.folder.exists():
        return None
    with inspect_folder(run.folder) as subject:
        samples = subject.training_data(SAMPLES)
        (top,) = top_eigenvalues(products(subject, samples), len(subject.model), 1)
        sharpness = one_step_sharpness(subject, samples, RADIUS)
        norm = float(subject.gradient(subject.model, samples).norm())
    return Measured(
        task=row.task,
        method=row.method,
        seed=row.seed,
        gradient_norm=norm,
        sharpness=sharpness,
        top_eigenvalue=top,
        samples=SAMPLES,
        commit=source_commit() or "unknown",
        setting=row.setting,
    )


Pairs = Mapping[str, tuple[float, float]]
"""By method what was measured and the test accuracy."""
FEWEST = 5
"""Pairs, for a correlation."""


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over so many methods, and where the truth lies with 95 %."""

    value: float
    low: float
    high: float
    methods: int

    @classmethod
    def of(cls, pairs: Pairs) -> Correlation | None:
        """None for fewer than five methods, or if one side is constant.

        Its interval is that of Fisher's z with the variance (1 + ρ²/2)/(n − 3) (Bonett & Wright,
        Psychometrika 2000).
        """
        value = _spearman(pairs)
        if value is None:
            return None
        half = 1.96 * math.sqrt((1 + value**2 / 2) / (len(pairs) - 3))
        return cls._around(value, half, len(pairs))

    @classmethod
    def of_tasks(cls, tasks: Sequence[Pairs]) -> Correlation | None:
        """The mean of the tasks' correlations; None if there are none, or of one method only.

        The same methods are on all tasks, so that pairs of one method are not independent of each other:
        the interval is the jackknife's over methods, of Fisher's z of the mean.
        """
        value = _mean_correlation(tasks)
        methods = dict.fromkeys(method for pairs in tasks if _spearman(pairs) is not None for method in pairs)
        if value is None:
            return None
        without = []
        for left_out in methods:
            rest = [{name: pair for name, pair in pairs.items() if name != left_out} for pairs in tasks]
            if (one := _mean_correlation(rest)) is not None:
                without.append(_fisher(one))
        count = len(without)
        if count < FEWEST:
            return None
        error = math.sqrt((count - 1) / count * sum((z - statistics.fmean(without)) ** 2 for z in without))
        return cls._around(value, float(stats.t.ppf(0.975, count - 1)) * error, len(methods))

    @classmethod
    def _around(cls, value: float, half: float, methods: int) -> Correlation:
        """With an interval of so much of Fisher's z to both sides."""
        middle = _fisher(value)
        return cls(value, math.tanh(middle - half), math.tanh(middle + half), methods)

    def text(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def _spearman(pairs: Pairs) -> float | None:
    """Ties share a rank; None where there is too little to say anything."""
    left, right = ([pair[side] for pair in pairs.values()] for side in (0, 1))
    if len(pairs) < FEWEST or len(set(left)) == 1 or len(set(right)) == 1:
        return None
    return float(stats.spearmanr(left, right).statistic)


def _mean_correlation(tasks: Sequence[Pairs]) -> float | None:
    values = [value for pairs in tasks if (value := _spearman(pairs)) is not None]
    return statistics.fmean(values) if values else None


def _fisher(value: float) -> float:
    return math.atanh(min(max(value, -0.999999), 0.999999))


def diagnostics_by_method(
    task: TaskStandings, measured: Sequence[Measured]
) -> dict[str, dict[str, tuple[float, float]]]:
    """By diagnostic and method the mean over seeds, and beside it the mean test accuracy."""
    flatness = {(row.method, row.seed, row.setting): row for row in measured if row.task == task.task}
    pairs: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in DIAGNOSTICS}
    for one in task.complete:
        accuracy = one.mean()
        if accuracy is None or not one.tuning:
            continue
        for name in DIAGNOSTICS:
            values = [
                _value(row, flatness.get((row.method, row.seed, row.setting)), name) for row in one.final
            ]
            known = [value for value in values if value is not None]
            if len(known) == len(values):
                pairs[name][one.method] = statistics.fmean(known), accuracy
    return pairs


def _value(row: Result, measured: Measured | None, name: str) -> float | None:
    if name == "gap":
        missing = row.train_accuracy is None or row.test_accuracy is None
        return None if missing else (row.train_accuracy or 0.0) - (row.test_accuracy or 0.0)
    value = getattr(measured if name in Measured.model_fields else row, name, None)
    return None if value is None else float(value)


def within_task(task: TaskStandings, measured: Sequence[Measured]) -> dict[str, Correlation | None]:
    """Over methods of one task."""
    return {name: Correlation.of(pairs) for name, pairs in diagnostics_by_method(task, measured).items()}


def across_tasks(
    tasks: Sequence[TaskStandings], measured: Sequence[Measured]
) -> dict[str, Correlation | None]:
    """The mean over tasks."""
    by_task = [diagnostics_by_method(task, measured) for task in tasks]
    return {name: Correlation.of_tasks([pairs[name] for pairs in by_task]) for name in DIAGNOSTICS}
