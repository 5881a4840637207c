"""Measuring a run: diagnose."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from flatfed.cli.terminal import (
    RUNS,
    AsJson,
    Root,
    app,
    command_of,
    console,
    measurement_bars,
    print_json,
    print_tables,
    say,
    tell,
)
from flatfed.core.errors import FlatfedError, printable


@command_of(app, "finished diagnostics are kept; the same command does the rest")
def diagnose(
    folder: Annotated[
        Path | None,
        typer.Argument(
            metavar="[RUN]", help="A run's folder; or a config file or my_task.py:make: its runs."
        ),
    ] = None,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[NAME]…", help="Which diagnostics, or all; the cheap ones if none is named."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option, e.g. points=51; with a config or task, task.width=64: such runs. Repeatable.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure again what is there already.")] = False,
    runs: Root = RUNS,
    as_json: AsJson = False,
) -> None:
    """Measure flatness, curvature, drift, stability and generalization of runs; without RUN, list them."""
    from flatfed.diagnostics import DIAGNOSTICS
    from flatfed.diagnostics import diagnose as measure
    from flatfed.diagnostics.registry import cheap_diagnostics, diagnostic_names
    from flatfed.runs.overview import is_reference, runs_of
    from flatfed.training.config import with_assignments

    if folder is None:
        _print_list(as_json)
        return
    chosen = list(dict.fromkeys(names or cheap_diagnostics()))
    settings = [text for text in assignments or [] if "." in text.partition("=")[0]]
    options = with_assignments({}, [text for text in assignments or [] if text not in settings])
    if settings and not is_reference(folder):
        raise FlatfedError(
            f"--set {settings[0]}: {folder} is one run; give settings with a config file or my_task.py:make"
        )
    if chosen == ["all"]:
        # Some need another run, which has to be given.
        chosen = [name for name in diagnostic_names() if DIAGNOSTICS[name].run_options <= set(options)]
    several = runs_of(folder, runs, settings) if is_reference(folder) else [folder]
    results, failed = {}, False
    for one in several:
        errors: dict[str, FlatfedError] = {}
        with measurement_bars() as watch:
            results[str(one)] = measure(one, chosen, options, again, watch, errors.__setitem__)
        _print_results(one, results[str(one)])
        for name, error in errors.items():
            say("error", f"{name}: {str(error).removeprefix(f'{name}: ')}", "red")
        failed = failed or bool(errors)
    if as_json:
        print_json(results)
    if failed:
        raise typer.Exit(2)


def _print_results(folder: Path, contents: Mapping[str, Mapping[str, Any]]) -> None:
    from flatfed.diagnostics import DIAGNOSTICS

    if not contents:
        return
    table = Table("diagnostic", "result", title=Text(printable(str(folder))), title_justify="left")
    for name, content in contents.items():
        table.add_row(name, DIAGNOSTICS[name].summary(content["result"]))
    console.print(table)
    for name, content in contents.items():
        print_tables(DIAGNOSTICS[name].tables(content["result"]))
    tell(f"files: {folder / 'diagnostics'}")


def _print_list(as_json: bool) -> None:
    from flatfed.diagnostics import DIAGNOSTICS
    from flatfed.diagnostics.registry import cheap_diagnostics, diagnostic_names

    if as_json:
        print_json(
            {
                name: {"title": DIAGNOSTICS[name].title, "options": DIAGNOSTICS[name].options({})}
                for name in diagnostic_names()
            }
        )
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
