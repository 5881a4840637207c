"""The papers' tables: reproduce."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from flatfed.cli.report import end_with_report
from flatfed.cli.run import run_labelled
from flatfed.cli.terminal import RUNS, Assignments, Methods, Only, Root, check_damage, command, console
from flatfed.core.errors import FlatfedError
from flatfed.diagnostics import figures
from flatfed.papers import tables
from flatfed.papers.presets import PaperCell
from flatfed.papers.reproduce import chosen_cells, measured, remaining_work, seeded
from flatfed.runs.files import check_replaceable
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import MEGABYTE, ClientRow, Spread, finite_values, first_round_reaching, total

FinishedCell = tuple[PaperCell, list[RunFolder]]
"""A cell and its finished runs."""


@command
def reproduce(
    table: Annotated[str | None, typer.Argument(help="e.g. fedsagd/table2; none lists them.")] = None,
    methods: Methods = None,
    only: Only = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the paper's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="With the settings that tuning found, where there are some.")
    ] = False,
    scale: Annotated[
        str, typer.Option(help="full, or small: a few clients and steps, to try it out.")
    ] = "full",
    assignments: Assignments = None,
    runs: Root = RUNS,
) -> None:
    """Run a table of the papers and print our numbers beside theirs."""
    if table is None:
        _list_tables()
        return
    if scale not in {"full", "small"}:
        raise FlatfedError(f"scale = {scale!r}: must be full or small")
    chosen = chosen_cells(table, methods or [], only, rounds, scale, assignments or [], tuned)
    work = remaining_work(chosen, range(seeds), runs)
    console.print(
        f"{table}: {len(chosen)} cells × {seeds} seeds; {work.runs} runs to do, {work.rounds:,} rounds, "
        f"{work.gradients:,} gradients, about {_duration(work.seconds)}."
    )
    labelled = [(cell.label, [seeded(cell, seed) for seed in range(seeds)]) for cell in chosen]
    name = f"report-{table.replace('/', '-')}.html"
    check_replaceable(runs / name)
    finished, damaged = run_labelled(labelled, runs, work.rounds)
    results_tables = _results_tables(list(zip(chosen, finished, strict=True)))
    _print_tables(results_tables)
    for note in tables()[table].notes:
        console.print(f"note: {note}")
    end_with_report(labelled, runs, damaged, name, title=tables()[table].title, tables=results_tables)
    check_damage(len(damaged))


def _list_tables() -> None:
    listing = Table("table", "what it shows")
    for name, table in tables().items():
        remark = f" (a diagnostic, not accuracies: {table.diagnostic})" if table.diagnostic else ""
        listing.add_row(name, table.title + remark)
    console.print(listing)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _results_tables(results: Sequence[FinishedCell]) -> list[figures.Table]:
    """A table for each part of the paper's, and one with the deviations between clients if it prints them."""
    results_tables = []
    for number, block in enumerate(dict.fromkeys(cell.block for cell, _ in results)):
        rows = [row for row in results if row[0].block == block]
        results_tables.append(_main_table(f"paper-{number}", rows))
        if rows[0][0].printed_deviations:
            results_tables.append(_deviations(f"deviations-{number}", rows))
    return results_tables


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


def _print_tables(results_tables: Sequence[figures.Table]) -> None:
    for results in results_tables:
        table = Table(title=results.title, title_justify="left")
        for position, header in enumerate(results.columns):
            table.add_column(header, justify="right" if position else "left", no_wrap=position > 0)
        for row in results.rows:
            table.add_row(*(entry.text for entry in row))
        console.print(table)
        if results.note:
            console.print(results.note)
