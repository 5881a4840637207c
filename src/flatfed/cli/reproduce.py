"""The papers' tables: reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flatfed.cli.report import end_with_report
from flatfed.cli.terminal import (
    RUNS,
    Assignments,
    Methods,
    Only,
    Root,
    Watcher,
    command,
    complain,
    console,
    round_progress,
)
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.papers import tables
from flatfed.papers.presets import PaperCell
from flatfed.papers.reproduce import CellResult, chosen_cells, remaining_work, run_cells, seeded
from flatfed.report.content import Cell as ReportCell
from flatfed.report.content import Table as ReportTable
from flatfed.report.content import amount, cell
from flatfed.runs.compare import run_folder
from flatfed.training.loop import Callback


@command
def reproduce(
    table: Annotated[str | None, typer.Argument(help="e.g. fedsagd/table2; none lists them.")] = None,
    methods: Methods = None,
    only: Only = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the paper's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="With the settings that sweeps found, where there are some.")
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
    failures: list[str] = []
    with round_progress() as progress:
        task = progress.add_task("all runs", total=work.rounds, note="", unit="rounds")

        def watch(cell: PaperCell, seed: int) -> Callback:
            return Watcher(progress, task, f"{cell.label}, seed {seed}: ")

        def failed(cell: PaperCell, seed: int, error: DivergedError) -> None:
            failures.append(f"{cell.label}, seed {seed}: {error}")

        results = run_cells(chosen, range(seeds), runs, watch, failed)
    for failure in failures:
        complain.print(f"[yellow]left out:[/] {escape(failure)}")
    content = _results_tables(results)
    _print_tables(content)
    for note in tables()[table].notes:
        console.print(f"note: {note}", highlight=False)
    labels = {run_folder(seeded(cell, seed), runs): cell.label for cell in chosen for seed in range(seeds)}
    name = f"report-{table.replace('/', '-')}.html"
    end_with_report(labels, runs / name, title=tables()[table].title, tables=content)


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


def _results_tables(results: Sequence[CellResult]) -> list[ReportTable]:
    """A table for each part of the paper's, and one with the deviations between clients if it prints them."""
    content = []
    for number, block in enumerate(dict.fromkeys(result.cell.block for result in results)):
        rows = [result for result in results if result.cell.block == block]
        content.append(_main_table(f"paper-{number}", rows))
        if rows[0].clients:
            content.append(_deviations(f"deviations-{number}", rows))
    return content


def _main_table(name: str, rows: Sequence[CellResult]) -> ReportTable:
    first = rows[0].cell
    unit = " %" if rows[0].scale == 100 else f"\n{first.statistic}"
    targets = [f"rounds to {target:.0%}\npaper | ours" for target in first.targets]
    columns = ["method", "lr (from)", f"paper{unit}", f"ours{unit}", "difference", *targets, "MB up"]
    cells = [row.cell for row in rows]
    notes = [
        f"(!) {cell.label}: the paper's cell {cell.printed['impossible']}"
        for cell in cells
        if "impossible" in cell.printed
    ]
    origins = dict.fromkeys(cell.origin.partition(": ")[::2] for cell in cells)
    notes += [f"lr ({origin}): {detail}" for origin, detail in origins if detail]
    return ReportTable(name, first.title, columns, [_main_row(row) for row in rows], "\n".join(notes))


def _main_row(row: CellResult) -> list[ReportCell]:
    printed, value = row.cell.printed, row.value
    deviation = f" ± {printed['std']:.2f}" if printed.get("std") is not None else ""
    rate = row.cell.config["training"]["lr"]
    return [
        cell(row.cell.label + (" (!)" if "impossible" in printed else "")),
        ReportCell(f"{rate:g} ({row.cell.origin.partition(':')[0]})", rate),
        cell(printed.get(row.cell.column), 2, more=deviation),
        ReportCell(value.text(2, row.scale), row.scale * value.mean) if value else ReportCell("diverged"),
        ReportCell("–") if row.difference is None else ReportCell(f"{row.difference:+.2f}", row.difference),
        *(cell(text) for text in _rounds_columns(row)),
        amount(row.megabytes_up),
    ]


def _rounds_columns(row: CellResult) -> list[str]:
    columns = []
    for printed, ours, reached in zip(row.cell.printed_rounds, row.rounds, row.reached, strict=True):
        share = f" ({reached} of {row.seeds})" if 0 < reached < row.seeds else ""
        columns.append(f"{'–' if printed is None else printed} | {ours.text(0) if ours else '–'}{share}")
    return columns


def _deviations(name: str, rows: Sequence[CellResult]) -> ReportTable:
    columns = [f"own {data} data\npaper | ours (chance)" for data in rows[0].clients]
    cells = []
    for row in rows:
        printed = row.cell.printed_deviations
        pairs = ((printed[data], ours.deviation_text if ours else "–") for data, ours in row.clients.items())
        cells.append([cell(row.cell.label), *(cell(f"{theirs:.2f} | {ours}") for theirs, ours in pairs)])
    return ReportTable(name, "Deviation between clients, %", ["method", *columns], cells)


def _print_tables(tables: Sequence[ReportTable]) -> None:
    for content in tables:
        table = Table(title=content.title, title_justify="left")
        for place, header in enumerate(content.columns):
            table.add_column(header, justify="right" if place else "left", no_wrap=place > 0)
        for row in content.rows:
            table.add_row(*(escape(entry.text) for entry in row))
        console.print(table)
        if content.note:
            console.print(content.note, highlight=False, markup=False)
