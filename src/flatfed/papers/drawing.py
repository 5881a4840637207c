"""The papers' figures from finished runs, panel by panel, as plain figures.

A panel of a paper's file says what is drawn of which runs; `DRAWERS` has a function for each kind.
"""

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from flatfed.diagnostics import DIAGNOSTICS, figures
from flatfed.papers.presets import PaperCell
from flatfed.papers.reproduce import measured
from flatfed.papers.results import FinishedCell
from flatfed.papers.schema import Panel, PaperTable
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import Curve, by_round, finite_values

Results = Mapping[tuple[int, int], Sequence[figures.Result]]
"""What diagnostics of the final models returned, for each seed, by the numbers of the panel and the cell."""
MANY = 20
"""An axis over which values differ by such a factor is logarithmic."""
LEAST_SPAN = 4.0
"""Points that an axis of accuracies has at least: smaller differences are mostly those of a test set."""


@dataclass(frozen=True)
class Row(figures.NumberedMethod):
    """What a legend names: the finished runs of a cell."""

    cell: PaperCell
    runs: Sequence[RunFolder]
    results: Sequence[figures.Result] = ()


@dataclass(frozen=True)
class Picture:
    """The rows of one picture of a panel."""

    panel: Panel
    name: str
    title: str
    rows: Sequence[Row]


def drawn(table: PaperTable, finished: Sequence[FinishedCell], results: Results) -> list[figures.Figure]:
    """All pictures of a figure, in its order, without those that have nothing to show."""
    pictures = (
        picture
        for number, panel in enumerate(table.panels)
        for picture in _pictures(panel, number, finished, results)
    )
    made = (figure for picture in pictures for figure in DRAWERS[picture.panel.draw](picture))
    return [replace(figure, layout={**figure.layout, "showlegend": True}) for figure in made if figure.traces]


def how_run(finished: Sequence[FinishedCell]) -> str:
    """How many seeds, and what of the sizes is not the paper's, in one line."""
    own = [cell.sizes_of_its_own for cell, _ in finished]
    common = [size for size in own[0] if all(size in sizes for sizes in own)]
    seeds = max(len(runs) for _, runs in finished)
    words = [f"{seeds} seed{'s' if seeds != 1 else ''}"]
    if any(own):
        others = "" if all(sizes == common for sizes in own) else "; more by picture, see the tables"
        words.append(f"not the paper's: {', '.join(common)}{others}")
    return "; ".join(words)


def _pictures(
    panel: Panel, number: int, finished: Sequence[FinishedCell], results: Results
) -> Iterator[Picture]:
    """A picture for each block, or one for those that the panel wants together."""
    blocks = dict.fromkeys(cell.block for cell, _ in finished)
    for group in [panel.blocks] if panel.blocks else [[block] for block in blocks]:
        members = [
            (place, cell, runs) for place, (cell, runs) in enumerate(finished) if runs and cell.block in group
        ]
        if not members:
            continue
        titles = [cell.title.split(", ") for _, cell, _ in members]
        shared = [word for word in titles[0] if all(word in title for title in titles)]
        rows = [
            Row(
                row,
                ", ".join([cell.label, *(word for word in title if word not in shared)]),
                cell,
                runs,
                results.get((number, place), ()),
            )
            for row, ((place, cell, runs), title) in enumerate(zip(members, titles, strict=True))
        ]
        title = ": ".join(filter(None, [panel.title, ", ".join(shared)])) + _stand_in(members[0][1])
        yield Picture(panel, f"panel-{number}-{group[0]}", title, rows)


def _stand_in(cell: PaperCell) -> str:
    """Which data or model were used in place of the paper's, which a title names."""
    own = [size for size in cell.sizes_of_its_own if size.startswith(("dataset =", "model ="))]
    return f" [{', '.join(own)}]" if own else ""


# -- quantities of the history ----------------------------------------------------------------------------


def _scale(quantity: str) -> float:
    """Accuracies are shown in percent."""
    return 100.0 if "accuracy" in quantity else 1.0


def _axis(panel: Panel) -> str:
    unit = " (%)" if _scale(panel.y) == 100 else ""
    return panel.label or panel.y.replace("_", " ") + unit


def _curves(picture: Picture) -> list[figures.Figure]:
    """A line for each row; with several quantities, one for each of them."""
    panel, lines = picture.panel, []
    named = panel.quantities or {"": panel.y}
    for row in picture.rows:
        for place, (name, quantity) in enumerate(named.items()):
            label = name if len(picture.rows) == 1 else ", ".join(filter(None, [row.label, name]))
            number = row.number * len(named) + place
            lines.append(_curve(figures.NumberedMethod(number, label or row.label), row, quantity, panel))
    lines = [line for line in lines if line["x"]]
    decades = math.inf if panel.logarithmic else 0
    return [figures.chart(picture.name, picture.title, lines, "round", _axis(panel), decades=decades)]


def _curve(method: figures.NumberedMethod, row: Row, quantity: str, panel: Panel) -> figures.Trace:
    scale, size = _scale(quantity), abs if panel.absolute else float
    seeds = [by_round(run.read_history(), quantity) for run in row.runs]
    curve = Curve.of([{at: scale * size(value) for at, value in seed.items()} for seed in seeds])
    return figures.line(method, curve.rounds, curve.mean, curve.deviation)


# -- what is swept ----------------------------------------------------------------------------------------


def _final(picture: Picture) -> list[figures.Figure]:
    """The figure's statistic over the swept values, a line for each method."""
    rows, lines = picture.rows, []
    for number, method in enumerate(dict.fromkeys(row.cell.method for row in rows)):
        own = [(row.cell, measured(row.cell, row.runs)) for row in rows if row.cell.method == method]
        points = [(float(cell.swept), ours) for cell, ours in own if ours is not None]
        deviations = [100 * ours.deviation for _, ours in points]
        several = all(map(math.isfinite, deviations))
        lines.append(
            figures.line(
                figures.NumberedMethod(number, method),
                [at for at, _ in points],
                [100 * ours.mean for _, ours in points],
                deviations if several else None,
                mode="lines+markers",
            )
        )
    cell = rows[0].cell
    figure = figures.chart(picture.name, picture.title, lines, cell.sweep or "", f"{cell.statistic} (%)")
    figure = replace(
        figure, layout={**figure.layout, "yaxis": {**figure.layout["yaxis"], "range": _range(lines)}}
    )
    places = [x for line in lines for x in line["x"] if x]
    if places and min(places) > 0 and max(places) / min(places) >= MANY:
        axis = {**figure.layout["xaxis"], "type": "log"}
        figure = replace(figure, layout={**figure.layout, "xaxis": axis})
    return [figure]


def _range(lines: Sequence[figures.Trace]) -> list[float]:
    values = finite_values(value for line in lines for value in line["y"]) or [0.0]
    middle, span = (min(values) + max(values)) / 2, max(LEAST_SPAN, 1.2 * (max(values) - min(values)))
    return [middle - span / 2, middle + span / 2]


# -- the final models -------------------------------------------------------------------------------------


def _surfaces(picture: Picture) -> list[figures.Figure]:
    """The losses around the final model of each row's first run, on one scale; or all in one picture.

    There the first one, which the others are compared with, is transparent.
    """
    panel = picture.panel
    kind = panel.y
    rows = [row for row in picture.rows if row.results]
    losses = [_losses(row, kind) for row in rows]
    low, high = min(map(min, losses), default=0.0), max(map(_upper, losses), default=1.0)
    layout = {"scene": {**figures.axes("b", "a"), "zaxis": {"range": [low, high], "title": {"text": "loss"}}}}
    traces = []
    for row in rows:
        first = row.results[0]
        trace = figures.heights("surface", first["b"], first["a"], first[kind], name=row.label)
        traces.append({**trace, "cmin": low, "cmax": high, "showscale": False})
    columns = ("run", "b", "a", f"{kind} loss")
    if panel.overlaid:
        over = [
            {**trace, "opacity": 1.0 if row.number else 0.5, "meta": {"method": row.number}}
            for row, trace in zip(rows, traces, strict=True)
        ]
        return [figures.Figure(picture.name, picture.title, over, layout, columns=columns)]
    return [
        figures.Figure(
            f"{picture.name}-{row.number}", f"{row.label}: {kind} loss", [trace], layout, columns=columns
        )
        for row, trace in zip(rows, traces, strict=True)
    ]


def _losses(row: Row, kind: str) -> list[float]:
    return finite_values(loss for line in row.results[0].get(kind) or [] for loss in line)


def _upper(losses: Sequence[float]) -> float:
    """A few corners may be far up, and the bottoms are to be compared."""
    return statistics.quantiles(losses, n=20)[-1] if len(losses) > 1 else max(losses)


def _result(picture: Picture) -> list[figures.Figure]:
    """What the diagnostic itself shows of several methods."""
    name = picture.panel.diagnostic
    methods = [
        figures.MethodResults(row.number, row.label, row.results) for row in picture.rows if row.results
    ]
    shown = DIAGNOSTICS[name].show({name: methods}) if methods else []
    return [
        replace(item, name=f"{picture.name}-{item.name}", title=picture.title or item.title, method=None)
        for item in shown
        if isinstance(item, figures.Figure)
    ]


DRAWERS: Mapping[str, Callable[[Picture], list[figures.Figure]]] = {
    "curves": _curves,
    "final": _final,
    "surfaces": _surfaces,
    "result": _result,
}
