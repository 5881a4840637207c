"""Figures and tables as plain data, and the helpers that diagnostics and reports make them with.

A figure is plotly traces without colours. A trace's `meta.method` is the number of the method it shows, from
which the page takes the colour and whether it is hidden; `meta.deviation` draws a band around a line.
"""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from flatfed.runs.statistics import Spread, finite, finite_values

Trace = dict[str, Any]
Result = Mapping[str, Any]
"""What a diagnostic returned, as its JSON file has it: numbers that were not finite are None."""
QUANTILES = {"5 %": 0.05, "25 %": 0.25, "50 %": 0.5, "75 %": 0.75, "95 %": 0.95}


@dataclass(frozen=True)
class Figure:
    """A plotly picture, a sentence about it, and the name of its data file."""

    name: str
    title: str
    traces: Sequence[Trace]
    layout: Mapping[str, Any]
    note: str = ""
    columns: Sequence[str] = ()
    """The headers of its data: the series, the axes."""
    method: int | None = None
    """The number of the method that the whole figure is about, if it is about one."""


@dataclass(frozen=True)
class TableCell:
    """A text and what it is sorted by; cells without a value come last."""

    text: str
    value: float | str | None = None


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    note: str = ""


Content = Sequence[Figure | Table]


# -- tables -----------------------------------------------------------------------------------------------


def cell(
    value: Spread | float | str | None, digits: int = 1, scale: float = 1.0, more: str = ""
) -> TableCell:
    if value is None:
        return TableCell("–")
    if isinstance(value, str):
        return TableCell(value, value)
    mean = scale * (value.mean if isinstance(value, Spread) else value)
    if abs(mean) >= 1e15:
        return TableCell(f"{mean:.4g}{more}", mean)
    # Where all seeds agree, "± 0" says nothing.
    if isinstance(value, Spread) and value.deviation:
        return TableCell(value.text(digits, scale) + more, mean)
    return TableCell(f"{mean:,.{digits}f}{more}", mean)


def percent(value: Spread | None) -> TableCell:
    return cell(value, 2, 100)


def amount(value: Spread | None, scale: float = 1.0) -> TableCell:
    """A cost of any size, to three digits."""
    size = abs(value.mean * scale) if value is not None else 0.0
    return cell(value, min(max(2 - math.floor(math.log10(size)), 0), 6) if size > 0 else 0, scale)


def significant(value: Spread | float | None) -> TableCell:
    """A number of any size and sign, to four digits."""
    if value is None:
        return TableCell("–")
    spread = value if isinstance(value, Spread) else Spread(value, 0)
    deviation = f" ± {spread.deviation:.2g}" if spread.deviation > 0 else ""
    return TableCell(f"{spread.mean:.4g}{deviation}", spread.mean)


def brief(value: float | None) -> str:
    """A number in a line of the terminal."""
    return "–" if value is None else f"{value:.3g}"


@dataclass(frozen=True)
class NumberedMethod:
    """A method of a comparison, by its number and name there."""

    number: int
    label: str


Method = TypeVar("Method", bound=NumberedMethod)


def method_table(
    name: str,
    title: str,
    methods: Iterable[Method],
    columns: Mapping[str, Callable[[Method], TableCell]],
    note: str = "",
) -> Table:
    """A table with a row for each method; `columns` says how each cell follows from the method."""
    rows = [[cell(method.label), *(make(method) for make in columns.values())] for method in methods]
    return Table(name, title, ["method", *columns], rows, note)


# -- traces and layouts -----------------------------------------------------------------------------------


def rounded(values: Iterable[Any]) -> list[float | None]:
    """Six digits are more than a picture shows and keep the file small; what is not finite becomes None."""
    return [None if (number := finite(value)) is None else float(f"{number:.6g}") for value in values]


def line(
    method: NumberedMethod,
    x: Iterable[Any],
    y: Iterable[Any],
    deviation: Iterable[Any] | None = None,
    **more: Any,
) -> Trace:
    """A method's line, with a band as wide as the deviation; `more` are other fields of a plotly trace."""
    meta: dict[str, Any] = {"method": method.number}
    if deviation is not None:
        meta["deviation"] = rounded(deviation)
    trace = {"type": "scatter", "name": method.label, "x": rounded(x), "y": rounded(y), "meta": meta}
    return {**trace, "mode": "markers" if len(trace["x"]) == 1 else "lines", **more}


def bound_line(method: NumberedMethod, x: Iterable[Any], y: Iterable[Any]) -> Trace:
    """A theoretical bound beside measured lines."""
    return line(method, x, y, name=f"{method.label}: bound", line={"dash": "dot"})


def box(method: NumberedMethod, values: Sequence[float]) -> Trace:
    """A box of quantiles, whose size does not grow with the number of values."""
    quantiles = rounded(float(np.quantile(values, share)) for share in QUANTILES.values())
    fences = zip(("lowerfence", "q1", "median", "q3", "upperfence"), quantiles, strict=True)
    trace: Trace = {"type": "box", "orientation": "h", "name": method.label, "y": [method.label]}
    trace |= {name: [value] for name, value in fences}
    return {**trace, "mean": rounded([statistics.fmean(values)]), "meta": {"method": method.number}}


def heights(kind: str, x: Sequence[Any], y: Sequence[Any], z: Iterable[Iterable[Any]], **more: Any) -> Trace:
    """Values over a grid, a row of z for each y, as a "contour", "surface" or "heatmap"."""
    grid = {"x": rounded(x), "y": rounded(y), "z": [rounded(row) for row in z]}
    if kind == "contour":
        grid |= {"colorbar": {"thickness": 8, "outlinewidth": 0}}
    return {"type": kind, **grid, "meta": {"ramp": True}, **more}


# -- figures ----------------------------------------------------------------------------------------------


def chart(
    name: str,
    title: str,
    traces: Sequence[Trace],
    x: str,
    y: str,
    note: str = "",
    *,
    titled: bool = True,
    decades: float = 0,
) -> Figure:
    """Lines of methods over two axes.

    The y axis has no title of its own unless `titled`, and is logarithmic over at most so many `decades`.
    """
    layout = axes(x, y if titled else "")
    if decades:
        layout = log_axis(layout, traces, decades)
    return Figure(name, title, traces, layout, note, ("method", x, y))


def box_chart(name: str, title: str, boxes: Sequence[Trace], x: str, note: str = "") -> Figure:
    return Figure(name, title, boxes, axes(x, ""), note, ("method", *QUANTILES, "mean"))


def axes(x: str, y: str, **more: Any) -> dict[str, Any]:
    """A layout with titled axes."""
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}}, **more}


def log_axis(layout: Mapping[str, Any], traces: Sequence[Trace], decades: float = math.inf) -> dict[str, Any]:
    """The layout with a logarithmic y axis around the positive values, or the upper decades of them.

    Values within one decade read better on a linear axis, so the layout stays as it is.
    """
    values = [value for trace in traces for value in trace["y"] if value is not None and value > 0]
    high = math.log10(max(values, default=1))
    low = max(math.log10(min(values, default=1)), high - decades)
    if high - low < 1:
        return dict(layout)
    margin = 0.05 * (high - low)
    ticks = "D2" if high - low < 2.5 else max(1, math.ceil((high - low) / 6))
    axis = {"type": "log", "range": [low - margin, high + margin], "dtick": ticks}
    if low > -4 and high < 4:
        # Without a format, plotly writes a bare 5 for 0.5.
        axis |= {"exponentformat": "none", "tickformat": "~g"}
    return {**layout, "yaxis": {**layout["yaxis"], **axis}}


# -- results of a diagnostic ------------------------------------------------------------------------------


@dataclass(frozen=True)
class MethodResults(NumberedMethod):
    """One diagnostic's results for one method of a comparison: one for each seed that was measured."""

    results: Sequence[Result]

    @property
    def first(self) -> Result:
        """Pictures of a landscape show one seed."""
        return self.results[0]

    def spread(self, *path: str | int) -> Spread | None:
        """Over the seeds, of the number that a path of keys leads to."""
        return Spread.of_finite(_at(result, path) for result in self.results)

    def of_clients(self, *path: str | int) -> list[float]:
        """The finite numbers at a path in each client's result, of all seeds together."""
        clients = (client for result in self.results for client in result.get("clients") or [])
        return finite_values(_at(client, path) for client in clients)

    def mean_line(self, x: str, y: str) -> Trace:
        """The mean over the seeds that were measured at the same places as the first."""
        same = [result for result in self.results if result[x] == self.first[x]]
        spreads = [Spread.of_finite(values) for values in zip(*(result[y] for result in same), strict=True)]
        means = [None if spread is None else spread.mean for spread in spreads]
        deviations = [None if spread is None else spread.deviation for spread in spreads]
        return line(self, self.first[x], means, deviations if len(same) > 1 else None)


def _at(value: Any, path: Iterable[str | int]) -> Any:
    """What a path of keys leads to; None where a mapping on the way is missing or has no such key."""
    for key in path:
        value = None if value is None else value.get(key) if isinstance(value, Mapping) else value[key]
    return value


def column(
    make: Callable[[Spread | None], TableCell], *path: str | int
) -> Callable[[MethodResults], TableCell]:
    """A column of a table: the spread over seeds of the number at a path."""
    return lambda method: make(method.spread(*path))


Measurements = Mapping[str, Sequence[MethodResults]]
"""By a diagnostic's name, the methods of a comparison that it was measured for."""
