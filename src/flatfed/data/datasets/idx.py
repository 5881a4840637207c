"""The idx format of MNIST and its relatives: a magic number, the shape, then the bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path

import numpy as np

from flatfed.data.datasets.base import Bytes, Folder, Labelled, Place, TrainTest, image_set

UNSIGNED_BYTE = 8  # the only one of the format's types that these data sets use


def read_idx(place: Place, folder: Path, name: str, dimensions: int, checksum: str | None = None) -> Bytes:
    """The array in `folder/name` or `folder/name.gz`; the checksum is that of the unpacked content."""
    path = folder / name
    if not path.is_file():
        path = folder / f"{name}.gz"
    content = place.read(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error):
            raise place.damaged(path, "truncated or not a gzip file") from None
    header = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, UNSIGNED_BYTE, dimensions)):
        raise place.damaged(path, f"starts with {content[:4].hex(' ')}, not as an idx{dimensions}-ubyte file")
    if len(content) < header:
        raise place.damaged(path, f"truncated, {len(content)} bytes")
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    expected = header + math.prod(shape)
    if len(content) != expected:
        kind = "truncated" if len(content) < expected else "too long"
        raise place.damaged(path, f"{kind}, {len(content):,} bytes where its header says {expected:,}")
    place.check_sum(path, content, checksum)
    # A copy, because arrays over `bytes` cannot be written to and torch wants ones that can.
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()


def read_labelled(
    place: Place, folder: Path, names: tuple[str, str], classes: int, first: int, checksums: dict[str, str]
) -> Labelled:
    """Images [n, 1, 28, 28] and labels counted from 0, from the files named (images, labels)."""
    images = read_idx(place, folder, names[0], 3, checksums.get(names[0]))
    labels = read_idx(place, folder, names[1], 1, checksums.get(names[1]))
    if images.shape[1:] != (28, 28):
        raise place.damaged(folder / names[0], f"images of {list(images.shape[1:])} pixels, not [28, 28]")
    if len(images) != len(labels):
        raise place.damaged(folder / names[1], f"{len(labels):,} labels for {len(images):,} images")
    return images[:, None], place.labels(folder / names[1], labels.astype(np.int64) - first, classes)


def load_ten_classes(
    place: Place, folder: Folder, checksums: dict[str, str], mean: float, std: float
) -> TrainTest:
    """A data set in MNIST's four files."""
    found = place.find(folder)
    train, test = (
        read_labelled(
            place, found, (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"), 10, 0, checksums
        )
        for part in ("train", "t10k")
    )
    return image_set(place.name, train, test, 10, (mean,), (std,))
