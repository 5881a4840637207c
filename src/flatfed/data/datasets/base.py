"""The form in which data sets reach the rest of the program, and what their loaders share.

A loader takes `folder`, where data sets live (by default `data_folder()`), and finds its own files below it
or in it. With `verify=True` files must be the published ones, by checksum where one is published, else by
their counts; `verify=False` accepts any files of the right format, for excerpts and tests.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.data.transform import AsStored, Augmentation, ImageTransform, Transform

Folder = Path | str | None
Bytes = NDArray[np.uint8]
Labelled = tuple[Bytes, NDArray[Any]]  # images [n, C, H, W] and their labels [n]


# Tensors have no single truth value to compare by, so two data sets are equal only if identical.
@dataclass(frozen=True, eq=False)
class TrainTest:
    """A classification data set in memory, split into training and test samples."""

    train_inputs: Tensor  # [train samples, ...] as stored: images uint8 [n, C, H, W], the rest as it comes
    train_targets: Tensor  # [train samples] int64, 0..classes-1
    test_inputs: Tensor
    test_targets: Tensor
    classes: int
    name: str
    transform: Transform = AsStored()  # from stored inputs to what a model sees
    groups: NDArray[np.int64] | None = None  # [train samples] number of the natural client
    test_groups: NDArray[np.int64] | None = None  # [test samples] in the same numbering
    group_names: tuple[str, ...] = ()  # of natural client 0, 1, …


@dataclass(frozen=True)
class Place:
    """Where the files of a data set are looked for."""

    name: str
    title: str  # what it is, in a few words
    folders: tuple[str, ...]  # below the data folder; a download goes to the first
    marks: tuple[str, ...]  # patterns of files, one of which shows that this is the folder
    system: tuple[str, ...] = ()  # where the operating system's own packages put the data set
    download: str = ""  # the name to download it by, if not its own
    script: str = ""  # how to make the files, if they cannot be downloaded

    @property
    def remedy(self) -> str:
        return self.script or f"run `flatfed data get {self.download or self.name}`"

    def locate(self, folder: Folder = None) -> Path | None:
        """The folder with the data set's files, None if there is none."""
        root = root_folder(folder)
        candidates = [*(root / each for each in self.folders), root]
        if folder is None:
            candidates += [Path(each) for each in self.system]
        for candidate in candidates:
            if any(path.is_file() for mark in self.marks for path in _matches(candidate, mark)):
                return candidate
        return None

    def find(self, folder: Folder = None) -> Path:
        found = self.locate(folder)
        if found is None:
            expected = root_folder(folder) / self.folders[0]
            wanted = f"no {' or '.join(self.marks)} in {expected}"
            raise FlatfedError(f"{self.name}: {wanted}; {self.remedy} or put the files there")
        return found

    def damaged(self, path: Path, what: str) -> FlatfedError:
        """The error for a file that is not what it should be."""
        again = self.script or f"run `flatfed data get {self.download or self.name} --force`"
        return FlatfedError(f"{path}: {what}; {again} or replace it")

    def read(self, path: Path, checksum: str | None = None, size: int | None = None) -> bytes:
        """A file's content, refused if it is missing or has another size or checksum than given."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            raise FlatfedError(
                f"{path}: not found; {self.remedy} or put the file into {path.parent}"
            ) from None
        except OSError as error:
            raise FlatfedError(f"{path}: cannot be read ({error.strerror}); check the file") from None
        if size is not None and len(content) != size:
            kind = "truncated" if len(content) < size else "too long"
            raise self.damaged(path, f"{kind}, {len(content):,} bytes where {size:,} are published")
        self.check_sum(path, content, checksum)
        return content

    def check_sum(self, path: Path, content: bytes, checksum: str | None) -> None:
        """Refuse content whose checksum differs from one written as `kind:digits`."""
        if checksum is None:
            return
        kind, _, wanted = checksum.partition(":")
        found = hashlib.new(kind, content, usedforsecurity=False).hexdigest()
        if found != wanted:
            raise self.damaged(
                path, f"wrong checksum, {kind} {found[:12]}… where {wanted[:12]}… is published"
            )

    def labels(self, path: Path, labels: NDArray[Any], classes: int) -> NDArray[np.int64]:
        """Labels as int64, refused if one is outside 0 … classes−1."""
        outside = (labels < 0) | (labels >= classes)
        if outside.any():
            first = int(np.argmax(outside))
            raise self.damaged(
                path, f"label {int(labels[first])} of sample {first} is outside 0 … {classes - 1}"
            )
        return labels.astype(np.int64)


def _matches(folder: Path, mark: str) -> Iterable[Path]:
    return folder.glob(mark) if "*" in mark else (folder / mark,)


def data_folder() -> Path:
    """Where data sets live: $FLATFED_DATA, or `flatfed` in the user's cache folder."""
    chosen = os.environ.get("FLATFED_DATA")
    if chosen:
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA")
        return (Path(local) if local else Path.home() / "AppData" / "Local") / "flatfed" / "Cache"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "flatfed"
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "flatfed"


def root_folder(folder: Folder) -> Path:
    return data_folder() if folder is None else Path(folder).expanduser()


def check_choice(option: str, value: object, known: Iterable[str]) -> None:
    """Refuse a value that is not one of the known names."""
    known = list(known)
    if value not in known:
        raise FlatfedError(f"{option} = {value!r}: unknown; {did_you_mean(str(value), known)}")


def brief(error: BaseException) -> str:
    """An error's text as one short line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 120 else text[:117] + "…"


def image_set(
    name: str,
    train: Labelled,
    test: Labelled,
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    augmentation: Augmentation = "none",
) -> TrainTest:
    """uint8 images and their transform; constants not given are those of the training set."""
    check_choice("augmentation", augmentation, get_args(Augmentation))
    channels = train[0].shape[1]
    if mean is None or std is None:
        mean, std = pixel_statistics(train[0])
    for option, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise FlatfedError(
                f"{option} = {list(values)}: the images have {channels} channels; give as many"
            )
    if min(std) <= 0:
        raise FlatfedError(f"std = {list(std)}: must be positive")
    return TrainTest(
        train_inputs=torch.from_numpy(train[0]),
        train_targets=torch.from_numpy(train[1].astype(np.int64)),
        test_inputs=torch.from_numpy(test[0]),
        test_targets=torch.from_numpy(test[1].astype(np.int64)),
        classes=classes,
        name=name,
        transform=ImageTransform(tuple(map(float, mean)), tuple(map(float, std)), augmentation),
    )


def with_groups(
    made: TrainTest, where: str, train: NDArray[Any] | None, test: NDArray[Any] | None
) -> TrainTest:
    """The data set with the natural client of each sample, numbered in the order of their names."""
    if train is None:
        return made
    given = [(train, made.train_targets)] + ([(test, made.test_targets)] if test is not None else [])
    for groups, targets in given:
        if groups.shape != (len(targets),) or groups.dtype.kind not in "iuU":
            raise FlatfedError(
                f"{where}: groups are {groups.dtype} {list(groups.shape)} for {len(targets)} samples; give "
                "each sample one whole number or text"
            )
    names, numbers = np.unique(np.concatenate([groups for groups, _ in given]), return_inverse=True)
    return replace(
        made,
        groups=numbers[: len(train)].astype(np.int64),
        test_groups=None if test is None else numbers[len(train) :].astype(np.int64),
        group_names=tuple(map(str, names.tolist())),
    )


def pixel_statistics(images: Bytes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixel/255 per channel of [n, C, H, W].

    Sums are whole numbers, so the result does not depend on the platform or on the order of the images.
    """
    total = np.zeros(images.shape[1], np.int64)
    squares = np.zeros(images.shape[1], np.int64)
    for start in range(0, len(images), 4096):  # a chunk's squares need twice its memory
        chunk = images[start : start + 4096]
        total += chunk.sum((0, 2, 3), dtype=np.int64)
        squares += np.square(chunk, dtype=np.uint16).sum((0, 2, 3), dtype=np.int64)
    count = images.size // images.shape[1]
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    deviation[deviation == 0] = 255.0  # a constant channel carries nothing; leave it finite
    return tuple((mean / 255).tolist()), tuple((deviation / 255).tolist())
