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
    model.safetensors  the final model; that of an earlier, shorter run stays until the next one is ready
    best.safetensors   the model of the best round by the validation samples, if there are some

Files are written beside their place, fsynced and renamed. The manifest has the checksums of all the others
(config, identity, history up to its round, tensors, final model and the clients' results) and its own; what
does not fit is refused by name. A folder that has files but no run in it is refused before anything is
written, and only files that a run has written are ever removed or replaced.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from flatfed.core.errors import FlatfedError
from flatfed.engines.client_store import ClientStore
from flatfed.runs.checkpoint import Checkpoint, Checkpoints, FinalFiles, Manifest
from flatfed.runs.environment import environment
from flatfed.runs.files import (
    BackgroundWriter,
    RunFolderError,
    json_bytes,
    module_bytes,
    read_bytes,
    read_json,
    read_sealed,
    sha256,
    write_atomically,
    write_json,
    write_sealed,
)
from flatfed.runs.history import HistoryFile, parsed
from flatfed.runs.identity import Identity, digest_of
from flatfed.runs.lock import Lock
from flatfed.training.evaluation import ClientSpread, client_spreads
from flatfed.training.loop import History, TrainingState

CHANGED = "damaged or edited, its checksum is not the one in the manifest"
_HALF_WRITTEN = re.compile(r"\.[a-z]+\.(json|jsonl|safetensors|png)\.\d+\.\d+")


class RunFolder:
    """Reads and writes a run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.checkpoints = Checkpoints(path / "checkpoint")
        self.lock = Lock(path / "checkpoint" / ".lock")
        self.history = HistoryFile(path / "history.jsonl")
        self._writer = BackgroundWriter()
        self.config_path = path / "config.json"
        self.identity_path = path / "identity.json"
        self.environment_path = path / "environment.json"
        self.clients_path = path / "clients.json"
        self.model_path = path / "model.safetensors"
        self.best_path = path / "best.safetensors"
        self.divergence_path = path / "diverged.json"
        self.stop_path = path / "stopped.json"
        self.identity = Identity({})

    @classmethod
    def existing(cls, path: Path) -> RunFolder:
        if not path.is_dir():
            raise RunFolderError(f"{path}: no such run folder")
        if not os.path.lexists(path / "config.json"):
            raise RunFolderError(f"{path}: not a run folder, it has no config.json")
        return cls(path)

    # -- what is there ------------------------------------------------------------------------------------

    def check_usable(self) -> None:
        """Refuses a folder that has files but no run in it, before anything is written."""
        if "\0" in str(self.path):
            raise RunFolderError(f"folder = {str(self.path)!r}: a null character; choose another name")
        checkpoints = self.checkpoints.path
        for folder in (self.path, checkpoints):
            if os.path.lexists(folder) and not folder.is_dir():
                raise RunFolderError(f"{folder}: not a folder; choose another name")
        if os.path.lexists(self.config_path):
            for path in self._files:
                if os.path.lexists(path) and not path.is_file():
                    raise RunFolderError(f"{path}: not a regular file; restore it or choose another folder")
            if not is_run_config(read_json(self.config_path)):
                raise RunFolderError(f"{self.config_path}: not the config of a run; choose another folder")
            return
        for path in [*_entries(self.path), *_entries(checkpoints)]:
            # What a run leaves that was killed before it had written its config.
            remains = path == self.lock.path and path.is_file() and path.stat().st_size == 0
            if not remains and path != checkpoints and not _HALF_WRITTEN.fullmatch(path.name):
                raise RunFolderError(
                    f"{self.path}: not empty and not a run folder (it has {path.name!r} and no config.json); "
                    "choose another folder"
                )

    def holds_run(self) -> bool:
        """Whether there is a run, by its config or, should that be damaged, by its manifest."""
        with contextlib.suppress(RunFolderError):
            if is_run_config(read_json(self.config_path)):
                return True
        with contextlib.suppress(RunFolderError):
            return self.checkpoints.read() is not None
        return False

    def verify(self) -> Manifest | None:
        """The manifest, if config, identity and history are those that it was written with."""
        manifest = self.checkpoints.read()
        if manifest is None:
            begun = self.history.path.exists() and self.history.path.stat().st_size > 0
            for path, exists in ((self.history.path, begun), (self.model_path, self.model_path.exists())):
                if exists:
                    raise RunFolderError(
                        f"{self.checkpoints.manifest_path}: missing, though there is {path.name}; restore it "
                        "or choose another folder"
                    )
            return None
        if sha256(read_bytes(self.config_path)) not in manifest.config:
            raise RunFolderError(
                f"{self.config_path}: {CHANGED}; restore it (more rounds are asked for by --rounds)"
            )
        if digest_of(read_json(self.identity_path)) != manifest.identity:
            raise RunFolderError(f"{self.identity_path}: {CHANGED}; restore it")
        self.history.checked(manifest.history)
        self._check_models(manifest)
        return manifest

    def _check_models(self, manifest: Manifest) -> list[str]:
        """The digests of the final and the best model, if there are some; they must be this run's."""
        digests = []
        for path in (self.model_path, self.best_path):
            if os.path.lexists(path):
                digests.append(sha256(read_bytes(path)))
                if digests[-1] not in manifest.models:
                    raise RunFolderError(
                        f"{path}: damaged, or not of this run; restore it, or move it away to have it "
                        "written again"
                    )
        return digests

    def finished_rounds(self) -> int | None:
        """How many rounds a complete run had, or None if it is not complete."""
        manifest = self.verify()
        final = manifest.final if manifest else None
        if manifest is None or final is None or final.round != manifest.round:
            return None
        digests = {self.model_path: final.model, self.clients_path: final.clients}
        if final.best is not None:
            digests[self.best_path] = final.best
        if not all(path.exists() for path in digests):
            return None
        for path, digest in digests.items():
            if sha256(read_bytes(path)) != digest:
                raise RunFolderError(
                    f"{path}: {CHANGED}; restore it, or move it away to have it written again"
                )
        return manifest.round

    def read_config(self) -> Any:
        """What was asked for, as it was written."""
        self.check_usable()
        self.verify()
        return read_json(self.config_path)

    def check_config(self, config: Mapping[str, Any]) -> None:
        """Refuses a folder in which something else was asked for."""
        if not self.config_path.exists():
            return
        different = first_difference(read_json(self.config_path), json.loads(json.dumps(config)))
        if different:
            raise RunFolderError(
                f"{self.path}: it holds another run ({different}); choose another folder or remove it"
            )

    def check_identity(self, identity: Identity) -> None:
        """Refuses a folder whose run had another model, data or settings."""
        if not self.identity_path.exists():
            return
        stored = read_json(self.identity_path)
        if not isinstance(stored, dict):
            raise RunFolderError(f"{self.identity_path}: damaged; restore it or choose another folder")
        different = identity.difference(stored)
        if different:
            raise RunFolderError(
                f"{self.path}: it holds another run (not the same: {different}); choose another folder or "
                "remove it"
            )

    # -- a run of this process ----------------------------------------------------------------------------

    def open(self, config: Mapping[str, Any], identity: Identity) -> None:
        """Takes the folder for this process; a run that is there must be the same one, and whole."""
        self.check_usable()
        self.checkpoints.path.mkdir(parents=True, exist_ok=True)
        self.lock.acquire(self.path)
        self.finished_rounds()
        self.check_config(config)
        self.identity = identity
        self.check_identity(identity)
        manifest = self.checkpoints.manifest
        if manifest is not None and manifest.server is not None and identity.uncovered:
            raise RunFolderError(
                f"{self.path}: it cannot be continued safely, because nothing tells whether this is the same "
                f"run ({identity.uncovered[0]}); choose another folder and give the task a name and version"
            )

    def begin(self, config: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
        """Writes what is asked for, once everything is known to be in order."""
        content, manifest = json_bytes(config), self.checkpoints.manifest
        if manifest is not None and manifest.config != (sha256(content),):
            # Whenever this is killed, config.json is one of the two.
            digests = sha256(read_bytes(self.config_path)), sha256(content)
            self.checkpoints.write(manifest.model_copy(update={"config": digests}))
        write_atomically(self.config_path, content)
        write_json(self.identity_path, dict(self.identity.components))
        write_json(self.environment_path, environment(engine))
        if manifest is None:
            # From now on, tensors or a history without a manifest are damage.
            manifest = Manifest(identity=self.identity.digest, config=(sha256(content),))
            self.checkpoints.write(manifest)
        self.history.restart(self.history.checked(manifest.history))
        for path in (self.divergence_path, self.stop_path):
            path.unlink(missing_ok=True)
        for path in _entries(self.path):
            if _HALF_WRITTEN.fullmatch(path.name) and path.is_file():
                path.unlink()

    def append(self, record: Mapping[str, Any]) -> None:
        self.history.append(record)

    def kept(self, round_number: int) -> str:
        return f"the state after round {round_number} is kept in {self.path}"

    def save(self, state: TrainingState, clients: ClientStore) -> None:
        self._writer.wait()
        pending, written = self.checkpoints.pending(state, clients), self.history.written

        def write() -> None:
            self.history.sync()
            self.checkpoints.save(pending, written)

        self._writer.start(write)
        # Not before: what an interrupt kept from being written is still to be written.
        clients.changed.clear()

    def wait(self) -> None:
        self._writer.wait()

    def close(self) -> None:
        """Gives the folder back once nothing writes to it any more."""
        self._writer.close()
        self.lock.release()

    def finish(
        self, module: nn.Module, per_client: list[dict[str, float]], best: nn.Module | None = None
    ) -> None:
        manifest = self.checkpoints.manifest
        assert manifest is not None, "a run begins with a manifest"
        model = module_bytes(module)
        spreads = {name: asdict(spread) for name, spread in client_spreads(per_client).items()}
        clients = json_bytes({"spread": spreads, "clients": per_client})
        contents = {self.model_path: model} | ({} if best is None else {self.best_path: module_bytes(best)})
        digests = tuple(map(sha256, contents.values()))
        # Whenever this is killed, a model is one of the two.
        self.checkpoints.write(
            manifest.model_copy(update={"models": (*self._check_models(manifest), *digests)})
        )
        write_atomically(self.clients_path, clients)
        for path, content in contents.items():
            write_atomically(path, content)
        final = FinalFiles(
            round=manifest.round, model=digests[0], clients=sha256(clients), best=[*digests, None][1]
        )
        changes = {"config": manifest.config[-1:], "models": digests, "final": final}
        self.checkpoints.write(manifest.model_copy(update=changes))

    # -- what happened ------------------------------------------------------------------------------------

    def read_history(self) -> History:
        """The lines of finished rounds, without a last one that was cut off."""
        return self.history.read()

    def checkpoint_history(self) -> History:
        """The lines up to the last checkpoint."""
        manifest = self.checkpoints.manifest
        return [] if manifest is None else parsed(self.history.checked(manifest.history))

    def last_checkpoint(self) -> Checkpoint:
        """The last complete checkpoint, which there must be."""
        self.verify()
        checkpoint = self.checkpoints.load()
        if checkpoint is None:
            advice = f"go on with flatfed resume {self.path}"
            raise FlatfedError(f"{self.path}: it has no checkpoint yet; {self.read_divergence() or advice}")
        return checkpoint

    def read_clients(self) -> dict[str, ClientSpread]:
        """The spread of the final model's accuracy over the clients, on "train" and "test" data."""
        content = read_json(self.clients_path)
        try:
            return {name: ClientSpread(**spread) for name, spread in content["spread"].items()}
        except (KeyError, TypeError, AttributeError):
            raise RunFolderError(
                f"{self.clients_path}: has no spread over clients; remove the folder and run it again"
            ) from None

    def read_commit(self) -> str | None:
        """Of the program that last trained here, if it was known."""
        content = read_json(self.environment_path) if self.environment_path.exists() else {}
        commit = content.get("commit") if isinstance(content, dict) else None
        return str(commit) if commit else None

    def note_divergence(self, error: str) -> None:
        write_sealed(self.divergence_path, {"error": error})

    def read_divergence(self) -> str | None:
        """What stopped a run that left the finite numbers, or None if nothing did."""
        return str(read_sealed(self.divergence_path).get("error")) if self.divergence_path.exists() else None

    def note_stop(self, reason: str, round_number: int, accuracies: Mapping[str, float]) -> None:
        """Records that a run was ended early, and the round that decided it, which the history lacks."""
        write_sealed(self.stop_path, {"reason": reason, "round": round_number, **accuracies})

    def read_stop(self) -> dict[str, Any] | None:
        """What `note_stop` recorded, or None if the run was not ended early."""
        return read_sealed(self.stop_path) if self.stop_path.exists() else None

    def own_files(self) -> list[Path]:
        """The files that a run and its diagnostics have written here, but for the lock."""
        others = {self.lock.path, *self._foreign_models()}
        files = [path for path in (*self._files, self.path / "synthetic.png") if path not in others]
        files += [path for path in _entries(self.path) if _HALF_WRITTEN.fullmatch(path.name)]
        files += self.checkpoints.own_files()
        files += [path for path in _entries(self.path / "diagnostics") if _is_result(path)]
        return [path for path in dict.fromkeys(files) if path.is_file() and not path.is_symlink()]

    def _foreign_models(self) -> list[Path]:
        """Files called as the run's models are, but of which the manifest knows nothing."""
        try:
            manifest = self.checkpoints.read()
        except RunFolderError:
            manifest = None
        known = () if manifest is None else manifest.models
        models = [path for path in (self.model_path, self.best_path) if path.is_file()]
        return [path for path in models if sha256(read_bytes(path)) not in known]

    @property
    def _files(self) -> tuple[Path, ...]:
        return (
            *(self.config_path, self.identity_path, self.environment_path, self.history.path),
            *(self.clients_path, self.model_path, self.best_path, self.divergence_path, self.stop_path),
            *(self.checkpoints.manifest_path, self.lock.path),
        )


def is_run_config(config: Any) -> bool:
    return isinstance(config, dict) and {"algorithm", "training"} <= config.keys()


def _is_result(path: Path) -> bool:
    """Whether a file is one that a diagnostic has written."""
    if path.suffix != ".json":
        return False
    try:
        content = read_json(path)
    except RunFolderError:
        return False
    return isinstance(content, dict) and {"format", "result"} <= content.keys()


def _entries(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def first_difference(before: Any, now: Any, name: str = "") -> str | None:
    """Where two configs ask for different runs; how they are executed and for how long does not count."""
    if name in {"execution", "training.rounds", "training.patience"}:
        return None
    if isinstance(before, dict) and isinstance(now, dict):
        for key in [*before, *(key for key in now if key not in before)]:
            inner = f"{name}.{key}" if name else key
            difference = first_difference(before.get(key), now.get(key), inner)
            if difference:
                return difference
        return None
    return None if before == now else f"{name} = {before!r} there, {now!r} here"
