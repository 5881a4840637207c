"""Memory without a name that grows, shared with forked processes; what becomes of freed memory."""

import ctypes
import mmap
import os
import tempfile
import weakref
from multiprocessing import reduction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatfed.core.errors import FlatfedError

_SMALLEST, _RESERVED = 2**16, 2**20
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
"""Options of glibc's mallopt."""


def keep_freed_memory() -> None:
    """Lets this process keep what it frees, where its allocator can be told so; for workers that train.

    Every step takes and frees the same few blocks; new pages for them take up to a third of a step.
    """
    if os.name != "posix" or not hasattr(library := ctypes.CDLL(None), "mallopt"):
        return
    library.mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    # Without this a thread's heap is given back when it is empty.
    library.mallopt(_TOP_PAD, 2**27)
    # Older versions allow less.
    if not library.mallopt(_MMAP_THRESHOLD, 2**30):
        library.mallopt(_MMAP_THRESHOLD, 2**25)


class GrowingMemory:
    """A file without a name, mapped as far as it is used; it vanishes with its processes, however they end.

    With `in_memory` it takes memory, on systems that have such files; else it is in `folder` (default: the
    system's temporary folder).
    """

    def __init__(self, in_memory: bool = True, folder: Path | None = None) -> None:
        if in_memory and hasattr(os, "memfd_create"):
            self._file = os.memfd_create("flatfed")
        else:
            with tempfile.TemporaryFile(dir=folder) as file:
                self._file = os.dup(file.fileno())
        self._keep(not in_memory, 0)

    def _keep(self, on_disk: bool, reserved: int) -> None:
        self._on_disk, self._reserved = on_disk, reserved
        self._mapped: mmap.mmap | None = None
        self._closed = weakref.finalize(self, os.close, self._file)

    def __reduce__(self) -> tuple[Any, ...]:
        """The same file, for a process that is just being started."""
        return _received, (reduction.DupFd(self._file), self._on_disk, self._reserved)

    def view(self, start: int, dtype: torch.dtype, count: int) -> Tensor:
        """So many numbers from a byte on; the view stays good when more memory is mapped.

        Whoever is the first to look beyond the end enlarges the file; two at once might cut it off again.
        """
        if count == 0:
            return torch.empty(0, dtype=dtype)
        end = start + count * dtype.itemsize
        mapped = self._mapped
        if mapped is None or len(mapped) < end:
            size = os.fstat(self._file).st_size
            if size < end:
                # Sparse: what has not been written takes no memory.
                size = max(2 * end, _SMALLEST)
                os.ftruncate(self._file, size)
            mapped = self._mapped = mmap.mmap(self._file, size)
        if self._on_disk and end > self._reserved:
            self._reserve(min(len(mapped), -(-end // _RESERVED) * _RESERVED))
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start)

    def _reserve(self, end: int) -> None:
        """Takes room on the disk before it is written to, which would end the process if there were none."""
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self._file, self._reserved, end - self._reserved)
            except OSError as error:
                raise FlatfedError(
                    f"client_memory: a scratch file cannot grow to {end} bytes ({error.strerror}); free some "
                    "room on its disk, or give a larger client_memory"
                ) from None
        self._reserved = end

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Gives the file back; views stay good."""
        self._mapped = None
        self._closed()


def _received(file: Any, on_disk: bool, reserved: int) -> GrowingMemory:
    memory = GrowingMemory.__new__(GrowingMemory)
    memory._file = file.detach()
    memory._keep(on_disk, reserved)
    return memory
