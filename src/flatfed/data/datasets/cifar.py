"""What CIFAR-10 and CIFAR-100 share: 32×32 colour images, in the binary or the pickled version.

Pickles can run programs, so they are read by an unpickler that knows nothing but plain values and
arrays of bytes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatfed.data.datasets.base import Bytes, Labelled, Place

Normalisation = Literal["feddyn", "fedswa"]
Constants = tuple[tuple[float, float, float], tuple[float, float, float]]

# The FedSWA, FedNSAM and DynaFed code uses these for both data sets.
SHARED: Constants = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
PIXELS = 3 * 32 * 32


def read_binary(
    place: Place,
    paths: Sequence[Path],
    label_bytes: int,
    classes: int,
    records: int | None,
    checksums: Mapping[str, str],
) -> Labelled:
    """Images and labels of .bin files, whose records are `label_bytes` labels and the pixels.

    The last label is the class. `records` is the published number in each file, None to accept any.
    """
    length = label_bytes + PIXELS

    def read(path: Path) -> tuple[Bytes, Any]:
        size = None if records is None else records * length
        content = np.frombuffer(place.read(path, checksums.get(path.name), size), np.uint8)
        if len(content) == 0 or len(content) % length:
            raise place.damaged(path, f"truncated, {len(content):,} bytes are not records of {length:,}")
        rows = content.reshape(-1, length)
        return rows[:, label_bytes:], place.labels(path, rows[:, label_bytes - 1], classes)

    return _joined(paths, read)


def read_pickled(
    place: Place,
    paths: Sequence[Path],
    label_key: str,
    classes: int,
    records: int | None,
    checksums: Mapping[str, str],
) -> Labelled:
    """Images and labels of pickled batches."""

    def read(path: Path) -> tuple[Bytes, Any]:
        content = place.read(path, checksums.get(path.name))
        try:
            batch = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
            batch = {_text(key): value for key, value in batch.items()}
            array, labels = batch["data"], np.asarray(batch[label_key])
            data = array.values if isinstance(array, _Array) else np.empty(0, np.uint8)
        except _Refused as error:
            raise place.damaged(path, f"its pickle asks for {error}, which no image file needs") from None
        except KeyError as error:
            raise place.damaged(path, f"has no entry {error}") from None
        except Exception:  # bytes that are no pickle can raise anything
            raise place.damaged(path, "truncated or not a pickled batch") from None
        if data.shape[1:] != (PIXELS,):
            raise place.damaged(path, f"has no array `data` of [images, {PIXELS}]")
        if labels.shape != (len(data),) or labels.dtype.kind not in "iu":
            raise place.damaged(path, f"has not one whole number in `{label_key}` for each image")
        if len(data) == 0 or (records is not None and len(data) != records):
            raise place.damaged(path, f"{len(data):,} images where {records or 'some'} are expected")
        return data, place.labels(path, labels, classes)

    return _joined(paths, read)


def _joined(paths: Sequence[Path], read: Callable[[Path], tuple[Bytes, Any]]) -> Labelled:
    # Reading and checksums leave the interpreter lock free.
    with ThreadPoolExecutor(2) as pool:
        parts = list(pool.map(read, paths))
    ends = np.cumsum([len(labels) for _, labels in parts])
    images = np.empty((int(ends[-1]), 3, 32, 32), np.uint8)
    for end, (pixels, labels) in zip(ends, parts, strict=True):
        images[end - len(labels) : end] = pixels.reshape(-1, 3, 32, 32)
    return images, np.concatenate([labels for _, labels in parts])


def _text(key: object) -> object:
    return key.decode("latin-1") if isinstance(key, bytes) else key


class _Refused(Exception):
    """A pickle asked for something other than arrays of bytes."""


class _Type:
    """Stands in for numpy's dtype; images are bytes, which need none of its further state."""

    def __init__(self, code: object, *flags: object) -> None:
        if _text(code) not in {"u1", "|u1"}:
            raise _Refused(f"an array of {_text(code)!r}")

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands in for numpy's arrays, whose own unpickling trusts the file with sizes and types."""

    values: Bytes

    def __setstate__(self, state: Any) -> None:
        _, shape, _, columns_first, content = state
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if columns_first else "C")


def _new_array(kind: object, shape: object, code: object) -> _Array:
    """Stands in for the function that makes the empty array which `__setstate__` fills."""
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into old pickle protocols."""
    if encoding not in {"latin1", "latin-1"}:
        raise _Refused(f"the codec {encoding}")
    return text.encode("latin-1")


class _ArraysOnly(pickle.Unpickler):
    """Loads arrays of bytes and plain values; nothing that a pickle names is looked up or called."""

    _admitted: Mapping[tuple[str, str], Any] = {
        ("numpy", "ndarray"): None,
        ("numpy", "dtype"): _Type,
        ("numpy.core.multiarray", "_reconstruct"): _new_array,
        ("numpy._core.multiarray", "_reconstruct"): _new_array,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._admitted[module, name]
        except KeyError:
            raise _Refused(f"{module}.{name}") from None
