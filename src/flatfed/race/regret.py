"""How good recommendations would have been: leave one task of the race out, recommend for it from the others.

On the task left out, the methods that the others put first are the portfolio. As in `flatfed recommend` the
tuning's validation accuracies choose the finalists and the final runs' validation accuracies the winner; test
accuracies only say what that was worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flatfed.race.effort import USUAL
from flatfed.race.portfolio import portfolio_of
from flatfed.race.preset import Preset
from flatfed.race.results import Result
from flatfed.race.standings import Standing, TaskStandings, all_standings, ranked


@dataclass(frozen=True)
class Regret:
    """Mean test accuracies on a task that was left out."""

    task: str
    recommended: str
    accuracy: float
    best: str
    """In hindsight."""
    best_accuracy: float
    fixed: str
    """The method that is best on the other tasks, tuned."""
    fixed_accuracy: float | None
    default_accuracy: float | None
    """FedAvg with its step size as given."""


def regrets(preset: Preset, rows: Sequence[Result]) -> list[Regret]:
    """For every task with enough results; none unless there are two."""
    tasks = ranked(all_standings(rows, preset.tasks))
    if len(tasks) < 2:
        return []
    kept = [row for row in rows if row.task in {task.task for task in tasks}]
    return [lost for task in tasks if (lost := _regret(preset, kept, task)) is not None]


def _regret(preset: Preset, rows: Sequence[Result], task: TaskStandings) -> Regret | None:
    others = portfolio_of(preset, rows, without=task.task)["methods"]
    there = {one.method: one for one in task.complete if one.tuning}
    entrants = [there[row["label"]] for row in others if row["label"] in there][: USUAL.methods]
    finalists = sorted(entrants, key=_tuned_validation, reverse=True)[: USUAL.finalists]
    scored = [(value, one) for one in finalists if (value := _final_validation(one)) is not None]
    best = task.best()
    if not scored or best is None:
        return None
    _, chosen = max(scored, key=lambda pair: pair[0])
    fixed = min(others, key=lambda row: row["place"])["label"]
    untuned = [one for one in task.complete if not one.tuning]
    accuracy, best_accuracy = chosen.mean(), best.mean()
    assert accuracy is not None and best_accuracy is not None, "both have final accuracies"
    return Regret(
        task=task.task,
        recommended=chosen.method,
        accuracy=accuracy,
        best=best.method,
        best_accuracy=best_accuracy,
        fixed=fixed,
        fixed_accuracy=there[fixed].mean() if fixed in there else None,
        default_accuracy=untuned[0].mean() if untuned else None,
    )


def _tuned_validation(one: Standing) -> float:
    return next((row.validation_accuracy or 0.0 for row in one.tuning if row.chosen), 0.0)


def _final_validation(one: Standing) -> float | None:
    values = [row.validation_accuracy for row in one.final]
    return statistics.fmean(value for value in values if value is not None) if None not in values else None
