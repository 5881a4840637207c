"""Our numbers beside a paper's, as tables."""

from collections.abc import Sequence

from flatfed.diagnostics import figures
from flatfed.papers.presets import PaperCell
from flatfed.papers.reproduce import measured
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import MEGABYTE, ClientRow, Spread, finite_values, first_round_reaching, total

FinishedCell = tuple[PaperCell, list[RunFolder]]
"""A cell and its finished runs."""


def results_tables(results: Sequence[FinishedCell]) -> list[figures.Table]:
    """A table for each part of the paper's, and one with the deviations between clients if it prints them."""
    tables = []
    for number, block in enumerate(dict.fromkeys(cell.block for cell, _ in results)):
        rows = [row for row in results if row[0].block == block]
        tables.append(_main_table(f"paper-{number}", rows))
        if rows[0][0].printed_deviations:
            tables.append(_deviations(f"deviations-{number}", rows))
    return tables


def _main_table(name: str, rows: Sequence[FinishedCell]) -> figures.Table:
    cells = [cell for cell, _ in rows]
    unit = " %" if cells[0].printed_scale == 100 else f"\n{cells[0].statistic}"
    targets = [f"rounds to {target:.0%}\npaper | ours" for target in cells[0].targets]
    columns = ["method", "lr (from)", f"paper{unit}", f"ours{unit}", "difference", *targets, "MB up"]
    wrong = [cell for cell in cells if "impossible" in cell.printed]
    notes = [f"(!) {cell.label}: the paper's cell {cell.printed['impossible']}" for cell in wrong]
    origins = dict.fromkeys(cell.origin.partition(": ")[::2] for cell in cells)
    notes += [f"lr ({origin}): {detail}" for origin, detail in origins if detail]
    return figures.Table(name, cells[0].title, columns, [_main_row(*row) for row in rows], "\n".join(notes))


def _main_row(cell: PaperCell, runs: Sequence[RunFolder]) -> list[figures.TableCell]:
    printed, ours, scale = cell.printed.get(cell.column), measured(cell, runs), cell.printed_scale
    rate, deviation = cell.config["training"]["lr"], cell.printed.get("std")
    difference = scale * ours.mean - printed if ours and printed is not None else None
    return [
        figures.cell(cell.label + (" (!)" if "impossible" in cell.printed else "")),
        figures.TableCell(f"{rate:g} ({cell.origin.partition(':')[0]})", rate),
        figures.cell(printed, 2, more="" if deviation is None else f" ± {deviation:.2f}"),
        figures.TableCell(ours.text(2, scale), scale * ours.mean) if ours else figures.TableCell("diverged"),
        figures.TableCell("–") if difference is None else figures.TableCell(f"{difference:+.2f}", difference),
        *(figures.cell(text) for text in _rounds_columns(cell, runs)),
        figures.amount(Spread.of_finite(total(run.read_history(), "bytes_up") / MEGABYTE for run in runs)),
    ]


def _rounds_columns(cell: PaperCell, runs: Sequence[RunFolder]) -> list[str]:
    columns = []
    for printed, target in zip(cell.printed_rounds, cell.targets, strict=True):
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
