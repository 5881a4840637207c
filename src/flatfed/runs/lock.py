"""One process at a time in a folder."""

import time
from pathlib import Path
from typing import IO

from flatfed.core.errors import FlatfedError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

PATIENCE = 2.0
"""Seconds."""


class Lock:
    """A locked file; the system takes the lock back when the process and its workers have ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[str] | None = None

    def acquire(self, owner: Path) -> None:
        if fcntl is None:
            return
        self._file = self.path.open("w")
        deadline = time.monotonic() + PATIENCE
        while True:
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                # The workers of a process that was killed end a moment after it.
                if time.monotonic() > deadline:
                    raise FlatfedError(
                        f"{owner}: another process is running it; wait or stop that one"
                    ) from None
                time.sleep(0.05)
            else:
                return

    def is_taken(self) -> bool:
        if fcntl is None or not self.path.exists():
            return False
        with self.path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except OSError:
                return True
        return False

    def release(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
