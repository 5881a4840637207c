"""The papers' tables and figures: reproduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.table import Table

from flatfed.cli.report import end_with_report
from flatfed.cli.run import run_labelled
from flatfed.cli.terminal import (
    RUNS,
    AsJson,
    Assignments,
    FromScratch,
    Methods,
    Only,
    Root,
    check_damage,
    command,
    console,
    measurement_bars,
    print_json,
    print_tables,
    table_facts,
    tell,
)

if TYPE_CHECKING:
    from flatfed.diagnostics import figures
    from flatfed.papers.results import FinishedCell


@command
def reproduce(
    table: Annotated[
        str | None, typer.Argument(help="e.g. fedsagd/table2 or fedswa/figure5; none lists them.")
    ] = None,
    methods: Methods = None,
    only: Only = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the paper's.")] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="How many seeds; 3 unless given, at the laptop scale 1.")
    ] = None,
    tuned: Annotated[
        bool, typer.Option("--tuned", help="With the settings that tuning found, where there are some.")
    ] = False,
    scale: Annotated[
        str,
        typer.Option(
            help="full; laptop: a figure in about an hour on two cores; small: a few steps, to try it out."
        ),
    ] = "full",
    assignments: Assignments = None,
    from_scratch: FromScratch = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Run nothing; print every setting and where it comes from.")
    ] = False,
    runs: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Run a table of the papers and print our numbers beside theirs, or draw a figure."""
    from flatfed.papers import bounds, tables
    from flatfed.papers.measuring import during_runs
    from flatfed.papers.reproduce import chosen_cells, remaining_work, seeded
    from flatfed.papers.results import results_tables, sources_tables
    from flatfed.papers.scaling import check_scale
    from flatfed.papers.theorems import bounds_tables
    from flatfed.report.svg import check_drawable
    from flatfed.runs.files import check_replaceable

    if table is None:
        _list_tables(as_json)
        return
    if table in bounds():
        console.print(_title(table))
        _show(bounds_tables(table, methods or []), as_json)
        return
    check_scale(scale)
    seeds = seeds or (1 if scale == "laptop" else 3)
    chosen = chosen_cells(table, methods or [], only, rounds, scale, assignments or [], tuned, from_scratch)
    sources = sources_tables(chosen)
    if explain:
        _show(sources, as_json)
        return
    measuring = during_runs(tables()[table], scale)
    if tables()[table].panels:
        check_drawable()
    if measuring is not None:
        # Runs of other tables lack what is measured here.
        runs = runs / table.replace("/", "-")
    work = remaining_work(chosen, range(seeds), runs)
    console.print(
        f"{table}: {len(chosen)} cells × {seeds} seeds; {work.runs} runs to do, {work.rounds:,} rounds, "
        f"{work.gradients:,} gradients, about {_duration(work.seconds)}."
    )
    console.print(_title(table))
    labelled = [(cell.label, [seeded(cell, seed) for seed in range(seeds)]) for cell in chosen]
    name = f"report-{table.replace('/', '-')}.html"
    check_replaceable(runs / name)
    runs_of_labels, damaged = run_labelled(labelled, runs, work.rounds, measuring=measuring)
    finished = list(zip(chosen, runs_of_labels, strict=True))
    drawn = _draw(table, finished, scale, runs) if tables()[table].panels else []
    results = results_tables(finished)
    if as_json:
        print_json([table_facts(result) for result in results])
    _print_tables(results)
    for note in tables()[table].notes:
        console.print(f"note: {note}")
    numbers = [*results, *sources]
    end_with_report(labelled, runs, damaged, name, title=_title(table), tables=numbers, figures=drawn)
    check_damage(len(damaged))


def _draw(table: str, finished: Sequence[FinishedCell], scale: str, runs: Path) -> list[figures.Figure]:
    """Measures what the figure shows of the finished runs, and draws it."""
    from flatfed.papers import tables
    from flatfed.papers.drawing import drawn, how_run
    from flatfed.papers.measuring import of_finished_runs
    from flatfed.report.svg import picture
    from flatfed.runs.files import write_atomically

    with measurement_bars() as watch:
        results = of_finished_runs(tables()[table], finished, scale, watch)
    pictures, note = drawn(tables()[table], finished, results), how_run(finished)
    if pictures:
        path = runs / f"{table.replace('/', '-')}.svg"
        write_atomically(path, picture(f"{table}: {tables()[table].title}", pictures, note))
        tell(f"Figure: {path}")
    return [replace(figure, note=note) for figure in pictures]


def _show(tables: Sequence[figures.Table], as_json: bool) -> None:
    if as_json:
        print_json([table_facts(table) for table in tables])
    print_tables(tables)


def _list_tables(as_json: bool) -> None:
    from flatfed.papers import bounds, papers, tables

    listing = Table("table or figure", "what it shows")
    titles = {name: table.title for name, table in bounds().items()}
    titles |= {name: table.title for name, table in tables().items()}
    if as_json:
        print_json(titles)
    for name, title in titles.items():
        listing.add_row(name, title)
    console.print(listing)
    for name, paper in papers().items():
        console.print(f"{name}: {paper.title}. {paper.citation}")


def _title(name: str) -> str:
    """The table's title with its paper."""
    from flatfed.papers import bounds, papers, tables

    title = bounds()[name].title if name in bounds() else tables()[name].title
    return f"{name}: {title}. {papers()[name.partition('/')[0]].citation}"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


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
