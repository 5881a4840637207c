"""The papers' tables: reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from flatfed.cli.report import end_with_report
from flatfed.cli.run import run_labelled
from flatfed.cli.terminal import (
    RUNS,
    Assignments,
    FromScratch,
    Methods,
    Only,
    Root,
    check_damage,
    command,
    console,
)
from flatfed.core.errors import FlatfedError

if TYPE_CHECKING:
    from flatfed.diagnostics import figures


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
    from_scratch: FromScratch = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Run nothing; print every setting and where it comes from.")
    ] = False,
    runs: Root = RUNS,
) -> None:
    """Run a table of the papers and print our numbers beside theirs."""
    from flatfed.papers import tables
    from flatfed.papers.reproduce import chosen_cells, remaining_work, seeded
    from flatfed.papers.results import results_tables, sources_tables
    from flatfed.runs.files import check_replaceable

    if table is None:
        _list_tables()
        return
    if scale not in {"full", "small"}:
        raise FlatfedError(f"scale = {scale!r}: must be full or small")
    chosen = chosen_cells(table, methods or [], only, rounds, scale, assignments or [], tuned, from_scratch)
    sources = sources_tables(chosen)
    if explain:
        _print_sources(sources)
        return
    work = remaining_work(chosen, range(seeds), runs)
    console.print(
        f"{table}: {len(chosen)} cells × {seeds} seeds; {work.runs} runs to do, {work.rounds:,} rounds, "
        f"{work.gradients:,} gradients, about {_duration(work.seconds)}."
    )
    console.print(_title(table))
    labelled = [(cell.label, [seeded(cell, seed) for seed in range(seeds)]) for cell in chosen]
    name = f"report-{table.replace('/', '-')}.html"
    check_replaceable(runs / name)
    finished, damaged = run_labelled(labelled, runs, work.rounds)
    results = results_tables(list(zip(chosen, finished, strict=True)))
    _print_tables(results)
    for note in tables()[table].notes:
        console.print(f"note: {note}")
    end_with_report(labelled, runs, damaged, name, title=_title(table), tables=[*results, *sources])
    check_damage(len(damaged))


def _list_tables() -> None:
    from flatfed.papers import papers, tables

    listing = Table("table", "what it shows")
    for name, table in tables().items():
        remark = f" (a diagnostic, not accuracies: {table.diagnostic})" if table.diagnostic else ""
        listing.add_row(name, table.title + remark)
    console.print(listing)
    for name, paper in papers().items():
        console.print(f"{name}: {paper.title}. {paper.citation}")


def _title(name: str) -> str:
    """The table's title with its paper."""
    from flatfed.papers import papers, tables

    return f"{name}: {tables()[name].title}. {papers()[name.partition('/')[0]].citation}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _print_sources(sources: Sequence[figures.Table]) -> None:
    for result in sources:
        table = Table(*result.columns, title=result.title, title_justify="left")
        for row in result.rows:
            table.add_row(*(entry.text for entry in row))
        console.print(table)


def _print_tables(results: Sequence[figures.Table]) -> None:
    for result in results:
        table = Table(title=result.title, title_justify="left")
        for position, header in enumerate(result.columns):
            least = None if position else 12  # names may be broken, but not into single letters
            justify: Literal["left", "right"] = "right" if position else "left"
            table.add_column(header, justify=justify, no_wrap=position > 0, min_width=least)
        for row in result.rows:
            table.add_row(*(entry.text for entry in row))
        console.print(table)
        if result.note:
            console.print(result.note)
