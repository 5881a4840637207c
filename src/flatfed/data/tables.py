"""Columns of numbers and texts: what files and data sets are read into.

A column is an array [rows, …] of float32, int64 or bytes, or texts that have yet to be numbered. What is
missing, not finite, or neither a number nor a text is refused by file, column and row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from flatfed.core.errors import FlatfedError, did_you_mean

Array = NDArray[Any]
MISSING = "empty; fill it in or leave the row out"


class Texts(NamedTuple):
    """Texts, as numbers of words."""

    codes: NDArray[np.int64]
    words: list[str]
    odd: int | None = None
    """The first row with a text, where other rows of the column are numbers."""


Column = Array | Texts


class Places(NamedTuple):
    """The numbers by which users know rows, such as lines of a file."""

    unit: str
    numbers: Sequence[int]


@dataclass(frozen=True)
class Table:
    """Some columns with equally many rows, and where they came from."""

    source: str
    columns: Mapping[str, Column]
    places: Places | None = None
    """Where each row is found: the number of its line or row."""

    def __len__(self) -> int:
        first = next(iter(self.columns.values()))
        return len(first.codes if isinstance(first, Texts) else first)

    def error(self, column: str, problem: str, row: int | None = None) -> FlatfedError:
        return Origin(self.source, column, self.places).error(problem, row)


class Origin(NamedTuple):
    """Where a column is from, to be named when something is wrong with it."""

    source: str
    column: str
    places: Places | None = None

    def error(self, problem: str, row: int | None = None) -> FlatfedError:
        where = f"{self.source}: column {self.column!r}"
        if row is not None:
            unit, number = (
                ("row", row + 1) if self.places is None else (self.places.unit, self.places.numbers[row])
            )
            where += f", {unit} {number}"
        return FlatfedError(f"{where}: {problem}")


def check_names(source: str, names: Sequence[str] | None, present: Sequence[str]) -> list[str]:
    """The columns to read, all of which must be there once."""
    for name in present if names is None else names:
        if name not in present:
            raise FlatfedError(f"{source}: no column {name!r}; {did_you_mean(name, present)}")
        if present.count(name) > 1:
            raise FlatfedError(f"{source}: {present.count(name)} columns are called {name!r}; rename them")
    return list(present if names is None else names)


def sized(table: Table) -> Table:
    """The table, if it has rows, and as many in every column."""
    rows = len(table) if table.columns else 0
    if rows == 0:
        raise FlatfedError(f"{table.source}: it has no rows; fill it or leave it out")
    for name, column in table.columns.items():
        length = len(column.codes if isinstance(column, Texts) else column)
        if length != rows:
            first = next(iter(table.columns))
            raise table.error(name, f"{length} rows, and {rows} in {first!r}; store as many of each")
    return table


def numbered_texts(values: Sequence[str], odd: int | None = None) -> Texts:
    words: dict[str, int] = {}
    codes = np.fromiter((words.setdefault(value, len(words)) for value in values), np.int64, len(values))
    return Texts(codes, list(words), odd)


def plain_numbers(origin: Origin, array: Array) -> Array:
    """Floats as float32, bytes of images as they are, and other whole numbers and booleans as int64."""
    if array.dtype.kind not in "fiub":
        raise origin.error(f"its values are {array.dtype}; give numbers or texts")
    if array.dtype.kind == "f":
        with np.errstate(over="ignore"):  # said in the next lines
            floats = np.ascontiguousarray(array, np.float32)
        finite = np.isfinite(floats).all(tuple(range(1, floats.ndim)))
        if not finite.all():
            row = int(np.argmin(finite))
            value = np.asarray(array[row]).reshape(-1)
            bad = value[~np.isfinite(floats[row].reshape(-1))][0]
            fix = "scale the data" if np.isfinite(bad) else "fill it in or leave the row out"
            raise origin.error(f"{bad:g} is no number that single precision holds; {fix}", row)
        return floats
    if array.dtype == np.uint8 and array.ndim > 2:
        return np.ascontiguousarray(array)
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 2**63:
        raise origin.error(f"{int(array.max())} is too large; use numbers below 2**63")
    return np.ascontiguousarray(array, np.int64)
