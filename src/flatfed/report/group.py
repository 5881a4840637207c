"""Runs sorted into comparisons (one data set, split and model) of methods (one config under any seeds)."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flatfed.report.read import Record, number
from flatfed.runs.compare import Spread
from flatfed.runs.folder import FREE_SETTINGS

SETTING = ("data", "partition", "model")
NOT_COMPARED = (FREE_SETTINGS - {"rounds"}) | {"seed"}


@dataclass(frozen=True)
class Curve:
    """A quantity over the rounds: the mean over seeds and the deviation between them."""

    rounds: list[int]
    mean: list[float]
    deviation: list[float] | None


@dataclass(frozen=True)
class Method:
    """One config under one or more seeds."""

    label: str
    runs: tuple[Record, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config

    @property
    def counted(self) -> list[Record]:
        """The runs that means are taken over: the complete ones, or all that have begun if none is.

        Of several runs under one seed the first that got furthest stands for all.
        """
        complete = [run for run in self.runs if run.state == "complete"]
        return _once(complete or [run for run in self.runs if run.history])

    @property
    def seeds(self) -> int:
        return len({_text(run.seed) for run in self.runs})

    def curve(self, key: str) -> Curve:
        """Over the rounds for which every run has the number."""
        return _curve([_values(run, key) for run in self.counted])

    def total(self, *keys: str) -> Curve:
        """The sum of some numbers over all rounds so far."""
        return _curve([_sums(run, keys) for run in self.counted])

    def final(self, key: str) -> Spread | None:
        """Over the runs whose last value is a number."""
        return spread([value] if (value := last_value(run, key)) is not None else [] for run in self.counted)

    def best(self, key: str) -> Spread | None:
        return spread([max(found)] if (found := _values(run, key).values()) else [] for run in self.counted)

    def rounds_to(self, key: str, target: float) -> list[int]:
        """The first round with at least `target`, of the runs that have one."""
        reached = (
            [place for place, value in _values(run, key).items() if value >= target][:1]
            for run in self.counted
        )
        return [place for found in reached for place in found]

    def measured(self, name: str) -> list[tuple[Record, Mapping[str, Any]]]:
        """The runs that a diagnostic was taken of, and its result."""
        runs = _once([run for run in self.runs if name in run.diagnostics])
        return [(run, run.diagnostics[name]["result"]) for run in runs]


@dataclass(frozen=True)
class Comparison:
    """Methods on one data set, split and model."""

    setting: Mapping[str, Any]
    methods: tuple[Method, ...]

    @property
    def records(self) -> Iterator[Record]:
        return (run for method in self.methods for run in method.runs)

    def history_keys(self) -> list[str]:
        """The names of all numbers in the histories, in order of appearance."""
        lines = (line for run in self.records for line in run.history)
        return list(dict.fromkeys(key for line in lines for key in line if number(line[key]) is not None))


def spread(found: Iterable[Iterable[float]]) -> Spread | None:
    """Over the runs that have a number; each gives a list of one or none."""
    values = [value for each in found for value in each]
    return Spread.of(values) if values else None


def last_value(run: Record, key: str) -> float | None:
    """What a run ended with; None if that is not a number."""
    return number(next((line[key] for line in reversed(run.history) if key in line), None))


def _once(runs: Sequence[Record]) -> list[Record]:
    """One run for each seed."""
    found: dict[str, Record] = {}
    for run in runs:
        known = found.setdefault(_text(run.seed), run)
        if len(run.history) > len(known.history):
            found[_text(run.seed)] = run
    return list(found.values())


def _values(run: Record, key: str) -> dict[int, float]:
    return {line["round"]: value for line in run.history if (value := number(line.get(key))) is not None}


def _sums(run: Record, keys: Sequence[str]) -> dict[int, float]:
    sums, total = {}, 0.0
    for line in run.history:
        total += sum(number(line.get(key)) or 0.0 for key in keys)
        sums[line["round"]] = total
    return sums


def _curve(of_runs: Sequence[Mapping[int, float]]) -> Curve:
    rounds = [place for place in (of_runs[0] if of_runs else {}) if all(place in each for each in of_runs)]
    if not rounds:
        return Curve([], [], None)
    values = np.array([[each[place] for place in rounds] for each in of_runs])
    deviation = values.std(axis=0, ddof=1).tolist() if len(of_runs) > 1 else None
    return Curve(rounds, values.mean(axis=0).tolist(), deviation)


# -- grouping ---------------------------------------------------------------------------------------------


def comparisons(records: Sequence[Record], labels: Mapping[Path, str]) -> list[Comparison]:
    """All runs, by setting and method, in the order in which they come."""
    settings: dict[str, dict[str, list[Record]]] = {}
    for record in records:
        setting = {key: record.config.get(key) for key in SETTING}
        methods = settings.setdefault(_text(setting), {})
        methods.setdefault(_text([labels.get(record.folder), _compared(record.config)]), []).append(record)
    found = []
    for groups in settings.values():
        members = [sorted(group, key=lambda run: _text(run.seed).zfill(24)) for group in groups.values()]
        names = _labels([group[0] for group in members], labels)
        named = tuple(Method(name, tuple(group)) for name, group in zip(names, members, strict=True))
        setting = {key: members[0][0].config.get(key) for key in SETTING}
        found.append(Comparison(setting, named))
    return found


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _compared(config: Mapping[str, Any]) -> dict[str, Any]:
    training = {key: value for key, value in config["training"].items() if key not in NOT_COMPARED}
    return {**config, "training": training}


def _labels(members: Sequence[Record], labels: Mapping[Path, str]) -> list[str]:
    """Given names, or the algorithm's with the options in which methods of that name differ."""
    names = [labels.get(run.folder) or algorithm_name(run.config) for run in members]
    flat = [flattened(_compared(run.config)) for run in members]
    found = []
    for place, name in enumerate(names):
        same = [other for other, known in zip(flat, names, strict=True) if known == name]
        keys = dict.fromkeys(key for each in same for key in each)
        differing = [key for key in keys if len({each.get(key, "–") for each in same}) > 1]
        options = ", ".join(f"{key.rpartition('.')[2]} {flat[place].get(key, '–')}" for key in differing)
        found.append(f"{name} ({options})" if options else name)
    return found


def algorithm_name(config: Mapping[str, Any]) -> str:
    """Its name, or its parts if it has none."""
    algorithm = config["algorithm"]
    if isinstance(algorithm.get("name"), str):
        return str(algorithm["name"])
    parts = [
        each
        for filling in algorithm.values()
        for each in (filling if isinstance(filling, list) else [filling])
    ]
    names = [each.get("part", "") if isinstance(each, dict) else str(each) for each in parts]
    return " × ".join(filter(None, map(str, names))) or "custom"


def flattened(value: Any, name: str = "") -> dict[str, str]:
    """Nested tables as one, with dotted names and values as short texts; what is None is left out."""
    if isinstance(value, Mapping):
        inner = (flattened(each, f"{name}.{key}" if name else str(key)) for key, each in value.items())
        return {key: text for each in inner for key, text in each.items()}
    if value is None:
        return {}
    return {name: short(value)}


def short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}" if math.isfinite(value) else str(value)
    return value if isinstance(value, str) else json.dumps(value)
