"""From columns of tables to trees of tensors: inputs and targets, with texts as numbers.

A name stands for a column with its own type: whole numbers and texts, which are numbered, become int64, other
numbers float32, and lists [rows, length]. A list of names stands for a matrix of float32 with these columns.
A dictionary has such entries and is the model's input by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatfed.core.errors import FlatfedError, did_you_mean, shown
from flatfed.core.tree import Tree, first_leaf, map_tree
from flatfed.data.tables import Array, Column, Table, Texts

ColumnNames = str | Sequence[str] | Mapping[str, str | Sequence[str]]
"""A column, several as one matrix, or a dictionary of such."""
Categories = Mapping[str, Sequence[str]]
"""The texts of columns in the order of their numbers."""


def check_columns(option: str, columns: object) -> None:
    entries = list(columns.values()) if isinstance(columns, Mapping) else [columns]
    for entry in entries:
        names: Any = [entry] if isinstance(entry, str) else entry
        listed = isinstance(names, list | tuple) and names and all(isinstance(name, str) for name in names)
        if not listed or len(set(names)) < len(names):
            raise FlatfedError(
                f"{option} = {shown(columns)}: give a column's name, a list of names, or a dictionary of such"
            )
    if isinstance(columns, Mapping) and not (columns and all(isinstance(key, str) for key in columns)):
        raise FlatfedError(f"{option} = {shown(columns)}: give names for the parts of the dictionary")


def names_in(columns: ColumnNames) -> list[str]:
    """All columns that are named, each once."""
    entries = list(columns.values()) if isinstance(columns, Mapping) else [columns]
    return list(
        dict.fromkeys(name for entry in entries for name in ([entry] if isinstance(entry, str) else entry))
    )


def check_categories(categories: object) -> None:
    if not isinstance(categories, Mapping):
        raise FlatfedError(f"categories = {shown(categories)}: give a dictionary of columns and their texts")
    for name, words in categories.items():
        texts = isinstance(words, list | tuple) and words and all(isinstance(word, str) for word in words)
        if not texts or not isinstance(name, str) or len(set(words)) < len(words):
            raise FlatfedError(f"categories[{name!r}] = {shown(words)}: give a list of different texts")


class ColumnReader:
    """Takes the columns out of one table after the other."""

    def __init__(self, inputs: ColumnNames, targets: ColumnNames, categories: Categories) -> None:
        self.inputs, self.targets = inputs, targets
        for name in categories:
            if name not in self.names:
                raise FlatfedError(
                    f"categories[{name!r}]: no column that is read; {did_you_mean(name, self.names)}"
                )
        self._given = {
            name: {word: number for number, word in enumerate(words)} for name, words in categories.items()
        }
        self._words: dict[str, dict[str, int]] = {}
        """The texts of columns whose numbers are not given, in the order in which they came."""
        self._numbers: dict[str, str] = {}
        """The columns that were numbers, and in which file first."""
        self.floats: set[str] = set()
        """Those that were not whole numbers everywhere."""

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*names_in(self.inputs), *names_in(self.targets)]))

    def arrays(self, table: Table) -> tuple[Tree, Tree]:
        """(inputs, targets) of a table as arrays, texts by numbers that `order` replaces."""
        return self._tree(table, self.inputs), self._tree(table, self.targets)

    def _tree(self, table: Table, columns: ColumnNames) -> Tree:
        if isinstance(columns, Mapping):
            return {key: self._tree(table, entry) for key, entry in columns.items()}
        if isinstance(columns, str):
            return self._own_type(table, columns)
        return np.stack([self._floats(table, name) for name in columns], axis=1)

    def _floats(self, table: Table, name: str) -> Array:
        column = table.columns[name]
        if isinstance(column, Texts):
            row = column.odd or 0
            raise table.error(
                name,
                f"{shown(column.words[column.codes[row]])} is not a number; name texts by themselves",
                row,
            )
        if column.ndim > 1:
            raise table.error(name, f"it has {list(column.shape[1:])} numbers a row; name it by itself")
        return column.astype(np.float32)

    def _own_type(self, table: Table, name: str) -> Array:
        column = table.columns[name]
        if name in self._given:
            return self._as_given(table, name, column)
        if not isinstance(column, Texts):
            if name in self._words:
                raise table.error(name, "numbers, and texts in another file; make them alike")
            self._numbers.setdefault(name, table.source)
            if column.dtype.kind == "f":
                self.floats.add(name)
            return column
        row = column.odd or 0
        text = shown(column.words[column.codes[row]])
        if column.odd is not None:
            raise table.error(
                name, f"{text} is not a number, as others are; correct it, or give categories[{name!r}]", row
            )
        if name in self._numbers:
            raise table.error(name, f"{text} is not a number, as those in {self._numbers[name]}", row)
        words = self._words.setdefault(name, {})
        return np.array([words.setdefault(word, len(words)) for word in column.words])[column.codes]

    def _as_given(self, table: Table, name: str, column: Column) -> Array:
        if not isinstance(column, Texts):
            raise table.error(name, "its values are lists, and categories are texts; leave them out")
        known = self._given[name]
        for number, word in enumerate(column.words):
            if word not in known:
                row = int(np.argmax(column.codes == number))
                raise table.error(name, f"{shown(word)} is none of its categories; add it or correct it", row)
        return np.array([known[word] for word in column.words])[column.codes]

    @property
    def categories(self) -> dict[str, tuple[str, ...]]:
        """The texts of every column that has some, in the order of their numbers."""
        collected = {name: tuple(sorted(words)) for name, words in self._words.items()}
        return collected | {name: tuple(words) for name, words in self._given.items()}

    @property
    def order(self) -> dict[str, NDArray[np.int64]]:
        """For columns whose texts were numbered as they came: the number that each number becomes."""
        new = {
            name: {word: number for number, word in enumerate(self.categories[name])} for name in self._words
        }
        return {name: np.array([new[name][word] for word in words]) for name, words in self._words.items()}


class ReadSamples:
    """The samples of one table after the other, in arrays that grow: no row is ever there twice."""

    def __init__(self, reader: ColumnReader, source: str) -> None:
        self._reader, self._source = reader, source
        self._columns = tuple(_leaves_as_written(columns) for columns in (reader.inputs, reader.targets))
        self._arrays: Tree = None

    def __len__(self) -> int:
        return 0 if self._arrays is None else len(first_leaf(self._arrays))

    def add(self, arrays: tuple[Tree, Tree]) -> None:
        if self._arrays is None:
            self._arrays = map_tree(_GrowingArray, arrays)
            return

        def append(grown: _GrowingArray, array: Array, columns: _Leaf) -> None:
            if array.shape[1:] != grown.shape[1:]:
                raise FlatfedError(
                    f"{self._source}: column {columns.names[0]!r}: it has rows shaped "
                    f"{list(array.shape[1:])} and {list(grown.shape[1:])}; make them alike"
                )
            grown.append(array)

        map_tree(append, self._arrays, arrays, self._columns)

    def tensors(self) -> tuple[Tree, Tree]:
        """(inputs, targets), once all tables are read."""
        order = self._reader.order

        def finished(grown: _GrowingArray, columns: _Leaf) -> Tensor:
            array = grown.finished()
            if columns.alone and columns.names[0] in self._reader.floats:
                array = array.astype(np.float32, copy=False)
            if columns.alone and columns.names[0] in order:
                np.take(order[columns.names[0]], array, out=array, mode="clip")
            return torch.from_numpy(array)

        inputs, targets = map_tree(finished, self._arrays, self._columns)
        return inputs, targets


class _Leaf:
    """The columns of one tensor."""

    def __init__(self, columns: str | Sequence[str]) -> None:
        self.alone = isinstance(columns, str)
        self.names = [columns] if isinstance(columns, str) else list(columns)


def _leaves_as_written(columns: ColumnNames) -> Tree:
    if isinstance(columns, Mapping):
        return {key: _Leaf(entry) for key, entry in columns.items()}
    return _Leaf(columns)


class _GrowingArray:
    """Rows behind each other, of bytes, whole numbers or floats."""

    GROWTH = 1.2

    def __init__(self, array: Array) -> None:
        self._array, self._rows = array.copy(), len(array)

    def __len__(self) -> int:
        return self._rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    def append(self, array: Array) -> None:
        if array.dtype != self._array.dtype:
            both = {array.dtype, self._array.dtype}
            floats = any(dtype.kind == "f" for dtype in both)
            self._array = self._array.astype(np.float32 if floats else np.int64)
        rows = self._rows + len(array)
        if rows > len(self._array):
            # The system moves large arrays by their pages, without a second copy.
            self._array.resize((max(rows, int(self.GROWTH * self._rows)), *self.shape[1:]), refcheck=False)
        self._array[self._rows : rows] = array
        self._rows = rows

    def finished(self) -> Array:
        self._array.resize((self._rows, *self.shape[1:]), refcheck=False)
        return self._array
