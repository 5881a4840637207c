"""Pictures of a partition: which client holds how many samples of which class.

`terminal_picture` draws with characters, `svg_picture` and `html_page` make files. All take the counts
[clients, classes] of `class_counts`. Shades follow the square root of the count, so that one large client
does not wash out all others, on one ramp of blues that grows darker with the count: it reads the same with
any colour vision and in print.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.style import Style
from rich.text import Text

from flatfed.core.errors import FlatfedError
from flatfed.data.partition import PartitionSummary
from flatfed.data.partition.base import Indices

Numbers = NDArray[np.float64]
RAMP = ((222, 235, 247), (158, 202, 225), (66, 146, 198), (8, 81, 156), (8, 32, 84))
EMPTY = (250, 251, 253)
SHADES = "░▒▓█"
SUFFIXES = (".svg", ".html")
FONT = "font-family='Helvetica, Arial, sans-serif'"


def describe(found: PartitionSummary) -> list[tuple[str, str]]:
    """A summary as (what, number) lines."""
    samples = found.samples_used + found.samples_unused
    held = f"{found.fewest_classes} … {found.most_classes} of {found.classes}"
    uncovered = ", ".join(map(str, found.uncovered_classes)) or "none"
    return [
        ("clients", f"{found.clients:,}"),
        ("samples in the data", f"{samples:,}"),
        ("samples used", f"{found.samples_used:,} ({found.samples_used / samples:.1%})"),
        ("samples unused", f"{found.samples_unused:,}"),
        ("samples duplicated", f"{found.samples_duplicated:,}"),
        (
            "samples per client",
            f"{found.smallest_client:,} … {found.largest_client:,}, median {found.median_client:g}",
        ),
        ("classes per client", f"{held}, mean {found.mean_classes:.1f}"),
        ("classes that nobody holds", uncovered),
    ]


def shade(value: float, largest: float) -> float:
    """Where on the ramp a count lies, 0 … 1."""
    return math.sqrt(min(value / largest, 1.0)) if largest > 0 else 0.0


def colour(position: float) -> tuple[int, int, int]:
    """The ramp's red, green and blue at a position 0 … 1."""
    scaled = position * (len(RAMP) - 1)
    lower = min(int(scaled), len(RAMP) - 2)
    red, green, blue = (
        round(low + (high - low) * (scaled - lower))
        for low, high in zip(RAMP[lower], RAMP[lower + 1], strict=True)
    )
    return red, green, blue


def binned(counts: Indices, columns: int, rows: int) -> tuple[Numbers, Indices, Indices]:
    """Mean counts of at most `columns` bins of clients by `rows` bins of classes, and where bins begin."""
    clients, classes = counts.shape
    starts = _bin_starts(clients, columns), _bin_starts(classes, rows)
    sums = np.add.reduceat(np.add.reduceat(counts, starts[0], axis=0), starts[1], axis=1)
    widths = np.diff(starts[0], append=clients)[:, None] * np.diff(starts[1], append=classes)
    return sums / widths, *starts


def _bin_starts(things: int, bins: int) -> Indices:
    """Bins of one width, of which only the last may be narrower."""
    return np.arange(0, things, max(1, -(-things // max(bins, 1))), dtype=np.int64)


# -- terminal ---------------------------------------------------------------------------------------------


def terminal_picture(counts: Indices, width: int, coloured: bool, rows: int = 40) -> Text:
    """Classes down, clients across, a character a cell; shaded characters where there are no colours."""
    clients, classes = counts.shape
    margin = max(len(str(classes - 1)), len("class")) + 1
    values, client_starts, class_starts = binned(counts, width - margin, rows)
    # Few clients get wider cells.
    cell = max(1, min(4, (width - margin) // len(client_starts)))
    largest = float(values.max())
    picture = Text("class".rjust(margin - 1) + "\n", no_wrap=True)
    for number, start in enumerate(class_starts):
        picture.append(f"{start:>{margin - 1}} ")
        for value in values[:, number]:
            _append_cell(picture, float(value), largest, cell, coloured)
        picture.append("\n")
    picture.append(" " * margin + _client_scale(client_starts, clients, cell) + "\n")
    clients_each, classes_each = (
        int(starts[1]) if len(starts) > 1 else 1 for starts in (client_starts, class_starts)
    )
    each = "a client" if clients_each == 1 else f"{clients_each} clients"
    rest = "" if classes_each == 1 else f", each row {classes_each} classes"
    picture.append(" " * margin + f"each column {each}{rest}; samples per client and class: 0 ")
    for position in range(9):
        _append_cell(picture, largest * (position / 8) ** 2, largest, 1, coloured)
    return picture.append(f" {largest:.3g}")


def _append_cell(picture: Text, value: float, largest: float, cell: int, coloured: bool) -> None:
    position = shade(value, largest)
    if coloured:
        # Cells without samples are painted too, so that the picture is the same on dark and light screens.
        background = Color.from_rgb(*(colour(position) if value > 0 else EMPTY))
        picture.append(" " * cell, Style(bgcolor=background))
    else:
        character = SHADES[min(int(position * len(SHADES)), len(SHADES) - 1)] if value > 0 else " "
        picture.append(character * cell)


def _client_scale(starts: Indices, clients: int, cell: int) -> str:
    line = ""
    step = tick_step(clients, max(1, len(starts) * cell // 10))
    for column, start in enumerate(starts):
        following = starts[column + 1] if column + 1 < len(starts) else clients
        tick = -(-int(start) // step) * step
        if tick < following and len(line) <= column * cell:
            line = line.ljust(column * cell) + str(tick) + " "
    return line + "client"


def tick_step(things: int, ticks: int) -> int:
    """A round distance, 1, 2 or 5 times a power of ten, that gives at most `ticks` ticks."""
    wanted = max(1.0, things / max(ticks, 1))
    power = 10 ** math.floor(math.log10(wanted))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= wanted)


# -- files ------------------------------------------------------------------------------------------------

LEFT, TOP, BOTTOM, RIGHT, SIZES = 56, 50, 76, 30, 56


def svg_picture(counts: Indices, title: str, labels: Sequence[Any] | None = None) -> str:
    """One rectangle for every client and class with samples, and above them each client's size."""
    clients, classes = counts.shape
    names = list(range(classes)) if labels is None else list(labels)
    cell_width = min(max(960 / clients, 2.0), 28.0)
    cell_height = min(max(480 / classes, 8.0), 26.0)
    across, down = clients * cell_width, classes * cell_height
    # Room for the title too, whose letters are about nine points wide.
    width = max(LEFT + across + RIGHT, LEFT + 9.0 * len(title) + RIGHT, 480.0)
    first_row = TOP + SIZES + 8
    height = first_row + down + BOTTOM
    largest = int(counts.max())
    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width:.0f}' height='{height:.0f}' "
        f"viewBox='0 0 {width:.0f} {height:.0f}' {FONT} font-size='12' fill='#222'>",
        f"<title>{escape(title)}</title>",
        "<rect class='page' width='100%' height='100%' fill='white'/>",
        f"<text x='{LEFT}' y='26' font-size='15' font-weight='bold'>{escape(title)}</text>",
        f"<rect class='panel' x='{LEFT}' y='{first_row}' width='{across:.2f}' height='{down:.2f}' "
        f"fill='{_hex(EMPTY)}' stroke='#999' stroke-width='0.6'/>",
        *_size_bars(counts, cell_width),
        *_cells(counts, names, cell_width, cell_height, first_row),
        *_axes(clients, names, cell_width, cell_height, first_row),
        *_legend(largest, first_row + down + 56),
        "</svg>\n",
    ]
    return "\n".join(parts)


def _hex(rgb: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def _cells(
    counts: Indices, names: Sequence[Any], cell_width: float, cell_height: float, first_row: float
) -> Iterator[str]:
    largest = int(counts.max())
    # A gap between cells that are large enough for one.
    inner_width = cell_width - 1 if cell_width >= 6 else cell_width
    inner_height = cell_height - 1
    yield f"<g class='cells' transform='translate({LEFT} {first_row})'>"
    for client, label in np.argwhere(counts > 0).tolist():
        count = int(counts[client, label])
        yield (
            f"<rect x='{client * cell_width:.2f}' y='{label * cell_height:.2f}' width='{inner_width:.2f}' "
            f"height='{inner_height:.2f}' fill='{_hex(colour(shade(count, largest)))}'>"
            f"<title>client {client}, class {escape(str(names[label]))}: {count}</title></rect>"
        )
    yield "</g>"


def _size_bars(counts: Indices, cell_width: float) -> Iterator[str]:
    sizes = counts.sum(axis=1)
    largest = int(sizes.max())
    base = TOP + SIZES
    yield f"<text x='{LEFT - 8}' y='{TOP + 10}' text-anchor='end' font-size='11'>{largest:,}</text>"
    yield f"<text x='{LEFT - 8}' y='{base}' text-anchor='end' font-size='11'>0</text>"
    yield _upright("samples", 14, TOP + SIZES / 2)
    bar = cell_width - 1 if cell_width >= 6 else cell_width
    yield "<g class='sizes' fill='#7f8c99'>"
    for client, size in enumerate(sizes.tolist()):
        tall = (SIZES - 4) * size / largest
        yield (
            f"<rect x='{LEFT + client * cell_width:.2f}' y='{base - tall:.2f}' width='{bar:.2f}' "
            f"height='{tall:.2f}'><title>client {client}: {size}</title></rect>"
        )
    yield "</g>"


def _axes(
    clients: int, names: Sequence[Any], cell_width: float, cell_height: float, first_row: float
) -> Iterator[str]:
    bottom = first_row + len(names) * cell_height
    yield "<g class='axes' font-size='11'>"
    for client in range(0, clients, tick_step(clients, max(1, int(clients * cell_width / 45)))):
        middle = LEFT + (client + 0.5) * cell_width
        yield f"<path d='M{middle:.2f} {bottom:.2f}v4' stroke='#666'/>"
        yield f"<text x='{middle:.2f}' y='{bottom + 16:.2f}' text-anchor='middle'>{client}</text>"
    for number in range(0, len(names), tick_step(len(names), int(len(names) * cell_height / 13))):
        middle = first_row + (number + 0.5) * cell_height + 4
        yield f"<text x='{LEFT - 8}' y='{middle:.2f}' text-anchor='end'>{escape(str(names[number]))}</text>"
    yield "</g>"
    centre = LEFT + clients * cell_width / 2
    yield f"<text x='{centre:.2f}' y='{bottom + 34:.2f}' text-anchor='middle'>client</text>"
    yield _upright("class", 14, (first_row + bottom) / 2)


def _upright(text: str, across: float, down: float) -> str:
    place = f"{across:.1f} {down:.1f}"
    return f"<text transform='translate({place}) rotate(-90)' text-anchor='middle'>{text}</text>"


def _legend(largest: int, top: float) -> Iterator[str]:
    step, steps, start = 4, 45, LEFT + 192
    yield "<g class='legend' font-size='11'>"
    yield f"<text x='{LEFT}' y='{top + 9:.2f}'>samples of a class at a client</text>"
    for number in range(steps):
        place = f"x='{start + number * step}' y='{top:.2f}' width='{step + 0.5}' height='11'"
        yield f"<rect {place} fill='{_hex(colour(number / (steps - 1)))}'/>"
    # The ramp goes by the square root, so half-way along it lies a quarter of the largest count.
    shown = {shade(value, largest): value for value in (largest, round(largest / 4)) if value > 0}
    yield f"<text x='{start - 6}' y='{top + 9:.2f}' text-anchor='end'>0</text>"
    for position, value in shown.items():
        middle = start + position * steps * step
        if position == 1.0:
            yield f"<text x='{middle + 6:.2f}' y='{top + 9:.2f}'>{value:,}</text>"
        elif value > 1:
            yield f"<path d='M{middle:.2f} {top:.2f}v-3' stroke='#666'/>"
            yield f"<text x='{middle:.2f}' y='{top - 5:.2f}' text-anchor='middle'>{value:,}</text>"
    yield "</g>"


def html_page(
    counts: Indices, title: str, found: PartitionSummary, labels: Sequence[Any] | None = None
) -> str:
    """The picture and the summary as one page that needs nothing else."""
    rows = "\n".join(
        f"<tr><th>{escape(what)}</th><td>{escape(number)}</td></tr>" for what, number in describe(found)
    )
    return (
        "<!DOCTYPE html>\n<html lang='en'><head><meta charset='utf-8'/>\n"
        f"<title>{escape(title)}</title>\n<style>"
        "body { font-family: Helvetica, Arial, sans-serif; margin: 2em; color: #222; background: white; } "
        "th { text-align: left; font-weight: normal; padding-right: 2em; } "
        "svg { max-width: 100%; height: auto; }</style></head>\n"
        f"<body>\n{svg_picture(counts, title, labels)}<table>\n{rows}\n</table>\n</body></html>\n"
    )


def check_output(path: Path) -> None:
    """Refuses a file whose kind cannot be written, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise FlatfedError(
            f"output = {str(path)!r}: only {' and '.join(SUFFIXES)} files can be written; name it "
            f"{path.stem or 'split'}.svg, which browsers and rsvg-convert turn into other formats"
        )


def write_picture(
    path: Path, counts: Indices, title: str, found: PartitionSummary, labels: Sequence[Any] | None = None
) -> None:
    check_output(path)
    is_page = path.suffix.lower() == ".html"
    text = html_page(counts, title, found, labels) if is_page else svg_picture(counts, title, labels)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
