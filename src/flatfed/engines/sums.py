"""Sums over a cohort whose bits do not depend on who added them up, and rows for rules that need them all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatfed.core.aggregate import Aggregate
from flatfed.core.algorithm import Algorithm
from flatfed.core.state import State
from flatfed.engines.memory import GrowingMemory

BLOCK_BYTES = 2**26
"""Of the rows of a cohort that are in memory at a time."""


@dataclass
class CohortSums:
    """Weighted sums over some clients of a cohort, in the cohort's order."""

    weight: float = 1.0
    clients: int = 1
    gradient_evaluations: int = 0
    bytes_up: int = 0
    uploads: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    displacement: Tensor | None = None
    """Of the clients' models, where the sum of the uploads "displacement" is not that."""
    squared_displacement: float = 0.0
    drift: float = 0.0
    loss: float = 0.0
    total_rate: float = 0.0
    rows: dict[str, Tensor] = field(default_factory=dict)
    """For rules that need all uploads: weights [C] and, in place of sums, uploads and buffers [C, n]."""

    def plus(self, other: CohortSums) -> CohortSums:
        """The sums over these clients and those that come after them."""

        def added(name: str) -> Any:
            left, right = getattr(self, name), getattr(other, name)
            if left is None:
                return None
            if not isinstance(left, dict):
                return left + right
            if name == "rows":
                return {key: torch.cat([value, right[key]]) for key, value in left.items()}
            return {key: value + right[key] for key, value in left.items()}

        return CohortSums(**{item.name: added(item.name) for item in fields(self)})

    def times(self, weight: float) -> CohortSums:
        """One client's numbers as they enter the sums."""
        return self if weight == 1 else replace(self._mapped(lambda value: weight * value), weight=weight)

    def copied(self) -> CohortSums:
        """With tensors of its own."""
        copied = self._mapped(lambda value: value.clone() if isinstance(value, Tensor) else value)
        return replace(copied, rows={key: value.clone() for key, value in self.rows.items()})

    def _mapped(self, function: Callable[[Any], Any]) -> CohortSums:
        """With a function of every weighted sum; counts and rows stay as they are."""

        def mapped(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: function(tensor) for key, tensor in value.items()}
            return None if value is None else function(value)

        unweighted = {"weight", "clients", "gradient_evaluations", "bytes_up", "rows"}
        names = [item.name for item in fields(self) if item.name not in unweighted]
        return replace(self, **{name: mapped(getattr(self, name)) for name in names})

    def mean(self, algorithm: Algorithm, uploads: State, buffers: State) -> Aggregate:
        """The cohort's aggregate, given what has been reduced otherwise than by the mean."""
        mean = self._mapped(lambda value: value / self.weight)
        displacement = mean.displacement
        if displacement is None and algorithm.sums_displacements:
            displacement = mean.uploads["displacement"]
        reduced = {"uploads": {**mean.uploads, **uploads}, "buffers": {**mean.buffers, **buffers}}
        values = {item.name: getattr(mean, item.name) for item in fields(Aggregate)}
        return Aggregate(**values | reduced | {"displacement": displacement})


class Piece(NamedTuple):
    """The sums over `length` consecutive chunks of a cohort."""

    start: int
    length: int
    sums: CohortSums


class PairwiseSum:
    """A sum over a cohort whose bits do not depend on who added up which stretch of it.

    Chunks are added in pairs, pairs of pairs and so on, always the same ones. Whoever has a stretch of chunks
    sums it as far as that goes and hands on the few pieces that are left; the pieces must come in order.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        while self.pieces:
            before = self.pieces[-1]
            if before.length != piece.length or before.start % (2 * piece.length):
                break
            piece = Piece(before.start, 2 * piece.length, self.pieces.pop().sums.plus(piece.sums))
        self.pieces.append(piece)

    def total(self) -> CohortSums:
        *others, last = (piece.sums for piece in self.pieces)
        for sums in reversed(others):
            last = sums.plus(last)
        return last


WEIGHTS, UPLOAD, BUFFER = "weights", "upload ", "buffer "


def rows_of(weights: Tensor, uploads: State, buffers: State) -> dict[str, Tensor]:
    """Some clients' uploads and buffer changes [C, …] as rows for a rule that needs them all."""
    return {
        WEIGHTS: weights,
        **{UPLOAD + key: value for key, value in uploads.items()},
        # A buffer may be a single number, which has no axis of its own.
        **{BUFFER + name: value.reshape(len(value), value[0].numel()) for name, value in buffers.items()},
    }


class _StoredRows:
    """One upload of every client of a cohort, in memory or in a scratch file."""

    def __init__(self, like: Tensor, in_memory: bool, folder: Path | None) -> None:
        self.dtype, self.length, self.device = like.dtype, like.shape[1], like.device
        self.weights = torch.empty(0)
        self.memory = GrowingMemory(in_memory, folder)

    def write(self, start: int, rows: Tensor) -> None:
        self._view(start, len(rows) * self.length).view(rows.shape).copy_(rows)

    def blocks(self) -> Iterator[Tensor]:
        clients = len(self.weights)
        width = max(1, BLOCK_BYTES // max(1, clients * self.dtype.itemsize))
        for start in range(0, self.length, width):
            count = min(width, self.length - start)
            block = torch.stack([self._view(row, count, start) for row in range(clients)])
            yield block.to(self.device)

    def _view(self, row: int, count: int, start: int = 0) -> Tensor:
        """So many numbers from one of a row on."""
        return self.memory.view((row * self.length + start) * self.dtype.itemsize, self.dtype, count)


class CohortCollector:
    """Takes the pieces of a cohort in order and makes its aggregate.

    For a rule that streams it holds a few sums. For one that needs all uploads it keeps a row per client, in
    memory up to a limit and beyond it in a scratch file, of which the rule sees a block of coordinates at a
    time.
    """

    def __init__(
        self, algorithm: Algorithm, clients: int, memory_bytes: int, folder: Path | None = None
    ) -> None:
        self.algorithm, self._clients = algorithm, clients
        self._memory_bytes, self._folder = memory_bytes, folder
        self._sum = PairwiseSum()
        self._weights: list[Tensor] = []
        self._stored: dict[str, _StoredRows] = {}

    def add(self, piece: Piece) -> None:
        if piece.sums.rows:
            self._keep(piece.sums.rows)
            piece = piece._replace(sums=replace(piece.sums, rows={}))
        self._sum.add(piece)

    def _keep(self, rows: dict[str, Tensor]) -> None:
        start = sum(len(weights) for weights in self._weights)
        if not self._stored:
            kept = {key: value for key, value in rows.items() if key != WEIGHTS}
            in_memory = sum(self._clients * value[0].nbytes for value in kept.values()) <= self._memory_bytes
            self._stored = {key: _StoredRows(value, in_memory, self._folder) for key, value in kept.items()}
        for key, stored in self._stored.items():
            stored.write(start, rows[key])
        self._weights.append(rows[WEIGHTS].clone())

    def aggregate(self, buffers: State) -> Aggregate:
        """The whole cohort's; `buffers` are those of the model, for their shapes."""
        uploads, changes = {}, {}
        for key, stored in self._stored.items():
            stored.weights = torch.cat(self._weights).to(stored.device, stored.dtype)
            # A buffer may be empty.
            combined = self.algorithm.aggregate.combine(stored) if stored.length else stored.weights[:0]
            stored.memory.close()
            if key.startswith(UPLOAD):
                uploads[key.removeprefix(UPLOAD)] = combined
            else:
                name = key.removeprefix(BUFFER)
                changes[name] = combined.view(buffers[name].shape)
        return self._sum.total().mean(self.algorithm, uploads, changes)
