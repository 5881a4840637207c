"""One process at a time in a folder."""

import errno
import os
import stat
import time
from pathlib import Path

from flatfed.core.errors import FlatfedError
from flatfed.runs.files import RunFolderError

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
        self._file: int | None = None

    def acquire(self, owner: Path) -> None:
        if fcntl is None:
            return
        self._file = self._open(os.O_RDWR | os.O_CREAT)
        deadline = time.monotonic() + PATIENCE
        while not self._take(self._file, fcntl.LOCK_EX):
            # The workers of a process that was killed end a moment after it.
            if time.monotonic() > deadline:
                raise FlatfedError(f"{owner}: another process is running it; wait or stop that one")
            time.sleep(0.05)

    def is_taken(self) -> bool:
        if fcntl is None or not self.path.is_file():
            return False
        file = self._open(os.O_RDONLY)
        try:
            return not self._take(file, fcntl.LOCK_SH)
        finally:
            os.close(file)

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _open(self, flags: int) -> int:
        """A pipe must not make us wait, and what a link leads to is not ours."""
        try:
            file = os.open(self.path, flags | os.O_NONBLOCK | os.O_NOFOLLOW, 0o666)
        except OSError as error:
            if error.errno in {errno.ELOOP, errno.EISDIR, errno.ENXIO}:
                raise RunFolderError(f"{self.path}: not a regular file; remove it") from None
            raise
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise RunFolderError(f"{self.path}: not a regular file; remove it")
        return file

    @staticmethod
    def _take(file: int, kind: int) -> bool:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True
