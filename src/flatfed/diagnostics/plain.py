"""Plain data: what results are written as, and what files of a run folder are read as, whatever they hold."""

import math
from pathlib import Path
from typing import Any

from flatfed.core.errors import FlatfedError, printable, shown
from flatfed.core.files import parse_json, read_text

NUMBER, CONTAINER = int | float, dict | list | tuple
LARGEST = 1e100
"""Sums and squares of larger numbers might not be finite."""
DEEPEST, MOST_FIELDS, MOST_VALUES = 50, 1000, 4_000_000
"""Far beyond what a run writes; more would take too much time or memory."""


def plain(value: Any, large: list[str] | None = None, field: str = "", depth: int = 0) -> Any:
    """The value with None for every number that is not finite or beyond LARGEST; `large` gets the latter."""
    if isinstance(value, CONTAINER):
        if depth == DEEPEST:
            raise FlatfedError(f"{_clipped(field)}: nested too deeply")
        if not isinstance(value, dict):
            return [plain(item, large, field, depth + 1) for item in value]
        if len(value) > MOST_FIELDS:
            raise FlatfedError(f"{_clipped(field)}: {len(value):,} fields, more than {MOST_FIELDS:,}")
        return {key: plain(item, large, f"{field}.{key}", depth + 1) for key, item in value.items()}
    if not isinstance(value, NUMBER) or abs(value) <= LARGEST:
        return value
    if large is not None and (isinstance(value, int) or math.isfinite(value)):
        large.append(f"{_clipped(field)} = {shown(value)}: too large a number to be used")
    return None


def _clipped(field: str) -> str:
    return printable(field.lstrip(".")[:80]) or "its content"


def parse_plain(text: str, name: object, notes: list[str]) -> Any:
    """What a JSON text says; `name` says whose text it is, and `notes` gets what is left out."""
    check_size(text, name)
    large: list[str] = []
    content = parse_json(text, name)
    try:
        value = plain(content, large)
    except FlatfedError as error:
        raise FlatfedError(f"{name}: {error}") from None
    if large:
        notes.append(f"{name}: {large[0]}" + (f" (and {len(large) - 1} more)" if len(large) > 1 else ""))
    return value


def check_size(text: str, name: object, marks: str = ",[{") -> None:
    """Refuses a text of so many values, which begin with some `marks`, that they would fill the memory."""
    if sum(text.count(mark) for mark in marks) > MOST_VALUES:
        raise FlatfedError(f"{name}: more than {MOST_VALUES:,} values, not what a run writes")


def read_plain(path: Path, notes: list[str]) -> Any:
    return parse_plain(read_text(path, "JSON"), path, notes)
