"""The idx format of MNIST and its relatives: a magic number, the shape, then the bytes."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from flatfed.data.datasets.base import Bytes, Labelled
from flatfed.data.datasets.catalog import DatasetInfo

UNSIGNED_BYTE = 8  # the only one of the format's types that these data sets use


def read_labelled(
    info: DatasetInfo, prefix: Path, classes: int, first_label: int = 0, checksums: Mapping[str, str] = {}
) -> Labelled:
    """Images [n, 1, 28, 28] and labels counted from 0, from two files whose paths start with `prefix`."""
    images_path = prefix.with_name(f"{prefix.name}-images-idx3-ubyte")
    labels_path = prefix.with_name(f"{prefix.name}-labels-idx1-ubyte")
    images = _read_idx(info, images_path, 3, checksums)
    labels = _read_idx(info, labels_path, 1, checksums)
    if images.shape[1:] != (28, 28):
        raise info.damaged(images_path, f"images of {list(images.shape[1:])} pixels, not [28, 28]")
    if len(images) != len(labels):
        raise info.damaged(labels_path, f"{len(labels):,} labels for {len(images):,} images")
    numbers = info.checked_labels(labels_path, labels.astype(np.int64) - first_label, classes)
    return Labelled(images[:, None], numbers)


def _read_idx(info: DatasetInfo, path: Path, dimensions: int, checksums: Mapping[str, str]) -> Bytes:
    """The array in the file or in the compressed file beside it; checksums are of the content."""
    checksum = checksums.get(path.name)
    if not path.is_file():
        path = path.with_name(f"{path.name}.gz")
    content = info.read(path)
    if path.suffix == ".gz":
        try:
            content = gzip.decompress(content)
        except (EOFError, OSError, zlib.error):
            raise info.damaged(path, "truncated or not a gzip file") from None
    header = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, UNSIGNED_BYTE, dimensions)):
        raise info.damaged(path, f"starts with {content[:4].hex(' ')}, not as an idx{dimensions}-ubyte file")
    if len(content) < header:
        raise info.damaged(path, f"truncated, {len(content)} bytes")
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    size = header + math.prod(shape)
    info.check_size(path, content, size, f"its header says {size:,}")
    info.check_checksum(path, content, checksum)
    # A copy, because arrays over `bytes` cannot be written to and torch wants ones that can.
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape).copy()
