"""Run folders as a report sees them: finished, still running or killed, of this or another version.

Only `config.json` is needed; whatever else is missing or damaged is left out and noted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatfed.core.errors import FlatfedError
from flatfed.runs.folder import History, Manifest, RunFolder, read_json

DIAGNOSTICS_FORMAT = 1


@dataclass(frozen=True)
class Record:
    """What a run folder holds."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    history: History
    clients: Sequence[Mapping[str, Any]]
    """The final model's loss and metrics on each client's data, if there are any."""
    diagnostics: Mapping[str, Mapping[str, Any]]
    """What `flatfed diagnose` measured, by name."""
    state: Literal["complete", "running", "diverged", "unfinished"]
    notes: tuple[str, ...]
    """What could not be read."""

    @property
    def seed(self) -> Any:
        return self.config["training"].get("seed", 0)

    @property
    def rounds(self) -> Any:
        return self.config["training"].get("rounds")


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among and directly below the paths, each once."""
    found: dict[Path, Path] = {}
    for path in paths:
        inside = [path]
        if path.is_dir() and not (path / "config.json").is_file():
            inside = sorted(child for child in path.iterdir() if (child / "config.json").is_file())
            if not inside:
                raise FlatfedError(
                    f"{path}: not a run folder, and there is none in it; give folders that flatfed run "
                    "or compare has made"
                )
        found |= {run.resolve(): run for run in inside}
    return list(found.values())


def read_run(path: Path) -> Record:
    folder = RunFolder.existing(path)
    config = read_json(path / "config.json")
    for table in ("algorithm", "training"):
        if not isinstance(config, dict) or not isinstance(config.get(table), dict):
            raise FlatfedError(
                f"{path / 'config.json'}: has no table {table!r}; was it written by another version of "
                "flatfed?"
            )
    notes: list[str] = []
    environment = _optional(path / "environment.json", dict, notes)
    clients = _optional(path / "clients.json", dict, notes).get("clients", [])
    history = folder.read_history()
    asked = config["training"].get("rounds")
    state: Literal["complete", "running", "diverged", "unfinished"] = "unfinished"
    if folder.is_running():
        state = "running"
    elif folder.divergence_path.exists():
        state = "diverged"
    elif folder.model_path.exists() and isinstance(asked, int) and len(history) >= asked:
        state = "complete"
    now = _examinable(folder, len(history), notes)
    diagnostics = {}
    for file in sorted((path / "diagnostics").glob("*.json")):
        content = _optional(file, dict, notes)
        if content.get("format", DIAGNOSTICS_FORMAT) != DIAGNOSTICS_FORMAT:
            notes.append(
                f"{file}: its format is {content['format']!r}, this version reads {DIAGNOSTICS_FORMAT}"
            )
        elif isinstance(content.get("result"), dict) and content.get("round", now) != now:
            notes.append(
                f"{file}: measured after round {content['round']}, but the run is at {now}; left out, "
                "measure it again"
            )
        elif isinstance(content.get("result"), dict):
            diagnostics[file.stem] = content
        elif content:
            notes.append(f"{file}: it has no result")
    return Record(
        folder=path,
        config=config,
        environment=environment,
        history=history,
        clients=[each for each in clients if isinstance(each, dict)] if isinstance(clients, list) else [],
        diagnostics=diagnostics,
        state=state,
        notes=tuple(notes),
    )


def _examinable(folder: RunFolder, finished: int, notes: list[str]) -> int:
    """The round whose state a diagnostic would now look at: that of the checkpoint, which may lag behind."""
    if not folder.manifest_path.exists():
        return finished
    try:
        return Manifest.read(folder.manifest_path).round
    except FlatfedError as error:
        notes.append(str(error))
        return finished


def _optional(path: Path, kind: type[Any], notes: list[str]) -> Any:
    """A file's content; empty, with a note, if it cannot be read, and without one if it is not there."""
    if not path.exists():
        return kind()
    try:
        content = read_json(path)
    except FlatfedError as error:
        notes.append(str(error))
        return kind()
    if not isinstance(content, kind):
        notes.append(f"{path}: not what a run writes")
        return kind()
    return content


def number(value: Any) -> float | None:
    """A finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
