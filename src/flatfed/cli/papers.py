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
from flatfed.diagnostics.figures import Table as ReportTable
from flatfed.diagnostics.figures import TableCell, amount, cell
from flatfed.papers import tables
from flatfed.papers.presets import Cell
from flatfed.papers.reproduce import Result, chosen_cells, remaining_work, seeded
from flatfed.papers.reproduce import reproduce as run_cells
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
        listing = Table("table", "what it shows")
        for name, content in tables().items():
            diagnostic = content.get("diagnostic")
            remark = f" (a diagnostic, not accuracies: {diagnostic})" if diagnostic else ""
            listing.add_row(name, content["title"] + remark)
        console.print(listing)
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

        def watch(cell: Cell, seed: int) -> Callback:
            return Watcher(progress, task, f"{cell.label}, seed {seed}: ")

        def failed(cell: Cell, seed: int, error: DivergedError) -> None:
            failures.append(f"{cell.label}, seed {seed}: {error}")

        results = run_cells(chosen, range(seeds), runs, watch, failed)
    for failure in failures:
        complain.print(f"[yellow]left out:[/] {escape(failure)}")
    shown = _results_tables(results)
    _print_tables(shown)
    for note in tables()[table]["notes"]:
        console.print(f"note: {note}", highlight=False)
    labels = {run_folder(seeded(each, seed), runs): each.label for each in chosen for seed in range(seeds)}
    name = f"report-{table.replace('/', '-')}.html"
    end_with_report(labels, runs / name, title=tables()[table]["title"], tables=shown)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _results_tables(results: Sequence[Result]) -> list[ReportTable]:
    """A table for each part of the paper's."""
    tables = []
    for number, block in enumerate(dict.fromkeys(result.cell.block for result in results)):
        rows = [result for result in results if result.cell.block == block]
        tables.append(_accuracies(f"paper-{number}", rows))
        if rows[0].printed_deviations:
            tables.append(_deviations(f"deviations-{number}", rows))
    return tables


def _accuracies(name: str, rows: Sequence[Result]) -> ReportTable:
    unit = " %" if rows[0].percent else f"\n{rows[0].measure}"
    targets = [f"rounds to {target:.0%}\npaper | ours" for target in rows[0].cell.targets]
    columns = ["method", "lr (from)", f"paper{unit}", f"ours{unit}", "difference", *targets, "MB up"]
    wrong = [row for row in rows if "impossible" in row.cell.printed]
    notes = [f"(!) {row.cell.label}: the paper's cell {row.cell.printed['impossible']}" for row in wrong]
    origins = dict.fromkeys(row.cell.origin.partition(": ")[::2] for row in rows)
    notes += [f"lr ({origin}): {detail}" for origin, detail in origins if detail]
    cells = [_result_cells(row) for row in rows]
    return ReportTable(name, rows[0].cell.title, columns, cells, "\n".join(notes))


def _result_cells(row: Result) -> list[TableCell]:
    mark = " (!)" if "impossible" in row.cell.printed else ""
    spread = "" if row.printed_deviation is None else f" ± {row.printed_deviation:.2f}"
    rate, scale = row.cell.config["training"]["lr"], 100 if row.percent else 1
    ours = None if row.ours is None else TableCell(row.ours.text(2, scale), scale * row.ours.mean)
    return [
        cell(row.cell.label + mark),
        TableCell(f"{rate:g} ({row.cell.origin.partition(':')[0]})", rate),
        cell(row.printed, 2, more=spread),
        ours or TableCell("diverged"),
        TableCell("–") if row.difference is None else TableCell(f"{row.difference:+.2f}", row.difference),
        *(cell(text) for text in _rounds_columns(row)),
        amount(row.megabytes_up),
    ]


def _deviations(name: str, rows: Sequence[Result]) -> ReportTable:
    columns = [f"own {data} data\npaper | ours (chance)" for data in rows[0].printed_deviations]
    cells = []
    for row in rows:
        found = ((printed, row.clients[data]) for data, printed in row.printed_deviations.items())
        texts = (f"{printed:.2f} | {ours.deviation_text if ours else '–'}" for printed, ours in found)
        cells.append([cell(row.cell.label), *(cell(text) for text in texts)])
    return ReportTable(name, "Deviation between clients, %", ["method", *columns], cells)


def _print_tables(tables: Sequence[ReportTable]) -> None:
    for content in tables:
        table = Table(title=content.title, title_justify="left")
        for place, header in enumerate(content.columns):
            table.add_column(header, justify="right" if place else "left", no_wrap=place > 0)
        for row in content.rows:
            table.add_row(*(escape(each.text) for each in row))
        console.print(table)
        if content.note:
            console.print(content.note, highlight=False, markup=False)


def _rounds_columns(row: Result) -> list[str]:
    columns = []
    for printed, ours, reached in zip(row.printed_rounds, row.our_rounds, row.reached, strict=True):
        own = "–" if ours is None else ours.text(0)
        if 0 < reached < row.seeds:
            own += f" ({reached} of {row.seeds})"
        columns.append(f"{'–' if printed is None else printed} | {own}")
    return columns
