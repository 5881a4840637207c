"""Several algorithms under several seeds, and what may honestly be said about them.

Runs live in folders named after their config, so a comparison that is started again only runs what is
missing. Every number comes with its spread over the seeds; accuracies also with the sampling error of the
test set, and per-client deviations with the floor that chance alone would give.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatfed.core.algorithm import TRANSPORT
from flatfed.core.errors import DivergedError
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import config_digest
from flatfed.runs.train import run_config
from flatfed.training.config import Config
from flatfed.training.evaluation import ClientSpread
from flatfed.training.loop import Callback


def run_folder(config: Config, root: Path) -> Path:
    """Where a config's run lives: named by its algorithm and a digest of everything that matters."""
    digest = config_digest(config)[:10]
    name = config.make_algorithm().name
    return root / f"{name}-seed{config.training.seed}-{digest}"


def is_complete(config: Config, folder: Path) -> bool:
    """Whether a folder holds the finished run of a config; another run's folder is refused."""
    existing = RunFolder(folder)
    existing.check_config(json.loads(config.model_dump_json()))
    return existing.finished_rounds() == config.training.rounds


@dataclass(frozen=True)
class Spread:
    """A mean over seeds and the standard deviation between them."""

    mean: float
    deviation: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        values = list(values)
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else math.nan)

    def text(self, digits: int = 1, scale: float = 1.0) -> str:
        mean = f"{self.mean * scale:,.{digits}f}"
        return mean if math.isnan(self.deviation) else f"{mean} ± {self.deviation * scale:,.{digits}f}"


@dataclass(frozen=True)
class Outcome:
    """One finished run in numbers."""

    accuracy: float
    rounds_to_target: int | None
    megabytes_down: float
    megabytes_up: float
    gradient_evaluations: int
    seconds: float
    clients: Mapping[str, ClientSpread]
    """The accuracy over clients, on "train" and, if they have some, "test" data of their own."""


def outcome(folder: Path, target: float) -> Outcome:
    history = RunFolder(folder).read_history()
    reached = (record["round"] for record in history if record.get("test_accuracy", 0.0) >= target)
    return Outcome(
        accuracy=history[-1]["test_accuracy"],
        rounds_to_target=next(reached, None),
        megabytes_down=sum(record["bytes_down"] for record in history) / 1e6,
        megabytes_up=sum(record["bytes_up"] for record in history) / 1e6,
        gradient_evaluations=sum(record["gradient_evaluations"] for record in history),
        seconds=sum(record["seconds"] for record in history),
        clients=RunFolder(folder).read_clients(),
    )


@dataclass(frozen=True)
class ClientRow:
    """The accuracy over clients, over all seeds."""

    mean: Spread
    deviation: Spread
    chance: float
    """The deviation that chance alone would give."""

    @classmethod
    def of(cls, runs: Sequence[Mapping[str, ClientSpread]], name: str) -> ClientRow | None:
        """The row of the "train" or "test" data, None if they are missing from a run."""
        spreads = [run[name] for run in runs if name in run]
        if not spreads or len(spreads) < len(runs):
            return None
        return cls(
            mean=Spread.of(spread.mean for spread in spreads),
            deviation=Spread.of(spread.deviation for spread in spreads),
            chance=statistics.fmean(spread.chance for spread in spreads),
        )

    @property
    def deviation_text(self) -> str:
        return f"{self.deviation.text(1, 100)} ({100 * self.chance:.1f})"


@dataclass(frozen=True)
class Row:
    """One algorithm over all seeds."""

    label: str
    lr: float
    accuracy: Spread
    rounds_to_target: Spread | None
    reached: int
    seeds: int
    megabytes_down: Spread
    megabytes_up: Spread
    gradient_evaluations: Spread
    seconds: Spread
    clients: ClientRow | None
    client_tests: ClientRow | None


def summarise(label: str, lr: float, outcomes: Sequence[Outcome]) -> Row:
    def spread(name: str) -> Spread:
        return Spread.of(getattr(each, name) for each in outcomes)

    reached = [each.rounds_to_target for each in outcomes if each.rounds_to_target is not None]
    return Row(
        label=label,
        lr=lr,
        accuracy=spread("accuracy"),
        rounds_to_target=Spread.of(reached) if reached else None,
        reached=len(reached),
        seeds=len(outcomes),
        megabytes_down=spread("megabytes_down"),
        megabytes_up=spread("megabytes_up"),
        gradient_evaluations=spread("gradient_evaluations"),
        seconds=spread("seconds"),
        clients=ClientRow.of([each.clients for each in outcomes], "train"),
        client_tests=ClientRow.of([each.clients for each in outcomes], "test"),
    )


@dataclass(frozen=True)
class Contestant:
    """An algorithm in a comparison: its label and what it changes in the common config."""

    label: str
    changes: Mapping[str, Any]

    def config(self, base: Mapping[str, Any], seed: int) -> Config:
        training = {**base.get("training", {}), **self.changes.get("training", {}), "seed": seed}
        changed = {**base, **self.changes, "training": training}
        common = base.get("algorithm", {})
        if isinstance(common, Mapping) and isinstance(changed.get("algorithm"), Mapping):
            # How uploads travel is part of the setting, unless a contestant has its own way.
            transport = {key: common[key] for key in TRANSPORT if key in common}
            changed["algorithm"] = {**transport, **changed["algorithm"]}
        return Config.checked(changed)


def compare(
    base: Mapping[str, Any],
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    target: float,
    root: Path,
    watch: Callable[[Contestant, int], Callback],
    failed: Callable[[Contestant, int, DivergedError], None],
) -> list[Row]:
    """Runs what is missing; an algorithm that diverges under a seed is reported and left out."""
    # Everything is checked before anything runs.
    configs = [[each.config(base, seed) for seed in seeds] for each in contestants]
    rows = []
    for each, of_seeds in zip(contestants, configs, strict=True):
        outcomes = []
        for config in of_seeds:
            seed = config.training.seed
            folder = run_folder(config, root)
            try:
                if not is_complete(config, folder):
                    run_config(config, folder, [watch(each, seed)])
            except DivergedError as error:
                failed(each, seed, error)
                continue
            outcomes.append(outcome(folder, target))
        if outcomes:
            rows.append(summarise(each.label, of_seeds[0].training.lr, outcomes))
    return rows
