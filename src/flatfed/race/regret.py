"""How good recommendations would have been: leave one task of the race out, recommend for it from the others.

On the task left out, the methods that the others put first are the portfolio. As in `flatfed recommend` the
tuning's validation accuracies choose the finalists, tuned FedAvg and the config's own algorithm (here FedAvg
with its step size as given) run beside them, and the final runs' validation accuracies choose the winner;
test accuracies only say what that was worth.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flatfed.race.effort import USUAL
from flatfed.race.portfolio import judged_tasks, portfolio_of
from flatfed.race.preset import Preset
from flatfed.race.results import Result
from flatfed.race.standings import BASELINE, Standing, TaskStandings


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
    tasks = judged_tasks(preset, rows)
    if len(tasks) < 2:
        return []
    return [lost for task in tasks if (lost := _regret(preset, rows, task)) is not None]


def _regret(preset: Preset, rows: Sequence[Result], task: TaskStandings) -> Regret | None:
    others = portfolio_of(preset, rows, without=task.task)["methods"]
    there = {one.method: one for one in task.complete if one.tuning}
    untuned = [one for one in task.complete if not one.tuning]
    entrants = [there[row["label"]] for row in others if row["label"] in there][: USUAL.methods]
    finalists = sorted(entrants, key=_tuned_validation, reverse=True)
    beside = [one for one in finalists[USUAL.finalists :] if one.method == BASELINE] + untuned
    run = [*finalists[: USUAL.finalists], *beside]
    scored = [(value, one) for one in run if (value := _final_validation(one)) is not None]
    best = task.best()
    if not entrants or not scored or best is None:
        return None
    _, chosen = max(scored, key=lambda pair: pair[0])
    fixed = min(others, key=lambda row: row["place"])["label"]
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


def summary(lost: Sequence[Regret]) -> str:
    """Beside the two choices that need no race: the default, and the best method of other tasks."""
    mean = statistics.fmean(one.best_accuracy - one.accuracy for one in lost)
    texts = [f"The mean regret is {100 * mean:.1f} points."]
    for what, others in (
        ("FedAvg with its step size as given", [(one, one.default_accuracy) for one in lost]),
        ("the best fixed choice", [(one, one.fixed_accuracy) for one in lost]),
    ):
        gains = [100 * (one.accuracy - other) for one, other in others if other is not None]
        if gains:
            better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
            texts.append(
                f"Beside {what} the recommendation is better on {better} and worse on {worse} of "
                f"{len(gains)} tasks: {statistics.fmean(gains):+.1f} points in the mean, "
                f"{min(gains):+.1f} at worst."
            )
    return " ".join(texts)
