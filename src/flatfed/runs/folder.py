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

Files are written beside their place, fsynced and renamed.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from flatfed.core.errors import FlatfedError
from flatfed.engines.client_store import ClientStore
from flatfed.runs.checkpoint import Checkpoint, Checkpoints, Manifest
from flatfed.runs.environment import environment
from flatfed.runs.files import read_json, save_module, write_atomically, write_json
from flatfed.runs.identity import Identity
from flatfed.runs.lock import Lock
from flatfed.training.evaluation import ClientSpread, client_spreads
from flatfed.training.loop import History, TrainingState


class RunFolder:
    """Reads and writes a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoint")
        self.lock = Lock(path / "checkpoint" / ".lock")
        self.config_path = path / "config.json"
        self.identity_path = path / "identity.json"
        self.history_path = path / "history.jsonl"
        self.clients_path = path / "clients.json"
        self.model_path = path / "model.safetensors"
        self.divergence_path = path / "diverged.json"
        self.stop_path = path / "stopped.json"
        self.identity = Identity({})

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not path.is_dir():
            raise FlatfedError(f"{path}: no such run folder")
        if not (path / "config.json").is_file():
            raise FlatfedError(f"{path}: not a run folder, it has no config.json")
        return cls(path)

    def open(self, config: Mapping[str, Any], identity: Identity) -> None:
        """Takes the folder for this process; a run that is there must be the same one."""
        self.checkpoints.path.mkdir(parents=True, exist_ok=True)
        self.lock.acquire(self.path)
        begun = self.checkpoints.manifest_path.exists()
        if begun:
            Manifest.read(self.checkpoints.manifest_path)  # Of an older version, all else may look strange.
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
        if not self.config_path.exists():
            return
        different = first_difference(read_json(self.config_path), json.loads(json.dumps(config)))
        if different:
            raise FlatfedError(
                f"{self.path}: it holds another run ({different}); choose another folder or remove it"
            )

    def begin(self, config: Mapping[str, Any], engine: Mapping[str, Any], history: History) -> None:
        """Writes what is asked for, once everything is known to be in order."""
        write_json(self.config_path, config)
        write_json(self.identity_path, dict(self.identity.components))
        write_json(self.path / "environment.json", environment(engine))
        # While the run goes on there is no final model, not even that of an earlier, shorter run.
        for path in (self.model_path, self.divergence_path, self.stop_path):
            path.unlink(missing_ok=True)
        lines = "".join(json.dumps(record) + "\n" for record in history)
        write_atomically(self.history_path, lines.encode())

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

    def kept(self, round_number: int) -> str:
        return f"the state after round {round_number} is kept in {self.path}"

    def save(self, state: TrainingState, clients: ClientStore) -> None:
        with self.history_path.open("rb") as file:
            os.fsync(file.fileno())
        self.checkpoints.save(state, clients, self.identity.digest)

    def last_checkpoint(self) -> Checkpoint:
        """The last complete checkpoint, which there must be."""
        checkpoint = self.checkpoints.load()
        if checkpoint is None:
            advice = f"go on with flatfed resume {self.path}"
            raise FlatfedError(f"{self.path}: it has no checkpoint yet; {self.read_divergence() or advice}")
        return checkpoint

    def finish(self, module: nn.Module, per_client: list[dict[str, float]]) -> None:
        spreads = {name: asdict(spread) for name, spread in client_spreads(per_client).items()}
        write_json(self.clients_path, {"spread": spreads, "clients": per_client})
        save_module(module, self.model_path)

    def finished_rounds(self) -> int | None:
        """How many rounds a complete run had, or None if it is not complete."""
        manifest_path = self.checkpoints.manifest_path
        if not (self.model_path.exists() and manifest_path.exists()):
            return None
        return Manifest.read(manifest_path).round

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
