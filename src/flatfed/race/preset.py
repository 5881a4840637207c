"""The race as data: its tasks, its methods and how they are tuned (race.toml)."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from flatfed.algorithms import ALGORITHMS, build
from flatfed.core.errors import check_choice
from flatfed.race.entries import Entry, compositions
from flatfed.race.results import Row
from flatfed.runs.halving import EVALUATIONS, Halving
from flatfed.runs.identity import digest_of


@dataclass(frozen=True)
class RaceTask:
    """A task of the race: the tables of a config, and which methods run on it."""

    name: str
    title: str
    config: Mapping[str, Any]
    entries: Sequence[Entry]


@dataclass(frozen=True)
class Preset:
    """The whole race."""

    tasks: Mapping[str, RaceTask]
    halving: Halving
    tuning_seed: int
    seeds: Sequence[int]
    compositions: Sequence[Entry]
    """What is screened beside the methods of every task."""
    screened: int
    """The configurations of each of those."""

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Preset:
        """From the tables of race.toml; registered algorithms that are not named there come last."""
        listed = [
            Entry(row["label"], row.get("algorithm", {"name": row["label"]}), row.get("tuned", True))
            for row in values["methods"]
        ]
        named = {entry.algorithm.get("name") for entry in listed}
        others = [Entry(name, {"name": name}) for name in sorted(ALGORITHMS) if name not in named]
        # Synthetic samples cost the server more than all else together.
        slow = [entry for entry in listed if build(entry.algorithm).server_tasks]
        quick = [entry for entry in listed if entry not in slow]
        entries = {entry.label: entry for entry in [*quick, *others, *slow]}
        tasks = {}
        for row in values["tasks"]:
            chosen = [entries[label] for label in row.get("methods", entries)]
            tasks[row["name"]] = RaceTask(row["name"], row["title"], row["config"], chosen)
        halving = Halving(values["configurations"], values["factor"], values["rungs"])
        generated = values.get("compositions", {"slots": {}, "configurations": 1})
        composed = compositions(generated["slots"]) if generated["slots"] else []
        seeds = values["seeds"]
        return cls(tasks, halving, values["tuning_seed"], seeds, composed, generated["configurations"])

    def digest(self, task: RaceTask, entry: Entry) -> str:
        """Of what decides the results of a method on a task, apart from the program itself."""
        halving = self.halving
        tuning = [halving.configurations, halving.factor, halving.counts, EVALUATIONS, self.tuning_seed]
        return digest_of([task.config, entry.algorithm, entry.tuned, tuning])[:10]

    def current(self, rows: Iterable[Row]) -> list[Row]:
        """Those that were made under the present settings; others cannot be compared with them."""
        settings, seeds = self._settings, {self.tuning_seed, *self.seeds}
        return [row for row in rows if (row.task, row.method, row.setting) in settings and row.seed in seeds]

    @functools.cached_property
    def _settings(self) -> set[tuple[str, str, str]]:
        """Of every task and method the names and the digest."""
        return {
            (task.name, entry.label, self.digest(task, entry))
            for task in self.tasks.values()
            for entry in (*task.entries, *self.compositions)
        }

    def chosen(
        self, tasks: Iterable[str] = (), methods: Iterable[str] = ()
    ) -> list[tuple[RaceTask, list[Entry]]]:
        """The tasks and methods of these names, or all in the order of the race but for compositions."""
        tasks, methods = list(tasks), list(methods)
        for name in tasks:
            check_choice("task", name, self.tasks)
        composed = {entry.label: entry for entry in self.compositions}
        labels = {entry.label for task in self.tasks.values() for entry in task.entries}
        for label in methods:
            check_choice("--methods", label, labels | composed.keys())
        named = [composed[label] for label in methods if label in composed]
        return [
            (task, [entry for entry in task.entries if not methods or entry.label in methods] + named)
            for name, task in self.tasks.items()
            if not tasks or name in tasks
        ]


@functools.cache
def preset() -> Preset:
    """The race that flatfed runs."""
    return Preset.of(tomllib.loads(resources.files(__package__).joinpath("race.toml").read_text("utf-8")))
