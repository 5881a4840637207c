"""Columns of Arrow tables, as parquet files and Hugging Face's data sets have them."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from flatfed.core.errors import shown
from flatfed.data.tables import MISSING, Column, Origin, Places, Table, Texts, plain_numbers, sized


def arrow_table(
    source: str,
    table: Any,
    names: Sequence[str],
    texts: Collection[str] = (),
    places: Places | None = None,
) -> Table:
    """Some columns of an Arrow table; those in `texts` are texts even if they are numbers."""
    columns = {
        name: _column(Origin(source, name, places), table.column(name), name in texts) for name in names
    }
    return sized(Table(source, columns, places))


def _column(origin: Origin, column: Any, is_text: bool) -> Column:
    import pyarrow  # noqa: PLC0415 (an extra)

    array, shape = _without_lists(origin, _combined(column))
    types = pyarrow.types
    if types.is_string(array.type) or types.is_large_string(array.type) or is_text:
        if shape:
            raise origin.error("lists of texts; turn them into numbers first")
        coded = array.cast(pyarrow.string()).dictionary_encode()
        codes = coded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        return Texts(codes, coded.dictionary.to_pylist())
    if types.is_decimal(array.type):
        array = array.cast(pyarrow.float64())
    if not (types.is_integer(array.type) or types.is_floating(array.type) or types.is_boolean(array.type)):
        raise origin.error(f"its values are {shown(str(array.type))}; give numbers or texts")
    return plain_numbers(origin, array.to_numpy(zero_copy_only=False).reshape(len(column), *shape))


def _without_lists(origin: Origin, array: Any) -> tuple[Any, list[int]]:
    """The values in lists of lists behind each other, and how long the lists are, from outside to inside."""
    import pyarrow  # noqa: PLC0415 (an extra)

    types, shape = pyarrow.types, list[int]()
    while True:
        if isinstance(array.type, pyarrow.ExtensionType):
            array = array.storage
        each = max(1, math.prod(shape))
        if array.null_count:
            raise origin.error(
                MISSING, int(np.argmax(array.is_null().to_numpy(zero_copy_only=False))) // each
            )
        if types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if types.is_fixed_size_list(array.type):
            shape.append(array.type.list_size)
        elif types.is_list(array.type) or types.is_large_list(array.type):
            lengths = array.value_lengths().to_numpy(zero_copy_only=False)
            odd = np.flatnonzero(lengths != lengths[0])
            if len(odd):
                raise origin.error(
                    f"a list of {lengths[odd[0]]}, and the first one has {lengths[0]}; make all as long",
                    int(odd[0]) // each,
                )
            shape.append(int(lengths[0]))
        else:
            return array, shape
        array = array.flatten()


def _combined(column: Any) -> Any:
    """A column in one piece."""
    import pyarrow  # noqa: PLC0415 (an extra)

    if not isinstance(column, pyarrow.ChunkedArray):
        return column
    chunks = column.chunks
    return pyarrow.array([], column.type) if not chunks else pyarrow.concat_arrays(chunks)
