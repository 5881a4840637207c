"""Figures as one SVG, for papers and for pages without scripts; needs matplotlib (the `figures` extra)."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.diagnostics.figures import Figure, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#3a3d44")
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}
STYLE: dict[Any, Any] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlesize": 10,
    "font.size": 9,
    "grid.color": "#e4e4e4",
    "legend.fontsize": 8,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "flatfed",
}
WIDTH, HEIGHT = 6.0, 3.6
TITLE = 50
"""Letters of a title that fit above a picture."""
OVERALL, NOTE = 55, 95
"""Letters for each picture in a line that fit above all of them and below."""
BESIDE: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
"""Legends stand beside what they explain, which they would hide."""


def check_drawable() -> None:
    """Refuses before anything is run what could not be drawn in the end."""
    if find_spec("matplotlib") is None:
        raise FlatfedError(
            "matplotlib: not installed, and figures are drawn with it; pip install 'flatfed[figures]'"
        )


def picture(title: str, figures: Sequence[Figure], note: str = "") -> bytes:
    """All figures as one SVG, beside and below each other; the same bytes for the same figures."""
    check_drawable()
    from matplotlib import rc_context  # noqa: PLC0415  (an extra, and it takes half a second)
    from matplotlib.figure import Figure as Canvas  # noqa: PLC0415

    columns = min(len(figures), 3 if len(figures) != 4 else 2)
    lines = math.ceil(len(figures) / columns)
    with rc_context(STYLE):
        canvas = Canvas(figsize=(WIDTH * columns, HEIGHT * lines + 0.5), layout="constrained")
        canvas.suptitle(textwrap.fill(title, OVERALL * columns), fontweight="bold", fontsize=11)
        if note:
            canvas.supxlabel(textwrap.fill(note, NOTE * columns), fontsize=8, color="#555555")
        for place, figure in enumerate(figures, start=1):
            solid = any(trace["type"] == "surface" for trace in figure.traces)
            axes = canvas.add_subplot(lines, columns, place, projection="3d" if solid else None)
            axes.set_title(textwrap.fill(figure.title, TITLE))
            (_draw_surfaces if solid else _draw_lines)(axes, figure)
        stored = io.BytesIO()
        canvas.savefig(stored, format="svg", metadata={"Date": None})
    return stored.getvalue()


def _draw_lines(axes: Axes, figure: Figure) -> None:
    for trace in figure.traces:
        colour, style = _look(trace)
        x, y = _numbers(trace["x"]), _numbers(trace["y"])
        if figure.layout["yaxis"].get("type") == "log":
            y[y <= 0] = np.nan  # a line would come from infinitely far below
        alone = np.count_nonzero(np.isfinite(y)) == 1
        marker = "o" if alone or "markers" in trace["mode"] else None
        axes.plot(x, y, style, color=colour, marker=marker, markersize=4, linewidth=1.6, label=trace["name"])
        if "deviation" in trace["meta"]:
            deviation = _numbers(trace["meta"]["deviation"])
            axes.fill_between(x, y - deviation, y + deviation, color=colour, alpha=0.15, linewidth=0)
    across, up = figure.layout["xaxis"], figure.layout["yaxis"]
    axes.set(xlabel=across["title"]["text"], ylabel=up["title"]["text"])
    axes.set(xscale=across.get("type", "linear"), yscale=up.get("type", "linear"))
    if "range" in up:
        axes.set(ylim=[10**end for end in up["range"]] if up.get("type") == "log" else up["range"])
    axes.legend(**BESIDE)


def _look(trace: Trace) -> tuple[str, str]:
    """The colour and the kind of line that pages have, too."""
    number = trace["meta"]["method"]
    dash = trace.get("line", {}).get("dash") or list(DASHES)[number // len(COLOURS) % len(DASHES)]
    return COLOURS[number % len(COLOURS)], DASHES[dash]


def _draw_surfaces(axes: Any, figure: Figure) -> None:
    scene = figure.layout["scene"]
    low, high = scene["zaxis"]["range"]
    for trace in figure.traces:
        x, y = np.meshgrid(_numbers(trace["x"]), _numbers(trace["y"]))
        z = np.array([_numbers(row) for row in trace["z"]])
        z[z > high] = np.nan  # what is above would hide the rest
        look: dict[str, Any] = {"cmap": "viridis", "vmin": low, "vmax": high}
        if "ramp" not in trace["meta"]:
            look = {"color": _look(trace)[0], "alpha": trace["opacity"]}
        axes.plot_surface(x, y, z, linewidth=0.2, rstride=1, cstride=1, label=trace["name"], **look)
    axes.set(xlabel="b", ylabel="a", zlim=(low, high))
    axes.view_init(elev=28, azim=-50)
    if len(figure.traces) > 1:
        axes.legend(**BESIDE)


def _numbers(values: Sequence[float | None]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.array([np.nan if value is None else value for value in values], dtype=float)
