"""Tables in files: parquet, CSV (also packed by gzip) and npz, read with a limit; nothing is unpickled."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from flatfed.core.errors import FlatfedError, brief
from flatfed.data.arrow import arrow_table
from flatfed.data.files import RegularFile, check_largest, read_file
from flatfed.data.npz import read_npz
from flatfed.data.tables import (
    MISSING,
    Array,
    Column,
    Origin,
    Places,
    Table,
    check_names,
    numbered_texts,
    plain_numbers,
    sized,
)

SUFFIXES = (".parquet", ".csv", ".csv.gz", ".npz")
BATCH = 2**14  # rows of a parquet file that are decoded at once


def suffix_of(path: Path) -> str | None:
    """The kind of a table's file; None if it is none."""
    return next((suffix for suffix in SUFFIXES if path.name.lower().endswith(suffix)), None)


def column_names(path: Path) -> list[str]:
    """What the columns of a file are called."""
    names: list[str] = []

    def none_of(present: list[str]) -> list[str]:
        names.extend(present)
        return []

    with _one_line(path):
        if suffix_of(path) == ".parquet":
            with _parquet(path) as opened:
                names.extend(opened.schema_arrow.names)
        elif suffix_of(path) == ".npz":
            read_npz(path, none_of)
        else:
            names, _, _ = _csv_rows(path)
    return names


def read_table(path: Path, names: Sequence[str] | None, texts: Collection[str] = ()) -> Table:
    """Some columns of a file, or all; those in `texts` are texts even if they look like numbers."""
    with _one_line(path):
        if suffix_of(path) == ".parquet":
            return _read_parquet(path, names, texts)
        if suffix_of(path) == ".npz":
            arrays = read_npz(path, partial(check_names, str(path), names))
            return _of_arrays(str(path), arrays, texts)
        return _read_csv(path, names, texts)


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise FlatfedError(
            f"{path}: cannot be read ({error.strerror or brief(error)}); check the file"
        ) from None


def _of_arrays(source: str, arrays: Mapping[str, Array], texts: Collection[str]) -> Table:
    columns: dict[str, Column] = {}
    for name, array in arrays.items():
        if array.ndim == 0:
            raise Origin(source, name).error("it is a single value; store one for every row")
        if array.ndim == 1 and (array.dtype.kind == "U" or name in texts):
            columns[name] = numbered_texts([str(value) for value in array.tolist()])
        else:
            columns[name] = plain_numbers(Origin(source, name), array)
    return sized(Table(source, columns))


# -- CSV ---------------------------------------------------------------------------------------------------


def _csv_rows(path: Path) -> tuple[list[str], list[list[str]], list[int]]:
    """The first line, the others as far as they are not empty, and their numbers."""
    try:
        content = read_file(path)
        # What Python makes of the cells is many times as large.
        check_largest(path, len(content) + 64 * (content.count(b",") + content.count(b"\n")))
        text = content.decode("utf-8-sig")
    except (gzip.BadGzipFile, EOFError, zlib.error):
        raise FlatfedError(f"{path}: truncated or not a gzip file; replace it") from None
    except UnicodeDecodeError as error:
        raise FlatfedError(f"{path}: byte {error.start} is no UTF-8; save the file as UTF-8") from None
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    rows, lines = [], []
    try:
        header = next(reader, [])
        begins = reader.line_num + 1
        for row in reader:
            if row:
                rows.append(row)
                lines.append(begins)
            begins = reader.line_num + 1
    except csv.Error as error:
        raise FlatfedError(f"{path}: line {reader.line_num}: not CSV ({brief(error)}); correct it") from None
    for row, line in zip(rows, lines, strict=True):
        if len(row) != len(header):
            raise FlatfedError(
                f"{path}: line {line}: {len(row)} cells, and {len(header)} columns in the first line; "
                "correct it"
            )
    return header, rows, lines


def _read_csv(path: Path, names: Sequence[str] | None, texts: Collection[str]) -> Table:
    header, rows, lines = _csv_rows(path)
    places = Places("line", lines)
    columns: dict[str, Column] = {}
    for name in check_names(str(path), names, header):
        origin = Origin(str(path), name, places)
        cells = [row[header.index(name)] for row in rows]
        empty = next((number for number, cell in enumerate(cells) if not cell.strip()), None)
        if empty is not None:
            raise origin.error(MISSING, empty)
        is_text = name in texts
        columns[name] = numbered_texts(cells) if is_text else _numbers_or_texts(origin, cells)
    return sized(Table(str(path), columns, places))


def _numbers_or_texts(origin: Origin, cells: Sequence[str]) -> Column:
    """Whole numbers if all cells are, or numbers, or else texts."""
    kinds: tuple[Any, ...] = (int, np.int64), (float, np.float64)
    # Python reads 1_2 as 12, but in a file that is a name.
    for read, kind in () if any("_" in cell for cell in cells) else kinds:
        try:
            return plain_numbers(origin, np.array([read(cell) for cell in cells], kind))
        except FlatfedError:
            raise
        except (ValueError, OverflowError):
            continue
    are_texts = [not _is_number(cell) for cell in cells]
    return numbered_texts(cells, None if all(are_texts) else are_texts.index(True))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return "_" not in cell


# -- parquet ---------------------------------------------------------------------------------------------


@contextmanager
def _parquet(path: Path) -> Iterator[Any]:
    """An opened parquet file; whatever goes wrong with it is said in one line."""
    try:
        from pyarrow import parquet  # noqa: PLC0415 (an extra)
    except ImportError:
        raise FlatfedError(
            f"{path}: pyarrow is missing, and parquet files need it; pip install 'flatfed[parquet]'"
        ) from None
    try:
        with RegularFile(path) as file, parquet.ParquetFile(file, memory_map=False) as opened:
            check_largest(path, path.stat().st_size)
            yield opened
    except (FlatfedError, FileNotFoundError):
        raise
    except Exception as error:  # damaged files can raise anything
        raise FlatfedError(f"{path}: not a readable parquet file ({brief(error)}); save it again") from None


def _read_parquet(path: Path, names: Sequence[str] | None, texts: Collection[str]) -> Table:
    with _parquet(path) as opened:
        import pyarrow  # noqa: PLC0415 (an extra)

        schema = opened.schema_arrow
        chosen = check_names(str(path), names, schema.names)
        batches, size = [], 0
        for batch in opened.iter_batches(BATCH, columns=chosen, use_threads=False):
            size += batch.nbytes
            check_largest(path, size)
            batches.append(batch)
        table = pyarrow.Table.from_batches(batches, schema.empty_table().select(chosen).schema)
    return arrow_table(str(path), table, chosen, texts)
