"""The race of all algorithms: race."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flatfed.cli.halving import duration
from flatfed.cli.terminal import RUNS, AsJson, Root, command, console, print_json, say, tell
from flatfed.core.errors import FlatfedError
from flatfed.training.progress import Watcher, round_progress

if TYPE_CHECKING:
    from flatfed.race.entries import Entry
    from flatfed.race.results import CsvTable, Measured
    from flatfed.race.runner import TaskRace
    from flatfed.runs.halving import Candidate
    from flatfed.training.loop import Callback

Missing = Sequence[tuple["TaskRace", Sequence["Entry"]]]
"""By task, the methods of which something is missing."""


@command
def race(
    tasks: Annotated[
        list[str] | None, typer.Argument(metavar="[TASK…]", help="Only these tasks; all of them if none.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", help="Only this method, as the race calls it. Repeatable."),
    ] = None,
    results: Annotated[Path, typer.Option(help="The csv file to go on from and to add to.")] = (
        RUNS / "race" / "results.csv"
    ),
    flatness: Annotated[
        bool, typer.Option("--flatness", help="Also measure how flat the final models here are.")
    ] = False,
    compositions: Annotated[
        bool, typer.Option("--compositions", help="Instead, screen compositions that no paper has.")
    ] = False,
    plan: Annotated[bool, typer.Option("--plan", help="Run nothing; print what is missing.")] = False,
    runs: Root = RUNS / "race",
    as_json: AsJson = False,
) -> None:
    """Race all algorithms on tasks of real data, each tuned with the same budget; add to the results.

    What has a row in the results is not run again, whichever machine made it.
    """
    from flatfed.race.preset import preset
    from flatfed.race.results import FLATNESS, CsvTable, Measured, Results
    from flatfed.race.runner import TaskRace

    known, chosen = Results(results), preset().chosen(tasks or (), methods or ())
    races = [(TaskRace(preset(), task, runs, known), entries) for task, entries in chosen]
    if compositions:
        for one, _ in races:
            _screen(one)
        return
    missing = [(one, [entry for entry in entries if one.is_missing(entry)]) for one, entries in races]
    _print_plan(races, missing, as_json)
    if plan:
        return
    failed = sum(_run_task(one, entries) for one, entries in missing if entries)
    if flatness:
        table = CsvTable(results.with_name(FLATNESS), Measured)
        for one, entries in races:
            _measure_flatness(one, entries, table)
    tell(f"Results: {results}")
    if failed:
        raise FlatfedError(f"{failed} methods could not be run (see above); the same command tries again")


def _print_plan(races: Missing, missing: Missing, as_json: bool) -> None:
    table = Table("task", "methods", "missing", "what it is")
    for (one, entries), (_, rest) in zip(races, missing, strict=True):
        table.add_row(one.task.name, str(len(entries)), str(len(rest)), one.task.title)
    if as_json:
        facts = {
            one.task.name: {
                "title": one.task.title,
                "methods": [entry.label for entry in entries],
                "missing": [entry.label for entry in rest],
            }
            for (one, entries), (_, rest) in zip(races, missing, strict=True)
        }
        print_json(facts)
    console.print(table)


def _run_task(race_: TaskRace, entries: Sequence[Entry]) -> int:
    """Runs what is missing of a task; returns how many methods could not be run."""
    limits, halving = race_.limits, race_.preset.halving
    tell(
        f"{race_.task.title}: {len(entries)} methods, {halving.configurations} configurations of each in "
        f"rungs of {', '.join(map(str, halving.counts))}, then {len(race_.preset.seeds)} seeds of "
        f"{limits.rounds} rounds ({limits.gradients:,} gradients of FedAvg). By a timed round about "
        f"{duration(race_.seconds(entries, race_.pace()))}."
    )
    failed = 0
    for entry in entries:
        with round_progress() as progress:
            bar = progress.add_task(entry.label, total=None, note="", unit="rounds")

            def watch(candidate: Candidate, rung: int, rounds: int) -> Callback:
                phase = f"rung {rung + 1} " if rung >= 0 else f"seed {candidate.run.training.seed} "
                prefix = phase + " ".join(candidate.method.texts(candidate.values)) + ": "
                return Watcher(progress, bar, prefix)  # noqa: B023 (used within this turn of the loop)

            try:
                race_.run(entry, watch)
            except FlatfedError as error:
                failed += 1
                say("left out", f"{entry.label}: {error}")
                continue
        _tell_result(race_, entry)
    return failed


def _screen(race_: TaskRace) -> None:
    """Screens all compositions on a task, and says which are best on all tasks so far."""
    from flatfed.race.screening import BEST, Screening, best_compositions

    screening = Screening(race_, race_.preset.compositions, race_.preset.screened)
    if screening.is_missing:
        tell(f"{race_.task.title}: {len(screening.entries)} compositions.")
        with round_progress() as progress:
            bar = progress.add_task("compositions", total=None, note="", unit="rounds")

            def watch(candidate: Candidate, rung: int, rounds: int) -> Callback:
                return Watcher(progress, bar, f"{candidate.method.label} rung {rung + 1}: ")

            screening.run(watch)
    best = best_compositions(race_.preset.current(race_.results.rows), BEST)
    tell(f"Best on the tasks so far: {', '.join(best)}")


def _measure_flatness(race_: TaskRace, entries: Sequence[Entry], table: CsvTable[Measured]) -> None:
    """Of the final runs of a task whose folders are on this machine and that are not in the table."""
    from flatfed.race.flatness import measure

    there = {row.key for row in table.rows}
    with round_progress() as progress:
        bar = progress.add_task(f"flatness, {race_.task.name}", total=None, note="", unit="runs")
        finished = [(entry, row) for entry in entries for row in race_.rows(entry)[1]]
        for entry, row in finished:
            if (row.task, row.method, row.seed, row.setting) in there or row.state != "complete":
                continue
            row_measured = measure(race_, entry, row)
            if row_measured is not None:
                table.add([row_measured])
                progress.update(bar, advance=1, note=f"{row.method}, seed {row.seed}")


def _tell_result(race_: TaskRace, entry: Entry) -> None:
    tuning, final = race_.rows(entry)
    reached = [f"{100 * row.test_accuracy:.2f}" if row.test_accuracy else row.state for row in final]
    settings = final[0].settings if final else "all configurations diverged"
    seconds = sum(row.seconds for row in (*tuning, *final))
    tell(f"{entry.label}: {settings}: test accuracy {', '.join(reached)} %; {duration(seconds)}")
