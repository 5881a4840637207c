"""Ways to spoil the files of a run folder."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from values import values

Damage = Callable[[Path], None]
"""Spoils the file or folder at a path, which may be missing."""


def changed(change: Callable[[bytes], bytes]) -> Damage:
    """Of a file's content."""

    def damage(path: Path) -> None:
        if path.is_file() and not path.is_symlink():
            path.write_bytes(change(path.read_bytes()))

    return damage


def flipped(place: float, bit: int) -> Damage:
    def flip(content: bytes) -> bytes:
        if not content:
            return content
        position = min(int(place * len(content)), len(content) - 1)
        return content[:position] + bytes([content[position] ^ 1 << bit]) + content[position + 1 :]

    return changed(flip)


def truncated(place: float) -> Damage:
    return changed(lambda content: content[: int(place * len(content))])


def edited(choice: int, key: str, value: Any) -> Damage:
    """A table, or a line of a history, that says something else of a key that it has, or has a new one."""

    def edit(content: bytes) -> bytes:
        lines = content.split(b"\n") if content[:1] == b"{" and b"\n" in content[:-1] else [content]
        number = choice % len(lines)
        try:
            table = json.loads(lines[number])
        except ValueError:
            number, lines = 0, [content]
            try:
                table = json.loads(content)
            except ValueError:
                return content
        if not isinstance(table, dict):
            return content
        table[key or sorted(table)[choice % len(table)] if table else key] = value
        lines[number] = json.dumps(table, default=str).encode()
        return b"\n".join(lines)

    return changed(edit)


def removed(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replaced(kind: str) -> Damage:
    """By something that is no file."""

    def damage(path: Path) -> None:
        removed(path)
        if not path.parent.is_dir():
            return
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to({"device": "/dev/zero", "loop": path, "nowhere": path.parent / "nowhere"}[kind])

    return damage


places, numbers = st.floats(0, 1), st.integers(0, 30)
bits = st.builds(flipped, places, st.integers(0, 7))
spoiled = st.one_of(
    bits,
    st.builds(truncated, places),
    st.binary(max_size=40).map(lambda content: changed(lambda _: content)),
    st.binary(max_size=40).map(lambda content: changed(lambda before: before + content)),
    st.builds(edited, numbers, st.sampled_from(["", "round", "format", "clients", "x"]), values),
    st.just(removed),
)
anything = spoiled | st.sampled_from(["fifo", "folder", "device", "loop", "nowhere"]).map(replaced)
