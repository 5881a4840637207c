"""Fetching data sets from where they are published.

A file is downloaded beside its destination, compared with the published checksum, unpacked there and only
then renamed into place; whatever happens, no half file is left under a data set's name. Archives may hold
nothing but files and folders, none of which leaves the destination.
"""

import fnmatch
import functools
import gzip
import http.client
import shutil
import stat
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.data.datasets.catalog import CATALOG, DatasetInfo, Download, Folder, brief, root_folder

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without an answer

ReportProgress = Callable[[str, int, int | None], None]  # the step, bytes so far, bytes in all if known


def get(name: str, folder: Folder = None, report: ReportProgress = lambda *_: None) -> Path:
    """Fetch a data set into the data folder and return the folder of its files.

    A published file that already lies in the data folder is used instead of a download.
    """
    info = CATALOG.get(name)
    if info is None:
        downloadable = [other.name for other in CATALOG.values() if other.downloads]
        raise FlatfedError(f"{name}: not a data set to download; {did_you_mean(name, downloadable)}")
    if not info.downloads:
        raise FlatfedError(f"{name}: cannot be downloaded; {info.script or info.origin}")
    root = root_folder(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlatfedError(f"{root}: cannot be made ({error.strerror}); give another folder") from None
    for download in info.downloads:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as temporary:
            _fetch(info, download, root, Path(temporary), report)
    return root / info.folders[0]


def _fetch(
    info: DatasetInfo, download: Download, root: Path, temporary: Path, report: ReportProgress
) -> None:
    destination, complete = root / info.folders[0], temporary / "complete"
    complete.mkdir()
    if download.contents:
        archive = root / download.file
        if not archive.is_file():
            archive = temporary / download.file
            _download_any(info, download, root, archive, report)
        elif mismatch := download.mismatch(archive):
            raise FlatfedError(f"{archive}: {mismatch}; delete it and run this again")
        report(f"unpacking {download.file}", 0, None)
        unpack(archive, complete, download.contents)
    else:
        present = destination / download.file
        if present.is_file() and download.checksum and not download.mismatch(present):
            return
        _download_any(info, download, destination, complete / download.file, report)
    for path in sorted(path for path in complete.rglob("*") if path.is_file()):
        target = destination / path.relative_to(complete)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


def _download_any(
    info: DatasetInfo, download: Download, folder: Path, path: Path, report: ReportProgress
) -> None:
    """Download from the first address that answers; `folder` is where a user may put the file instead."""
    reasons = []
    for url in download.urls:
        try:
            _download(url, path, functools.partial(report, download.file))
        except _Unreachable as error:
            reasons.append(f"{url} {error}")
            path.unlink(missing_ok=True)
            continue
        if mismatch := download.mismatch(path):
            raise FlatfedError(f"{url}: {mismatch}; nothing was kept; try again later")
        return
    raise FlatfedError(
        f"{info.name}: {'; '.join(reasons)}; fetch {download.file} elsewhere, put it into {folder} and run "
        f"`flatfed data get {info.name}` again"
    )


class _Unreachable(Exception):
    """A file that a server does not give, and why."""


def _download(url: str, path: Path, report: Callable[[int, int | None], None]) -> None:
    """Write what a server sends to a new file."""
    done = 0
    request = urllib.request.Request(url, headers={"User-Agent": "flatfed"})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        raise _Unreachable(f"answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Unreachable(f"cannot be reached ({brief(getattr(error, 'reason', error))})") from None
    with closing(response), path.open("xb") as output:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        report(0, total)
        while True:
            try:
                chunk = response.read(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _Unreachable(f"broke off after {done:,} bytes ({brief(error)})") from None
            if not chunk:
                break
            output.write(chunk)
            done += len(chunk)
            report(done, total)
    if total is not None and done != total:
        raise _Unreachable(f"broke off after {done:,} of {total:,} bytes")


# An entry of an archive: its name, whether it is a folder, whether a link or device, and how to open it.
_Member = tuple[str, bool, bool, Callable[[], IO[bytes] | None]]
# What the standard library raises for archives that are cut off, damaged or encrypted.
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, RuntimeError)


def unpack(archive: Path, folder: Path, contents: tuple[str, ...]) -> None:
    """Unpack the files that match `contents`; refuse an archive with links or names that leave the folder."""

    def unsafe(name: str, reason: str) -> FlatfedError:
        return FlatfedError(f"{archive.name}: holds {name!r}, {reason}; nothing was unpacked, do not use it")

    kept = 0
    try:
        for name, is_folder, is_special, open_member in _members(archive):
            path = PurePosixPath(name)
            if is_special:
                raise unsafe(name, "a link or device")
            if path.is_absolute() or ".." in path.parts or any(sign in name for sign in "\\:\0"):
                raise unsafe(name, "which leads out of its folder")
            parts = _kept_parts(path.parts, contents)
            if is_folder or not parts:
                continue
            target = folder.joinpath(*parts)
            target.parent.mkdir(parents=True, exist_ok=True)
            source = open_member()
            if source is None or target.exists():
                raise unsafe(name, "a second time")
            with source, target.open("xb") as output:
                shutil.copyfileobj(source, output, CHUNK)
            kept += 1
    except _BROKEN as error:
        raise FlatfedError(
            f"{archive.name}: not a whole archive ({brief(error)}); delete it if it is yours and try again"
        ) from None
    if not kept:
        raise FlatfedError(f"{archive.name}: has no {' or '.join(contents)}; it is another archive")


def _members(archive: Path) -> Iterator[_Member]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                special = stat.S_IFMT(entry.external_attr >> 16) not in {0, stat.S_IFREG, stat.S_IFDIR}
                yield entry.filename, entry.is_dir(), special, functools.partial(zipped.open, entry)
    else:
        with tarfile.open(archive) as tar:
            for item in tar:
                special = not (item.isreg() or item.isdir())
                yield item.name, item.isdir(), special, functools.partial(tar.extractfile, item)


def _kept_parts(parts: tuple[str, ...], contents: tuple[str, ...]) -> tuple[str, ...]:
    """A path from the first part on that matches one of `contents`; empty if it is left out."""
    if any(part.startswith(".") for part in parts):
        return ()  # what an operating system leaves in archives
    for position, part in enumerate(parts):
        if any(fnmatch.fnmatchcase(part, pattern) for pattern in contents):
            return parts[position:]
    return ()
