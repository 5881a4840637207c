"""The race of compositions among themselves: many, with few configurations each."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from flatfed.race.entries import Entry
from flatfed.race.preset import Preset
from flatfed.race.results import Result
from flatfed.race.runner import TaskRace
from flatfed.race.standings import Standing, TaskStandings
from flatfed.runs.halving import Halving, Tuning, Watch
from flatfed.runs.ranking import Interval

DROPPED = 5
"""One of so many compositions goes on to the next rung."""
BEST = 3
"""Compositions that are worth racing on other tasks, with --methods."""


@dataclass(frozen=True)
class Screening:
    """The race of compositions among themselves on one task, tuned under its tuning seed."""

    race: TaskRace
    entries: Sequence[Entry]
    configurations: int

    @property
    def is_missing(self) -> bool:
        """Unless every composition has rows."""
        return not all(self._rows(entry) for entry in self.entries)

    def _rows(self, entry: Entry) -> list[Result]:
        setting = self.race.preset.digest(self.race.task, entry)
        return self.race.results.of(self.race.task.name, entry.label, "screening", setting)

    @property
    def survivors(self) -> list[int]:
        counts = Halving(self.configurations).counts
        return [max(1, len(self.entries) // DROPPED**rung) for rung in range(len(counts))]

    def run(self, watch: Watch) -> None:
        """Adds a row for every configuration of every composition, once all have ended."""
        methods = [self.race.method(entry) for entry in self.entries]
        halving, gradients = Halving(self.configurations), self.race.limits.gradients
        tuning = Tuning.checked(methods, halving, gradients, self.survivors)
        self.race.results.add(
            [
                row
                for entry, tuned in zip(self.entries, tuning.run(watch), strict=True)
                for row in self.race.tried(entry, tuned, "screening")
            ]
        )


def best_compositions(rows: Sequence[Result], count: int) -> list[str]:
    """The labels with the best mean place over the tasks on which compositions were screened."""
    places: dict[str, list[int]] = {}
    screened = [row for row in rows if row.phase == "screening"]
    for task in dict.fromkeys(row.task for row in screened):
        best: dict[str, tuple[bool, float]] = {}
        own = [row for row in screened if row.task == task]
        most = max(row.gradients for row in own)
        for row in own:
            if row.validation_accuracy is not None:
                # Those that came to the last rung first.
                worth = row.gradients > most / 2, row.validation_accuracy
                best[row.method] = max(best.get(row.method, (False, 0.0)), worth)
        for place, label in enumerate(sorted(best, key=lambda name: best[name], reverse=True)):
            places.setdefault(label, []).append(place)
    return sorted(places, key=lambda label: statistics.fmean(places[label]))[:count]


@dataclass(frozen=True)
class Elsewhere:
    """A composition on a task that it was not chosen on, beside the methods that have a name."""

    task: str
    composition: Standing
    named: Standing
    """The best of them."""
    ahead: Interval | None
    """Of that one."""
    place: int
    methods: int
    """The named ones and this composition."""


def elsewhere(
    preset: Preset, tasks: Sequence[TaskStandings], labels: Sequence[str], screened_on: Sequence[str]
) -> list[Elsewhere]:
    """What compositions did on tasks on which none were screened."""
    composed = {entry.label for entry in preset.compositions}
    outcomes = []
    for task in (task for task in tasks if task.task not in screened_on):
        tuned = [one for one in task.complete if one.tuning]
        named = [one for one in tuned if one.method not in composed]
        for one in (one for one in tuned if one.method in labels and named):
            beside = [other.method for other in tuned if other is one or other in named]
            place = beside.index(one.method) + 1
            ahead = one.ahead_of(named[0])
            outcomes.append(Elsewhere(task.task, one, named[0], ahead, place, len(beside)))
    return outcomes
