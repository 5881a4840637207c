"""Fetching data sets from where they are published.

A file is downloaded beside its destination, compared with the published checksum, unpacked there and only
then renamed into place; whatever happens, no half file is left under a data set's name. Archives may hold
nothing but files and folders, none of which leaves the destination.
"""

from __future__ import annotations

import fnmatch
import gzip
import hashlib
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
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, NamedTuple

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.data.datasets import PLACES
from flatfed.data.datasets.base import Folder, brief, root_folder

CHUNK = 1 << 20
TIMEOUT = 30  # seconds without an answer

Watch = Callable[[str, int, int | None], None]  # what is going on, bytes so far, bytes in all if known


@dataclass(frozen=True)
class Source:
    """A published file and what becomes of it."""

    urls: tuple[str, ...]  # the same file, tried in order
    checksum: str | None  # `kind:digits` of the file; None if its publisher gives none
    size: int  # bytes
    folder: str  # below the data folder
    # Of an archive: patterns of the names that go directly into the folder, without what is above them in
    # the archive; everything else in it is left out. Empty: the file itself goes into the folder.
    contents: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.urls[0].rsplit("/", 1)[-1]


def _idx_files(folder: str, bases: tuple[str, ...], files: dict[str, tuple[str, int]]) -> tuple[Source, ...]:
    return tuple(
        Source(tuple(base + name for base in bases), checksum, size, folder)
        for name, (checksum, size) in files.items()
    )


SOURCES: dict[str, tuple[Source, ...]] = {
    "cifar10": (
        Source(
            ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
            "md5:c32a1d4ab5d03f1284b67883e8d87530",
            170_052_171,
            "cifar-10-batches-bin",
            ("*.bin", "*.txt"),
        ),
    ),
    "cifar100": (
        Source(
            ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
            "md5:03b5dce01913d631647c71ecec9e9cb8",
            168_513_733,
            "cifar-100-binary",
            ("*.bin", "*.txt"),
        ),
    ),
    "mnist": _idx_files(
        "mnist",
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
        ),
        {
            "train-images-idx3-ubyte.gz": ("md5:f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            "train-labels-idx1-ubyte.gz": ("md5:d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            "t10k-images-idx3-ubyte.gz": ("md5:9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            "t10k-labels-idx1-ubyte.gz": ("md5:ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        },
    ),
    "fashion_mnist": _idx_files(
        "fashion-mnist",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            "train-images-idx3-ubyte.gz": ("md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            "train-labels-idx1-ubyte.gz": ("md5:25c81989df183df01b3e8a0aad5dffbe", 29_515),
            "t10k-images-idx3-ubyte.gz": ("md5:bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            "t10k-labels-idx1-ubyte.gz": ("md5:bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        },
    ),
    "emnist": (
        Source(
            ("https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",),
            "md5:58c8d27c78d21e728a6bc7b3cc06412e",
            561_753_746,
            "emnist",
            ("emnist-*",),
        ),
    ),
    "shakespeare": (
        Source(
            ("https://www.ibiblio.org/bosak/xml/eg/shaks200.zip",),
            None,
            2_200_000,
            "shakespeare",
            ("*.xml",),
        ),
    ),
    "tiny_imagenet": (
        Source(
            ("http://cs231n.stanford.edu/tiny-imagenet-200.zip",),
            "md5:90528d7ca1a48142e341f4ef8d21d0de",
            248_100_043,
            "tiny-imagenet-200",
            ("train", "val", "wnids.txt", "words.txt"),
        ),
    ),
    "cinic10": (
        Source(
            ("https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",),
            "md5:6ee4d0c996905fe93221de577967a372",
            687_544_992,
            "CINIC-10",
            ("train", "valid", "test"),
        ),
    ),
}


def _unwatched(what: str, done: int, total: int | None) -> None:
    pass


def get(name: str, folder: Folder = None, watch: Watch = _unwatched) -> Path:
    """Fetch a data set into the data folder and return the folder of its files.

    A published file that already lies in the data folder is used instead of a download.
    """
    sources = _sources(name)
    root = root_folder(folder)
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FlatfedError(f"{root}: cannot be made ({error.strerror}); give another folder") from None
    for source in sources:
        with tempfile.TemporaryDirectory(prefix=".download-", dir=root) as temporary:
            _fetch(name, source, root, Path(temporary), watch)
    return root / sources[0].folder


def _sources(name: str) -> tuple[Source, ...]:
    if name in PLACES:
        name = PLACES[name].download or name
    if name in SOURCES:
        return SOURCES[name]
    if name in PLACES:
        raise FlatfedError(f"{name}: cannot be downloaded; {PLACES[name].remedy}")
    raise FlatfedError(f"{name}: not a data set to download; {did_you_mean(name, SOURCES)}")


def _fetch(name: str, source: Source, root: Path, temporary: Path, watch: Watch) -> None:
    destination = root / source.folder
    made = temporary / "made"
    made.mkdir()
    if not source.contents:
        present = destination / source.file
        if (
            present.is_file()
            and source.checksum
            and _agrees(source.checksum, _digest(present, source.checksum))
        ):
            return
        _download_any(name, source, destination, made / source.file, watch)
    else:
        archive = root / source.file
        if not archive.is_file():
            archive = temporary / source.file
            _download_any(name, source, root, archive, watch)
        elif source.checksum and not _agrees(source.checksum, found := _digest(archive, source.checksum)):
            raise _wrong_checksum(str(archive), source.checksum, found, "delete it and run this again")
        watch(f"unpacking {source.file}", 0, None)
        unpack(archive, made, source.contents)
    for path in sorted(path for path in made.rglob("*") if path.is_file()):
        target = destination / path.relative_to(made)
        target.parent.mkdir(parents=True, exist_ok=True)
        path.replace(target)


def _download_any(name: str, source: Source, folder: Path, file: Path, watch: Watch) -> None:
    """Download from the first address that answers; `folder` is where a user may put the file instead."""
    reasons = []
    for url in source.urls:
        try:
            found = _download(url, file, source, watch)
        except _Unreachable as error:
            reasons.append(f"{url} {error}")
            file.unlink(missing_ok=True)
            continue
        if source.checksum and not _agrees(source.checksum, found):
            raise _wrong_checksum(url, source.checksum, found, "nothing was kept; try again later")
        return
    raise FlatfedError(
        f"{name}: {'; '.join(reasons)}; fetch {source.file} elsewhere, put it into {folder} and run "
        f"`flatfed data get {name}` again"
    )


class _Unreachable(Exception):
    """A file that a server does not give, and why."""


def _download(url: str, file: Path, source: Source, watch: Watch) -> str:
    """Write what a server sends to a new file and return its checksum."""
    digest = _new_digest(source.checksum)
    done = 0
    request = urllib.request.Request(url, headers={"User-Agent": "flatfed"})
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        raise _Unreachable(f"answers {error.code} {error.reason}") from None
    except (OSError, http.client.HTTPException) as error:
        raise _Unreachable(f"cannot be reached ({brief(getattr(error, 'reason', error))})") from None
    with closing(response), file.open("xb") as output:
        length = response.headers.get("Content-Length")
        total = int(length) if length and length.isdecimal() else None
        watch(source.file, 0, total)
        while True:
            try:
                chunk = response.read(CHUNK)
            except (OSError, http.client.HTTPException) as error:
                raise _Unreachable(f"broke off after {done:,} bytes ({brief(error)})") from None
            if not chunk:
                break
            output.write(chunk)
            digest.update(chunk)
            done += len(chunk)
            watch(source.file, done, total)
    if total is not None and done != total:
        raise _Unreachable(f"broke off after {done:,} of {total:,} bytes")
    return digest.hexdigest()


def _new_digest(checksum: str | None) -> hashlib._Hash:
    return hashlib.new((checksum or "sha256:").partition(":")[0], usedforsecurity=False)


def _digest(path: Path, checksum: str | None) -> str:
    digest = _new_digest(checksum)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _agrees(checksum: str, found: str) -> bool:
    return found == checksum.partition(":")[2]


def _wrong_checksum(what: str, checksum: str, found: str, fix: str) -> FlatfedError:
    kind, _, wanted = checksum.partition(":")
    return FlatfedError(
        f"{what}: wrong checksum, {kind} {found[:12]}… where {wanted[:12]}… is published; {fix}"
    )


class _Member(NamedTuple):
    """A file in an archive."""

    name: str
    open: Callable[[], IO[bytes] | None]


# What the standard library raises for archives that are cut off, damaged or encrypted.
_BROKEN = (tarfile.TarError, zipfile.BadZipFile, gzip.BadGzipFile, EOFError, zlib.error, RuntimeError)


def unpack(archive: Path, into: Path, contents: tuple[str, ...]) -> None:
    """Unpack the wanted files of a .zip or .tar archive; refuse one that has links or leaves its folder."""
    kept = 0
    try:
        for member in _zip_members(archive) if zipfile.is_zipfile(archive) else _tar_members(archive):
            wanted = _wanted_part(_safe_parts(archive, member.name), contents)
            if wanted is None:
                continue
            target = into.joinpath(*wanted)
            target.parent.mkdir(parents=True, exist_ok=True)
            opened = member.open()
            if opened is None or target.exists():
                raise _unsafe(archive, member.name, "a second time")
            with opened as content, target.open("xb") as output:
                shutil.copyfileobj(content, output, CHUNK)
            kept += 1
    except (
        tarfile.TarError,
        zipfile.BadZipFile,
        gzip.BadGzipFile,
        EOFError,
        zlib.error,
        RuntimeError,
    ) as error:
        raise FlatfedError(
            f"{archive.name}: not a whole archive ({brief(error)}); delete it if it is yours and try again"
        ) from None
    if not kept:
        raise FlatfedError(f"{archive.name}: has no {' or '.join(contents)}; it is another archive")


def _tar_members(archive: Path) -> Iterator[_Member]:
    with tarfile.open(archive) as tar:
        for member in tar:
            if not (member.isreg() or member.isdir()):
                raise _unsafe(archive, member.name, "a link or device")
            if member.isreg():
                yield _Member(member.name, lambda member=member: tar.extractfile(member))  # type: ignore[misc]
            else:
                _safe_parts(archive, member.name)


def _zip_members(archive: Path) -> Iterator[_Member]:
    with zipfile.ZipFile(archive) as zipped:
        for member in zipped.infolist():
            mode = stat.S_IFMT(member.external_attr >> 16)
            if mode not in {0, stat.S_IFREG, stat.S_IFDIR}:
                raise _unsafe(archive, member.filename, "a link or device")
            if member.is_dir():
                _safe_parts(archive, member.filename)
            else:
                yield _Member(member.filename, lambda member=member: zipped.open(member))  # type: ignore[misc]


def _safe_parts(archive: Path, name: str) -> tuple[str, ...]:
    """The parts of a member's path, refused if following them could leave the destination."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name or "\0" in name:
        raise _unsafe(archive, name, "which leads out of its folder")
    return path.parts


def _unsafe(archive: Path, name: str, what: str) -> FlatfedError:
    return FlatfedError(f"{archive.name}: holds {name!r}, {what}; nothing was unpacked, do not use it")


def _wanted_part(parts: tuple[str, ...], contents: tuple[str, ...]) -> tuple[str, ...] | None:
    if any(part.startswith(".") for part in parts):
        return None  # what an operating system leaves in archives
    for position, part in enumerate(parts):
        if any(fnmatch.fnmatchcase(part, pattern) for pattern in contents):
            return parts[position:]
    return None
