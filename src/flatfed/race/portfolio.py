"""What the race found, for tasks that it has not seen: which methods to try first, and with which settings.

portfolio.json is made from the race's results by `make docs`.
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from flatfed.algorithms import build
from flatfed.race.preset import Preset
from flatfed.race.results import Result
from flatfed.race.standings import BASELINE, TaskStandings, all_standings
from flatfed.runs.halving import Method, Place
from flatfed.runs.setting import Setting


@dataclass(frozen=True)
class Proposal:
    """A method to try, and where its settings were best."""

    label: str
    algorithm: Mapping[str, Any]
    settings: Mapping[str, float]
    """By place, such as "training.lr": the median over the race's tasks."""

    def method(self, setting: Setting) -> Method:
        """Its first configuration has these settings, where the method is tuned in them."""
        method = Method.of(self.label, self.algorithm, setting, own=False)
        places: dict[str, Place] = {".".join(map(str, place)): place for place in method.space}
        known = {places[name]: value for name, value in self.settings.items() if name in places}
        return method.starting_at(known)


@dataclass(frozen=True)
class Portfolio:
    """Methods in the order in which they are worth trying, and the race's tasks that say so."""

    proposals: Sequence[Proposal]
    tasks: Sequence[str]

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Portfolio:
        proposals = [Proposal(row["label"], row["algorithm"], row["settings"]) for row in values["methods"]]
        return cls(proposals, values["tasks"])


def judged_tasks(preset: Preset, rows: Sequence[Result]) -> list[TaskStandings]:
    """Those on which at least half of their methods have run; the best of a few is not yet the best.

    Tasks with a short list of methods count like all others.
    """
    judged = []
    for task in all_standings(preset.current(rows), preset.tasks):
        labels = {entry.label for entry in preset.tasks[task.task].entries}
        if 2 * sum(one.method in labels for one in task.complete) >= len(labels):
            judged.append(task)
    return judged


def portfolio_of(preset: Preset, rows: Sequence[Result], without: str = "") -> dict[str, Any]:
    """As plain data, from the results on all tasks `without` one.

    Methods are sorted by their mean place among those of a task, as a share of them, so that tasks on which
    few methods have run count the same. FedAvg is always among the first.
    """
    tasks = [task for task in judged_tasks(preset, rows) if task.task != without]
    entries = {
        entry.label: entry
        for task in preset.tasks.values()
        for entry in task.entries
        # What a server does between rounds takes time that no budget of gradients counts.
        if entry.tuned and not build(entry.algorithm).server_tasks
    }
    places: dict[str, list[float]] = {}
    settings: dict[str, dict[str, list[float]]] = {}
    for task in tasks:
        for label, place in _places(task).items():
            if label in entries:
                places.setdefault(label, []).append(place)
                for name, value in task[label].final[0].values.items():
                    settings.setdefault(label, {}).setdefault(name, []).append(value)
    order = sorted(places, key=lambda label: (label != BASELINE, statistics.fmean(places[label])))
    return {
        "tasks": [preset.tasks[task.task].title for task in tasks],
        "methods": [
            {
                "label": label,
                "algorithm": dict(entries[label].algorithm),
                "place": round(statistics.fmean(places[label]), 3),
                "settings": {name: statistics.median(values) for name, values in settings[label].items()},
            }
            for label in order
        ],
    }


def _places(task: TaskStandings) -> dict[str, float]:
    """From 0 for the best method to 1; methods that diverged are last."""
    methods = [one.method for one in task.complete]
    return {method: place / max(1, len(methods) - 1) for place, method in enumerate(methods)}


# Tried where the race has no results yet.
USUAL = ("fedavg", "fedavgm", "fedcm", "scaffold", "fedsam", "mofedsam", "fedacg", "fedadam")


@functools.cache
def portfolio() -> Portfolio:
    """What was shipped; a usual choice of methods with their own settings if the race has no results."""
    text = resources.files(__package__).joinpath("portfolio.json").read_text("utf-8")
    shipped = Portfolio.of(json.loads(text))
    if shipped.proposals:
        return shipped
    return Portfolio([Proposal(name, {"name": name}, {}) for name in USUAL], [])
