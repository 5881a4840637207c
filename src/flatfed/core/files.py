"""Reading small files that may hold anything: one line of error names the file and what is wrong with it."""

import json
import stat
import tomllib
from pathlib import Path
from typing import Any

from flatfed.core.errors import FlatfedError, first_line, shown

LARGEST = 2**28
"""Texts of more bytes than this are refused before they are read."""


def as_path(option: str, value: object) -> Path:
    """A path that a user gives."""
    try:
        path = Path(value)  # type: ignore[arg-type]
    except TypeError:
        raise FlatfedError(f"{option} = {shown(value)}: give a path") from None
    if "\0" in str(path) or value == "":
        raise FlatfedError(f"{option} = {shown(value)}: no path; choose another name")
    return path


def read_bytes(path: Path, largest: int = LARGEST) -> bytes:
    """The content of a regular file: a pipe might never end, and a huge file fills the memory."""
    if "\0" in str(path):
        raise FlatfedError(f"{str(path)!r}: cannot be read (a null character)")
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise FlatfedError(f"{path}: cannot be read (not a regular file)")
        if status.st_size > largest:
            raise FlatfedError(f"{path}: {status.st_size} bytes are more than the {largest} that are read")
        return path.read_bytes()
    except OSError as error:
        raise FlatfedError(f"{path}: cannot be read ({error.strerror})") from None


def read_text(path: Path, expected: str = "text") -> str:
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError:
        raise FlatfedError(f"{path}: not a text file; expected {expected}") from None


def parse_json(text: str, name: object) -> Any:
    """What a JSON text says; `name` says whose text it is."""
    try:
        return json.loads(text)
    except RecursionError:
        raise FlatfedError(f"{name}: nested too deeply") from None
    except ValueError as error:  # also for numbers of thousands of digits
        raise FlatfedError(f"{name}: not valid JSON: {first_line(error)}") from None


def parse_toml(text: str, name: object) -> dict[str, Any]:
    """What a TOML text says; `name` says whose text it is."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise FlatfedError(f"{name}: nested too deeply") from None
    except ValueError as error:
        raise FlatfedError(f"{name}: not valid TOML: {first_line(error)}") from None


def read_json(path: Path) -> Any:
    return parse_json(read_text(path, "JSON"), path)


def read_toml(path: Path) -> dict[str, Any]:
    return parse_toml(read_text(path, "a TOML config"), path)
