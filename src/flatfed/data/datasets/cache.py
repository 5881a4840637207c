"""Decoded samples, kept beside a data set's files and mapped into memory at the next start.

A cache belongs to the files that it was made of: it is used if their sizes and times are those of then or,
where they are not, their checksums. What is in it has checksums too, so a damaged one is made anew, like one
of another version. It may be removed at any time; where it cannot be written there is none.
"""

import json
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from hashlib import file_digest
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from flatfed.data.datasets.base import Array, Labelled

VERSION = 2
SMALLEST = 2**23
"""Data sets of fewer bytes are read as quickly as a cache of them would be."""
BLOCK = 2**24
"""Bytes that have a checksum of their own."""
ABANDONED_SECONDS = 3600.0
_bypassed: ContextVar[bool] = ContextVar("bypassed", default=False)

Arrays = dict[str, Array]
Sources = dict[str, list[Any]]
"""By the name of each file its size, its time of change and its checksum."""


@contextmanager
def bypassed() -> Iterator[None]:
    """Caches are neither read nor written, so that the files themselves are looked at."""
    token = _bypassed.set(True)
    try:
        yield
    finally:
        _bypassed.reset(token)


def arrays_of(train: Labelled, test: Labelled) -> Arrays:
    return {
        "train_inputs": train.inputs,
        "train_labels": train.labels,
        "test_inputs": test.inputs,
        "test_labels": test.labels,
    }


def samples_of(arrays: Arrays) -> tuple[Labelled, Labelled]:
    """The inverse of `arrays_of`."""
    train, test = (Labelled(arrays[f"{part}_inputs"], arrays[f"{part}_labels"]) for part in ("train", "test"))
    return train, test


def cached(name: str, files: Sequence[Path], read: Callable[[], Arrays]) -> Arrays:
    """What `read` makes of some files of one folder, from the cache of that name if there is one of them."""
    path = files[0].with_name(f".flatfed-{name}.safetensors")
    if _bypassed.get() or not all(file.is_file() for file in files):
        return read()
    stored = _load(path, files)
    if stored is not None:
        return stored
    times = _sizes_and_times(files)
    arrays = read()
    if sum(array.nbytes for array in arrays.values()) >= SMALLEST:
        try:
            # Should a file change from here on, the times say so.
            sources = {file.name: [*times[file.name], _digest(file)] for file in files}
            _store(path, arrays, sources, stat.S_IMODE(files[0].stat().st_mode))
        except (OSError, SafetensorError):
            pass  # A folder that cannot be written to, or a full disk: there is no cache.
    return arrays


def _load(path: Path, files: Sequence[Path]) -> Arrays | None:
    """The arrays of a cache that belongs to the files and is whole, mapped privately: changes stay here."""
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            return None
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            about = json.loads(metadata["flatfed"])
            if (
                metadata["checksum"] != _checksum(metadata["flatfed"])
                or about["version"] != VERSION
                or not _are_sources(about["sources"], files)
            ):
                return None
            arrays = {name: file.get_tensor(name).numpy() for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return arrays if about["checksums"] == _checksums(arrays) else None


def _are_sources(sources: Sources, files: Sequence[Path]) -> bool:
    times = _sizes_and_times(files)
    if sources.keys() != times.keys():
        return False
    if all(sources[name][:2] == times[name] for name in times):
        return True
    return all(sources[file.name][2] == _digest(file) for file in files)


def _store(path: Path, arrays: Arrays, sources: Sources, mode: int) -> None:
    about = json.dumps({"version": VERSION, "sources": sources, "checksums": _checksums(arrays)})
    _remove_abandoned(path)
    with tempfile.TemporaryDirectory(prefix=f"{path.name}-", dir=path.parent) as folder:
        temporary = Path(folder) / path.name
        plain = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        save_file(plain, temporary, {"flatfed": about, "checksum": _checksum(about)})
        # Whoever may read the files may read this.
        temporary.chmod(mode)
        temporary.replace(path)


def _remove_abandoned(path: Path) -> None:
    """What a process that was killed has left of a cache that it was writing."""
    for folder in path.parent.glob(f"{path.name}-*"):
        with suppress(OSError):  # another process was first, or there is something else in it
            if time.time() - folder.stat().st_mtime > ABANDONED_SECONDS:
                (folder / path.name).unlink(missing_ok=True)
                folder.rmdir()


def _sizes_and_times(files: Sequence[Path]) -> Mapping[str, list[int]]:
    statuses = {file.name: file.stat() for file in files}
    return {name: [status.st_size, status.st_mtime_ns] for name, status in statuses.items()}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return file_digest(content, "sha256").hexdigest()


def _checksum(text: str) -> str:
    return str(zlib.crc32(text.encode()))


def _checksums(arrays: Arrays) -> dict[str, list[Any]]:
    """Of every array its type, its shape, and the checksums of its blocks."""
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        return {
            name: [str(array.dtype), list(array.shape), *pool.map(zlib.crc32, _blocks(array))]
            for name, array in arrays.items()
        }


def _blocks(array: Array) -> Iterator[Array]:
    content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return (content[start : start + BLOCK] for start in range(0, len(content), BLOCK))
