"""Which runs there are below a folder, and how far each has come; and removing some."""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatfed.core.errors import FlatfedError, shown
from flatfed.core.files import parse_json
from flatfed.runs.files import read_json
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import setting_of
from flatfed.runs.statistics import last
from flatfed.training import own_task
from flatfed.training.best import ended_early
from flatfed.training.config import Config
from flatfed.training.own_task import parse_reference


@dataclass(frozen=True)
class RunSummary:
    """A run folder in one line."""

    folder: Path
    task: str
    method: str
    seed: int | None
    rounds: int
    planned_rounds: int | None
    """The rounds that were asked for."""
    accuracy: float | None
    state: str
    bytes: int
    config: Mapping[str, Any]


def run_folders(root: Path) -> list[Path]:
    """The run folders at and below a folder, in the order of their names."""
    if not root.is_dir():
        raise FlatfedError(f"{root}: no such folder; give one with run folders in it")
    folders = []
    for path, below, files in os.walk(root):
        if "config.json" in files and "checkpoint" in below and RunFolder(Path(path)).holds_run():
            folders.append(Path(path))
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
    return folders


def runs_of(reference: Path, root: Path, assignments: Sequence[str] = ()) -> list[Path]:
    """The folders below `root` with runs of a config file's task, or of one such as my_task.py:make.

    Only those with the settings that are assigned; other options of a function may differ from run to run.
    """
    config = Config.read(reference, assignments)
    values = config.model_dump(mode="json")
    setting, defaults = setting_of(values), {}
    if config.task is not None:
        setting = {"task": {key: setting["task"][key] for key in ("file", "make")}}
        defaults = {f"task.{key}": value for key, value in own_task.defaults(config.task).items()}
    keys = [assignment.partition("=")[0].strip() for assignment in assignments]
    wanted = {key: _at(values, key, defaults) for key in keys}
    folders = []
    for folder in run_folders(root):
        with contextlib.suppress(FlatfedError, TypeError, AttributeError):
            recorded = read_json(RunFolder(folder).config_path)
            own = setting_of(recorded) if setting.keys() != {"task"} else {"task": _reference(recorded)}
            if own == setting and wanted == {key: _at(recorded, key, defaults) for key in wanted}:
                folders.append(folder)
    if not folders:
        options = "".join(f" --set {shlex.quote(assignment)}" for assignment in assignments)
        command = f"flatfed run {shlex.quote(str(reference))}{options}"
        raise FlatfedError(f"{reference}: no such run of it in {root}; make one with {command}")
    return folders


def _reference(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: config["task"].get(key) for key in ("file", "make")} if config.get("task") else {}


def _at(config: Mapping[str, Any], key: str, defaults: Mapping[str, Any]) -> Any:
    """A setting of a config, or what it is where nothing is said."""
    value: Any = config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return defaults.get(key) if value is None else value


def is_reference(path: Path) -> bool:
    """Whether a path names a task or a config file rather than run folders."""
    return parse_reference(str(path)) is not None or path.suffix == ".toml"


def summary(folder: Path) -> RunSummary:
    """What a folder says about its run; one that cannot be read is damaged."""
    existing, size = RunFolder(folder), sum(path.stat().st_size for path in _files(folder))
    try:
        config = read_json(existing.config_path)
        training = config["training"]
        history = existing.read_history()
        rounds, planned, seed = len(history), int(training["rounds"]), int(training["seed"])
        method, task = _described(config["algorithm"]), _task(config)
        over = rounds >= planned or ended_early(history, training.get("patience"), training.get("best_by"))
        accuracy, state = last(history), _state(existing, over)
    except (FlatfedError, KeyError, TypeError, ValueError, AttributeError, OverflowError):
        return RunSummary(folder, "", "", None, 0, None, None, "damaged", size, {})
    return RunSummary(folder, task, method, seed, rounds, planned, accuracy, state, size, config)


def _state(folder: RunFolder, over: bool) -> str:
    if folder.lock.is_taken():
        return "running"
    if folder.divergence_path.exists():
        return "diverged"
    if folder.stop_path.exists():
        return "stopped early"
    return "complete" if over and folder.model_path.exists() else "incomplete"


def _described(table: Any) -> str:
    """A {name, options…} table as a contestant of a comparison is written."""
    if not isinstance(table, Mapping) or "name" not in table:
        return "composed" if isinstance(table, Mapping) else str(table)
    options = [
        f"{key}={value}" for key, value in table.items() if key != "name" and not isinstance(value, Mapping)
    ]
    return ":".join(filter(None, [str(table["name"]), ",".join(options)]))


def _task(config: Mapping[str, Any]) -> str:
    if "task" in config:
        return f"{Path(str(config['task']['file'])).name}:{config['task']['make']}"
    if "data" not in config:
        return "from Python"
    partition = config["partition"]
    options = [f"{value}" for key, value in partition.items() if key != "name"]
    return " ".join([config["data"]["dataset"], partition["name"], *options, config["model"]["name"]])


def matches(run: RunSummary, conditions: Mapping[str, Any]) -> bool:
    """Whether a run's config has these values; `state` is the run's own."""
    return all(_value(run, key) == value for key, value in conditions.items())


def _value(run: RunSummary, key: str) -> Any:
    return run.state if key == "state" else _at(run.config, key, {})


def parse_conditions(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` conditions; values are JSON or plain text."""
    conditions = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise FlatfedError(f"--where {shown(text)}: write it as key=value, e.g. algorithm.name=fedsam")
        try:
            conditions[key.strip()] = parse_json(value, text)
        except FlatfedError:
            conditions[key.strip()] = value.strip()
    return conditions


def remove(folder: Path) -> list[Path]:
    """Removes the files that runs and diagnostics write, and the folder if nothing else is in it.

    Returns what is left there.
    """
    existing = RunFolder.existing(folder)
    existing.lock.acquire(folder)
    try:
        own = existing.own_files()
        for path in own:
            path.unlink()
    finally:
        existing.lock.release()
    existing.lock.path.unlink(missing_ok=True)
    for path in (existing.checkpoints.path, folder / "diagnostics", folder):
        with contextlib.suppress(OSError):  # not empty, or not there
            path.rmdir()
    return _files(folder)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink()]
