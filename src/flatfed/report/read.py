"""Run folders as a report sees them: finished, still running or killed, of this or another version.

Only `config.json` is needed; whatever else is missing or damaged is left out and noted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatfed.core.errors import FlatfedError
from flatfed.diagnostics.folder import FORMAT
from flatfed.runs.checkpoint import Manifest
from flatfed.runs.files import read_json
from flatfed.runs.folder import RunFolder
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
    """The run folders among and directly below the paths, each once."""
    runs: dict[Path, Path] = {}
    for path in paths:
        inside = [path]
        if path.is_dir() and not (path / "config.json").is_file():
            inside = sorted(child for child in path.iterdir() if (child / "config.json").is_file())
            if not inside:
                raise FlatfedError(
                    f"{path}: not a run folder, and there is none in it; give folders that flatfed run "
                    "or compare has made"
                )
        runs |= {run.resolve(): run for run in inside}
    return list(runs.values())


def read_run(path: Path) -> RunRecord:
    folder = RunFolder.existing(path)
    config = read_json(path / "config.json")
    for table in ("algorithm", "training"):
        if not isinstance(config, dict) or not isinstance(config.get(table), dict):
            advice = "was it written by another version of flatfed?"
            raise FlatfedError(f"{path / 'config.json'}: has no table {table!r}; {advice}")
    notes: list[str] = []
    environment = _read_optional(path / "environment.json", notes)
    clients = _read_optional(path / "clients.json", notes).get("clients")
    history = folder.read_history()
    diagnostics = _read_diagnostics(folder, len(history), notes)
    listed = [client for client in clients if isinstance(client, dict)] if isinstance(clients, list) else []
    return RunRecord(
        folder=path,
        config=config,
        environment=environment,
        history=history,
        clients=listed or _diagnosed_clients(diagnostics),
        diagnostics=diagnostics,
        state=_state(folder, config["training"].get("rounds"), len(history)),
        notes=tuple(notes),
    )


def _state(folder: RunFolder, rounds: Any, finished: int) -> RunState:
    if folder.lock.is_taken():
        return "running"
    if folder.divergence_path.exists():
        return "diverged"
    if folder.model_path.exists() and isinstance(rounds, int) and finished >= rounds:
        return "complete"
    return "unfinished"


def _read_diagnostics(folder: RunFolder, finished: int, notes: list[str]) -> dict[str, dict[str, Any]]:
    """What was measured of the state that would be measured now, that of the last checkpoint."""
    now = finished
    manifest_path = folder.checkpoints.manifest_path
    if manifest_path.exists():
        try:
            now = Manifest.read(manifest_path).round
        except FlatfedError as error:
            notes.append(str(error))
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
            diagnostics[file.stem] = content
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
    if not path.exists():
        return {}
    try:
        content = read_json(path)
        if not isinstance(content, dict):
            raise FlatfedError(f"{path}: not what a run writes")
    except FlatfedError as error:
        notes.append(str(error))
        return {}
    return content
