"""Several algorithms on one task, from Python: a table, a data frame, and the report."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from flatfed.algorithms import build
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.settings import Training
from flatfed.engines.execution import Execution
from flatfed.report.page import write_report
from flatfed.runs import curves
from flatfed.runs.compare import Row, summarise
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
        lines = [COLUMNS, *self.table]
        widths = [max(len(line[place]) for line in lines) for place in range(len(COLUMNS))]
        texts = [
            "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines
        ]
        return "\n".join([*(text.rstrip() for text in texts), f"report: {self.report}"])

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
) -> Comparison:
    """Trains algorithms, or names of them, on the same task, clients and batches, and reports on them.

    Runs live in folders below `folder`; what is complete there is not run again. All runs start from the
    weights of the task's model; seeds differ in who takes part and in which batches. `target` is the accuracy
    to which rounds are counted.
    """
    if seeds < 1:
        raise FlatfedError(f"seeds = {seeds}: must be at least 1")
    chosen = algorithms if isinstance(algorithms, Mapping) else _labelled(algorithms)
    if not chosen:
        raise FlatfedError("algorithms: none; give some, for instance [ff.fedavg(), ff.fedsam()]")
    built = {label: build(one) if isinstance(one, str) else one for label, one in chosen.items()}
    root = Path(folder)
    report = root / "report.html"
    check_replaceable(report)
    runs, paths = dict[str, list[Run]](), dict[Path, str]()
    for label, algorithm in built.items():
        for seed in range(seeds):
            settings = training.replaced(seed=seed)
            digest = digest_of([algorithm.describe(), settings.model_dump(mode="json")])[:10]
            path = root / f"{algorithm.name}-seed{seed}-{digest}"
            run = train(task, algorithm, settings, execution, folder=path, evaluate_on_clients=True)
            runs.setdefault(label, []).append(run)
            paths[path] = label
    rows = [
        summarise(label, training.lr, [RunFolder(path) for path in paths if paths[path] == label], target)
        for label in built
    ]
    write_report(list(paths), report, labels=paths, targets=[target])
    return Comparison(rows, runs, report)


def _labelled(algorithms: Sequence[Algorithm | str]) -> dict[str, Algorithm | str]:
    named = [(one if isinstance(one, str) else one.name, one) for one in algorithms]
    labels = [label for label, _ in named]
    for label in labels:
        if labels.count(label) > 1:
            raise FlatfedError(f"algorithms: there are two called {label!r}; give a dictionary with labels")
    return dict(named)
