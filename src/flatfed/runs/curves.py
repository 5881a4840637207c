"""A run at a glance: in one line, as a table, and as curves over its rounds."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.runs.statistics import ACCURACY, finite
from flatfed.training.loop import History

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure

Curve = list[tuple[int, float]]
WIDTH, HEIGHT = 320, 120


def main_number(history: History) -> str:
    """What a run is judged by: the test accuracy if there is one, else the loss."""
    for name in (ACCURACY, "test_loss"):
        if any(name in record for record in history):
            return name
    return "train_loss"


def curve(history: History, name: str) -> Curve:
    """The rounds in which a number was recorded, and its finite values."""
    values = ((record["round"], finite(record.get(name))) for record in history)
    return [(number, value) for number, value in values if value is not None]


def described(history: History) -> str:
    """The last values in a few words."""
    if not history:
        return "no round yet"
    words = [f"{len(history)} rounds"]
    for name in dict.fromkeys(("train_loss", main_number(history))):
        if points := curve(history, name):
            words.append(f"{name.replace('_', ' ')} {points[-1][1]:.4g}")
    return ", ".join(words)


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Lines of texts below each other."""
    widths = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    texts = ("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)
    return "\n".join(text.rstrip() for text in texts)


def data_frame(histories: Mapping[str, History]) -> pandas.DataFrame:
    """One row a round, under each run's label."""
    try:
        import pandas  # noqa: PLC0415 (an extra)
    except ImportError:
        raise FlatfedError("pandas: not installed; pip install 'flatfed[dataframe]'") from None
    if len(histories) == 1:
        return pandas.DataFrame(next(iter(histories.values())))
    rows: list[dict[str, Any]] = [
        {"run": label, **record} for label, history in histories.items() for record in history
    ]
    return pandas.DataFrame(rows)


def figure(histories: Mapping[str, History], name: str | None) -> Figure:
    """The curves of several runs in one plotly figure."""
    from plotly import graph_objects  # noqa: PLC0415 (takes half a second)

    recorded = sorted({key for history in histories.values() for record in history for key in record})
    name = name or main_number([record for history in histories.values() for record in history])
    if name not in recorded:
        raise FlatfedError(f"value = {name!r}: not recorded; {did_you_mean(name, recorded)}")
    drawn = graph_objects.Figure()
    for label, history in histories.items():
        points = curve(history, name)
        drawn.add_scatter(
            x=[number for number, _ in points], y=[value for _, value in points], name=label, mode="lines"
        )
    return drawn.update_layout(
        xaxis_title="round", yaxis_title=name.replace("_", " "), template="plotly_white"
    )


def picture(histories: Mapping[str, History]) -> str:
    """The main numbers over the rounds as a small SVG, which needs no script."""
    name = main_number([record for history in histories.values() for record in history])
    curves = {label: points for label, history in histories.items() if (points := curve(history, name))}
    if not curves:
        return ""
    values = [value for points in curves.values() for _, value in points]
    last = max(points[-1][0] for points in curves.values())
    low, high = min(values), max(values)
    lines = []
    for index, (label, points) in enumerate(curves.items()):
        places = " ".join(
            f"{WIDTH * number / last:.1f},{HEIGHT * (high - value) / ((high - low) or 1):.1f}"
            for number, value in points
        )
        colour = f"hsl({(210 + 67 * index) % 360} 65% 45%)"
        lines.append(
            f'<polyline points="{places}" fill="none" stroke="{colour}" stroke-width="2">'
            f"<title>{html.escape(label)}</title></polyline>"
        )
    caption = f"{name.replace('_', ' ')}: {low:.4g} to {high:.4g} over {last} rounds"
    return (
        f'<svg viewBox="-4 -4 {WIDTH + 8} {HEIGHT + 8}" width="{WIDTH}" height="{HEIGHT}" role="img">'
        f"{''.join(lines)}</svg><br><small>{caption}</small>"
    )


def labelled(runs: Sequence[tuple[str, History]]) -> dict[str, History]:
    """Histories by label; those that share one are numbered."""
    names = [label for label, _ in runs]
    return {
        label if names.count(label) == 1 else f"{label} {names[:place].count(label) + 1}": history
        for place, (label, history) in enumerate(runs)
    }
