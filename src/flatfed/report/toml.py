"""A run's config as a file that `flatfed run` takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def toml(config: Mapping[str, Any]) -> str | None:
    """The config as a file for `flatfed run`; None for a run from Python, whose data and model it lacks."""
    if "data" not in config:
        return None
    tables = {key: value for key, value in config.items() if isinstance(value, Mapping)}
    lines = [f"{key} = {_toml_value(value)}" for key, value in config.items() if key not in tables and value]
    for table, values in tables.items():
        lines.append(f"[{table}]")
        known = {**values} | ({"batch_size": "full"} if values.get("batch_size", 1) is None else {})
        lines += [f"{key} = {_toml_value(value)}" for key, value in known.items() if value is not None]
        lines.append("")
    return "\n".join(lines)


def _toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        inner = (f"{_quoted(key)} = {_toml_value(each)}" for key, each in value.items() if each is not None)
        return f"{{ {', '.join(inner)} }}"
    if isinstance(value, list):
        return f"[{', '.join(_toml_value(each) for each in value)}]"
    return _quoted(value) if isinstance(value, str) else repr(value)


def _quoted(text: str) -> str:
    """A TOML string: only quotes, backslashes and control characters need escaping."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return (
        '"'
        + "".join(each if each >= " " and each != "\x7f" else f"\\u{ord(each):04x}" for each in escaped)
        + '"'
    )
