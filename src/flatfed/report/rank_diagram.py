"""A critical-difference diagram: mean ranks on a line, bars over methods that cannot be told apart."""

import html

from flatfed.runs.ranking import Ranks

WIDTH, MARGIN, ROW = 900, 250, 18
FONT = 'font-family="sans-serif" font-size="12"'


def rank_diagram(ranks: Ranks) -> str:
    """As SVG; the best methods on the left."""
    count = len(ranks.means)

    def place(rank: float) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (rank - 1) / max(1, count - 1)

    top = 60
    lines = []
    for tick in range(1, count + 1):
        if tick in {1, count} or tick % 5 == 0:
            lines.append(_line(place(tick), top - 5, place(tick), top))
            lines.append(_text(place(tick), top - 9, str(tick), "middle"))
    lines.append(_line(place(1), top, place(count), top))
    end = min(place(1 + ranks.critical_difference), place(count))
    cut = "" if 1 + ranks.critical_difference <= count else " (longer than the axis)"
    lines.append(_line(place(1), 22, end, 22, 3))
    lines.append(_text(place(1), 14, f"critical difference {ranks.critical_difference:.2f}{cut}", "start"))
    bars = top + 8
    for number, group in enumerate(ranks.alike):
        first, last = ranks.means[group[0]], ranks.means[group[-1]]
        height = bars + 6 * number
        lines.append(_line(place(first) - 3, height, place(last) + 3, height, 3))
    below = bars + 6 * len(ranks.alike) + 14
    half = (count + 1) // 2
    for number, (name, rank) in enumerate(ranks.means.items()):
        left = number < half
        row = below + ROW * (number if left else count - 1 - number)
        side = MARGIN - 12 if left else WIDTH - MARGIN + 12
        lines += [_line(place(rank), top, place(rank), row), _line(place(rank), row, side, row)]
        lines.append(
            _text(side + (-4 if left else 4), row + 4, f"{name} ({rank:.1f})", "end" if left else "start")
        )
    height = below + ROW * half
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}">\n<rect width="100%" height="100%" fill="white"/>\n'
        + "\n".join(lines)
        + "\n</svg>\n"
    )


def _line(left: float, top: float, right: float, bottom: float, width: float = 1) -> str:
    ends = f'x1="{left:.1f}" y1="{top:.1f}" x2="{right:.1f}" y2="{bottom:.1f}"'
    return f'<line {ends} stroke="black" stroke-width="{width}"/>'


def _text(left: float, bottom: float, text: str, anchor: str) -> str:
    return f'<text x="{left:.1f}" y="{bottom:.1f}" text-anchor="{anchor}" {FONT}>{html.escape(text)}</text>'
