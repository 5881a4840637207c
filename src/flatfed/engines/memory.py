"""Memory without a name that grows, and that a forked process sees as its own."""

import mmap
import os
import tempfile
import weakref
from pathlib import Path

import torch
from torch import Tensor

_SMALLEST = 2**16


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
        self._mapped: mmap.mmap | None = None
        self._closed = weakref.finalize(self, os.close, self._file)

    def view(self, start: int, dtype: torch.dtype, count: int) -> Tensor:
        """So many numbers from a byte on; the view stays good when more memory is mapped.

        Whoever is the first to look beyond the end enlarges the file; two at once might cut it off again.
        """
        end = start + count * dtype.itemsize
        mapped = self._mapped
        if mapped is None or len(mapped) < end:
            size = os.fstat(self._file).st_size
            if size < end:
                # Sparse: what has not been written takes no memory.
                size = max(2 * end, _SMALLEST)
                os.ftruncate(self._file, size)
            mapped = self._mapped = mmap.mmap(self._file, size)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start)

    @property
    def size(self) -> int:
        return os.fstat(self._file).st_size

    def close(self) -> None:
        """Gives the file back; views stay good."""
        self._mapped = None
        self._closed()
