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
    command,
    complain,
    console,
    describe_round,
    round_progress,
)
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.experiments.papers import tables
from flatfed.experiments.papers.presets import Cell
from flatfed.experiments.papers.reproduce import Result, chosen_cells, remaining_work
from flatfed.experiments.papers.reproduce import reproduce as run_cells
from flatfed.experiments.run import Callback
from flatfed.experiments.run import Progress as RoundProgress


@command
def reproduce(
    table: Annotated[str | None, typer.Argument(help="e.g. fedsagd/table2; none lists them.")] = None,
    methods: Methods = None,
    only: Only = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the paper's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
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
            later = " (needs compressed uploads: not yet)" if name.startswith("fedsynsam") else ""
            listing.add_row(name, content["title"] + later)
        console.print(listing)
        return
    if scale not in {"full", "small"}:
        raise FlatfedError(f"scale = {scale!r}: must be full or small")
    chosen = chosen_cells(table, methods or [], only, rounds, scale, assignments or [])
    work = remaining_work(chosen, range(seeds), runs)
    console.print(
        f"{table}: {len(chosen)} cells × {seeds} seeds; {work.runs} runs to do, {work.rounds:,} rounds, "
        f"{work.gradients:,} gradients, about {_duration(work.seconds)}."
    )
    failures: list[str] = []
    with round_progress() as progress:
        task = progress.add_task("all runs", total=work.rounds, note="")

        def watch(cell: Cell, seed: int) -> Callback:
            def update(now: RoundProgress) -> None:
                progress.update(
                    task, advance=1, note=f"{cell.label}, seed {seed}: {describe_round(now.record)}"
                )

            return update

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
        targets = rows[0].cell.targets
        table = Table(title=rows[0].cell.title, title_justify="left")
        table.add_column("method")
        for header in ("paper %", "ours %", "difference"):
            table.add_column(header, justify="right", no_wrap=True)
        for target in targets:
            table.add_column(f"rounds to {target:.0%}\npaper | ours", justify="right", no_wrap=True)
        for row in rows:
            printed = "–" if row.printed is None else f"{row.printed:.2f}"
            if row.printed_deviation is not None:
                printed += f" ± {row.printed_deviation:.2f}"
            difference = "–" if row.difference is None else f"{row.difference:+.2f}"
            mark = " [yellow](!)[/]" if "impossible" in row.cell.printed else ""
            ours = "diverged" if row.ours is None else row.ours.text(2, 100)
            table.add_row(row.cell.label + mark, printed, ours, difference, *_rounds_columns(row))
        console.print(table)
        for row in rows:
            if "impossible" in row.cell.printed:
                console.print(f"(!) {row.cell.label}: the paper's cell {row.cell.printed['impossible']}")


def _rounds_columns(row: Result) -> list[str]:
    columns = []
    for printed, ours, reached in zip(row.printed_rounds, row.our_rounds, row.reached, strict=True):
        own = "–" if ours is None else ours.text(0)
        if 0 < reached < row.seeds:
            own += f" ({reached} of {row.seeds})"
        columns.append(f"{'–' if printed is None else printed} | {own}")
    return columns
