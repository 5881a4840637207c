"""The papers' tables: reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

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
from flatfed.experiments.papers import tables
from flatfed.experiments.papers.presets import Cell
from flatfed.experiments.papers.reproduce import Result, chosen_cells, remaining_work
from flatfed.experiments.papers.reproduce import reproduce as run_cells
from flatfed.experiments.run import Callback


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
            remark = " (needs compressed uploads: not yet)" if name.startswith("fedsynsam") else ""
            if "diagnostic" in content:
                remark = f" (a diagnostic, not accuracies: {content['diagnostic']})"
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
    _print_results(results)
    for note in tables()[table]["notes"]:
        console.print(f"note: {note}", highlight=False)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _print_results(results: Sequence[Result]) -> None:
    for block in dict.fromkeys(result.cell.block for result in results):
        rows = [result for result in results if result.cell.block == block]
        _print_accuracies(rows)
        if rows[0].printed_deviations:
            _print_deviations(rows)
        for row in rows:
            if "impossible" in row.cell.printed:
                console.print(f"(!) {row.cell.label}: the paper's cell {row.cell.printed['impossible']}")
        for name, detail in dict.fromkeys(row.cell.origin.partition(": ")[::2] for row in rows):
            if detail:
                console.print(f"lr ({name}): {detail}", highlight=False)


def _print_accuracies(rows: Sequence[Result]) -> None:
    table = Table(title=rows[0].cell.title, title_justify="left")
    table.add_column("method")
    for header in ("lr (from)", "paper %", "ours %", "difference"):
        table.add_column(header, justify="right", no_wrap=True)
    for target in rows[0].cell.targets:
        table.add_column(f"rounds to {target:.0%}\npaper | ours", justify="right", no_wrap=True)
    for row in rows:
        printed = "–" if row.printed is None else f"{row.printed:.2f}"
        if row.printed_deviation is not None:
            printed += f" ± {row.printed_deviation:.2f}"
        difference = "–" if row.difference is None else f"{row.difference:+.2f}"
        mark = " [yellow](!)[/]" if "impossible" in row.cell.printed else ""
        ours = "diverged" if row.ours is None else row.ours.text(2, 100)
        rate = f"{row.cell.config['training']['lr']:g} ({row.cell.origin.partition(':')[0]})"
        table.add_row(row.cell.label + mark, rate, printed, ours, difference, *_rounds_columns(row))
    console.print(table)


def _print_deviations(rows: Sequence[Result]) -> None:
    table = Table()
    table.add_column("deviation between clients, %")
    for name in rows[0].printed_deviations:
        table.add_column(f"own {name} data\npaper | ours (chance)", justify="right", no_wrap=True)
    for row in rows:
        found = ((printed, row.clients[name]) for name, printed in row.printed_deviations.items())
        table.add_row(
            row.cell.label,
            *(f"{printed:.2f} | {ours.deviation_text if ours else '–'}" for printed, ours in found),
        )
    console.print(table)


def _rounds_columns(row: Result) -> list[str]:
    columns = []
    for printed, ours, reached in zip(row.printed_rounds, row.our_rounds, row.reached, strict=True):
        own = "–" if ours is None else ours.text(0)
        if 0 < reached < row.seeds:
            own += f" ({reached} of {row.seeds})"
        columns.append(f"{'–' if printed is None else printed} | {own}")
    return columns
