"""Measuring a run: diagnose."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flatfed.cli.terminal import app, command_of, console, say, tell
from flatfed.core.errors import FlatfedError, printable

if TYPE_CHECKING:
    from flatfed.diagnostics.subject import Tick


@command_of(app, "finished diagnostics are kept; the same command does the rest")
def diagnose(
    folder: Annotated[Path | None, typer.Argument(metavar="[RUN]", help="A run's folder.")] = None,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="Which diagnostics, or all; the cheap ones if none is named."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="An option, e.g. samples=5000 or points=51. Repeatable."
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what is there already.")] = False,
) -> None:
    """Measure flatness, curvature, drift, stability and generalization of a run; without RUN, list them."""
    from flatfed.diagnostics import DIAGNOSTICS
    from flatfed.diagnostics import diagnose as measure
    from flatfed.diagnostics.registry import cheap_diagnostics, diagnostic_names
    from flatfed.training.config import with_assignments

    if folder is None:
        _print_list()
        return
    chosen = list(dict.fromkeys(names or cheap_diagnostics()))
    options = with_assignments({}, assignments or [])
    if chosen == ["all"]:
        # Some need another run, which has to be given.
        chosen = [name for name in diagnostic_names() if DIAGNOSTICS[name].run_options <= set(options)]
    with contextlib.ExitStack() as stack:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=Console(stderr=True))

        def watch(name: str) -> Tick:
            if not progress.tasks:  # only what takes time gets a bar, not a complaint about the folder
                stack.enter_context(progress)
            task = progress.add_task(name, total=1.0)
            return lambda share: progress.update(task, completed=share)

        errors: dict[str, FlatfedError] = {}
        contents = measure(folder, chosen, options, again, watch, errors.__setitem__)
    if contents:
        table = Table("diagnostic", "result", title=Text(printable(str(folder))), title_justify="left")
        for name, content in contents.items():
            table.add_row(name, DIAGNOSTICS[name].summary(content["result"]))
        console.print(table)
        tell(f"files: {folder / 'diagnostics'}")
    for name, error in errors.items():
        say("error", f"{name}: {str(error).removeprefix(f'{name}: ')}", "red")
    if errors:
        raise typer.Exit(2)


def _print_list() -> None:
    from flatfed.diagnostics import DIAGNOSTICS
    from flatfed.diagnostics.registry import cheap_diagnostics, diagnostic_names

    table = Table("name", "what it measures", "options")
    for name in diagnostic_names():
        options = [
            f"{key}={_option_text(key, value)}" for key, value in DIAGNOSTICS[name].options({}).items()
        ]
        table.add_row(name, DIAGNOSTICS[name].title, ", ".join(options))
    console.print(table)
    listed = ", ".join(cheap_diagnostics())
    console.print(f"flatfed diagnose RUN measures {listed}; name others, or all.")


def _option_text(key: str, value: Any) -> str:
    if value is None:
        return "all" if key in {"samples", "clients"} else "the run's"
    return str(value)
