"""Pickles of plain values and arrays of bytes.

Pickles can run programs, so nothing that one names is looked up or called: stand-ins take the place of the
few names that such a file needs, and every other name is refused.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import numpy as np

from flatfed.data.datasets.base import Bytes


class UnsafePickleError(Exception):
    """A pickle names something other than arrays of bytes."""


def load_pickle(content: bytes) -> dict[object, Any]:
    """A pickled dictionary, its keys as text; bytes that are no pickle can raise anything."""
    values = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    return {_text(key): value.values if isinstance(value, _Array) else value for key, value in values.items()}


def _text(key: object) -> object:
    return key.decode("latin-1") if isinstance(key, bytes) else key


class _Type:
    """Stands in for numpy's dtype; bytes need none of its further state."""

    def __init__(self, code: object, *flags: object) -> None:
        if _text(code) not in {"u1", "|u1"}:
            raise UnsafePickleError(f"an array of {_text(code)!r}")

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
        raise UnsafePickleError(f"the codec {encoding}")
    return text.encode("latin-1")


class _ArraysOnly(pickle.Unpickler):
    _stand_ins: Mapping[tuple[str, str], Any] = {
        ("numpy", "ndarray"): None,
        ("numpy", "dtype"): _Type,
        ("numpy.core.multiarray", "_reconstruct"): _new_array,
        ("numpy._core.multiarray", "_reconstruct"): _new_array,
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._stand_ins[module, name]
        except KeyError:
            raise UnsafePickleError(f"{module}.{name}") from None
