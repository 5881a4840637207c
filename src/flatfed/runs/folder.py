"""A run's folder: what was asked for, what happened, and everything needed to go on.

    config.json        what was asked for
    identity.json      digests of everything that decides the run's numbers
    environment.json   versions, machine, commit, and the engine's choices
    history.jsonl      one line per round
    checkpoint/        manifest.json, and the safetensors files that it names
    diverged.json      why a run that left the finite numbers ended
    stopped.json       why a run was ended before its last round
    clients.json       the final model's loss and metrics on each client's data, and their spread
    synthetic.png      the synthetic samples, where an algorithm makes some that are images
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
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import IO, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from flatfed.core.errors import FlatfedError, one_line
from flatfed.engines.client_store import ClientStore
from flatfed.runs.identity import Identity
from flatfed.training.evaluation import ClientSpread, client_spreads
from flatfed.training.loop import History, TrainingState

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

FORMAT = 2
LOCK = ".lock"
LOCK_PATIENCE = 2.0
"""Seconds."""


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


class StoredFile(BaseModel):
    """A safetensors file of a checkpoint and the digest of its content."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    name: str
    sha256: str
    rows: int = 0
    """Clients in the file, for files of client state."""


class Manifest(BaseModel):
    """What a checkpoint consists of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int
    round: Annotated[int, Field(strict=True, ge=0)]
    identity: str
    """The digest of the run's identity."""
    server: StoredFile
    clients: tuple[StoredFile, ...] = ()

    @classmethod
    def read(cls, path: Path) -> Manifest:
        content = read_json(path)
        written = content.get("format") if isinstance(content, dict) else None
        if written != FORMAT:
            raise FlatfedError(
                f"{path}: its format is {written!r}, this version reads {FORMAT}; choose another folder or "
                "remove it"
            )
        try:
            return cls(**content)
        except ValidationError as error:
            raise FlatfedError(f"{path}: damaged ({one_line(error)})") from None


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after `round` rounds."""

    round: int
    identity: str
    server: dict[str, Tensor]
    buffers: dict[str, Tensor]


class RunFolder:
    """Reads and writes a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = path / "checkpoint"
        self.manifest_path = self.checkpoints / "manifest.json"
        self.identity_path = path / "identity.json"
        self.history_path = path / "history.jsonl"
        self.clients_path = path / "clients.json"
        self.model_path = path / "model.safetensors"
        self.divergence_path = path / "diverged.json"
        self.identity = Identity({})
        self.stop_path = path / "stopped.json"
        self._locked: IO[str] | None = None
        self._manifest = Manifest(format=FORMAT, round=0, identity="", server=StoredFile(name="", sha256=""))

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not path.is_dir():
            raise FlatfedError(f"{path}: no such run folder")
        if not (path / "config.json").is_file():
            raise FlatfedError(f"{path}: not a run folder, it has no config.json")
        return cls(path)

    def open(self, config: Mapping[str, Any], identity: Identity) -> None:
        """Takes the folder for this process; a run that is there must be the same one."""
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._lock()
        begun = self.manifest_path.exists()
        if begun:
            Manifest.read(self.manifest_path)  # Of an older version, all else may look strange.
        self.check_config(config)
        self.identity = identity
        if self.identity_path.exists():
            stored = read_json(self.identity_path)
            if not isinstance(stored, dict):
                raise FlatfedError(f"{self.identity_path}: damaged; restore it or choose another folder")
            different = identity.difference(stored)
            if different:
                raise FlatfedError(
                    f"{self.path}: it holds another run (the {different} of it is not the same); choose "
                    "another folder or remove it"
                )
        if begun and identity.uncovered:
            raise FlatfedError(
                f"{self.path}: it cannot be continued safely, because nothing tells whether this is the same "
                f"run ({identity.uncovered[0]}); choose another folder and give the task a name and version"
            )

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuses a folder in which something else was asked for."""
        path = self.path / "config.json"
        if not path.exists():
            return
        different = first_difference(read_json(path), json.loads(json.dumps(config)))
        if different:
            raise FlatfedError(
                f"{self.path}: it holds another run ({different}); choose another folder or remove it"
            )

    def begin(self, config: Mapping[str, Any], engine: Mapping[str, Any], history: History) -> None:
        """Writes what is asked for, once everything is known to be in order."""
        write_json(self.path / "config.json", config)
        write_json(self.identity_path, dict(self.identity.components))
        write_json(self.path / "environment.json", environment(engine))
        # While the run goes on there is no final model, not even that of an earlier, shorter run.
        self.model_path.unlink(missing_ok=True)
        self.divergence_path.unlink(missing_ok=True)
        self.stop_path.unlink(missing_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in history)
        write_atomically(self.history_path, lines.encode())

    def _lock(self) -> None:
        """One process at a time; the system takes the lock back when it and its workers have ended."""
        if fcntl is None:
            return
        self._locked = (self.checkpoints / LOCK).open("w")
        deadline = time.monotonic() + LOCK_PATIENCE
        while True:
            try:
                fcntl.flock(self._locked, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # The workers of a process that was killed end a moment after it.
                if time.monotonic() > deadline:
                    raise FlatfedError(
                        f"{self.path}: another process is running it; wait or stop that one"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def is_running(self) -> bool:
        """Whether a process has taken the folder."""
        path = self.checkpoints / LOCK
        if fcntl is None or not path.exists():
            return False
        with path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

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
        for line in self.history_path.read_text(errors="replace").splitlines():
            try:
                record = json.loads(line)
            except ValueError:
                break
            # Rounds count from 1; a line that is not the next round ends what can be trusted.
            number = record.get("round") if isinstance(record, dict) else None
            if number != len(history) + 1 or (rounds is not None and number > rounds):
                break
            history.append(record)
        return history

    def append(self, record: Mapping[str, Any]) -> None:
        with self.history_path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    # -- checkpoints --------------------------------------------------------------------------------------

    def kept(self, round_number: int) -> str:
        return f"the state after round {round_number} is kept in {self.path}"

    def save(self, state: TrainingState, clients: ClientStore) -> None:
        if self.history_path.exists():
            with self.history_path.open("rb") as file:
                os.fsync(file.fileno())
        tensors = {f"server/{name}": value for name, value in state.server.items()}
        tensors |= {f"buffers/{name}": value for name, value in state.buffers.items()}
        manifest = Manifest(
            format=FORMAT,
            round=state.round,
            identity=self.identity.digest,
            server=self._write_tensors(f"server-{state.round}", tensors),
            clients=self._log_clients(state.round, clients),
        )
        write_json(self.manifest_path, manifest.model_dump())
        self._manifest = manifest
        clients.changed.clear()
        files = {manifest.server.name, *(entry.name for entry in manifest.clients)}
        for path in self.checkpoints.iterdir():
            if path.name not in files | {self.manifest_path.name, LOCK}:
                path.unlink()

    def _log_clients(self, round_number: int, store: ClientStore) -> tuple[StoredFile, ...]:
        """The client files of the next checkpoint: those of the last one and the rows that changed."""
        logged = self._manifest.clients
        old_rows = sum(entry.rows for entry in logged)
        everything = old_rows + len(store.changed) > 2 * len(store)
        clients = store.clients() if everything else sorted(store.changed)
        if not clients:
            return logged
        rows = [row for client in clients if (row := store.row(client)) is not None]
        entry = self._write_tensors(
            f"clients-{round_number}",
            {"clients": torch.tensor(clients), "rows": torch.stack(rows)},
            rows=len(clients),
        )
        return (entry,) if everything else (*logged, entry)

    def _write_tensors(self, stem: str, tensors: Mapping[str, Tensor], rows: int = 0) -> StoredFile:
        content = save_tensors({key: value.cpu().contiguous() for key, value in tensors.items()})
        digest = hashlib.sha256(content).hexdigest()
        # A round may be saved more than once; what the manifest still names must not be overwritten.
        name = f"{stem}-{digest[:8]}.safetensors"
        write_atomically(self.checkpoints / name, content)
        return StoredFile(name=name, sha256=digest, rows=rows)

    def _read_tensors(self, entry: StoredFile) -> dict[str, Tensor]:
        path = self.checkpoints / Path(entry.name).name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise FlatfedError(f"{path}: missing from the checkpoint ({error.strerror})") from None
        if hashlib.sha256(content).hexdigest() != entry.sha256:
            raise FlatfedError(f"{path}: damaged, its checksum is not the one in the manifest")
        try:
            return load_tensors(content)
        except SafetensorError as error:
            raise FlatfedError(f"{path}: not a safetensors file ({error})") from None

    def load(self) -> Checkpoint | None:
        """The last complete checkpoint without its client rows; None if there is none."""
        if not self.manifest_path.exists():
            return None
        self._manifest = Manifest.read(self.manifest_path)
        groups: dict[str, dict[str, Tensor]] = {"server": {}, "buffers": {}}
        for name, value in self._read_tensors(self._manifest.server).items():
            group, _, key = name.partition("/")
            groups[group][key] = value
        manifest = self._manifest
        return Checkpoint(manifest.round, manifest.identity, groups["server"], groups["buffers"])

    def last_checkpoint(self) -> Checkpoint:
        """The last complete checkpoint, which there must be."""
        checkpoint = self.load()
        if checkpoint is None:
            advice = f"go on with flatfed resume {self.path}"
            raise FlatfedError(f"{self.path}: it has no checkpoint yet; {self.read_divergence() or advice}")
        return checkpoint

    def load_clients(self, store: ClientStore) -> None:
        """Puts the checkpoint's client rows into the store."""
        for entry in self._manifest.clients:
            logged = self._read_tensors(entry)
            rows = logged["rows"]
            if rows.dim() != 2 or rows.shape[1] != store.row_length or rows.dtype != store.dtype:
                raise FlatfedError(f"{self.path}: its client state is of another model or algorithm")
            for client, row in zip(logged["clients"].tolist(), rows, strict=True):
                store.stage_row(client, row)
            store.commit()
        store.changed.clear()

    def finish(self, module: nn.Module, per_client: list[dict[str, float]]) -> None:
        spreads = {name: asdict(spread) for name, spread in client_spreads(per_client).items()}
        write_json(self.clients_path, {"spread": spreads, "clients": per_client})
        save_module(module, self.model_path)

    def read_clients(self) -> dict[str, ClientSpread]:
        """The spread of the final model's accuracy over the clients, on "train" and "test" data."""
        content = read_json(self.clients_path)
        try:
            return {name: ClientSpread(**spread) for name, spread in content["spread"].items()}
        except (KeyError, TypeError, AttributeError):
            raise FlatfedError(
                f"{self.clients_path}: has no spread over clients; remove the folder and run it again"
            ) from None

    def note_divergence(self, error: str) -> None:
        write_json(self.divergence_path, {"error": error})

    def read_divergence(self) -> str | None:
        """What stopped a run that left the finite numbers, or None if nothing did."""
        if not self.divergence_path.exists():
            return None
        content = read_json(self.divergence_path)
        return str(content.get("error") if isinstance(content, dict) else content)

    def note_stop(self, reason: str, round_number: int, accuracy: float) -> None:
        """Records that a run was ended early, and the round that decided it, which the history lacks."""
        write_json(self.stop_path, {"reason": reason, "round": round_number, "test_accuracy": accuracy})

    def read_stop(self) -> dict[str, Any] | None:
        """What `note_stop` recorded, or None if the run was not ended early."""
        if not self.stop_path.exists():
            return None
        content = read_json(self.stop_path)
        if not isinstance(content, dict) or not content.keys() >= {"reason", "round", "test_accuracy"}:
            raise FlatfedError(f"{self.stop_path}: damaged; remove it to continue the run")
        return content

    def finished_rounds(self) -> int | None:
        """How many rounds a complete run had, or None if it is not complete."""
        if not (self.model_path.exists() and self.manifest_path.exists()):
            return None
        return Manifest.read(self.manifest_path).round


def save_module(module: nn.Module, path: Path) -> None:
    """A module's parameters and buffers by name; tensors that are shared are written once for each name."""
    tensors = {name: value.detach().cpu().clone() for name, value in module.state_dict().items()}
    write_atomically(path, save_tensors({name: value.contiguous() for name, value in tensors.items()}))


def first_difference(before: Any, now: Any, name: str = "") -> str | None:
    """Where two configs ask for different runs; how they are executed and for how long does not count."""
    if name in {"execution", "training.rounds"}:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{name}.{key}" if name else key
            difference = first_difference(before.get(key), now.get(key), inner)
            if difference:
                return difference
        return None
    return None if before == now else f"{name} = {before!r} there, {now!r} here"
