"""Our numbers beside a paper's, as tables."""

from collections.abc import Sequence

from flatfed.diagnostics import figures
from flatfed.papers.presets import PaperCell
from flatfed.papers.reproduce import measured
from flatfed.papers.sources import settings
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import (
    MEGABYTE,
    ClientRow,
    Spread,
    by_round,
    finite_values,
    first_round_reaching,
    last,
    total,
)

FinishedCell = tuple[PaperCell, list[RunFolder]]
"""A cell and its finished runs."""
ALL = "all"


def results_tables(results: Sequence[FinishedCell]) -> list[figures.Table]:
    """A table for each part of the paper's, and one with the deviations between clients if it prints them."""
    tables = []
    for number, block in enumerate(dict.fromkeys(cell.block for cell, _ in results)):
        rows = [row for row in results if row[0].block == block]
        tables.append(_main_table(f"paper-{number}", rows))
        if printed := [row for row in rows if row[0].printed_deviations]:
            tables.append(_deviations(f"deviations-{number}", printed))
    return tables


def sources_tables(cells: Sequence[PaperCell]) -> list[figures.Table]:
    """Every setting of every cell with its source: what all have in common, then the rest of each part."""
    parts = {block: _statements(block, cells) for block in dict.fromkeys(cell.block for cell in cells)}
    shared = [row for row in next(iter(parts.values())) if all(row in rows for rows in parts.values())]
    common = [row for row in shared if row[-1] == ALL]
    titled = [("Where the settings come from", common)]
    titles = {cell.block: cell.title for cell in cells}
    titled += [(titles[block], [row for row in rows if row not in common]) for block, rows in parts.items()]
    columns = ["setting", "value", "source", "rows"]
    return [
        figures.Table(f"sources-{number}", title, columns, [list(map(figures.cell, row)) for row in rows])
        for number, (title, rows) in enumerate(titled)
        if rows
    ]


def _statements(block: int, cells: Sequence[PaperCell]) -> list[tuple[str, str, str, str]]:
    """Setting, value, source and the rows of the part that have them."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    own = [cell for cell in cells if cell.block == block]
    for cell in own:
        for name, value in settings(cell.config).items():
            rows.setdefault((name, str(value), cell.sources[name]), []).append(cell.label)
    everyone = [cell.label for cell in own]
    return [(*row, ALL if labels == everyone else ", ".join(labels)) for row, labels in sorted(rows.items())]


def _main_table(name: str, rows: Sequence[FinishedCell]) -> figures.Table:
    cells = [cell for cell, _ in rows]
    first, *others = map(_in_short, cells[0].statistics.values())
    unit = " %" if cells[0].printed_scale == 100 else ""
    targets = [f"rounds to {target:.0%}\npaper | ours" for target in cells[0].targets]
    further = [f"{statistic}{unit}\npaper | ours" for statistic in others]
    gains = ["improvement\npaper | ours"] if any("gain" in cell.printed for cell in cells) else []
    columns = ["method", "lr (from)", f"paper{unit}\n{first}", f"ours{unit}\n{first}", "difference"]
    losses = [_matching_losses(runs) for _, runs in rows]
    matching = ["matching loss"] if any(losses) else []
    columns += [*further, *gains, *targets, *matching, "MB up"]
    wrong = [cell for cell in cells if "impossible" in cell.printed]
    notes = [f"(!) {cell.label}: the paper's cell {cell.printed['impossible']}" for cell in wrong]
    origins = dict.fromkeys(cell.origin.partition(": ")[::2] for cell in cells)
    notes += [f"lr ({origin}): {detail}" for origin, detail in origins if detail]
    own = [cell.sizes_of_its_own for cell in cells]
    sizes = [size for size in own[0] if all(size in others for others in own)]
    title = cells[0].title + (f" [run with {', '.join(sizes)}]" if sizes else "")
    # The row that the others improve on is the one whose improvement is a dash.
    baseline = next((measured(*row) for row in rows if row[0].printed.get("gain", 0) is None), None)
    if matching:
        notes.append("matching loss: of the synthetic samples; 1 is nothing learnt")
    body = []
    for row, loss in zip(rows, losses, strict=True):
        *left, sent = _main_row(*row, baseline, bool(gains))
        body.append([*left, *([figures.cell(loss.text(2) if loss else "–")] if matching else []), sent])
    return figures.Table(name, title, columns, body, "\n".join(notes))


def _matching_losses(runs: Sequence[RunFolder]) -> Spread | None:
    """What the distillation of synthetic samples ended with, where there was one."""
    return Spread.of_finite(last(run.read_history(), "matching_loss") for run in runs)


def _main_row(
    cell: PaperCell, runs: Sequence[RunFolder], baseline: Spread | None, gains: bool
) -> list[figures.TableCell]:
    printed, ours, scale = cell.printed.get(cell.column), measured(cell, runs), cell.printed_scale
    rate, deviation = cell.config["training"]["lr"], cell.printed.get("std")
    difference = scale * ours.mean - printed if ours and printed is not None else None
    missing = "–" if any(by_round(run.read_history()) for run in runs) else "diverged"
    improvement = scale * (ours.mean - baseline.mean) if ours and baseline else None
    more = [(cell.printed.get(column), measured(cell, runs, column)) for column in [*cell.statistics][1:]]
    return [
        figures.cell(cell.label + (" (!)" if "impossible" in cell.printed else "")),
        figures.TableCell(f"{rate:g} ({cell.origin.partition(':')[0]})", rate),
        figures.cell(printed, 2, more="" if deviation is None else f" ± {deviation:.2f}"),
        figures.TableCell(ours.text(2, scale), scale * ours.mean) if ours else figures.TableCell(missing),
        figures.TableCell("–") if difference is None else figures.TableCell(f"{difference:+.2f}", difference),
        *(figures.cell(f"{_number(paper)} | {mean.text(2, scale) if mean else '–'}") for paper, mean in more),
        *([figures.cell(f"{_number(cell.printed.get('gain'))} | {_number(improvement)}")] if gains else []),
        *(figures.cell(text) for text in _rounds_columns(cell, runs)),
        figures.amount(Spread.of_finite(total(run.read_history(), "bytes_up") / MEGABYTE for run in runs)),
    ]


def _in_short(statistic: str) -> str:
    """For the head of a column, whose numbers are accuracies."""
    return (
        statistic.replace(" accuracy", "").replace("accuracy ", "").replace("mean over clients,", "clients'")
    )


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _rounds_columns(cell: PaperCell, runs: Sequence[RunFolder]) -> list[str]:
    columns = []
    for printed, target in zip(cell.rounds_as_printed, cell.targets, strict=True):
        reached = finite_values(first_round_reaching(run.read_history(), target) for run in runs)
        ours = Spread.of_finite(reached)
        some = f" ({len(reached)} of {len(runs)})" if 0 < len(reached) < len(runs) else ""
        columns.append(f"{'–' if printed is None else printed} | {ours.text(0) if ours else '–'}{some}")
    return columns


def _deviations(name: str, rows: Sequence[FinishedCell]) -> figures.Table:
    columns = [f"own {data} data\npaper | ours (chance)" for data in rows[0][0].printed_deviations]
    cells = []
    for cell, runs in rows:
        clients = [run.read_clients() for run in runs]
        pairs = [(value, ClientRow.of(clients, data)) for data, value in cell.printed_deviations.items()]
        texts = [f"{printed:.2f} | {ours.deviation_text if ours else '–'}" for printed, ours in pairs]
        cells.append([figures.cell(text) for text in (cell.label, *texts)])
    return figures.Table(name, "Deviation between clients, %", ["method", *columns], cells)
