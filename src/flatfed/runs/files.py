"""The files of a run: written as a whole or not at all, and read back only as they were written."""

import hashlib
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from flatfed.core import files
from flatfed.core.errors import FlatfedError, user_errors

MARK = b"<!-- written by flatfed -->"
"""In the first lines of every page and picture."""


class RunFolderError(FlatfedError):
    """A folder that is damaged or no run's; other runs can go on."""


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class BackgroundWriter:
    """Writes beside the caller's own work, one thing at a time.

    An interrupt may come between any two steps of the caller. What counts is therefore what lies in the
    queue, never what the caller remembers of it; and should an interrupted start lead to a second thread, the
    two take turns.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._turn = threading.Lock()
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, write: Callable[[], None]) -> None:
        self.wait()
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._work, name="flatfed-writer", daemon=True)
            self._thread.start()
        self._queue.put(write)

    def wait(self) -> None:
        """Returns once everything is written; an error is raised here, each time."""
        if self._thread is not None and self._thread.is_alive():
            written = threading.Event()
            self._queue.put(written.set)
            written.wait()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Returns once nothing is written any more; `wait` has raised the error, or another one is raised."""
        self._queue.put(None)
        if self._thread is not None and self._thread.is_alive():
            self._thread.join()

    def _work(self) -> None:
        while True:
            with self._turn:
                task = self._queue.get()
                if task is None:
                    self._queue.put(None)
                    return
                try:
                    task()
                except BaseException as error:
                    self._error = error


def json_bytes(content: Any) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()


def write_json(path: Path, content: Any) -> None:
    write_atomically(path, json_bytes(content))


def read_bytes(path: Path) -> bytes:
    """Of a regular file of any size."""
    try:
        return files.read_bytes(path, largest=sys.maxsize)
    except FlatfedError as error:
        raise RunFolderError(str(error)) from None


def read_json(path: Path) -> Any:
    try:
        return files.read_json(path)
    except FlatfedError as error:
        raise RunFolderError(f"{error}; is this a run folder?") from None


def write_sealed(path: Path, content: dict[str, Any]) -> None:
    """A JSON table and, in it, the checksum of all the rest."""
    write_json(path, {**content, "sha256": _seal(content)})


def read_sealed(path: Path) -> dict[str, Any]:
    return unsealed(read_json(path), path)


def unsealed(content: Any, path: Path) -> dict[str, Any]:
    seal = content.pop("sha256", None) if isinstance(content, dict) else None
    if seal != _seal(content):
        raise RunFolderError(f"{path}: damaged or edited, its checksum is not that of its content")
    return dict(content)


def _seal(content: Any) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode())


def check_replaceable(path: Path) -> None:
    """Refuses to overwrite a page or picture that is not flatfed's."""
    if os.path.lexists(path) and MARK not in files.read_bytes(path, largest=sys.maxsize)[:4096]:
        raise FlatfedError(f"{path}: it exists and is not flatfed's; choose another name or remove it")


def stored_state(module: nn.Module) -> dict[str, Tensor]:
    """What is stored of a module: its parameters and buffers by name."""
    with user_errors(f"model: state_dict of {type(module).__qualname__}"):
        state = dict(module.state_dict())
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise FlatfedError(
                f"model: its state has {name!r}, a {type(value).__name__}, and only tensors are stored; keep "
                "it in a buffer, or outside of the state"
            )
    return state


def module_bytes(module: nn.Module) -> bytes:
    """A module's parameters and buffers by name; tensors that are shared are written once for each name."""
    tensors = {name: value.detach().cpu().clone() for name, value in stored_state(module).items()}
    return save_tensors({name: value.contiguous() for name, value in tensors.items()})
