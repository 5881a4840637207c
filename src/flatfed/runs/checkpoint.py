"""A run's checkpoints: manifest.json, and the safetensors files that it names.

The manifest is written last: at any moment it names a complete checkpoint. It has the checksums of everything
that the checkpoint consists of, and its own. Client state is a log: a checkpoint adds the rows that changed
since the last one, and the log is rewritten when more than half of it is out of date. Nothing is ever
unpickled. Files are written beside the training, one checkpoint at a time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from flatfed.core.errors import one_line
from flatfed.engines.client_store import ClientStore
from flatfed.engines.evaluator import Snapshot
from flatfed.runs.files import (
    RunFolderError,
    read_bytes,
    read_json,
    sha256,
    unsealed,
    write_atomically,
    write_sealed,
)
from flatfed.runs.history import WrittenHistory
from flatfed.training.loop import TrainingState

FORMAT = 3
_TENSOR_FILE = re.compile(r"(server|clients)-\d+-[0-9a-f]{8}\.safetensors")
_HALF_WRITTEN = re.compile(rf"\.({_TENSOR_FILE.pattern}|manifest\.json)\.\d+\.\d+")


class _Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


class StoredFile(_Entry):
    """A safetensors file of a checkpoint and the digest of its content."""

    name: str
    sha256: str
    rows: int = 0
    """Clients in the file, for files of client state."""


class FinalFiles(_Entry):
    """The digests of what is written after the last round."""

    round: int
    model: str
    clients: str
    best: str | None = None
    """None without validation samples to choose it by."""


class Manifest(BaseModel):
    """What a checkpoint consists of."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: int = FORMAT
    round: Annotated[int, Field(strict=True, ge=0)] = 0
    identity: str
    """The digest of the run's identity."""
    config: tuple[str, ...]
    """The digests of config.json; two while a run that is asked for more rounds replaces it."""
    history: WrittenHistory = WrittenHistory()
    server: StoredFile | None = None
    """None until the first checkpoint."""
    clients: tuple[StoredFile, ...] = ()
    models: tuple[str, ...] = ()
    """The digests of the final and the best model; twice as many while the next ones replace them."""
    final: FinalFiles | None = None
    """Of the last complete run, which may have had fewer rounds."""

    @classmethod
    def read(cls, path: Path) -> Manifest:
        content = read_json(path)
        written = content.get("format") if isinstance(content, dict) else None
        if written != FORMAT:
            raise RunFolderError(
                f"{path}: its format is {written!r}, this version reads {FORMAT}; choose another folder or "
                "remove it"
            )
        try:
            return cls(**unsealed(content, path))
        except ValidationError as error:
            raise RunFolderError(f"{path}: damaged ({one_line(error)})") from None


@dataclass(frozen=True)
class Checkpoint:
    """A run's state after `round` rounds."""

    round: int
    identity: str
    server: dict[str, Tensor]
    buffers: dict[str, Tensor]
    best: Snapshot | None = None


class ClientRows(NamedTuple):
    """The state of some clients, which nobody changes any more."""

    clients: list[int]
    rows: Tensor
    everything: bool
    """Whether these are all clients with state."""


class PendingCheckpoint(NamedTuple):
    """A state that is to be written."""

    round: int
    server: Mapping[str, Tensor]
    clients: ClientRows | None
    """What changed since the last checkpoint."""


class Checkpoints:
    """Reads and writes the folder of a run's checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"
        self.manifest: Manifest | None = None

    def own_files(self) -> list[Path]:
        """All files of checkpoints, also those that a kill has left."""
        names = (_TENSOR_FILE, _HALF_WRITTEN)
        files = self.path.iterdir() if self.path.is_dir() else ()
        return [path for path in files if any(name.fullmatch(path.name) for name in names)]

    def read(self) -> Manifest | None:
        """The present manifest; None if nothing was ever saved."""
        if self.manifest_path.exists() or self.manifest_path.is_symlink():
            self.manifest = Manifest.read(self.manifest_path)
        elif self.path.is_dir() and any(_TENSOR_FILE.fullmatch(path.name) for path in self.path.iterdir()):
            raise RunFolderError(
                f"{self.manifest_path}: missing, though there are files of a checkpoint; restore it or "
                "choose another folder"
            )
        return self.manifest

    def write(self, manifest: Manifest) -> None:
        write_sealed(self.manifest_path, manifest.model_dump(mode="json"))
        self.manifest = manifest

    def pending(self, state: TrainingState, clients: ClientStore) -> PendingCheckpoint:
        """What is to be written of the present state; training may go on meanwhile."""
        tensors = {f"server/{name}": value for name, value in state.server.items()}
        tensors |= {f"buffers/{name}": value for name, value in state.buffers.items()}
        if state.best is not None:
            # Copies: in a file, no two tensors may be one, as they are while the present round is the best.
            tensors["best/model"] = state.best.model.clone()
            tensors |= {f"best_buffers/{name}": value.clone() for name, value in state.best.buffers.items()}
        return PendingCheckpoint(state.round, tensors, self._changed_clients(clients))

    def save(self, pending: PendingCheckpoint, history: WrittenHistory) -> None:
        assert self.manifest is not None, "a run begins with a manifest"
        server = self._write_tensors(f"server-{pending.round}", pending.server)
        changes = {
            "round": pending.round,
            "config": self.manifest.config[-1:],
            "history": history,
            "server": server,
            "clients": self._log_clients(self.manifest.clients, pending),
        }
        self.write(self.manifest.model_copy(update=changes))
        named = {server.name, *(entry.name for entry in self.manifest.clients)}
        for path in self.path.iterdir():
            ours = _TENSOR_FILE.fullmatch(path.name) or _HALF_WRITTEN.fullmatch(path.name)
            if ours and path.name not in named:
                path.unlink()

    def _changed_clients(self, store: ClientStore) -> ClientRows | None:
        """Copies of the rows that changed since the last checkpoint, or of all; None if none did."""
        assert self.manifest is not None, "a run begins with a manifest"
        old_rows = sum(entry.rows for entry in self.manifest.clients)
        everything = old_rows + len(store.changed) > 2 * len(store)
        clients = store.clients() if everything else sorted(store.changed)
        if not clients:
            return None
        rows = torch.stack([row for client in clients if (row := store.row(client)) is not None])
        return ClientRows(clients, rows, everything)

    def _log_clients(
        self, logged: tuple[StoredFile, ...], pending: PendingCheckpoint
    ) -> tuple[StoredFile, ...]:
        """The client files of the next checkpoint: those of the last one and the rows that changed."""
        if pending.clients is None:
            return logged
        clients, rows, everything = pending.clients
        tensors = {"clients": torch.tensor(clients), "rows": rows}
        entry = self._write_tensors(f"clients-{pending.round}", tensors, rows=len(clients))
        return (entry,) if everything else (*logged, entry)

    def _write_tensors(self, stem: str, tensors: Mapping[str, Tensor], rows: int = 0) -> StoredFile:
        content = save_tensors({key: value.cpu().contiguous() for key, value in tensors.items()})
        digest = sha256(content)
        # A round may be saved more than once; what the manifest still names must not be overwritten.
        name = f"{stem}-{digest[:8]}.safetensors"
        write_atomically(self.path / name, content)
        return StoredFile(name=name, sha256=digest, rows=rows)

    def path_of(self, entry: StoredFile) -> Path:
        return self.path / Path(entry.name).name

    @property
    def server_path(self) -> Path:
        """The file with the server's state."""
        server = self.manifest.server if self.manifest else None
        return self.manifest_path if server is None else self.path_of(server)

    def _read_tensors(self, entry: StoredFile) -> dict[str, Tensor]:
        path = self.path_of(entry)
        if not path.exists():
            raise RunFolderError(f"{path}: missing from the checkpoint; restore it or choose another folder")
        content = read_bytes(path)
        if sha256(content) != entry.sha256:
            raise RunFolderError(f"{path}: damaged, its checksum is not the one in the manifest")
        try:
            return load_tensors(content)
        except SafetensorError as error:
            raise RunFolderError(f"{path}: not a safetensors file ({error})") from None

    def load(self) -> Checkpoint | None:
        """The last complete checkpoint without its client rows; None if there is none."""
        manifest = self.read()
        if manifest is None or manifest.server is None:
            return None
        groups: dict[str, dict[str, Tensor]] = {"server": {}, "buffers": {}, "best": {}, "best_buffers": {}}
        for name, value in self._read_tensors(manifest.server).items():
            group, _, key = name.partition("/")
            groups.setdefault(group, {})[key] = value
        if len(groups) > 4 or "model" not in groups["server"] or groups["best"].keys() - {"model"}:
            raise RunFolderError(f"{self.path_of(manifest.server)}: not the server's state of a run")
        best = Snapshot(groups["best"]["model"], groups["best_buffers"]) if groups["best"] else None
        return Checkpoint(manifest.round, manifest.identity, groups["server"], groups["buffers"], best)

    def load_clients(self, store: ClientStore) -> None:
        """Puts the checkpoint's client rows into the store."""
        for entry in self.manifest.clients if self.manifest else ():
            logged = self._read_tensors(entry)
            shapes = {name: (tuple(value.shape), value.dtype) for name, value in logged.items()}
            if shapes != {
                "clients": ((entry.rows,), torch.int64),
                "rows": ((entry.rows, store.row_length), store.dtype),
            }:
                raise RunFolderError(
                    f"{self.path_of(entry)}: its client state is of another model or algorithm"
                )
            for client, row in zip(logged["clients"].tolist(), logged["rows"], strict=True):
                store.stage_row(client, row)
            store.commit()
        store.changed.clear()
