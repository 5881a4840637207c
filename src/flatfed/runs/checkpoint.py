"""A run's checkpoints: manifest.json, and the safetensors files that it names.

The manifest is written last: at any moment it names a complete checkpoint. Client state is a log: a
checkpoint adds the rows that changed since the last one, and the log is rewritten when more than half of it
is out of date. Nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

from flatfed.core.errors import FlatfedError, one_line
from flatfed.engines.client_store import ClientStore
from flatfed.runs.files import read_json, write_atomically, write_json
from flatfed.training.loop import TrainingState

FORMAT = 2


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


class Checkpoints:
    """Reads and writes the folder of a run's checkpoints."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest_path = path / "manifest.json"
        self._logged: tuple[StoredFile, ...] = ()

    def save(self, state: TrainingState, clients: ClientStore, identity: str) -> None:
        tensors = {f"server/{name}": value for name, value in state.server.items()}
        tensors |= {f"buffers/{name}": value for name, value in state.buffers.items()}
        manifest = Manifest(
            format=FORMAT,
            round=state.round,
            identity=identity,
            server=self._write_tensors(f"server-{state.round}", tensors),
            clients=self._log_clients(state.round, clients),
        )
        write_json(self.manifest_path, manifest.model_dump())
        self._logged = manifest.clients
        clients.changed.clear()
        files = {manifest.server.name, *(entry.name for entry in manifest.clients)}
        for path in self.path.iterdir():
            if path.name not in files | {self.manifest_path.name, ".lock"}:
                path.unlink()

    def _log_clients(self, round_number: int, store: ClientStore) -> tuple[StoredFile, ...]:
        """The client files of the next checkpoint: those of the last one and the rows that changed."""
        old_rows = sum(entry.rows for entry in self._logged)
        everything = old_rows + len(store.changed) > 2 * len(store)
        clients = store.clients() if everything else sorted(store.changed)
        if not clients:
            return self._logged
        rows = torch.stack([row for client in clients if (row := store.row(client)) is not None])
        tensors = {"clients": torch.tensor(clients), "rows": rows}
        entry = self._write_tensors(f"clients-{round_number}", tensors, rows=len(clients))
        return (entry,) if everything else (*self._logged, entry)

    def _write_tensors(self, stem: str, tensors: Mapping[str, Tensor], rows: int = 0) -> StoredFile:
        content = save_tensors({key: value.cpu().contiguous() for key, value in tensors.items()})
        digest = hashlib.sha256(content).hexdigest()
        # A round may be saved more than once; what the manifest still names must not be overwritten.
        name = f"{stem}-{digest[:8]}.safetensors"
        write_atomically(self.path / name, content)
        return StoredFile(name=name, sha256=digest, rows=rows)

    def _read_tensors(self, entry: StoredFile) -> dict[str, Tensor]:
        path = self.path / Path(entry.name).name
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
        manifest = Manifest.read(self.manifest_path)
        self._logged = manifest.clients
        groups: dict[str, dict[str, Tensor]] = {"server": {}, "buffers": {}}
        for name, value in self._read_tensors(manifest.server).items():
            group, _, key = name.partition("/")
            groups[group][key] = value
        return Checkpoint(manifest.round, manifest.identity, **groups)

    def load_clients(self, store: ClientStore) -> None:
        """Puts the checkpoint's client rows into the store."""
        for entry in self._logged:
            logged = self._read_tensors(entry)
            rows = logged["rows"]
            if rows.dim() != 2 or rows.shape[1] != store.row_length or rows.dtype != store.dtype:
                raise FlatfedError(f"{self.path}: its client state is of another model or algorithm")
            for client, row in zip(logged["clients"].tolist(), rows, strict=True):
                store.stage_row(client, row)
            store.commit()
        store.changed.clear()
