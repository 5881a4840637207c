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
    return Measured(
        task=row.task,
        method=row.method,
        seed=row.seed,
        sharpness=sharpness,
        top_eigenvalue=top,
        samples=SAMPLES,
        commit=source_commit() or "unknown",
    )


@dataclass(frozen=True)
class Correlation:
    """Spearman's rank correlation over so many pairs, and where the truth lies with 95 %."""

    value: float
    low: float
    high: float
    pairs: int

    @classmethod
    def of(cls, left: Sequence[float], right: Sequence[float]) -> Correlation | None:
        """None for fewer than five pairs, or if one side is constant.

        Its interval is that of Fisher's z with the variance (1 + ρ²/2)/(n − 3) (Bonett & Wright,
        Psychometrika 2000).
        """
        if len(left) < 5 or len(set(left)) == 1 or len(set(right)) == 1:
            return None
        value = float(stats.spearmanr(left, right).statistic)
        middle = math.atanh(min(max(value, -0.999999), 0.999999))
        half = 1.96 * math.sqrt((1 + value**2 / 2) / (len(left) - 3))
        return cls(value, math.tanh(middle - half), math.tanh(middle + half), len(left))

    def text(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def diagnostics_by_method(
    task: TaskStandings, measured: Sequence[Measured]
) -> dict[str, dict[str, tuple[float, float]]]:
    """By diagnostic and method the mean over seeds, and beside it the mean test accuracy."""
    flatness = {(row.method, row.seed): row for row in measured if row.task == task.task}
    pairs: dict[str, dict[str, tuple[float, float]]] = {name: {} for name in DIAGNOSTICS}
    for one in task.complete:
        accuracy = one.mean()
        if accuracy is None or not one.tuning:
            continue
        for name in DIAGNOSTICS:
            values = [_value(row, flatness.get((row.method, row.seed)), name) for row in one.final]
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
    pairs = diagnostics_by_method(task, measured)
    return {name: Correlation.of(*_columns(by_method)) for name, by_method in pairs.items()}


def across_tasks(
    tasks: Sequence[TaskStandings], measured: Sequence[Measured]
) -> dict[str, Correlation | None]:
    """Over methods and tasks, where both sides are ranks within their task."""
    pooled: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in DIAGNOSTICS}
    for task in tasks:
        for name, by_method in diagnostics_by_method(task, measured).items():
            for ranks, column in zip(pooled[name], _columns(by_method), strict=True):
                ranks.extend((stats.rankdata(column) / max(1, len(column))).tolist())
    return {name: Correlation.of(*columns) for name, columns in pooled.items()}


def _columns(by_method: Mapping[str, tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [left for left, _ in by_method.values()], [right for _, right in by_method.values()]
