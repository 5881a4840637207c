"""What a report is made of: tables, and figures as plain plotly traces.

Traces carry no colours. `meta.method` is the number of the method that a trace shows, from which the page
takes its colour and whether it is hidden; `meta.deviation` makes the page draw a band around a line.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flatfed.runs.compare import Spread

Trace = dict[str, Any]


@dataclass(frozen=True)
class Figure:
    """A plotly picture, a line about it, and the name of its data file."""

    name: str
    title: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    note: str = ""
    columns: Sequence[str] = ()
    """The headers of its data: the series, the axes."""
    method: int | None = None
    """The number of the method that it is all about, if it is about one."""


@dataclass(frozen=True)
class Cell:
    """A text and what it is sorted by; cells without a value come last."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""


@dataclass(frozen=True)
class Section:
    """A part of a comparison under one heading."""

    name: str
    title: str
    content: Sequence[Figure | Table] = field(default_factory=list)
    note: str = ""


def cell(value: Spread | float | str | None, digits: int = 1, scale: float = 1.0, more: str = "") -> Cell:
    if value is None:
        return Cell("–")
    if isinstance(value, str):
        return Cell(value, value)
    if isinstance(value, Spread) and value.deviation:
        return Cell(value.text(digits, scale) + more, value.mean * scale)
    # Where all seeds agree, "± 0" says nothing.
    mean = value.mean if isinstance(value, Spread) else value
    return Cell(f"{mean * scale:,.{digits}f}{more}", mean * scale)


def amount(value: Spread | None, scale: float = 1.0) -> Cell:
    """A cost of any size, to three digits."""
    size = abs(value.mean * scale) if value is not None else 0.0
    return cell(value, min(max(2 - math.floor(math.log10(size)), 0), 6) if size > 0 else 0, scale)


def significant(value: Spread | float | None) -> Cell:
    """A number of any size and sign, to four digits."""
    if value is None:
        return Cell("–")
    if isinstance(value, Spread):
        known = value.deviation and not math.isnan(value.deviation)
        return Cell(f"{value.mean:.4g} ± {value.deviation:.2g}" if known else f"{value.mean:.4g}", value.mean)
    return Cell(f"{value:.4g}", value)


def rounded(values: Iterable[float | None]) -> list[float | None]:
    """Six digits are more than a picture shows and keep the file small."""
    return [None if value is None or not math.isfinite(value) else float(f"{value:.6g}") for value in values]


def line(
    method: int | None,
    name: str,
    x: Iterable[float | None],
    y: Iterable[float | None],
    deviation: Iterable[float | None] | None = None,
    **more: Any,
) -> Trace:
    trace: Trace = {"type": "scatter", "mode": "lines", "name": name, "x": rounded(x), "y": rounded(y)}
    trace["meta"] = {"method": method}
    if deviation is not None:
        trace["meta"]["deviation"] = rounded(deviation)
    if len(trace["x"]) == 1:
        trace["mode"] = "markers"
    return trace | more


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with titled axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **more}


def log_axis(layout: Mapping[str, Any], traces: Sequence[Trace], decades: float = math.inf) -> dict[str, Any]:
    """The layout with a logarithmic y axis around the positive values, or the upper decades of them.

    Values within one decade read better on a linear axis, which it then stays.
    """
    values = [value for trace in traces for value in trace["y"] if value is not None and value > 0]
    if not values:
        return dict(layout)
    high = math.log10(max(values))
    low = max(math.log10(min(values)), high - decades)
    if high - low < 1:
        return dict(layout)
    margin = 0.05 * (high - low)
    ticks = "D2" if high - low < 2.5 else max(1, math.ceil((high - low) / 6))
    axis = {"type": "log", "range": [low - margin, high + margin], "dtick": ticks}
    if low > -4 and high < 4:
        # Without a format, plotly writes a bare 5 for 0.5.
        axis |= {"exponentformat": "none", "tickformat": "~g"}
    return {**layout, "yaxis": {**layout["yaxis"], **axis}}
