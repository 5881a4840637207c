"""Pictures of a partition: which client holds how many samples of which class.

`terminal_picture` draws with characters, `svg_picture` and `html_page` make files. All take the counts
[clients, classes] of `class_counts`. Shades follow the square root of the count, so that one large client
does not wash out all others, on one ramp of blues that grows darker with the count: it reads the same with
any colour vision and in print.
"""

import math
from pathlib import Path

import jinja2
import numpy as np
from numpy.typing import NDArray
from rich.color import Color
from rich.style import Style
from rich.text import Text

from flatfed.core.errors import FlatfedError
from flatfed.data.partition import PartitionSummary
from flatfed.data.partition.base import Indices

FOLDER = Path(__file__).parent
TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(FOLDER),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
    undefined=jinja2.StrictUndefined,
)
Numbers = NDArray[np.float64]
RAMP = ((222, 235, 247), (158, 202, 225), (66, 146, 198), (8, 81, 156), (8, 32, 84))
EMPTY = (250, 251, 253)
SHADES = "░▒▓█"
SUFFIXES = (".svg", ".html")


def describe(summary: PartitionSummary) -> list[tuple[str, str]]:
    """A summary as pairs of a description and a number."""
    samples = summary.samples_used + summary.samples_unused
    sizes = f"{summary.smallest_client:,} … {summary.largest_client:,}, median {summary.median_client:g}"
    held = f"{summary.fewest_classes} … {summary.most_classes} of {summary.classes}"
    return [
        ("clients", f"{summary.clients:,}"),
        ("samples in the data", f"{samples:,}"),
        ("samples used", f"{summary.samples_used:,} ({summary.samples_used / samples:.1%})"),
        ("samples unused", f"{summary.samples_unused:,}"),
        ("samples duplicated", f"{summary.samples_duplicated:,}"),
        ("samples per client", sizes),
        ("classes per client", f"{held}, mean {summary.mean_classes:.1f}"),
        ("classes that nobody holds", ", ".join(map(str, summary.uncovered_classes)) or "none"),
    ]


def shade(value: float, largest: float) -> float:
    """Where on the ramp a count lies, 0 … 1."""
    return math.sqrt(min(value / largest, 1.0)) if largest > 0 else 0.0


def colour(position: float) -> tuple[int, int, int]:
    """The ramp's red, green and blue at a position 0 … 1."""
    places = np.linspace(0, 1, len(RAMP))
    red, green, blue = (round(float(np.interp(position, places, hue))) for hue in zip(*RAMP, strict=True))
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
    in_column, in_row = (int(starts[1]) if len(starts) > 1 else 1 for starts in (client_starts, class_starts))
    columns = "a client" if in_column == 1 else f"{in_column} clients"
    rows_too = "" if in_row == 1 else f", each row {in_row} classes"
    picture.append(" " * margin + f"each column {columns}{rows_too}; samples per client and class: 0 ")
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
    least = max(1.0, things / max(ticks, 1))
    power = 10 ** math.floor(math.log10(least))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= least)


# -- files ------------------------------------------------------------------------------------------------


def svg_picture(counts: Indices, title: str) -> str:
    """One rectangle for every client and class with samples, and above them each client's size."""
    clients, classes = counts.shape
    cell_width, cell_height = min(max(960 / clients, 2.0), 28.0), min(max(480 / classes, 8.0), 26.0)
    largest = int(counts.max())
    held = ((client, label, int(counts[client, label])) for client, label in np.argwhere(counts > 0).tolist())
    # The ramp goes by the square root, so about half-way along it lies a quarter of the largest count.
    quarter = round(largest / 4)
    return TEMPLATES.get_template("split.svg").render(
        title=title,
        clients=clients,
        classes=classes,
        cell_width=cell_width,
        cell_height=cell_height,
        cells=[(client, label, count, _hex(colour(shade(count, largest)))) for client, label, count in held],
        sizes=counts.sum(axis=1).tolist(),
        client_step=tick_step(clients, max(1, int(clients * cell_width / 45))),
        class_step=tick_step(classes, int(classes * cell_height / 13)),
        empty=_hex(EMPTY),
        ramp=[_hex(colour(number / 44)) for number in range(45)],
        largest=largest,
        quarter=quarter,
        quarter_position=shade(quarter, largest),
    )


def _hex(rgb: tuple[int, int, int]) -> str:
    return "#{:02x}{:02x}{:02x}".format(*rgb)


def html_page(counts: Indices, title: str, summary: PartitionSummary) -> str:
    """The picture and the summary as one page that needs nothing else."""
    picture, template = svg_picture(counts, title), TEMPLATES.get_template("split.html")
    return template.render(title=title, picture=picture, numbers=describe(summary))


def check_output(path: Path) -> None:
    """Refuses a file whose kind cannot be written, before any work is done."""
    if path.suffix.lower() not in SUFFIXES:
        raise FlatfedError(
            f"output = {str(path)!r}: only {' and '.join(SUFFIXES)} files can be written; name it "
            f"{path.stem or 'split'}.svg, which browsers and rsvg-convert turn into other formats"
        )


def write_picture(path: Path, counts: Indices, title: str, summary: PartitionSummary) -> None:
    is_page = path.suffix.lower() == ".html"
    text = html_page(counts, title, summary) if is_page else svg_picture(counts, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
