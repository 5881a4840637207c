"""Runs sorted into comparisons (one data set, split and model) of methods (one config under any seeds)."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

from flatfed.core.errors import printable
from flatfed.diagnostics.figures import NumberedMethod
from flatfed.report.read import RunRecord
from flatfed.runs import statistics
from flatfed.runs.identity import method_of, setting_of
from flatfed.runs.statistics import ACCURACY, Curve, Spread, finite
from flatfed.training.evaluation import ClientSpread

CLIENT_NUMBERS = {
    "training": ("accuracy", "samples"),
    "test": ("test_accuracy", "test_samples"),
    "personal model, test": ("test_personal_accuracy", "test_samples"),
    "fine-tuned, test": ("test_fine_tuned_accuracy", "test_samples"),
}
"""What a client's accuracy and the number of samples behind it are called, by model and kind of data."""


@dataclass(frozen=True)
class Method(NumberedMethod):
    """One config under one or more seeds."""

    runs: tuple[RunRecord, ...]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.runs[0].config

    @cached_property
    def counted(self) -> list[RunRecord]:
        """The runs that means are taken over: the complete ones, or all that have begun if none is.

        Of several runs under one seed the first that got furthest stands for all.
        """
        complete = [run for run in self.runs if run.state == "complete"]
        return _one_per_seed(complete or [run for run in self.runs if run.history])

    @property
    def seeds(self) -> int:
        return len({_text(run.seed) for run in self.runs})

    def curve(self, key: str = ACCURACY) -> Curve:
        return Curve.of([statistics.by_round(run.history, key) for run in self.counted])

    def running_total(self, *keys: str) -> Curve:
        return Curve.of([statistics.running_total(run.history, *keys) for run in self.counted])

    def last(self, key: str = ACCURACY) -> Spread | None:
        return Spread.of_finite(statistics.last(run.history, key) for run in self.counted)

    def best(self, key: str = ACCURACY) -> Spread | None:
        return Spread.of_finite(statistics.best(run.history, key) for run in self.counted)

    def at_best_validation(self) -> Spread | None:
        """The test accuracy in the round that is best on the validation samples."""
        return Spread.of_finite(statistics.at_best(run.history) for run in self.counted)

    def rounds_to(self, target: float) -> list[int]:
        """The first round with at least the target accuracy, of the runs that have one."""
        rounds = (statistics.first_round_reaching(run.history, target) for run in self.counted)
        return [number for number in rounds if number is not None]

    @cached_property
    def client_accuracies(self) -> dict[str, list[list[tuple[float, float | None]]]]:
        """By kind of data, each run's final accuracies on the clients' own, and on how many samples."""
        accuracies: dict[str, list[list[tuple[float, float | None]]]] = {kind: [] for kind in CLIENT_NUMBERS}
        for (kind, names), run in product(CLIENT_NUMBERS.items(), self.counted):
            pairs = ([finite(client.get(name)) for name in names] for client in run.clients)
            accuracies[kind].append([(value, samples) for value, samples in pairs if value is not None])
        return accuracies

    @cached_property
    def client_spreads(self) -> dict[str, list[Spread | None]]:
        """By kind: the mean over clients, the deviation between them, and what of it chance would give."""
        spreads = {}
        for kind, runs in self.client_accuracies.items():
            numbers: list[list[float]] = [[], [], []]
            for pairs in filter(None, runs):
                accuracies = [accuracy for accuracy, _ in pairs]
                sizes = [int(samples) for _, samples in pairs if samples is not None and samples >= 1]
                numbers[0].append(fmean(accuracies))
                numbers[1].append(pstdev(accuracies))
                if len(sizes) == len(pairs) and all(0 <= accuracy <= 1 for accuracy in accuracies):
                    numbers[2].append(ClientSpread.of(accuracies, sizes).chance)
            spreads[kind] = [Spread.of_finite(values) for values in numbers]
        return spreads

    def measured(self, name: str) -> list[Mapping[str, Any]]:
        """The results of a diagnostic, one for each seed that it was measured for."""
        runs = _one_per_seed([run for run in self.runs if name in run.diagnostics])
        return [run.diagnostics[name]["result"] for run in runs]


@dataclass(frozen=True)
class Comparison:
    """Methods on one data set, split and model."""

    methods: tuple[Method, ...]

    @property
    def runs(self) -> Iterator[RunRecord]:
        return (run for method in self.methods for run in method.runs)

    @cached_property
    def history_keys(self) -> list[str]:
        """The names of all numbers in the histories, in order of appearance."""
        keys: dict[str, None] = {}
        for line in (line for run in self.runs for line in run.history):
            keys |= {key: None for key in line if key not in keys and finite(line[key]) is not None}
        return list(keys)


def _one_per_seed(runs: Sequence[RunRecord]) -> list[RunRecord]:
    """Of each seed the first run that got furthest."""
    by_seed: dict[str, list[RunRecord]] = {}
    for run in runs:
        by_seed.setdefault(_text(run.seed), []).append(run)
    return [max(group, key=lambda run: len(run.history)) for group in by_seed.values()]


# -- grouping ---------------------------------------------------------------------------------------------


def comparisons(runs: Sequence[RunRecord], labels: Mapping[Path, str]) -> list[Comparison]:
    """All runs, by setting and method, in the order in which they come."""
    settings: dict[str, dict[str, list[RunRecord]]] = {}
    for run in runs:
        methods = settings.setdefault(_text(setting_of(run.config)), {})
        methods.setdefault(_text([labels.get(run.folder), method_of(run.config)]), []).append(run)
    results = []
    for groups in settings.values():
        by_seed = [sorted(group, key=lambda run: _text(run.seed).zfill(24)) for group in groups.values()]
        firsts = [group[0] for group in by_seed]
        named = zip(_labels(firsts, labels), by_seed, strict=True)
        numbered = tuple(Method(number, name, tuple(group)) for number, (name, group) in enumerate(named))
        results.append(Comparison(numbered))
    return results


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def _labels(runs: Sequence[RunRecord], labels: Mapping[Path, str]) -> list[str]:
    """Given names, or the algorithm's with the options in which methods of that name differ."""
    names = [labels.get(run.folder) or algorithm_name(run.config) for run in runs]
    named = list(zip(names, (flattened(method_of(run.config)) for run in runs), strict=True))
    complete = []
    for name, own in named:
        namesakes = [config for other, config in named if other == name]
        options = [f"{key.rpartition('.')[2]} {own.get(key, '–')}" for key in differing_keys(namesakes)]
        complete.append(clipped(f"{name} ({', '.join(options)})" if options else name, 200))
    return complete


def differing_keys(configs: Sequence[Mapping[str, str]]) -> list[str]:
    """The keys of flattened configs whose values are not the same in all of them."""
    keys = dict.fromkeys(key for config in configs for key in config)
    return [key for key in keys if len({config.get(key) for config in configs}) > 1]


def algorithm_name(config: Mapping[str, Any]) -> str:
    """Its name, or its parts if it has none."""
    algorithm = config["algorithm"]
    if isinstance(algorithm.get("name"), str):
        return clipped(algorithm["name"], 100)
    fillings = [filling if isinstance(filling, list) else [filling] for filling in algorithm.values()]
    parts = [part for filling in fillings for part in filling]
    names = [part.get("part", "") if isinstance(part, dict) else str(part) for part in parts]
    return clipped(" × ".join(filter(None, map(str, names))), 100) or "custom"


def clipped(text: str, most: int = 500) -> str:
    """A text that may be of any length and hold anything, in one line."""
    return printable(text if len(text) <= most else f"{text[: most - 1]}…")


def flattened(value: Any, name: str = "") -> dict[str, str]:
    """Nested tables as one, with dotted names and values as short texts; what is None is left out."""
    if isinstance(value, Mapping):
        inner = (flattened(item, f"{name}.{key}" if name else str(key)) for key, item in value.items())
        return {key: text for table in inner for key, text in table.items()}
    if value is None:
        return {}
    if isinstance(value, float):
        return {name: f"{value:g}" if math.isfinite(value) else str(value)}
    return {name: value if isinstance(value, str) else json.dumps(value)}
