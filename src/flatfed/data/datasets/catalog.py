"""The registry of data sets: what each one is, where its files lie and how to get them.

A loader takes `folder`, where data sets live (by default `data_folder()`), and finds its own files below it
or in it. With `verify=True` the files must be the published ones, by checksum where one is published, else by
their counts; `verify=False` accepts any files of the right format, for excerpts and tests.
"""

import functools
import gzip
import hashlib
import inspect
import os
import sys
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, ValidationError, validate_call

from flatfed.core.errors import FlatfedError, brief, one_line
from flatfed.data.datasets.base import TrainTest
from flatfed.data.files import expanded, read_file

Folder = Path | str | None
Options = ParamSpec("Options")
Loader = Callable[Options, TrainTest]


@dataclass(frozen=True)
class Download:
    """A published file."""

    urls: tuple[str, ...]  # of the same file, tried in order
    checksum: str | None  # `kind:digits` of the file; None if its publisher gives none
    size: int  # bytes
    # Of an archive: patterns of the names that go directly into the data set's folder, without what is above
    # them in the archive; everything else is left out. Empty: the file itself goes into the folder.
    contents: tuple[str, ...] = ()

    @property
    def file(self) -> str:
        return self.urls[0].rsplit("/", 1)[-1]

    def mismatch(self, path: Path) -> str:
        """How a file differs from the published one; empty if it does not."""
        return _checksum_mismatch(self.checksum, path)


def archive(url: str, checksum: str | None, size: int, *contents: str) -> tuple[Download]:
    """The downloads of a data set that is published as one archive."""
    return (Download((url,), checksum, size, contents),)


@dataclass(frozen=True)
class DatasetInfo:
    """What a data set is, and where its files are looked for and downloaded from."""

    name: str
    title: str  # what it is, in a few words
    origin: str = ""  # of a data set that has no files in the data folder: where it comes from
    own_clients: bool = (
        False  # whether it is divided among its natural clients unless a config says otherwise
    )
    folders: tuple[str, ...] = ()  # below the data folder; downloads go to the first
    markers: tuple[str, ...] = ()  # patterns of files, one of which shows that this is the folder
    system_folders: tuple[str, ...] = ()  # where the operating system's own packages put the data set
    downloads: tuple[Download, ...] = ()
    script: str = ""  # how to make the files, if they cannot be downloaded
    # Where one folder holds several versions: the options that load each, by the pattern of its files.
    versions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [option for option in ("folders", "markers") if not getattr(self, option)]
        if not (self.downloads or self.script):
            missing.append("downloads or script")
        if missing and not self.origin:
            raise ValueError(f"data set {self.name!r}: {', '.join(missing)} missing; give them, or an origin")

    @property
    def remedy(self) -> str:
        return self.script or f"run `flatfed data get {self.name}`"

    def locate(self, folder: Folder = None) -> Path | None:
        """The folder with the data set's files, None if there is none."""
        root = root_folder(folder)
        candidates = [*(root / name for name in self.folders), root]
        if folder is None:
            candidates += map(Path, self.system_folders)
        for candidate in candidates:
            if any(path.is_file() for marker in self.markers for path in candidate.glob(marker)):
                return candidate
        return None

    def find(self, folder: Folder = None) -> Path:
        located = self.locate(folder)
        if located is None:
            missing = f"no {' or '.join(self.markers)} in {root_folder(folder) / self.folders[0]}"
            raise FlatfedError(f"{self.name}: {missing}; {self.remedy} or put the files there")
        return located

    def damaged(self, path: Path, problem: str) -> FlatfedError:
        """The error for a file that is not what it should be."""
        remedy = self.script or f"run `flatfed data get {self.name} --force`"
        return FlatfedError(f"{path}: {problem}; {remedy} or replace it")

    def read(
        self, path: Path, checksum: str | None = None, size: int | None = None, largest: int | None = None
    ) -> bytearray:
        """What is in a file, unpacked if it is called .gz; refused if it is not as published."""
        try:
            content = read_file(path, largest)
        except (gzip.BadGzipFile, EOFError, zlib.error):
            raise self.damaged(path, "truncated or not a gzip file") from None
        except FileNotFoundError:
            raise FlatfedError(
                f"{path}: not found; {self.remedy} or put the file into {path.parent}"
            ) from None
        except OSError as error:
            raise FlatfedError(f"{path}: cannot be read ({error.strerror}); check the file") from None
        if size is not None:
            self.check_size(path, content, size, f"{size:,} are published")
        if mismatch := _checksum_mismatch(checksum, content):
            raise self.damaged(path, mismatch)
        return content

    def check_size(self, path: Path, content: bytearray, size: int, expectation: str) -> None:
        if len(content) != size:
            problem = "truncated" if len(content) < size else "too long"
            raise self.damaged(path, f"{problem}, {len(content):,} bytes where {expectation}")

    def check_count(self, path: Path, count: int, published: int, unit: str = "images") -> None:
        if count != published:
            raise self.damaged(path, f"{count:,} {unit} where {published:,} are published")

    def checked_labels(self, path: Path, labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
        """Labels as int64, refused if one is outside 0 … classes−1."""
        outside = (labels < 0) | (labels >= classes)
        if outside.any():
            first = int(np.argmax(outside))
            label = int(labels[first])
            raise self.damaged(path, f"label {label} of sample {first} is outside 0 … {classes - 1}")
        return labels.astype(np.int64)


DATASETS: dict[str, Callable[..., TrainTest]] = {}  # loaders
CATALOG: dict[str, DatasetInfo] = {}


def checked_options(name: str) -> Callable[[Loader[Options]], Loader[Options]]:
    """Make a loader refuse options of another type than it declares."""

    def add(load: Loader[Options]) -> Loader[Options]:
        validated = validate_call(config=ConfigDict(strict=True, allow_inf_nan=False))(load)

        @functools.wraps(load)
        def checked(*values: Options.args, **options: Options.kwargs) -> TrainTest:
            try:
                return validated(*values, **options)
            except ValidationError as error:
                raise FlatfedError(one_line(error, inspect.signature(load).parameters, name)) from None
            except OSError as error:
                raise FlatfedError(
                    f"{name}: {error.filename}: cannot be read ({brief(error)}); check the file"
                ) from None
            except MemoryError:
                raise FlatfedError(
                    f"{name}: its data need more memory than there is; use fewer or smaller files"
                ) from None

        return checked

    return add


def register(info: DatasetInfo) -> Callable[[Loader[Options]], Loader[Options]]:
    """List a data set in `CATALOG` and the decorated function, which loads it, in `DATASETS`."""

    def add(load: Loader[Options]) -> Loader[Options]:
        if info.name in DATASETS:
            raise ValueError(f"data set {info.name!r} is already registered; choose another name")
        if "folder" not in inspect.signature(load).parameters:
            raise ValueError(
                f"data set {info.name!r}: its loader takes no `folder`; add `folder: Folder = None`"
            )
        DATASETS[info.name], CATALOG[info.name] = checked_options(info.name)(load), info
        return DATASETS[info.name]

    return add


def data_folder() -> Path:
    """Where data sets live: $FLATFED_DATA, or `flatfed` in the user's cache folder."""
    if chosen := os.environ.get("FLATFED_DATA"):
        return expanded("FLATFED_DATA", chosen)
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local") / "flatfed" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "flatfed"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "flatfed"


def root_folder(folder: Folder) -> Path:
    return data_folder() if folder is None else expanded("folder", folder)


def _checksum_mismatch(checksum: str | None, source: bytearray | Path) -> str:
    """How a file or its content differs from its published checksum `kind:digits`; empty if it does not."""
    if checksum is None:
        return ""
    kind, _, published = checksum.partition(":")
    digest = hashlib.new(kind, usedforsecurity=False)
    if isinstance(source, Path):
        with source.open("rb") as file:
            hashlib.file_digest(file, lambda: digest)
    else:
        digest.update(source)
    actual = digest.hexdigest()
    if actual == published:
        return ""
    return f"wrong checksum, {kind} {actual[:12]}… where {published[:12]}… is published"
