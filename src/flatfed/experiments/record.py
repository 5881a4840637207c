"""A run's folder: what was asked for, what happened, and everything needed to go on.

    config.json        what was asked for
    environment.json   versions, machine, commit, and the engine's choices
    history.jsonl      one line per round
    checkpoint/        manifest.json, and the safetensors files that it names
    clients.json       the final model's loss and metrics on each client's data
    model.safetensors  the final model; it is written last, so a folder that has it is complete

Files are written beside their place, fsynced and renamed, and the manifest comes last: at any moment it
names a complete checkpoint. Client state is a log: a checkpoint adds the rows that changed since the last
one, and the log is rewritten when more than half of it is out of date. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from flatfed.core.errors import FlatfedError
from flatfed.core.state import ClientStore

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
LOCK = ".lock"
History = list[dict[str, Any]]


def write_atomically(path: Path, content: bytes) -> None:
    """Either the whole content is at `path`, safely on disk, or what was there before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise FlatfedError(f"{path}: cannot be read as JSON ({error}); is this a run folder?") from None


def versions() -> dict[str, str]:
    names = ("flatfed", "torch", "numpy", "pydantic", "safetensors", "scikit-learn")
    return {"python": platform.python_version(), **{name: metadata.version(name) for name in names}}


def source_commit() -> str | None:
    """The commit of the flatfed source tree that is running, if it is one."""
    folder = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    tracked = subprocess.run(
        ["git", "ls-files", "--error-unmatch", Path(__file__).name],
        cwd=folder,
        capture_output=True,
        timeout=10,
        check=False,
    )
    return done.stdout.strip() if tracked.returncode == 0 else None


def environment(engine: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "commit": source_commit(),
        "platform": platform.platform(),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "engine": dict(engine),
        "command": sys.argv,
    }


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after `round` rounds."""

    round: int
    server: dict[str, Tensor]
    buffers: dict[str, Tensor]


class RunFolder:
    """Reads and writes a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"
        self.manifest_path = self.checkpoints / "manifest.json"
        self.history_path = path / "history.jsonl"
        self.model_path = path / "model.safetensors"
        self._locked: IO[str] | None = None
        self._logged: list[dict[str, Any]] = []
        """The client files of the current checkpoint: name, digest, number of rows."""

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not path.is_dir():
            raise FlatfedError(f"{path}: no such run folder")
        if not (path / "config.json").is_file():
            raise FlatfedError(f"{path}: not a run folder, it has no config.json")
        return cls(path)

    def create(self, config: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        """Writes what was asked for; an existing folder must ask for the same."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock()
        path = self.path / "config.json"
        if path.exists():
            before = read_json(path)
            different = _first_difference(before, json.loads(json.dumps(config)))
            if different:
                raise FlatfedError(
                    f"{self.path}: it holds another run ({different}); choose another folder or remove it"
                )
        write_json(path, config)
        write_json(self.path / "environment.json", environment(engine))
        # While the run goes on there is no final model, not even that of an earlier, shorter run.
        self.model_path.unlink(missing_ok=True)

    def _lock(self) -> None:
        """One process at a time; the system takes the lock back when the process ends, however it ends."""
        if fcntl is None:
            return
        self._locked = (self.checkpoints / LOCK).open("w")
        try:
            fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FlatfedError(f"{self.path}: another process is running it; wait or stop that one") from None

    def close(self) -> None:
        if self._locked is not None:
            self._locked.close()
            self._locked = None

    # -- history ------------------------------------------------------------------------------------------

    def read_history(self, rounds: int | None = None) -> History:
        """The lines of finished rounds, without a last one that was cut off."""
        if not self.history_path.exists():
            return []
        history: History = []
        for line in self.history_path.read_text().splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                break
            if rounds is not None and record["round"] > rounds:
                break
            history.append(record)
        return history

    def rewrite_history(self, history: History) -> None:
        lines = "".join(json.dumps(record) + "\n" for record in history)
        write_atomically(self.history_path, lines.encode())

    def append_history(self, record: Mapping[str, Any]) -> None:
        with self.history_path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    # -- checkpoints --------------------------------------------------------------------------------------

    def save(self, checkpoint: Checkpoint, store: ClientStore) -> None:
        if self.history_path.exists():
            with self.history_path.open("rb") as file:
                os.fsync(file.fileno())
        tensors = {f"server/{name}": value for name, value in checkpoint.server.items()}
        tensors |= {f"buffers/{name}": value for name, value in checkpoint.buffers.items()}
        server_file = self._write_tensors(f"server-{checkpoint.round}.safetensors", tensors)
        logged = self._log_clients(checkpoint.round, store)
        write_json(
            self.manifest_path,
            {"format": FORMAT, "round": checkpoint.round, "server": server_file, "clients": logged},
        )
        self._logged = logged
        store.changed.clear()
        wanted = {server_file["name"], *(each["name"] for each in logged), self.manifest_path.name, LOCK}
        for path in self.checkpoints.iterdir():
            if path.name not in wanted:
                path.unlink()

    def _log_clients(self, round_number: int, store: ClientStore) -> list[dict[str, Any]]:
        if not store.vectors:
            return []
        logged_rows = sum(each["rows"] for each in self._logged)
        everything = logged_rows + len(store.changed) > 2 * len(store)
        clients = store.clients() if everything else sorted(store.changed)
        if not clients:
            return self._logged
        rows = [store.row(client) for client in clients]
        tensors = {
            "clients": torch.tensor(clients),
            "rows": torch.stack([row for row in rows if row is not None]),
        }
        entry = self._write_tensors(f"clients-{round_number}.safetensors", tensors)
        return [*([] if everything else self._logged), {**entry, "rows": len(clients)}]

    def _write_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        content = save_tensors({key: value.cpu().contiguous() for key, value in tensors.items()})
        write_atomically(self.checkpoints / name, content)
        return {"name": name, "sha256": hashlib.sha256(content).hexdigest()}

    def _read_tensors(self, entry: Mapping[str, Any]) -> dict[str, Tensor]:
        path = self.checkpoints / Path(entry["name"]).name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FlatfedError(f"{path}: missing from the checkpoint ({error.strerror})") from None
        if hashlib.sha256(content).hexdigest() != entry["sha256"]:
            raise FlatfedError(f"{path}: damaged, its checksum is not the one in the manifest")
        try:
            return load_tensors(content)
        except SafetensorError as error:
            raise FlatfedError(f"{path}: not a safetensors file ({error})") from None

    def load(self, store: ClientStore) -> Checkpoint | None:
        """The last complete checkpoint, its client rows put into the store; None if there is none."""
        if not self.manifest_path.exists():
            return None
        manifest = read_json(self.manifest_path)
        if manifest.get("format") != FORMAT:
            raise FlatfedError(
                f"{self.manifest_path}: format {manifest.get('format')!r}, this version reads {FORMAT}"
            )
        tensors = self._read_tensors(manifest["server"])
        for entry in manifest["clients"]:
            logged = self._read_tensors(entry)
            for client, row in zip(logged["clients"].tolist(), logged["rows"], strict=True):
                store.stage_row(client, row.clone())
            store.commit()
        store.changed.clear()
        self._logged = manifest["clients"]
        groups: dict[str, dict[str, Tensor]] = {"server": {}, "buffers": {}}
        for name, value in tensors.items():
            group, _, key = name.partition("/")
            groups[group][key] = value
        return Checkpoint(manifest["round"], groups["server"], groups["buffers"])

    def finish(self, module: nn.Module, per_client: list[dict[str, float]]) -> None:
        write_json(self.path / "clients.json", per_client)
        save_module(module, self.model_path)

    def finished_rounds(self) -> int | None:
        """How many rounds a complete run had, or None if it is not complete."""
        if not (self.model_path.exists() and self.manifest_path.exists()):
            return None
        return int(read_json(self.manifest_path)["round"])


def save_module(module: nn.Module, path: Path) -> None:
    """A module's parameters and buffers by name; tensors that are shared are written once for each name."""
    tensors = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    write_atomically(path, save_tensors({name: value.contiguous() for name, value in tensors.items()}))


# Settings that do not change a run's numbers, so that a run may go on under other ones.
FREE_SETTINGS = {"rounds", "workers", "client_memory", "checkpoint_every", "device"}


def _first_difference(before: Any, now: Any, name: str = "") -> str | None:
    if name.rpartition(".")[2] in FREE_SETTINGS:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{name}.{key}" if name else key
            found = _first_difference(before.get(key), now.get(key), inner)
            if found:
                return found
        return None
    return None if before == now else f"{name} = {before!r} there, {now!r} here"
