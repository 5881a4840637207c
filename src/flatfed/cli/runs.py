"""Which runs there are: runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Column, Table

from flatfed.cli.terminal import RUNS, app, command_of, console, print_json, say, tell
from flatfed.core.errors import FlatfedError, printable


@command_of(app, "what was removed is gone, the rest is as it was")
def runs(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="A folder with run folders.")] = RUNS,
    where: Annotated[
        list[str] | None,
        typer.Option(
            "--where",
            metavar="KEY=VALUE",
            help="Only runs with this setting, e.g. algorithm.name=fedsam or state=incomplete. Repeatable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Remove the runs that are listed.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before removing.")] = False,
) -> None:
    """List runs, how far they have come and how they ended; or remove some."""
    from flatfed.runs import overview

    conditions = overview.parse_conditions(where or [])
    present = [overview.summary(path) for path in overview.run_folders(folder)]
    chosen = [run for run in present if overview.matches(run, conditions)]
    if as_json:
        print_json(
            [
                {
                    "folder": str(run.folder),
                    "task": run.task,
                    "method": run.method,
                    "seed": run.seed,
                    "rounds": run.rounds,
                    "planned_rounds": run.planned_rounds,
                    "test_accuracy": run.accuracy,
                    "state": run.state,
                    "bytes": run.bytes,
                    "config": run.config,
                }
                for run in chosen
            ]
        )
    else:
        words = (Column(name, overflow="fold") for name in ("folder", "task", "method"))
        table = Table(*words, "seed", "rounds", "accuracy %", "state", "MB")
        for run in chosen:
            cells = (
                str(run.folder.relative_to(folder)),
                run.task,
                run.method,
                "–" if run.seed is None else str(run.seed),
                f"{run.rounds} of {'–' if run.planned_rounds is None else run.planned_rounds}",
                "–" if run.accuracy is None else f"{100 * run.accuracy:.1f}",
                run.state,
                f"{run.bytes / 1e6:.1f}",
            )
            table.add_row(*map(printable, cells))
        console.print(table)
        size = sum(run.bytes for run in chosen)
        tell(f"{len(chosen)} of {len(present)} runs in {folder}, {size / 1e6:,.1f} MB")
    if remove and chosen:
        if any(run.state == "running" for run in chosen):
            raise FlatfedError("state = running: another process is at one of them; stop it, or leave it out")
        if not yes and not typer.confirm(f"Remove {len(chosen)} runs for good?", err=True):
            raise typer.Exit(1)
        for run in chosen:
            for path in overview.remove(run.folder):
                say("left", f"{path}: not a file of a run")
