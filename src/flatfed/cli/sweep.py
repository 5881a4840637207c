"""Searching settings: sweep."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from flatfed.cli.terminal import (
    RUNS,
    Assignments,
    Root,
    Watcher,
    command,
    complain,
    console,
    round_progress,
)
from flatfed.core.errors import DivergedError
from flatfed.experiments.config import Config
from flatfed.experiments.run import Callback
from flatfed.experiments.sweep import Plan, Trial, parse_grid
from flatfed.experiments.sweep import sweep as run_trials


@command
def sweep(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
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
    assignments: Assignments = None,
    runs: Root = RUNS,
) -> None:
    """Try a grid of settings, stopping runs that fall behind, and print the best (needs optuna)."""
    base = Config.read(config, assignments or []).model_dump(exclude_unset=True)
    plan = Plan.checked(base, parse_grid(grid), metric, seed)
    name = study or f"{config.stem}-{plan.digest}"
    with round_progress() as progress:
        count = min(trials or len(plan.combinations), len(plan.combinations))
        task = progress.add_task(name, total=count * plan.rounds, note="", unit="rounds")

        def watch(assigned: Sequence[str], done: int) -> Callback:
            return Watcher(progress, task, f"{' '.join(assigned)}: ", before=done * plan.rounds)

        found = run_trials(plan, name, runs, trials, watch)
        progress.update(task, completed=count * plan.rounds, note="")
    for trial in found:
        if trial.state == "diverged":
            complain.print(
                f"[yellow]diverged:[/] {escape(' '.join(trial.assignments))}: {escape(trial.note)}"
            )
    _print_trials(found, plan, config, seed, assignments or [])
    console.print(f"Sweep {name} in {runs}; the same command goes on with what is missing.", highlight=False)


def _print_trials(
    found: Sequence[Trial], plan: Plan, config: Path, seed: int | None, assignments: Sequence[str]
) -> None:
    table = Table(title_justify="left")
    for header in (*plan.grid, f"accuracy %\n({plan.metric})", "rounds", "state", "run folder"):
        table.add_column(header, justify="left" if header in {"state", "run folder"} else "right")
    for trial in found:
        value = "–" if trial.value is None else f"{100 * trial.value:.2f}"
        values = [assigned.partition("=")[2] for assigned in trial.assignments]
        table.add_row(*values, value, str(trial.rounds), trial.state, trial.folder.name)
    console.print(table)
    if not found or found[0].state != "complete":
        raise DivergedError(
            "no trial ran to its end; add smaller values of training.lr to the grid or set clip"
        )
    seeded = [] if seed is None else [f"training.seed={seed}"]
    best = [*assignments, *seeded, *found[0].assignments]
    line = " ".join(f"--set {shlex.quote(each)}" for each in best)
    console.print("best:", highlight=False)
    console.print(
        f"flatfed run {shlex.quote(str(config))} {line}", highlight=False, markup=False, soft_wrap=True
    )
