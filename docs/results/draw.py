"""Curves of several runs as one SVG: accuracies and cosines on a linear scale, all else on a logarithmic one.

    python docs/results/draw.py OUT.svg TITLE MEASURE RUN=LABEL [RUN=LABEL …]

MEASURE is a field of the runs' history, for instance test_accuracy, or flatness_distance (a running mean over
ten rounds, with the single rounds behind it), or global_stability, what `flatfed diagnose RUN
global_stability` wrote (the largest of the replacements, with all of them behind it). RUN@FIELD=LABEL draws
another field of a run than MEASURE, which then only says the scale. MEASURE:megabytes draws it against what
the clients have sent instead of rounds.
"""

from __future__ import annotations

import itertools
import json
import math
import sys
from html import escape
from pathlib import Path

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#555555")
DASHES = ("", "7 3", "2 3")
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 900, 480, 70, 50, 270, 55
WINDOW = 10

Points = list[tuple[float, float]]


def is_accuracy(measure: str) -> bool:
    return measure.endswith("accuracy")


def is_linear(measure: str) -> bool:
    return is_accuracy(measure) or measure.startswith("cosine")


def ticks(low: float, high: float) -> list[float]:
    """Round numbers between two values."""
    size = next(size for size in (0.05, 0.1, 0.2, 1, 2, 5, 10, 20) if (high - low) / size <= 9)
    return [size * number for number in range(math.ceil(low / size), math.floor(high / size) + 1)]


def decades(low: float, high: float) -> list[float]:
    exponents = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    values = [digit * 10.0**exponent for exponent in exponents for digit in (1, 2, 5)]
    return [value for value in values if low <= value <= high]


def curves(run: Path, measure: str, megabytes: bool) -> tuple[Points, list[Points]]:
    """A run's main curve and the thin ones behind it."""
    if measure == "global_stability":
        result = json.loads((run / "diagnostics" / f"{measure}.json").read_text())["result"]
        rounds = result["rounds"]
        replacements = [list(zip(rounds, values, strict=True)) for values in result["replacements"]]
        return list(zip(rounds, result["discrepancy"], strict=True)), replacements
    lines = [json.loads(line) for line in (run / "history.jsonl").read_text().splitlines()]
    sent = itertools.accumulate(line["bytes_up"] / 1e6 for line in lines)
    across = list(sent) if megabytes else [line["round"] for line in lines]
    points = [(x, line[measure]) for x, line in zip(across, lines, strict=True) if measure in line]
    if is_linear(measure):
        return [(x, 100 * y if is_accuracy(measure) else y) for x, y in points], []
    recent = [points[max(0, end - WINDOW) : end] for end in range(1, len(points) + 1)]
    return [(some[-1][0], sum(y for _, y in some) / len(some)) for some in recent], [points]


def picture(title: str, measure: str, runs: list[tuple[str, Path, str]], megabytes: bool = False) -> str:
    drawn = [(label, *curves(run, field or measure, megabytes)) for label, run, field in runs]
    linear = is_linear(measure)
    values = [y for _, main, thin in drawn for line in [main, *thin] for _, y in line if linear or y > 0]
    scale = float if linear else math.log10
    low, high = scale(min(values)), scale(max(values))
    last = max(x for _, main, _ in drawn for x, _ in main)

    def place(point: tuple[float, float]) -> str:
        across = LEFT + (WIDTH - LEFT - RIGHT) * point[0] / last
        share = (scale(point[1]) - low) / ((high - low) or 1)
        return f"{across:.1f},{HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share:.1f}"

    def path(points: Points, style: str) -> str:
        shown = [point for point in points if linear or point[1] > 0]
        return f"<polyline fill='none' points='{' '.join(map(place, shown))}' {style}/>"

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' width='{WIDTH}' "
        f"height='{HEIGHT}' font-family='Helvetica, Arial, sans-serif' font-size='12' fill='#222'>",
        f"<title>{escape(title)}</title><rect width='100%' height='100%' fill='white'/>",
        f"<text x='{LEFT}' y='28' font-size='15' font-weight='bold'>{escape(title)}</text>",
    ]
    bottom = HEIGHT - BOTTOM
    for value in (ticks if linear else decades)(min(values), max(values)):
        height = float(place((0, value)).split(",")[1])
        parts.append(f"<path d='M{LEFT} {height}H{WIDTH - RIGHT}' stroke='#e4e4e4'/>")
        parts.append(f"<text x='{LEFT - 8}' y='{height + 4}' text-anchor='end'>{value:g}</text>")
    for share in range(5):
        at = LEFT + (WIDTH - LEFT - RIGHT) * share / 4
        parts.append(f"<path d='M{at} {bottom}v5' stroke='#666'/>")
        parts.append(f"<text x='{at}' y='{bottom + 20}' text-anchor='middle'>{last * share / 4:.3g}</text>")
    parts.append(f"<path d='M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}' fill='none' stroke='#666'/>")
    parts.append(
        f"<text x='{(LEFT + WIDTH - RIGHT) / 2}' y='{HEIGHT - 12}' text-anchor='middle'>"
        f"{'megabytes sent by clients' if megabytes else 'round'}</text>"
    )
    # The legend in the order of the curves' ends, top to bottom.
    numbered = sorted(enumerate(drawn), key=lambda item: -item[1][1][-1][1])
    for row, (number, (label, main, thin)) in enumerate(numbered):
        style = (
            f"stroke='{COLOURS[number % len(COLOURS)]}' stroke-dasharray='{DASHES[number // len(COLOURS)]}'"
        )
        parts += [path(points, f"{style} stroke-width='0.8' opacity='0.35'") for points in thin]
        parts.append(path(main, f"{style} stroke-width='2.2'"))
        y, x = TOP + 12 + 24 * row, WIDTH - RIGHT + 16
        parts.append(f"<path d='M{x} {y}h26' {style} stroke-width='2.2'/>")
        parts.append(f"<text x='{x + 34}' y='{y + 4}'>{escape(label)}: {main[-1][1]:.3g}</text>")
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    output, heading, what, *chosen = sys.argv[1:]
    asked = []
    for text in chosen:
        place, _, name = text.partition("=")
        folder, _, field = place.partition("@")
        asked.append((name, Path(folder), field))
    what, _, against = what.partition(":")
    if against not in ("", "megabytes") or (against and what == "global_stability"):
        sys.exit(f"MEASURE = {what}:{against}: only a field of the history can be drawn, against megabytes")
    Path(output).write_text(picture(heading, what, asked, megabytes=against == "megabytes"))
