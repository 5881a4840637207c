"""The command `flatfed tune`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table
from rich.text import Text

from flatfed.cli.halving import Subject, set_options, tune_by_halving
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
    print_json,
    say,
    tell,
)
from flatfed.core.errors import DivergedError, FlatfedError, printable
from flatfed.training.progress import Watcher, round_progress

if TYPE_CHECKING:
    from flatfed.runs.tune import Search, Trial
    from flatfed.training.loop import Callback


@command
def tune(
    config: Annotated[
        Path, typer.Argument(help="A TOML file, my_task.py:make, or a paper's table, e.g. fedsagd/table2.")
    ],
    grid: Annotated[
        list[str] | None,
        typer.Option("--grid", metavar="KEY=V,V,…", help="e.g. training.lr=0.01,0.1. Repeatable."),
    ] = None,
    halving: Annotated[
        bool,
        typer.Option(
            "--halving", help="Instead of a grid: step size and own options, the better third goes on."
        ),
    ] = False,
    gradients: Annotated[
        int | None, typer.Option(min=1, help="With --halving: of a whole run; every method gets the same.")
    ] = None,
    trials: Annotated[
        int | None, typer.Option(min=1, help="Try only this many combinations, chosen by TPE (needs optuna).")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="final or best: accuracy of the last or the best round.")
    ] = "final",
    choose_by: Annotated[
        str,
        typer.Option(help="validation or test: samples to choose by; data.validation=0.1 holds some out."),
    ] = "validation",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    methods: Methods = None,
    only: Only = None,
    assignments: Assignments = None,
    from_scratch: FromScratch = False,
    runs: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Try a grid of settings, or --halving, stopping runs that fall behind, and print the best.

    For a paper's table, every cell that --methods and --only choose is tuned by itself.
    """
    from flatfed.runs.tune import Search, parse_grid
    from flatfed.runs.tune import tune as run_trials

    subjects = _subjects(config, methods or [], only, assignments or [], seed, from_scratch)
    if halving:
        for option, given in (("--grid", bool(grid)), ("--choose-by", choose_by != "validation")):
            if given:
                raise FlatfedError(
                    f"{option}: not with --halving, which has ranges of its own and chooses by validation"
                )
        if metric != "final":
            raise FlatfedError(f"--metric {metric}: rungs of --halving are judged by their final round")
        tune_by_halving(subjects, runs, seed, trials, gradients, as_json)
        return
    if gradients is not None:
        raise FlatfedError(f"--gradients {gradients}: only with --halving; a grid's runs have their rounds")
    values = parse_grid(grid or [])
    searches = [Search.checked(subject.config, values, metric, seed, choose_by) for subject in subjects]
    rounds = [search.rounds * min(trials or len(search.configs), len(search.configs)) for search in searches]
    with round_progress() as progress:
        task = progress.add_task("all trials", total=sum(rounds), note="", unit="rounds")

        def watch(number: int, assigned: Sequence[str], ended: int) -> Callback:
            prefix = f"{subjects[number].label} {' '.join(assigned)}: "
            before = sum(rounds[:number]) + ended * searches[number].rounds
            return Watcher(progress, task, prefix, before)

        results = [
            run_trials(search, runs, trials, partial(watch, number)) for number, search in enumerate(searches)
        ]
        progress.update(task, completed=sum(rounds), note="")
    if as_json:
        chosen_by = {"chosen_by": searches[0].choose_by}
        trial_lists = [[asdict(trial) | chosen_by for trial in ended] for ended in results]
        print_json({one.label: trials for one, trials in zip(subjects, trial_lists, strict=True)})
    for subject, search, ended in zip(subjects, searches, results, strict=True):
        _print_trials(ended, search, subject.label)
    damaged = sum(trial.state == "left out" for ended in results for trial in ended)
    _print_best(subjects, results, damaged, searches[0])
    tell(f"Run folders are in {runs}; the same command runs what is missing.")
    check_damage(damaged)


def _subjects(
    config: Path,
    methods: Sequence[str],
    only: str | None,
    assignments: Sequence[str],
    seed: int | None,
    from_scratch: bool,
) -> list[Subject]:
    from flatfed.papers import tables
    from flatfed.papers.reproduce import chosen_cells
    from flatfed.training.config import Config

    table = config.as_posix()
    if table in tables():
        changes = set_options(assignments) + (" --from-scratch" if from_scratch else "")
        return [
            Subject(
                f"{cell.label} ({cell.title})",
                cell.config,
                f"flatfed reproduce {table} --only {shlex.quote(cell.title)} "
                f"--methods {shlex.quote(cell.method)}{changes}",
            )
            for cell in chosen_cells(table, methods, only, assignments=assignments, from_scratch=from_scratch)
        ]
    if methods or only is not None:
        raise FlatfedError(f"{config}: --methods and --only choose cells of a paper's table, not of a file")
    values = Config.read(config, assignments).model_dump(exclude_unset=True)
    changes = set_options([*assignments, *([] if seed is None else [f"training.seed={seed}"])])
    return [Subject(config.stem, values, f"flatfed run {shlex.quote(str(config))}{changes}")]


def _print_trials(trials: Sequence[Trial], search: Search, title: str) -> None:
    table = Table(title=Text(printable(title)), title_justify="left")
    for header in (
        *map(printable, search.grid),
        f"{search.choose_by}\naccuracy %\n({search.metric})",
        "rounds",
        "state",
        "run folder",
    ):
        words = header in {"state", "run folder"}
        table.add_column(header, justify="left" if words else "right", overflow="fold")
    for trial in trials:
        if trial.state in {"diverged", "left out"}:
            say(trial.state, f"{' '.join(trial.assignments)}: {trial.note}")
        value = "–" if trial.value is None else f"{100 * trial.value:.2f}"
        values = [assignment.partition("=")[2] for assignment in trial.assignments]
        cells = (*values, value, str(trial.rounds), trial.state, trial.folder.name)
        table.add_row(*map(printable, cells))
    console.print(table)


def _print_best(
    subjects: Sequence[Subject], results: Sequence[Sequence[Trial]], damaged: int, search: Search
) -> None:
    lines = [
        subject.command + set_options(trials[0].assignments)
        for subject, trials in zip(subjects, results, strict=True)
        if trials and trials[0].state == "complete"
    ]
    if not lines:
        check_damage(damaged)
        raise DivergedError(
            "no trial ran to its end; add smaller values of training.lr to the grid or set clip"
        )
    if search.choose_by == "test":
        say("note", "chosen by the test samples, on which it looks better than it is")
    console.print(f"chosen by {search.metric} {search.choose_by} accuracy, best:")
    for line in lines:
        tell(line)
