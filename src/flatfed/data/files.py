"""Reading data files that may hold anything: not a pipe, and never more than fits.

A file, unpacked, and the arrays of a data set of one's own may have `LARGEST` bytes, or as many as the
environment variable FLATFED_LARGEST_FILE says. The limit is held while a file is read or unpacked.
"""

import gzip
import io
import os
import stat
from pathlib import Path
from typing import Protocol

from flatfed.core.errors import FlatfedError

LARGEST = 2**30
LARGEST_READ = 2**25
"""Bytes that an archive may have read at once: tables of contents and names, which its reader trusts."""
CHUNK = 2**20


class UnsoundArchiveError(Exception):
    """An archive that asks for more than any sound one does."""


class _Stream(Protocol):
    def read(self, size: int, /) -> bytes: ...


class RegularFile(io.FileIO):
    """A regular file, opened for reading: a pipe or device might never end."""

    def __init__(self, path: Path) -> None:
        if not stat.S_ISREG(path.stat().st_mode):
            raise FlatfedError(f"{path}: not a regular file; put the data there")
        super().__init__(path)

    def read(self, size: int | None = -1, /) -> bytes:
        return super().read(_bounded(size))


class UnpackedFile(gzip.GzipFile):
    """What a gzip file unpacks to: the headers of an archive in it do not count as its files."""

    _total = 0

    def read(self, size: int | None = -1) -> bytes:
        content = super().read(_bounded(size))
        self._total += len(content)
        if self._total > 2 * largest_file():
            raise UnsoundArchiveError(f"more than {self._total:,} bytes, unpacked")
        return content


def _bounded(size: int | None) -> int:
    if size is not None and size > LARGEST_READ:
        raise UnsoundArchiveError(f"a table or name of {size:,} bytes")
    return -1 if size is None else size


def largest_file() -> int:
    text = os.environ.get("FLATFED_LARGEST_FILE") or str(LARGEST)
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise FlatfedError(
            f"FLATFED_LARGEST_FILE = {text[:40]!r}: must be a number of bytes, for instance {LARGEST}"
        )
    return int(text)


def check_largest(name: object, size: int, largest: int | None = None) -> None:
    """Refuse what has more bytes than `largest`, or than the limit of all files."""
    limit = largest_file()
    if largest is not None and size > largest:
        raise FlatfedError(f"{name}: more than {largest:,} bytes, which is too much for it; replace it")
    if size > limit:
        raise FlatfedError(
            f"{name}: more than {limit:,} bytes, unpacked; if it is meant to be so large, set "
            "FLATFED_LARGEST_FILE to more"
        )


def read_up_to(stream: _Stream, size: int) -> bytearray:
    """At most `size` bytes; takes no more memory than there are."""
    content = bytearray()
    while len(content) < size and (chunk := stream.read(min(CHUNK, size - len(content)))):
        content += chunk
    return content


def read_file(path: Path, largest: int | None = None) -> bytearray:
    """What is in a file, unpacked if it is called .gz."""
    limit = largest_file()
    with RegularFile(path) as file:
        packed = path.suffix == ".gz"
        if not packed:
            check_largest(path, path.stat().st_size, largest)
        content = read_up_to(UnpackedFile(fileobj=file) if packed else file, min(limit, largest or limit) + 1)
    check_largest(path, len(content), largest)
    return content


def expanded(option: str, path: Path | str) -> Path:
    """A path of the user's with ~ replaced."""
    try:
        os.fsencode(path)
        if "\0" not in str(path):
            return Path(path).expanduser()
    # What is no path, and the last for ~somebody who has no home.
    except (TypeError, UnicodeEncodeError, RuntimeError):
        pass
    raise FlatfedError(f"{option} = {str(path)[:200]!r}: there is no such path; give another one")
