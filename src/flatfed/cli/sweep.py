"""Searching settings: sweep."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.progress import Progress, TaskID
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
from flatfed.papers import tables
from flatfed.papers.reproduce import chosen_cells
from flatfed.runs.tune import Plan, Trial, parse_grid
from flatfed.runs.tune import sweep as run_trials
from flatfed.training.config import Config
from flatfed.training.loop import Callback


@dataclass(frozen=True)
class Subject:
    """What is swept: a config, and the command that runs it with the settings that come after."""

    label: str
    config: Mapping[str, Any]
    again: str


@command
def sweep(
    config: Annotated[Path, typer.Argument(help="A TOML file, or a paper's table, e.g. fedsagd/table2.")],
    grid: Annotated[
        list[str], typer.Option("--grid", metavar="KEY=V,V,…", help="e.g. training.lr=0.01,0.1. Repeatable.")
    ],
    trials: Annotated[
        int | None, typer.Option(min=1, help="Try only this many combinations, chosen by TPE.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="final or best: accuracy of the last or the best round.")
    ] = "final",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    study: Annotated[
        str | None, typer.Option(help="The sweep's name; from config and grid if not given.")
    ] = None,
    methods: Methods = None,
    only: Only = None,
    assignments: Assignments = None,
    runs: Root = RUNS,
) -> None:
    """Try a grid of settings, stopping runs that fall behind, and print the best (needs optuna).

    For a paper's table, every cell that --methods and --only choose is swept by itself.
    """
    subjects = _subjects(config, methods or [], only, assignments or [], seed)
    if study and len(subjects) > 1:
        raise FlatfedError(f"study = {study!r}: names one sweep, not {len(subjects)}; choose one method")
    values = parse_grid(grid)
    plans = [Plan.checked(subject.config, values, metric, seed) for subject in subjects]
    stem = config.as_posix().replace("/", "-") if config.as_posix() in tables() else config.stem
    names = [study or f"{stem}-{plan.digest}" for plan in plans]
    everything = []
    with round_progress() as progress:
        counts = [plan.rounds * min(trials or len(plan.configs), len(plan.configs)) for plan in plans]
        task = progress.add_task("all trials", total=sum(counts), note="", unit="rounds")
        for number, (subject, plan) in enumerate(zip(subjects, plans, strict=True)):
            watch = partial(_watch, progress, task, subject.label, sum(counts[:number]), plan.rounds)
            everything.append(run_trials(plan, names[number], runs, trials, watch))
        progress.update(task, completed=sum(counts), note="")
    for subject, plan, found in zip(subjects, plans, everything, strict=True):
        _print_trials(found, plan, subject.label)
    _print_best(subjects, everything)
    console.print(
        f"{'Sweep' if len(names) == 1 else 'Sweeps'} {', '.join(names)} in {runs}; the same command goes on "
        "with what is missing.",
        highlight=False,
    )


def _watch(
    progress: Progress, task: TaskID, label: str, before: int, rounds: int, assigned: Sequence[str], done: int
) -> Callback:
    """What to call after a trial's rounds, `before` being the rounds of all sweeps before this one."""
    return Watcher(progress, task, f"{label} {' '.join(assigned)}: ", before + done * rounds)


def _subjects(
    config: Path, methods: Sequence[str], only: str | None, assignments: Sequence[str], seed: int | None
) -> list[Subject]:
    table = config.as_posix()
    if table in tables():
        changes = _set_options(assignments)
        return [
            Subject(
                f"{cell.label} ({cell.title})",
                cell.config,
                f"flatfed reproduce {table} --only {shlex.quote(cell.title)} "
                f"--methods {shlex.quote(cell.method)}{changes}",
            )
            for cell in chosen_cells(table, methods, only, assignments=assignments)
        ]
    if methods or only is not None:
        raise FlatfedError(f"{config}: --methods and --only choose cells of a paper's table, not of a file")
    values = Config.read(config, assignments).model_dump(exclude_unset=True)
    changes = _set_options([*assignments, *([] if seed is None else [f"training.seed={seed}"])])
    return [Subject(config.stem, values, f"flatfed run {shlex.quote(str(config))}{changes}")]


def _set_options(assignments: Sequence[str]) -> str:
    return "".join(f" --set {shlex.quote(each)}" for each in assignments)


def _print_trials(found: Sequence[Trial], plan: Plan, title: str) -> None:
    for trial in found:
        if trial.state == "diverged":
            complain.print(
                f"[yellow]diverged:[/] {escape(' '.join(trial.assignments))}: {escape(trial.note)}"
            )
    table = Table(title=title, title_justify="left")
    for header in (*plan.grid, f"accuracy %\n({plan.metric})", "rounds", "state", "run folder"):
        table.add_column(header, justify="left" if header in {"state", "run folder"} else "right")
    for trial in found:
        value = "–" if trial.value is None else f"{100 * trial.value:.2f}"
        values = [assigned.partition("=")[2] for assigned in trial.assignments]
        table.add_row(*values, value, str(trial.rounds), trial.state, trial.folder.name)
    console.print(table)


def _print_best(subjects: Sequence[Subject], everything: Sequence[Sequence[Trial]]) -> None:
    lines = [
        subject.again + _set_options(found[0].assignments)
        for subject, found in zip(subjects, everything, strict=True)
        if found and found[0].state == "complete"
    ]
    if not lines:
        raise DivergedError(
            "no trial ran to its end; add smaller values of training.lr to the grid or set clip"
        )
    console.print("best:", highlight=False)
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
