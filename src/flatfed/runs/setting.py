"""What the methods of a race share: a task, and settings to which each method adds its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flatfed.algorithms import build
from flatfed.core.algorithm import COMMON, Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.settings import Training
from flatfed.engines.execution import Execution
from flatfed.engines.planning import make_plan
from flatfed.runs.compare import named_folder
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import config_digest, digest_of, run_identity
from flatfed.runs.train import Run, train
from flatfed.training.config import Config
from flatfed.training.evaluation import ClientSpread
from flatfed.training.loop import Callback, History
from flatfed.training.task import Task


@dataclass(frozen=True)
class PlannedRun:
    """A training that has a folder, whether it has begun or not."""

    algorithm: Algorithm
    training: Training
    execution: Execution
    config: Mapping[str, Any]
    """As its folder records it."""
    folder: Path

    def history(self, rounds: int) -> History | None:
        """Its first rounds, if its folder has that many; a folder with another run in it is refused."""
        folder = RunFolder(self.folder)
        folder.check_usable()
        finished, manifest = folder.finished_rounds(), folder.checkpoints.manifest
        folder.check_config(self.config)
        further = manifest is not None and manifest.round > rounds
        return folder.read_history()[:rounds] if finished == rounds or further else None

    def finished_rounds(self) -> History:
        return RunFolder(self.folder).read_history()

    def client_spreads(self) -> dict[str, ClientSpread]:
        """Of a complete run."""
        return RunFolder(self.folder).read_clients()

    def commit(self) -> str | None:
        """Of the program that last trained it."""
        return RunFolder(self.folder).read_commit()

    def check_task(self, task: Task) -> None:
        """Refuses a folder whose run had another model, data or settings."""
        used = task.model, task.federation, self.algorithm, task.loss, task.used_metrics
        plan = make_plan(*used, self.training, self.execution.device)
        RunFolder(self.folder).check_identity(run_identity(task, plan))

    def divergence(self) -> str | None:
        return RunFolder(self.folder).read_divergence()

    def train(self, task: Task, rounds: int, callbacks: Sequence[Callback], complete: bool) -> Run:
        """Goes on in the folder up to some round; a `complete` run is also evaluated on every client."""
        training = self.training.replaced(rounds=rounds)
        return train(
            task,
            self.algorithm,
            training,
            self.execution,
            callbacks=callbacks,
            folder=self.folder,
            evaluate_on_clients=complete,
            config={**self.config, "training": training.model_dump(mode="json")},
            progress=False,
        )


@dataclass(frozen=True)
class Setting:
    """Tables as a config file has them and the folder for runs; from Python, also the task."""

    tables: Mapping[str, Any]
    root: Path
    task: Task | None = None
    workers: int | None = None
    """Of every run, unless the tables say how many."""
    _made: dict[int, Task] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def of_task(cls, task: Task, training: Training, execution: Execution, root: Path) -> Setting:
        tables = {"training": training.model_dump(), "execution": execution.model_dump()}
        return cls({"algorithm": {"name": "fedavg"}, **tables}, root, task)

    @property
    def seed(self) -> int:
        return int(self.tables.get("training", {}).get("seed", 0))

    def task_of(self, seed: int) -> Task:
        """The task under a seed, made once; a task from Python is the same under all seeds."""
        if self.task is not None:
            return self.task
        if seed not in self._made:
            self._made.clear()
            self._made[seed] = self._config({"name": "fedavg"}, {"seed": seed}).make_task()
        return self._made[seed]

    def planned(self, algorithm: Mapping[str, Any], **training: Any) -> PlannedRun:
        """The run of an algorithm and training settings, beside what all runs share."""
        common = self.tables.get("algorithm", {})
        shared = {key: common[key] for key in COMMON if isinstance(common, Mapping) and key in common}
        if "name" not in algorithm:
            shared = {key: value for key, value in shared.items() if key not in algorithm}
        description = {**shared, **algorithm}
        if self.task is None:
            config = self._config(description, training)
            made = config.make_algorithm()
            digest, recorded = config_digest(config), json.loads(config.model_dump_json())
            chosen, execution, words = config.training, config.execution, config.setting_words
        else:
            words = self.task.words
            made = build(description)
            chosen = Training(**{**self.tables["training"], **training})
            execution = Execution(**self.tables["execution"])
            settings = {"training": chosen.model_dump(), "execution": execution.model_dump()}
            recorded = {"algorithm": made.describe(), **settings}
            digest = digest_of([made.describe(), chosen.model_dump(mode="json")])
        if execution.workers is None and self.workers is not None:
            # Not recorded: what is asked for stays what it is.
            execution = execution.replaced(workers=self.workers)
        folder = named_folder(self.root, words, made, chosen.seed, digest)
        return PlannedRun(made, chosen, execution, recorded, folder)

    def _config(self, algorithm: Mapping[str, Any], training: Mapping[str, Any]) -> Config:
        changed = {**self.tables.get("training", {}), **training}
        return Config.checked({**self.tables, "algorithm": algorithm, "training": changed})

    def check(self) -> None:
        """Refuses a setting in which validation samples cannot choose, or runs end by themselves."""
        patience = self.tables.get("training", {}).get("patience")
        if patience is not None:
            raise FlatfedError(f"patience = {patience!r}: halving ends runs by itself; leave it out")
        check_choosable(self.task_of(self.seed))


def check_choosable(task: Task) -> None:
    """Refuses a task that has no validation samples, or no accuracy, to choose by."""
    if task.federation.validation is None:
        raise FlatfedError(
            "validation: there are no samples to choose by; hold some out with data.validation = 0.1 "
            "(--set data.validation=0.1), or federation.with_validation(0.1) in Python"
        )
    if "accuracy" not in task.used_metrics:
        raise FlatfedError(
            "metrics: runs are ranked by their accuracy, which this task has not; give it one, "
            'metrics={"accuracy": …}, where more is better'
        )
