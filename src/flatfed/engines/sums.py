"""Sums over clients, whose bits do not depend on who added them up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor


@dataclass
class Totals:
    """Weighted sums over clients: of uploads, buffer changes, losses and step sizes."""

    weight: float = 1.0
    clients: int = 1
    upload: dict[str, Tensor] = field(default_factory=dict)
    moved: dict[str, Tensor] = field(default_factory=dict)
    """The displacement itself, where what is uploaded is something else."""
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rate: float = 0.0
    loss: float = 0.0
    evaluations: int = 0
    """Minibatch gradients taken."""
    bytes_up: int = 0
    """What the uploads take on the wire, without buffers."""
    drift: float = 0.0
    """Of the squared distance from the received model, meaned over the steps."""
    squared: float = 0.0
    """Of the squared length of the displacement."""

    def plus(self, other: Totals) -> Totals:
        def added(left: Any, right: Any) -> Any:
            if isinstance(left, dict):
                return {name: value + right[name] for name, value in left.items()}
            return left + right

        return Totals(
            **{each.name: added(getattr(self, each.name), getattr(other, each.name)) for each in fields(self)}
        )

    def times(self, weight: float) -> Totals:
        """One client's numbers as they enter the sums."""
        return self if weight == 1 else replace(self._each(lambda value: weight * value), weight=weight)

    def mean(self) -> Totals:
        """Sums over clients divided by their weight."""
        return self._each(lambda value: value / self.weight)

    def copied(self) -> Totals:
        """With tensors of its own."""
        return self._each(lambda value: value.clone() if isinstance(value, Tensor) else value)

    def _each(self, function: Callable[[Any], Any]) -> Totals:
        """With a function of every number; what is counted stays a count."""

        def changed(value: Any) -> Any:
            if isinstance(value, dict):
                return {name: function(tensor) for name, tensor in value.items()}
            return function(value)

        counted = {"weight", "clients", "evaluations", "bytes_up"}
        return replace(
            self,
            **{
                each.name: changed(getattr(self, each.name))
                for each in fields(self)
                if each.name not in counted
            },
        )

    @property
    def displacement(self) -> Tensor:
        """Of the participants' models, whatever they uploaded in its place."""
        return self.moved.get("moved", self.upload["displacement"])

    @property
    def flatness_distance(self) -> float:
        """mean ‖Δ_i − Δ̄‖² of the mean totals, as the mean square less the square of the mean."""
        return max(0.0, self.squared - float(torch.linalg.vector_norm(self.displacement)) ** 2)


class Piece(NamedTuple):
    """The sum over `length` consecutive places of a cohort."""

    start: int
    length: int
    totals: Totals


class OrderedSum:
    """A sum over a cohort whose bits do not depend on who added up which stretch of it.

    Places are added in pairs, pairs of pairs and so on, always the same ones. Whoever has a stretch of places
    sums it as far as that goes and hands on the few pieces that are left; the pieces must come in order.
    """

    def __init__(self) -> None:
        self.pieces: list[Piece] = []

    def add(self, piece: Piece) -> None:
        while self.pieces:
            before = self.pieces[-1]
            if before.length != piece.length or before.start % (2 * piece.length):
                break
            piece = Piece(before.start, 2 * piece.length, self.pieces.pop().totals.plus(piece.totals))
        self.pieces.append(piece)

    def total(self) -> Totals:
        *others, last = (piece.totals for piece in self.pieces)
        for totals in reversed(others):
            last = totals.plus(last)
        return last
