"""Run folders as a report sees them: finished, still running or killed, of this or another version.

Only `config.json` is needed; whatever else is missing or damaged is left out and noted.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatfed.core.errors import FlatfedError, shown
from flatfed.core.files import read_bytes
from flatfed.diagnostics import DIAGNOSTICS
from flatfed.diagnostics.figures import MethodResults
from flatfed.diagnostics.folder import FORMAT
from flatfed.diagnostics.plain import check_size, parse_plain, read_plain
from flatfed.diagnostics.registry import MISUNDERSTANDINGS
from flatfed.runs.folder import RunFolder
from flatfed.training.best import ended_early
from flatfed.training.loop import History

RunState = Literal["complete", "running", "diverged", "unfinished"]


@dataclass(frozen=True)
class RunRecord:
    """What a run folder holds."""

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    history: History
    clients: Sequence[Mapping[str, Any]]
    """The final model's loss and metrics on each client's data, if they were evaluated."""
    diagnostics: Mapping[str, Mapping[str, Any]]
    """What `flatfed diagnose` measured, by name."""
    state: RunState
    notes: tuple[str, ...]
    """What could not be read."""

    @property
    def seed(self) -> Any:
        return self.config["training"].get("seed", 0)

    @property
    def rounds(self) -> Any:
        """How many the run is to have."""
        return self.config["training"].get("rounds")


def find_runs(paths: Sequence[Path]) -> list[Path]:
    """The run folders among and directly below the paths, each once; a path without any stands for itself."""
    runs: dict[Path, Path] = {}
    for path in paths:
        try:
            if not path.is_dir():
                raise FlatfedError(f"{path}: no such run folder")
            inside = [path]
            if not os.path.lexists(path / "config.json"):
                children = sorted(path.iterdir())
                inside = [child for child in children if os.path.lexists(child / "config.json")] or [path]
        except OSError as error:
            raise FlatfedError(f"{path}: cannot be read ({error.strerror})") from None
        runs |= {run.resolve(): run for run in inside}
    return list(runs.values())


def read_run(path: Path) -> RunRecord:
    folder, notes = RunFolder(path), list[str]()
    if not os.path.lexists(path / "config.json"):
        raise FlatfedError(
            f"{path}: not a run folder, and there is none in it; give folders that flatfed run or compare "
            "has made"
        )
    config = read_plain(path / "config.json", notes)
    for table in ("algorithm", "training"):
        if not isinstance(config, dict) or not isinstance(config.get(table), dict):
            advice = "was it written by another version of flatfed?"
            raise FlatfedError(f"{path / 'config.json'}: has no table {table!r}; {advice}")
    history = _read_history(folder.history.path, notes)
    environment = _read_optional(path / "environment.json", notes)
    clients = _read_optional(path / "clients.json", notes).get("clients")
    diagnostics = _read_diagnostics(folder, len(history), notes)
    listed = [client for client in clients if isinstance(client, dict)] if isinstance(clients, list) else []
    return RunRecord(
        folder=path,
        config=config,
        environment=environment,
        history=history,
        clients=listed or _diagnosed_clients(diagnostics),
        diagnostics=diagnostics,
        state=_state(folder, config["training"], history),
        notes=tuple(notes),
    )


def _read_history(path: Path, notes: list[str]) -> History:
    """The finished rounds, up to the first line that is damaged."""
    history: History = []
    large: list[str] = []
    lines = _optional(path, lambda: _read_lines(path), notes) or [""]
    for number, line in enumerate(lines, start=1):
        try:
            record = parse_plain(line, f"{path}, line {number}", large)
            if not isinstance(record, dict) or record.get("round") != number or record["round"] is True:
                raise FlatfedError(f"{path}, line {number}: not the record of round {number}")
        except FlatfedError as error:
            if number < len(lines):  # else it is just being written
                notes.append(f"{error}; only the {number - 1} rounds before it are shown")
            break
        history.append(record)
    if large:
        notes.append(large[0] + (f" (and {len(large) - 1} more lines)" if len(large) > 1 else ""))
    return history


def _read_lines(path: Path) -> list[str]:
    text = read_bytes(path).decode(errors="replace")
    check_size(text, path, ",[{\n")
    return text.split("\n")


def _state(folder: RunFolder, training: Mapping[str, Any], history: History) -> RunState:
    # Nothing but a file is opened: a pipe would wait for a writer.
    if folder.lock.path.is_file() and folder.lock.is_taken():
        return "running"
    if folder.divergence_path.exists():
        return "diverged"
    rounds = training.get("rounds")
    over = isinstance(rounds, int) and len(history) >= rounds
    over = over or ended_early(history, training.get("patience"), training.get("best_by"))
    return "complete" if over and folder.model_path.is_file() else "unfinished"


def _read_diagnostics(folder: RunFolder, finished: int, notes: list[str]) -> dict[str, dict[str, Any]]:
    """What was measured of the state that would be measured now, that of the last checkpoint."""
    manifest = _read_optional(folder.checkpoints.manifest_path, notes)
    now = manifest.get("round", finished)
    diagnostics = {}
    for file in sorted((folder.path / "diagnostics").glob("*.json")):
        content = _read_optional(file, notes)
        measured = content.get("round", now)
        if content.get("format", FORMAT) != FORMAT:
            notes.append(f"{file}: its format is {content['format']!r}, this version reads {FORMAT}")
        elif content and not isinstance(content.get("result"), dict):
            notes.append(f"{file}: it has no result")
        elif measured != now:
            advice = "left out, measure it again"
            notes.append(f"{file}: measured after round {measured}, but the run is at {now}; {advice}")
        elif content:
            try:
                if file.stem in DIAGNOSTICS:
                    DIAGNOSTICS[file.stem].show({file.stem: [MethodResults(0, "", [content["result"]])]})
                diagnostics[file.stem] = content
            except MISUNDERSTANDINGS as error:  # of another version, or damaged
                notes.append(f"{file}: not as expected ({shown(error)}), left out")
    return diagnostics


def _diagnosed_clients(diagnostics: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """For runs that did not evaluate their clients, what the diagnostic of that name measured."""
    result = diagnostics["clients"]["result"] if "clients" in diagnostics else {}
    accuracies, sizes = result.get("accuracy"), result.get("samples")
    if not isinstance(accuracies, list) or not isinstance(sizes, list):
        return []
    pairs = zip(accuracies, sizes, strict=False)
    return [{"accuracy": accuracy, "samples": samples} for accuracy, samples in pairs]


def _read_optional(path: Path, notes: list[str]) -> dict[str, Any]:
    """A file's content; empty, with a note, if it cannot be read, and without one if it is not there."""
    content = _optional(path, lambda: read_plain(path, notes), notes)
    if content is not None and not isinstance(content, dict):
        notes.append(f"{path}: not what a run writes")
    return content if isinstance(content, dict) else {}


def _optional(path: Path, read: Callable[[], Any], notes: list[str]) -> Any:
    """What is read of a file; None, with a note, if that fails, and without one if it is not there."""
    try:
        return read() if os.path.lexists(path) else None
    except FlatfedError as error:
        notes.append(str(error))
        return None
