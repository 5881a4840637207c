"""Memory without a name that grows, and that a forked process sees as its own."""

from __future__ import annotations

import mmap
import os
import tempfile
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

_SMALLEST = 2**16


class GrowingMemory:
    """A file without a name, mapped as far as it is used; it vanishes with its processes, however they end.

    Without a `folder` it is in memory, on systems that have such files, and else in the temporary folder.
    """

    def __init__(self, folder: Path | None = None, in_memory: bool = True) -> None:
        self._file: IO[bytes]
        if in_memory and hasattr(os, "memfd_create"):
            self._file = os.fdopen(os.memfd_create("flatfed"), "r+b")
        else:
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115
        self._mapped: mmap.mmap | None = None

    def view(self, start: int, dtype: torch.dtype, count: int) -> Tensor:
        """So many numbers from a byte on; the view stays good when more memory is mapped."""
        end = start + count * dtype.itemsize
        mapped = self._mapped
        if mapped is None or len(mapped) < end:
            number = self._file.fileno()
            size = os.fstat(number).st_size
            if size < end:
                # Sparse: what has not been written takes no memory.
                size = max(2 * end, _SMALLEST)
                os.ftruncate(number, size)
            mapped = self._mapped = mmap.mmap(number, size)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=start)

    def close(self) -> None:
        self._mapped = None
        self._file.close()
