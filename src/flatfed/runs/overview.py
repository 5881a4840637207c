"""Which runs there are below a folder, and how far each has come; and removing some."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatfed.core.errors import FlatfedError, shown
from flatfed.runs.files import read_json
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import last


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
        if "config.json" in files and "checkpoint" in below:
            folders.append(Path(path))
            below.clear()
        below[:] = sorted(name for name in below if not name.startswith("."))
    return folders


def summary(folder: Path) -> RunSummary:
    """What a folder says about its run; one that cannot be read is damaged."""
    existing, size = RunFolder(folder), sum(path.stat().st_size for path in _files(folder))
    try:
        config = read_json(existing.config_path)
        training = config["training"]
        history = existing.read_history()
        rounds, planned, seed = len(history), int(training["rounds"]), int(training["seed"])
        method, task = _described(config["algorithm"]), _task(config)
        accuracy, state = last(history), _state(existing, rounds, planned)
    except (FlatfedError, KeyError, TypeError, ValueError, AttributeError):
        return RunSummary(folder, "", "", None, 0, None, None, "damaged", size, {})
    return RunSummary(folder, task, method, seed, rounds, planned, accuracy, state, size, config)


def _state(folder: RunFolder, rounds: int, planned: int) -> str:
    if folder.lock.is_taken():
        return "running"
    if folder.divergence_path.exists():
        return "diverged"
    if folder.stop_path.exists():
        return "stopped early"
    return "complete" if rounds >= planned and folder.model_path.exists() else "incomplete"


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
    if key == "state":
        return run.state
    value: Any = run.config
    for name in key.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def parse_conditions(texts: Sequence[str]) -> dict[str, Any]:
    """`key=value` conditions; values are JSON or plain text."""
    conditions = {}
    for text in texts:
        key, sign, value = text.partition("=")
        if not sign or not key.strip():
            raise FlatfedError(f"--where {shown(text)}: write it as key=value, e.g. algorithm.name=fedsam")
        try:
            conditions[key.strip()] = json.loads(value)
        except ValueError:
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
