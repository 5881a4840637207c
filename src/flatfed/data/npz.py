"""Numpy archives of plain numbers and texts, read with a limit and without unpickling anything."""

import io
import math
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatfed.core.errors import FlatfedError, brief
from flatfed.data.files import RegularFile, check_largest, read_up_to

Array = NDArray[Any]


def read_npz(path: Path, choose: Callable[[list[str]], Sequence[str]]) -> dict[str, Array]:
    """The arrays that are chosen from all names; each header is looked at before there is room for it."""
    try:
        with RegularFile(path) as file:
            check_largest(path, path.stat().st_size)
            if file.read(6) == np.lib.format.MAGIC_PREFIX:
                raise FlatfedError(f"{path}: one array, not an archive; save it with numpy.savez")
            with zipfile.ZipFile(file) as archive:
                entries = [name for name in archive.namelist() if name.endswith(".npy")]
                present = [name.removesuffix(".npy") for name in entries]
                arrays: dict[str, Array] = {}
                for name in choose(present):
                    if (count := present.count(name)) > 1:
                        raise ValueError(f"{count} arrays {name}")
                    arrays[name] = _read_array(path, archive, name, arrays.values())
                return arrays
    except FileNotFoundError:
        raise FlatfedError(f"{path}: not found; save it with numpy.savez or give another file") from None
    except (FlatfedError, MemoryError):
        raise
    except Exception as error:  # damaged archives and headers can raise anything
        raise FlatfedError(f"{path}: not a readable .npz archive ({brief(error)}); save it again") from None


def _read_array(path: Path, archive: zipfile.ZipFile, name: str, others: Iterable[Array]) -> Array:
    entry = archive.getinfo(f"{name}.npy")
    if entry.flag_bits & 1 or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError(f"{name} is encrypted or compressed in a way that numpy does not use")
    with archive.open(entry) as stream:
        start = io.BytesIO(stream.read(2**14))  # a header says how long it is, but not for more than this
        version = np.lib.format.read_magic(start)
        if version > (2, 0):
            raise ValueError(f"{name} has the format {version[0]}.{version[1]}, which only records need")
        shape, columns_first, dtype = (
            np.lib.format.read_array_header_1_0(start)
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0(start)
        )
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which are not unpickled; store numbers")
        if dtype.kind not in "fiubU" or dtype.itemsize == 0 or min(shape, default=0) < 0:
            raise ValueError(f"{name} is {dtype} {list(shape)}")
        count, size = math.prod(shape), math.prod(shape) * dtype.itemsize
        # Numbers other than bytes and floats are widened to eight bytes.
        widened = count * max(dtype.itemsize, 1 if dtype == np.uint8 or dtype.kind == "f" else 8)
        check_largest(f"{path}: {name} and what is before it", widened + sum(each.nbytes for each in others))
        content = bytearray(start.read())
        content += read_up_to(stream, size + 1 - len(content))
    if len(content) != size:
        raise ValueError(f"{name} has not the {size:,} bytes that its header says")
    return np.ndarray(shape, dtype, content, order="F" if columns_first else "C")
