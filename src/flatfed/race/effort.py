"""How much is tried for a recommendation, and how long that takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from flatfed.core.errors import FlatfedError, shown
from flatfed.runs.budget import Pace
from flatfed.runs.halving import Halving

UNITS = {"s": 1, "m": 60, "h": 3600}
REFERENCES = 2
"""Runs beside the finalists under every seed: FedAvg tuned, and what the config says."""


def seconds_of(text: str) -> float:
    """30m, 90s or 1.5h."""
    matched = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh])", text.strip()) if isinstance(text, str) else None
    if matched is None or float(matched[1]) == 0:
        raise FlatfedError(f"budget = {shown(text)}: write it as 90s, 30m or 1.5h")
    return float(matched[1]) * UNITS[matched[2]]


@dataclass(frozen=True)
class Effort:
    """How many methods and configurations are tried, and how many go on."""

    methods: int
    configurations: int
    finalists: int
    seeds: int
    share: float = 1.0
    """Of the rounds that the config asks for."""

    @property
    def halving(self) -> Halving:
        return Halving(self.configurations)

    @property
    def survivors(self) -> list[int]:
        """The methods of each rung: half of those before, but enough for the finals."""
        return [max(self.finalists, self.methods // 2**rung) for rung in range(len(self.halving.counts))]

    @property
    def starts(self) -> int:
        """Of runs, each of a rung counted."""
        tuning = sum(
            methods * count for methods, count in zip(self.survivors, self.halving.counts, strict=True)
        )
        return tuning + (self.finalists + REFERENCES) * self.seeds

    def gradients(self, whole: int, dearest: float) -> float:
        """All that are taken, at most, where a whole run of one gradient per step has so many.

        Which methods run to the end is not known beforehand: the `dearest` takes so many times as many.
        """
        before, tuning, whole_run = 0, 0, whole * self.share
        rungs = zip(self.survivors, self.halving.counts, self.halving.limits(int(whole_run)), strict=True)
        for methods, count, limit in rungs:
            tuning += methods * count * (limit - before)
            before = limit
        return tuning + dearest * (self.finalists + REFERENCES) * self.seeds * whole_run

    def seconds(self, whole: int, dearest: float, pace: Pace) -> float:
        return pace.seconds(self.starts, self.gradients(whole, dearest))


def efforts(seeds: int) -> Iterator[Effort]:
    """From the most to the least."""
    for methods, configurations, finalists in (
        (12, 9, 3),
        (8, 9, 3),
        (6, 9, 3),
        (6, 3, 3),
        (4, 3, 2),
        (3, 3, 2),
    ):
        yield Effort(methods, configurations, finalists, seeds)
    for share in (0.5, 0.25, 0.1):
        yield Effort(3, 3, 2, seeds, share)


USUAL = Effort(8, 9, 3, 3)
"""Without a budget."""


def affordable(
    whole: int,
    dearest: float,
    pace: Pace,
    seeds: int,
    gradients: int | None = None,
    seconds: float | None = None,
) -> Effort:
    """The most that a budget allows, of gradients or of time."""
    if gradients is None and seconds is None:
        return replace(USUAL, seeds=seeds)
    for effort in efforts(seeds):
        if gradients is not None and effort.gradients(whole, dearest) <= gradients:
            return effort
        if seconds is not None and effort.seconds(whole, dearest, pace) <= seconds:
            return effort
    least = list(efforts(seeds))[-1]
    if gradients is not None:
        raise FlatfedError(
            f"gradients = {shown(gradients)}: too few to compare anything; the least is "
            f"{least.gradients(whole, dearest):,.0f}, a tenth of the rounds"
        )
    raise FlatfedError(
        f"budget: {seconds:.0f} s are too few to compare anything; by a timed round the least takes "
        f"{least.seconds(whole, dearest, pace):.0f} s, or ask for fewer rounds or seeds"
    )
