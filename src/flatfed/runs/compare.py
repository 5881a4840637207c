"""Several algorithms under several seeds, and what may honestly be said about them.

Runs live in folders named after their config, so a comparison that is started again only runs what is
missing. Every number comes with its spread over the seeds; accuracies also with the sampling error of the
test set, and per-client deviations with the floor that chance alone would give.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

from flatfed.core.algorithm import COMMON, Algorithm
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.settings import Training
from flatfed.engines.planning import make_plan
from flatfed.runs.files import RunFolderError
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import config_digest, run_identity
from flatfed.runs.statistics import (
    MEGABYTE,
    ClientRow,
    Spread,
    finite_values,
    first_round_reaching,
    last,
    total,
)
from flatfed.runs.train import run_config
from flatfed.training.best import ended_early
from flatfed.training.config import Config, with_assignments
from flatfed.training.loop import Callback
from flatfed.training.task import Task

LabelledRuns = Sequence[tuple[str, Sequence[Config]]]
"""What is run under each label, one config for each seed."""
Measuring = Callable[[Config, Task], AbstractContextManager[Sequence[Callback]]]
"""What is measured while a run goes on."""


def run_folder(config: Config, root: Path) -> Path:
    """Where a config's run lives."""
    return named_folder(
        root, config.setting_words, config.make_algorithm(), config.training.seed, config_digest(config)
    )


def named_folder(root: Path, words: Sequence[str], algorithm: Algorithm, seed: int, digest: str) -> Path:
    """A run's folder, whose name says data set, split and method as far as they have names, and the seed.

    The digest of everything that matters tells it from all others.
    """
    method = f"{algorithm.name}-seed{seed}-{digest[:10]}"
    named, by_method = (
        root / re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip(".-")
        for name in ("-".join([*words, method]), method)
    )
    # Folders were once named by the method alone; their runs go on where they are.
    return by_method if by_method.exists() and not named.exists() else named


def check_comparable(task: Task) -> None:
    """Refuses a task whose runs have no accuracy to be compared by, before anything is trained."""
    if task.federation.test is None:
        raise FlatfedError("federation: it has no test samples to compare by; give it some (test=…)")
    if "accuracy" not in task.used_metrics:
        raise FlatfedError(
            "metrics: runs are compared by their test accuracy, which this task has not; give it one, "
            'metrics={"accuracy": …}, where more is better'
        )


def is_complete(config: Config, folder: Path) -> bool:
    """Whether a folder holds the finished run of a config; another run's folder is refused."""
    existing = RunFolder(folder)
    existing.check_usable()
    finished = existing.finished_rounds()
    existing.check_config(json.loads(config.model_dump_json()))
    if finished is not None and config.task is not None:
        # The config names a file of the user's, in which anything may have changed since.
        task, device = config.make_task(), config.execution.device
        used = task.model, task.federation, config.make_algorithm(), task.loss, task.used_metrics
        existing.check_identity(run_identity(task, make_plan(*used, config.training, device)))
    if finished is None or finished == config.training.rounds:
        return finished is not None
    training, history = config.training, existing.read_history()[:finished]
    return finished < training.rounds and ended_early(history, training.patience, training.best_by)


@dataclass(frozen=True)
class RunFailure:
    """A run that is left out, because it diverged or its folder is damaged."""

    name: str
    folder: Path
    error: DivergedError | RunFolderError


def run_missing(
    runs: LabelledRuns,
    root: Path,
    watch: Callable[[str, Path], list[Callback]],
    measuring: Measuring | None = None,
) -> tuple[list[list[RunFolder]], list[RunFailure]]:
    """Runs what is missing; returns each label's finished runs, and what is left out."""
    finished: list[list[RunFolder]] = []
    failures = []
    for label, configs in runs:
        finished.append([])
        for config in configs:
            folder, name = run_folder(config, root), f"{label}, seed {config.training.seed}"
            try:
                if not is_complete(config, folder):
                    task = config.make_task()
                    with measuring(config, task) if measuring else nullcontext([]) as measures:
                        # Trackers also send what is measured, so they come last.
                        run_config(config, folder, [*measures, *watch(name, folder)], task)
                finished[-1].append(RunFolder(folder))
            except (DivergedError, RunFolderError) as error:
                failures.append(RunFailure(name, folder, error))
    return finished, failures


@dataclass(frozen=True)
class Row:
    """One algorithm over all seeds."""

    label: str
    lr: float
    accuracy: Spread
    rounds_to_target: Spread | None
    reached: int
    """Under how many seeds the target was reached."""
    seeds: int
    megabytes_down: Spread
    megabytes_up: Spread
    gradient_evaluations: Spread
    seconds: Spread
    clients: ClientRow | None
    client_tests: ClientRow | None


def summarise(label: str, lr: float, folders: Sequence[RunFolder], target: float) -> Row:
    """The row of an algorithm from its finished runs, one for each seed."""
    histories = [folder.read_history() for folder in folders]
    clients = [folder.read_clients() for folder in folders]
    accuracy = Spread.of_finite(last(history) for history in histories)
    if accuracy is None:
        raise FlatfedError(f"{label}: its runs have no test accuracy to compare; give the data a test set")
    reached = finite_values(first_round_reaching(history, target) for history in histories)

    def cost(key: str, unit: float = 1.0) -> Spread:
        return Spread.of(total(history, key) / unit for history in histories)

    return Row(
        label=label,
        lr=lr,
        accuracy=accuracy,
        rounds_to_target=Spread.of_finite(reached),
        reached=len(reached),
        seeds=len(folders),
        megabytes_down=cost("bytes_down", MEGABYTE),
        megabytes_up=cost("bytes_up", MEGABYTE),
        gradient_evaluations=cost("gradient_evaluations"),
        seconds=cost("seconds"),
        clients=ClientRow.of(clients, "train"),
        client_tests=ClientRow.of(clients, "test"),
    )


@dataclass(frozen=True)
class Contestant:
    """An algorithm in a comparison: its label and what it changes in the common config."""

    label: str
    changes: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> Contestant:
        """`fedsam:radius=0.05,lr=0.2`: an algorithm, its options and its own training settings."""
        name, _, options = text.partition(":")
        assignments = [item for item in options.split(",") if item]
        keys = [item.partition("=")[0].strip() for item in assignments]
        for key in keys:
            if keys.count(key) > 1:
                raise FlatfedError(f"{text}: {key} is given twice; give it once")
        values = with_assignments({}, assignments)
        if "seed" in values:
            raise FlatfedError(f"{text}: every algorithm runs under the same seeds; use --seeds")
        training = {key: values.pop(key) for key in list(values) if key in Training.model_fields}
        return cls(text, {"algorithm": {"name": name, **values}, "training": training})

    def config(self, base: Mapping[str, Any], seed: int) -> Config:
        training = {**base.get("training", {}), **self.changes.get("training", {}), "seed": seed}
        changed = {**base, **self.changes, "training": training}
        common = base.get("algorithm", {})
        if isinstance(common, Mapping) and isinstance(changed.get("algorithm"), Mapping):
            # The optimizer and how uploads travel are part of the setting, unless a contestant has its own.
            shared = {key: common[key] for key in COMMON if key in common}
            changed["algorithm"] = {**shared, **changed["algorithm"]}
        return Config.checked(changed)


@dataclass(frozen=True)
class Demo:
    """The comparison that `flatfed demo` runs, from demo.toml."""

    setting: Mapping[str, Any]
    contestants: Sequence[Contestant]
    seeds: int
    target: float

    @classmethod
    def read(cls) -> Demo:
        values = tomllib.loads(resources.files(__package__).joinpath("demo.toml").read_text("utf-8"))
        contestants = [
            replace(Contestant.parse(text), label=text.partition(":")[0]) for text in values["algorithms"]
        ]
        return cls(values["setting"], contestants, values["seeds"], values["target"])


DEMO = Demo.read()
