"""The settings of an algorithm on a task, tuned from Python: every combination of a grid, or by halving."""

from __future__ import annotations

import copy
import html
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatfed.algorithms import build
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import DivergedError, FlatfedError, shown
from flatfed.core.files import as_path
from flatfed.core.settings import Training
from flatfed.engines.execution import Execution
from flatfed.runs import curves
from flatfed.runs.halving import Candidate, Halving, Method, Tuning
from flatfed.runs.setting import PlannedRun, Setting, check_choosable
from flatfed.runs.statistics import VALIDATION, by_round
from flatfed.runs.train import train
from flatfed.training.loop import Callback
from flatfed.training.task import Task

if TYPE_CHECKING:
    import pandas

Grid = Mapping[str, Sequence[Any]]
"""The values to try by setting, named as on the command line: training.lr, algorithm.radius."""
TABLES = ("training", "algorithm")


@dataclass(frozen=True)
class Tried:
    """A run with some settings, and what it reached."""

    settings: Mapping[str, Any]
    accuracy: float | None
    """On the validation samples: after the last round of a grid's run, in the last fifth of one of halving.

    None if the run diverged.
    """
    state: str
    rounds: int
    run: PlannedRun


@dataclass(frozen=True, repr=False)
class TuningResult:
    """All that was tried, the best first."""

    tried: Sequence[Tried]

    @property
    def best(self) -> Tried:
        return self.tried[0]

    @property
    def algorithm(self) -> Algorithm:
        """With the best settings."""
        return self.best.run.algorithm

    @property
    def training(self) -> Training:
        """With the best settings."""
        return self.best.run.training

    @property
    def table(self) -> list[tuple[str, ...]]:
        """A line for each run, as texts."""
        return [
            (
                *map(_text, one.settings.values()),
                "–" if one.accuracy is None else f"{100 * one.accuracy:.2f}",
                str(one.rounds),
                one.state,
            )
            for one in self.tried
        ]

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*self.best.settings, "validation accuracy %", "rounds", "state")

    def __repr__(self) -> str:
        return curves.text_table([self._columns, *self.table])

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        rows = (
            "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in line)
            for tag, line in [("th", self._columns), *(("td", line) for line in self.table)]
        )
        return f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each run (needs pandas)."""
        records = [
            {**one.settings, "validation_accuracy": one.accuracy, "rounds": one.rounds, "state": one.state}
            for one in self.tried
        ]
        return curves.data_frame({"": records})


def tune(
    task: Task,
    algorithm: Algorithm | str,
    training: Training,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    *,
    grid: Grid | None = None,
    configurations: int | None = None,
    gradients: int | None = None,
    folder: str | Path = "runs/tune",
    progress: bool | None = None,
) -> TuningResult:
    """Tries settings of an algorithm on a task and ranks them by their accuracy on validation samples.

    With a `grid`, all its combinations; without one, by halving: the step size and the options that the
    algorithm declares with a range, in so many `configurations` (9 unless given), the better third of which
    goes on. Runs have folders below `folder`; what is there is not run again. `gradients` is what a whole run
    of halving takes. `progress` is as in `train`, for the runs of a grid.
    """
    _check(task, algorithm, training, execution)
    built = build(algorithm) if isinstance(algorithm, str) else algorithm
    check_choosable(task)
    setting = Setting.of_task(task, training, execution, as_path("folder", folder))
    if grid is None:
        method = Method.of(built.name, built.describe(), setting)
        halving = Halving() if configurations is None else Halving(configurations)
        (tuned,) = Tuning.checked([method], halving, gradients).run(_unwatched)
        ranked = sorted(tuned.candidates, key=lambda candidate: candidate.worth, reverse=True)
        tried = [_of_candidate(candidate, training.rounds) for candidate in ranked]
    else:
        for name, value in (("configurations", configurations), ("gradients", gradients)):
            if value is not None:
                raise FlatfedError(f"{name} = {value}: only without a grid, which has runs of its own")
        runs = [(settings, _planned(setting, built, settings)) for settings in _combinations(grid)]
        results = [_trained(task, settings, run, progress) for settings, run in runs]
        tried = sorted(results, key=lambda one: (one.accuracy is not None, one.accuracy or 0.0), reverse=True)
    if tried[0].accuracy is None:
        raise DivergedError("no run reached its end; try smaller values of training.lr, or set clip")
    return TuningResult(tried)


def _of_candidate(candidate: Candidate, rounds: int) -> Tried:
    names = (".".join(map(str, place)) for place in candidate.method.space)
    settings = dict(zip(names, candidate.values, strict=True))
    accuracy = next((value for value in reversed(candidate.accuracies) if value is not None), None)
    state: str = candidate.state
    if state == "tried":
        state = "complete" if candidate.rounds == rounds else "ended by halving"
    run = replace(candidate.run, training=candidate.run.training.replaced(rounds=rounds))
    return Tried(settings, None if state == "diverged" else accuracy, state, candidate.rounds, run)


def _combinations(grid: object) -> list[dict[str, Any]]:
    if not isinstance(grid, Mapping) or not grid:
        raise FlatfedError(
            f"grid = {shown(grid)}: give values by setting, for instance {{'training.lr': [0.1, 0.3]}}"
        )
    for key, values in grid.items():
        if not isinstance(key, str) or key.partition(".")[0] not in TABLES or not key.partition(".")[2]:
            raise FlatfedError(
                f"grid: {shown(key)}: write training.lr, or algorithm. and the name of an option"
            )
        if not isinstance(values, list | tuple) or not values:
            raise FlatfedError(f"grid[{key!r}] = {shown(values)}: give a list of values")
    return [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]


def _planned(setting: Setting, algorithm: Algorithm, settings: Mapping[str, Any]) -> PlannedRun:
    description: dict[str, Any] = copy.deepcopy(algorithm.describe())
    chosen: dict[str, Any] = {}
    for key, value in settings.items():
        table, *places, last = key.split(".")
        inner = description if table == "algorithm" else chosen
        for place in places:
            inner = inner.setdefault(place, {})
            if not isinstance(inner, dict):
                raise FlatfedError(f"grid: {key}: {place} is not a table")
        inner[last] = value
    return setting.planned(description, **chosen)


def _trained(task: Task, settings: Mapping[str, Any], run: PlannedRun, progress: bool | None) -> Tried:
    used = run.algorithm, run.training, run.execution
    try:
        finished = train(task, *used, folder=run.folder, config=run.config, progress=progress)
    except DivergedError:
        return Tried(settings, None, "diverged", len(run.finished_rounds()), run)
    curve = by_round(finished.history, VALIDATION)
    return Tried(settings, curve[max(curve)], "complete", len(finished.history), run)


def _unwatched(candidate: Candidate, rung: int, rounds: int) -> Callback:
    return lambda now: None


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _check(task: object, algorithm: object, training: object, execution: object) -> None:
    for name, value, kinds, fix in (
        ("task", task, Task, "give a flatfed.Task"),
        ("algorithm", algorithm, Algorithm | str, "give an algorithm, or the name of one"),
        ("training", training, Training, "give a flatfed.Training"),
        ("execution", execution, Execution, "give a flatfed.Execution"),
    ):
        if not isinstance(value, kinds):
            raise FlatfedError(f"{name} = {shown(value)}: {fix}")
