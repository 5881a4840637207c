"""The methods of the race: registered algorithms, and compositions that no paper has."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatfed.algorithms import ALGORITHMS, build
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.part import NEUTRAL, SLOTS, Part
from flatfed.parts import Average


@dataclass(frozen=True)
class Entry:
    """A method of the race: an algorithm as a config describes it, without what is tuned in it."""

    label: str
    algorithm: Mapping[str, Any]
    tuned: bool = True
    """Otherwise it runs with the values as given, to show what tuning gains."""


def compositions(slots: Mapping[str, Sequence[Any]]) -> list[Entry]:
    """What some choices for slots allow, each with the names of its parts for a label."""
    known = {_kinds(make()) for make in ALGORITHMS.values()}
    entries = []
    for fillings in itertools.product(*slots.values()):
        description = {
            slot: filling for slot, filling in zip(slots, fillings, strict=True) if filling != NEUTRAL
        }
        try:
            algorithm = build(description)
        except FlatfedError:
            continue  # parts that cannot work together
        if _kinds(algorithm) not in known:
            names = [
                filling if isinstance(filling, str) else filling["part"] for filling in description.values()
            ]
            entries.append(Entry(" × ".join(names), description))
    return entries


def _kinds(algorithm: Algorithm) -> frozenset[type[Part]]:
    """The parts that do something; averaging at any rate is FedAvg's server."""
    return frozenset(type(part) for part in algorithm.parts if type(part) not in {SLOTS[part.slot], Average})
