"""The raw results of the race: a csv file with a row for every configuration tried and for every final run.

It is what is committed, and all that another machine needs to go on: a method whose rows are there is not
tuned again, and a final run whose row is there is not run again. What was measured of the final models is in
a file beside it.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from flatfed.core.errors import FlatfedError
from flatfed.core.files import read_text
from flatfed.core.settings import CheckedModel
from flatfed.runs.lock import Lock

Phase = Literal["tuning", "final", "screening"]


class Result(CheckedModel):
    """A run of the race. Accuracies, costs and diagnostics are None where there are none."""

    task: str
    method: str
    phase: Phase
    configuration: int | None = None
    """Its number among those that tuning tried; the first has the values as given."""
    seed: int
    settings: str
    """What was tuned: key=value, separated by spaces."""
    chosen: bool
    """Whether these are the settings of the final runs."""
    state: Literal["tried", "diverged", "left out", "complete"]
    rounds: int
    gradients: int
    bytes_up: int
    bytes_down: int
    validation_accuracy: float | None = None
    """On the validation samples; of final runs after the last round, of others in the last fifth."""
    test_accuracy: float | None = None
    """Of final runs, after the last round; no test accuracy is read while tuning."""
    test_tail: float | None = None
    """The mean of the test accuracies of the last fifth of the rounds."""
    test_at_gradients: float | None = None
    """The last test accuracy within as many gradients as FedAvg's whole run takes."""
    test_at_bytes: float | None = None
    """The last test accuracy within as many bytes, up and down, as FedAvg's whole run takes."""
    test_samples: int | None = None
    train_accuracy: float | None = None
    """The mean over clients on their own training samples."""
    train_loss: float | None = None
    client_drift: float | None = None
    update_norm: float | None = None
    flatness_distance: float | None = None
    """These four are means over the last fifth of the rounds."""
    seconds: float
    """Of all rounds, with the evaluations between them."""
    commit: str
    setting: str
    """A digest of the task's, the method's and the tuning's settings."""

    @property
    def key(self) -> tuple[object, ...]:
        """What there is only one row of."""
        return self.task, self.method, self.phase, self.configuration, self.seed, self.setting

    @property
    def values(self) -> dict[str, float]:
        """The settings by their places."""
        pairs = (text.partition("=") for text in self.settings.split())
        return {name: float(value) for name, _, value in pairs}


class Measured(CheckedModel):
    """The flatness of a final run's model, on some of its training samples."""

    task: str
    method: str
    seed: int
    gradient_norm: float
    """Of the loss."""
    sharpness: float
    """The rise of the loss after a step of length 0.1 along its gradient."""
    top_eigenvalue: float
    """Of the loss's Hessian."""
    samples: int
    commit: str
    setting: str
    """That of the final run's row."""

    @property
    def key(self) -> tuple[object, ...]:
        """What there is only one row of."""
        return self.task, self.method, self.seed, self.setting


FLATNESS = "flatness.csv"
"""The file of what is measured, beside the results."""
Row = TypeVar("Row", Result, Measured)


class CsvTable(Generic[Row]):
    """A csv file of rows, which grows."""

    def __init__(self, path: Path, kind: type[Row]) -> None:
        self.path = path
        self.kind: type[Row] = kind
        self.rows: list[Row] = []
        self.reload()

    def reload(self) -> None:
        """Reads what other processes have added."""
        self.rows = read_rows(self.path, self.kind) if self.path.exists() else []

    def add(self, rows: Sequence[Row]) -> None:
        """At the end of the file, but for those that another process has added meanwhile."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lock = Lock(self.path)
        lock.acquire(self.path)
        try:
            self.reload()
            known = {row.key for row in self.rows}
            new = [row for row in rows if row.key not in known]
            with self.path.open("ab") as file:
                header = file.tell() == 0
                file.write(csv_text(new, self.kind, header).encode())
                file.flush()
                os.fsync(file.fileno())
        finally:
            lock.release()
        self.reload()


class Results(CsvTable[Result]):
    """The race's runs."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, Result)

    def of(self, task: str, method: str, phase: Phase, setting: str | None = None) -> list[Result]:
        """The rows of a method on a task, made under some setting."""
        return [
            row
            for row in self.rows
            if (row.task, row.method, row.phase) == (task, method, phase) and setting in {None, row.setting}
        ]


def csv_text(rows: Iterable[CheckedModel], kind: type[CheckedModel], header: bool) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    if header:
        writer.writerow(kind.model_fields)
    for row in rows:
        writer.writerow([_text(getattr(row, name)) for name in kind.model_fields])
    return text.getvalue()


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def read_results(path: Path) -> list[Result]:
    return read_rows(path, Result)


def read_rows(path: Path, kind: type[Row]) -> list[Row]:
    """The rows of a file; one that cannot be read is named."""
    text, columns = read_text(path, "a csv file"), list(kind.model_fields)
    if not text:
        return []
    if not text.endswith("\n"):
        raise FlatfedError(f"{path}: its last line is cut off; remove that line")
    lines = csv.reader(io.StringIO(text))
    header = next(lines)
    if header != columns:
        wrong = next(iter(set(header) ^ set(columns)), "their order")
        raise FlatfedError(f"{path}: not the columns of the race's results ({wrong}); give another file")
    rows = []
    for number, line in enumerate(lines, 2):
        if len(line) != len(columns):
            raise FlatfedError(f"{path}: line {number} has {len(line)} of {len(columns)} columns; remove it")
        try:
            rows.append(kind(**{name: value for name, value in zip(header, line, strict=True) if value}))
        except FlatfedError as error:
            raise FlatfedError(f"{path}: line {number}: {error}") from None
    return rows
