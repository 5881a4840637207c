"""Several algorithms on one task, from Python: a table, a data frame, and the report."""

from __future__ import annotations

import html
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flatfed.algorithms import build
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, shown
from flatfed.core.files import as_path
from flatfed.core.settings import Training
from flatfed.engines.execution import Execution
from flatfed.report.page import write_report
from flatfed.runs import curves
from flatfed.runs.compare import Row, check_comparable, named_folder, summarise
from flatfed.runs.files import check_replaceable
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import digest_of
from flatfed.runs.train import Run, train
from flatfed.training.task import Task

if TYPE_CHECKING:
    import pandas

COLUMNS = ("algorithm", "accuracy %", "rounds to target", "MB down", "MB up", "gradients", "seconds")


@dataclass(frozen=True, repr=False)
class Comparison:
    """The finished runs of every algorithm, one for each seed, and what may be said about them."""

    rows: Sequence[Row]
    runs: Mapping[str, Sequence[Run]]
    report: Path
    """The HTML page about them."""

    @property
    def table(self) -> list[tuple[str, ...]]:
        """A line for each algorithm: means and standard deviations over the seeds, as texts."""
        return [
            (
                row.label,
                row.accuracy.text(1, 100),
                row.rounds_to_target.text(0) if row.rounds_to_target else "not reached",
                row.megabytes_down.text(1),
                row.megabytes_up.text(1),
                row.gradient_evaluations.text(0),
                row.seconds.text(1),
            )
            for row in self.rows
        ]

    def __repr__(self) -> str:
        return f"{curves.text_table([COLUMNS, *self.table])}\nreport: {self.report}"

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        head = "".join(f"<th>{html.escape(name)}</th>" for name in COLUMNS)
        body = "".join(
            f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in line)}</tr>" for line in self.table
        )
        first = {label: runs[0].history for label, runs in self.runs.items()}
        return f"<table><tr>{head}</tr>{body}</table>{curves.picture(first)}"

    def to_dataframe(self) -> pandas.DataFrame:
        """One row for each algorithm and seed, with the numbers of its last round (needs pandas)."""
        records = [
            {"algorithm": label, "seed": run.training.seed, **run.history[-1]}
            for label, runs in self.runs.items()
            for run in runs
        ]
        return curves.data_frame({"": records})


def compare(
    task: Task,
    algorithms: Sequence[Algorithm | str] | Mapping[str, Algorithm | str],
    training: Training,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    *,
    seeds: int = 3,
    folder: str | Path = "runs",
    target: float = 0.95,
    progress: bool | None = None,
) -> Comparison:
    """Trains algorithms, or names of them, on the same task, clients and batches, and reports on them.

    Runs live in folders below `folder`; what is complete there is not run again. All runs start from the
    weights of the task's model; seeds differ in who takes part and in which batches. `target` is the accuracy
    to which rounds are counted. `progress` is as in `train`.
    """
    _check(task, training, execution, seeds, folder, target)
    built = _built(algorithms)
    root = as_path("folder", folder)
    report = root / "report.html"
    check_replaceable(report)
    runs: dict[str, list[Run]] = {}
    folders: dict[str, list[Path]] = {}
    for label, algorithm in built.items():
        for seed in range(seeds):
            settings = training.replaced(seed=seed)
            digest = digest_of([label, algorithm.describe(), settings.model_dump(mode="json")])
            path = named_folder(root, task.words, algorithm, seed, digest)
            try:
                run = train(
                    task,
                    algorithm,
                    settings,
                    execution,
                    folder=path,
                    evaluate_on_clients=True,
                    progress=progress,
                )
            except DivergedError as error:
                warnings.warn(f"{label}, seed {seed}, is left out: {error}", FlatfedWarning, stacklevel=2)
                continue
            runs.setdefault(label, []).append(run)
            folders.setdefault(label, []).append(path)
    if not runs:
        raise DivergedError("no run was left to compare; lower lr or set clip")
    rows = [
        summarise(label, training.lr, [RunFolder(path) for path in paths], target)
        for label, paths in folders.items()
    ]
    labels = {path: label for label, paths in folders.items() for path in paths}
    write_report(list(labels), report, labels=labels, targets=[target])
    return Comparison(rows, runs, report)


def _check(
    task: object, training: object, execution: object, seeds: object, folder: object, target: object
) -> None:
    for name, value, kind in (
        ("task", task, Task),
        ("training", training, Training),
        ("execution", execution, Execution),
        ("folder", folder, str | Path),
    ):
        if not isinstance(value, kind) or value == "":
            wanted = "a path" if name == "folder" else f"a flatfed.{name.capitalize()}"
            raise FlatfedError(f"{name} = {shown(value)}: give {wanted}")
    assert isinstance(task, Task) and isinstance(training, Training)
    if not isinstance(seeds, int) or seeds < 1:
        raise FlatfedError(f"seeds = {shown(seeds)}: give a number of them, 1 or more")
    if not isinstance(target, int | float) or not 0 <= target <= 1:
        raise FlatfedError(f"target = {shown(target)}: give an accuracy between 0 and 1")
    if training.seed:
        raise FlatfedError(
            f"training.seed = {training.seed}: every algorithm runs under the seeds 0, 1, …; use seeds"
        )
    check_comparable(task)


def _built(algorithms: object) -> dict[str, Algorithm]:
    chosen = dict(algorithms) if isinstance(algorithms, Mapping) else _labelled(algorithms)
    if not chosen:
        raise FlatfedError("algorithms: none; give some, for instance [ff.fedavg(), ff.fedsam()]")
    for label, one in chosen.items():
        if not isinstance(label, str) or not isinstance(one, Algorithm | str):
            raise FlatfedError(
                f"algorithms: {shown(label)}: {shown(one)}; give labels and algorithms, or names of them"
            )
    return {label: build(one) if isinstance(one, str) else one for label, one in chosen.items()}


def _labelled(algorithms: object) -> dict[str, Algorithm | str]:
    if not isinstance(algorithms, list | tuple):
        raise FlatfedError(
            f"algorithms = {shown(algorithms)}: give a list of them, or a dictionary with labels"
        )
    named = [(one if isinstance(one, str) else getattr(one, "name", shown(one)), one) for one in algorithms]
    labels = [label for label, _ in named]
    for label in labels:
        if labels.count(label) > 1:
            raise FlatfedError(f"algorithms: there are two called {label!r}; give a dictionary with labels")
    return dict(named)
