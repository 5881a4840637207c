"""Fetching data sets from where they are published.

A file is downloaded beside its destination, compared with the published checksum, unpacked there and only
then renamed into place; whatever happens, no half file is left under a data set's name. Archives may hold
nothing but files and folders, none of which leaves the destination, and no more than `files.largest_file()`
bytes together.
"""

import fnmatch
import functools
import http.client
import stat
import tarfile
import tempfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from flatfed.core.errors import FlatfedError, brief, did_you_mean
from flatfed.data.datasets.catalog import CATALOG, DatasetInfo, Download, Folder, root_folder
from flatfed.data.files import CHUNK, RegularFile, UnpackedFile, UnsoundArchiveError, check_largest

MOST_MEMBERS = 400_000  # files in an archive
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
            try:
                _fetch(info, download, root, Path(temporary), report)
            except OSError as error:
                reason = brief(error)
                raise FlatfedError(f"{root}: cannot be written to ({reason}); give another folder") from None
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
            _download(url, path, download.size, functools.partial(report, download.file))
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


def _download(url: str, path: Path, size: int, report: Callable[[int, int | None], None]) -> None:
    """Write what a server sends to a new file, unless it is far more than the published `size`."""
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
            done += len(chunk)
            if done > 2 * size + CHUNK:
                raise _Unreachable(f"sends more than {done:,} bytes where {size:,} are published")
            output.write(chunk)
            report(done, total)
    if total is not None and done != total:
        raise _Unreachable(f"broke off after {done:,} of {total:,} bytes")


class _Member(NamedTuple):
    name: str
    size: int  # as the archive says
    is_folder: bool
    is_special: bool  # a link or device
    open: Callable[[], IO[bytes] | None]


def unpack(archive: Path, folder: Path, contents: tuple[str, ...]) -> None:
    """Unpack the files that match `contents`; refuse an archive with links or names that leave the folder."""

    def unsafe(name: str, reason: str) -> FlatfedError:
        return FlatfedError(f"{archive.name}: holds {name!r}, {reason}; nothing was unpacked, do not use it")

    kept, declared, unpacked = 0, 0, 0
    try:
        for number, (name, size, is_folder, is_special, open_member) in enumerate(_members(archive)):
            if number == MOST_MEMBERS:
                raise UnsoundArchiveError(f"more than {number:,} files")
            declared += size
            check_largest(archive.name, declared)  # what is skipped has to be unpacked as well
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
                while chunk := source.read(CHUNK):
                    unpacked += len(chunk)
                    check_largest(archive.name, unpacked)
                    output.write(chunk)
            kept += 1
    except FlatfedError:
        raise
    except Exception as error:  # archives that are cut off, damaged or encrypted can raise anything
        if isinstance(error, OSError) and error.errno:
            raise  # for the disk, not the archive
        raise FlatfedError(
            f"{archive.name}: not a whole archive ({brief(error)}); delete it if it is yours and try again"
        ) from None
    if not kept:
        raise FlatfedError(f"{archive.name}: has no {' or '.join(contents)}; it is another archive")


def _members(archive: Path) -> Iterator[_Member]:
    with RegularFile(archive) as file:
        if not zipfile.is_zipfile(archive):
            yield from _tar_members(file)
            return
        with zipfile.ZipFile(file) as zipped:
            for entry in zipped.infolist():
                special = stat.S_IFMT(entry.external_attr >> 16) not in {0, stat.S_IFREG, stat.S_IFDIR}
                open_entry = functools.partial(zipped.open, entry)
                yield _Member(entry.filename, entry.file_size, entry.is_dir(), special, open_entry)


def _tar_members(file: RegularFile) -> Iterator[_Member]:
    packed = file.read(2) == b"\x1f\x8b"
    file.seek(0)
    stream = UnpackedFile(fileobj=file) if packed else file
    with tarfile.open(fileobj=stream, mode="r:") as tar:
        for item in tar:
            special = not (item.isreg() or item.isdir())
            open_item = functools.partial(tar.extractfile, item)
            yield _Member(item.name, item.size, item.isdir(), special, open_item)


def _kept_parts(parts: tuple[str, ...], contents: tuple[str, ...]) -> tuple[str, ...]:
    """A path from the first part on that matches one of `contents`; empty if it is left out."""
    if any(part.startswith(".") for part in parts):
        return ()  # what an operating system leaves in archives
    for position, part in enumerate(parts):
        if any(fnmatch.fnmatchcase(part, pattern) for pattern in contents):
            return parts[position:]
    return ()
