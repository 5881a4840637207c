"""What clients remember between rounds, kept for them where they are simulated.

State exists only for clients that have taken part. It is in memory up to a budget and in a memory-mapped file
beyond, so memory never depends on the size of the population.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from flatfed.core.state import Dimensions, State, Vector
from flatfed.engines.execution import Execution
from flatfed.engines.memory import GrowingMemory
from flatfed.engines.planning import Plan


class Slots(NamedTuple):
    """Where a client's vectors are, if it has any, and where its new ones go."""

    old: int | None
    new: int


class ClientStore:
    """One row of numbers for each client that has taken part.

    A round's new rows are staged beside the old ones and become visible together in `commit`, so that an
    interrupted round leaves no trace. Rows fill memory up to `memory_bytes`, then a scratch file in `folder`
    (default: the system's temporary folder). A forked process shares the files that the store had then: it
    can `load` from and `write` to the slots that this one has reserved.
    """

    def __init__(
        self,
        vectors: Iterable[Vector],
        dimensions: Dimensions,
        dtype: torch.dtype,
        memory_bytes: int,
        folder: Path | None = None,
        private: State = MappingProxyType({}),
    ) -> None:
        """For declared vectors, and for what a client keeps of its own before it first takes part."""
        self._declared, self._private = tuple(vectors), private
        self.lengths = {vector.name: dimensions.length(vector) for vector in self._declared}
        self.lengths |= {key: len(value) for key, value in private.items()}
        self.row_length = sum(self.lengths.values())
        self.dtype = dtype
        self._row_bytes = self.row_length * dtype.itemsize
        self._memory_slots = memory_bytes // max(1, self._row_bytes)
        self._folder = folder
        self.files: dict[str, GrowingMemory] = {}
        self._slot: dict[int, int] = {}
        self._staged: dict[int, int] = {}
        self._free: list[int] = []
        self._slots = 0
        self._lock = threading.Lock()
        self.changed: set[int] = set()

    @classmethod
    def for_plan(cls, plan: Plan, execution: Execution, folder: Path | None = None) -> ClientStore:
        """For what clients keep under a plan."""
        vectors, memory = plan.algorithm.client_vectors, execution.client_memory_bytes
        return cls(vectors, plan.dimensions, plan.layout.dtype, memory, folder, plan.private_state)

    def __len__(self) -> int:
        return len(self._slot)

    def clients(self) -> list[int]:
        return sorted(self._slot)

    def row(self, client: int) -> Tensor | None:
        """The committed row [R] of a client, or None if it has never taken part.

        It may be overwritten once the client has taken part again, after the commit of that round.
        """
        slot = self._slot.get(client)
        return None if slot is None else self._row(slot)

    def read(self, client: int, received: Tensor) -> dict[str, Tensor]:
        """A client's vectors; on its first round their initial values, given the model it receives."""
        return self.load(self._slot.get(client), received)

    def stage(self, client: int, state: State) -> None:
        """Copies a client's new vectors, which count from `commit` on."""
        self.write(self.reserve(client).new, state)

    def stage_row(self, client: int, row: Tensor) -> None:
        self._row(self.reserve(client).new).copy_(row)

    def reserve(self, client: int) -> Slots:
        """Stages a client and makes room for its new vectors, which must be written before `commit`."""
        if not self.lengths:
            return Slots(None, 0)
        with self._lock:
            if self._free:
                slot = self._free.pop()
            else:
                slot, self._slots = self._slots, self._slots + 1
            self._staged[client] = slot
            # Only here, so that no other process ever has to enlarge a file.
            self._row(slot)
            return Slots(self._slot.get(client), slot)

    def load(self, slot: int | None, received: Tensor) -> dict[str, Tensor]:
        """The vectors in a slot; initial ones where there is none."""
        if slot is not None:
            return {key: piece.to(received.device) for key, piece in self._pieces(slot).items()}
        first = {
            vector.name: received
            if vector.initial == "model"
            else received.new_full((self.lengths[vector.name],), vector.initial)
            for vector in self._declared
        }
        return first | {key: value.to(received.device) for key, value in self._private.items()}

    def write(self, slot: int, state: State) -> None:
        """Copies vectors into a slot."""
        if not self.lengths:
            return
        for key, piece in self._pieces(slot).items():
            piece.copy_(state[key])

    def commit(self) -> None:
        with self._lock:
            self._free += [self._slot[client] for client in self._staged if client in self._slot]
            self._slot.update(self._staged)
            self.changed.update(self._staged)
            self._staged = {}

    def discard(self) -> None:
        with self._lock:
            self._free += self._staged.values()
            self._staged = {}

    def _pieces(self, slot: int) -> dict[str, Tensor]:
        return dict(zip(self.lengths, self._row(slot).split(list(self.lengths.values())), strict=True))

    def _row(self, slot: int) -> Tensor:
        kind, first = ("memory", 0) if slot < self._memory_slots else ("scratch", self._memory_slots)
        if kind not in self.files:
            self.files[kind] = GrowingMemory(kind == "memory", self._folder)
        return self.files[kind].view((slot - first) * self._row_bytes, self.dtype, self.row_length)
