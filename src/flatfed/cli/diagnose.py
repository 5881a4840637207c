"""Examining a run: diagnose."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table

from flatfed.cli.terminal import app, command_of, complain, console
from flatfed.core.errors import FlatfedError
from flatfed.diagnostics import CHEAP, DIAGNOSTICS
from flatfed.diagnostics import diagnose as examine
from flatfed.diagnostics.folder import options_of
from flatfed.diagnostics.subject import Tick
from flatfed.training.config import with_assignments

command = command_of(app, "finished diagnostics are kept; the same command does the rest")


@command
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
    if folder is None:
        _print_list()
        return
    chosen = list(dict.fromkeys(names or CHEAP))
    options = with_assignments({}, assignments or [])
    if chosen == ["all"]:
        # A line needs another run to go to.
        chosen = [name for name in DIAGNOSTICS if name != "line" or "other" in options]
    with contextlib.ExitStack() as stack:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=Console(stderr=True))

        def watch(name: str) -> Tick:
            if not progress.tasks:  # only what takes time gets a bar, not a complaint about the folder
                stack.enter_context(progress)
            task = progress.add_task(name, total=1.0)
            return lambda share: progress.update(task, completed=share)

        errors: dict[str, FlatfedError] = {}
        found = examine(folder, chosen, options, again, watch, errors.__setitem__)
    if found:
        _print_found(folder, found)
    for name, error in errors.items():
        complain.print(f"[red]error:[/] {name}: {escape(str(error).removeprefix(f'{name}: '))}")
    if errors:
        raise typer.Exit(2)


def _print_found(folder: Path, found: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table("diagnostic", "result", title=escape(str(folder)), title_justify="left")
    for name, content in found.items():
        table.add_row(name, summary(name, content["result"]))
    console.print(table)
    console.print(f"files: {folder / 'diagnostics'}", highlight=False)


def _print_list() -> None:
    table = Table("name", "what it measures", "options")
    for name, function in DIAGNOSTICS.items():
        options = ", ".join(f"{key}={_shown(key, value)}" for key, value in options_of(name, {}).items())
        title = (function.__doc__ or "").strip().splitlines()[0]
        table.add_row(name, escape(title), escape(options))
    console.print(table)
    console.print(f"flatfed diagnose RUN measures {', '.join(CHEAP)}; name others, or all.", highlight=False)


def summary(name: str, result: Mapping[str, Any]) -> str:  # noqa: PLR0911
    """A result in a line or two."""
    match name:
        case "generalization":
            return ", ".join(f"{key} gap {_number(value)}" for key, value in result["gap"].items())
        case "clients":
            return (
                f"accuracy {result['mean']:.1%} ± {result['deviation']:.1%} between clients "
                f"({result['binomial_floor']:.1%} by chance)"
            )
        case "drift":
            return (
                f"flatness distance {_number(result['flatness_distance'])}, "
                f"client drift {_number(result['client_drift'])}"
            )
        case "sharpness":
            own = _mean([each["sharpness"] for each in result["clients"]])
            return f"global {_number(result['global'])}, clients' mean {_number(own)}"
        case "perturbation":
            means = {key: _mean(values) for key, values in result["cosine"].items()}
            return (
                ", ".join(f"cosine of {key} {each:.2f}" for key, each in means.items() if each is not None)
                or "no estimate"
            )
        case "local_stability" | "global_stability":
            what = "steps" if name == "local_stability" else "rounds"
            return f"{_number(result['discrepancy'][-1])} apart after {result[what][-1]} {what}"
        case "hessian":
            whole = result["global"]
            tops = [each["eigenvalues"][0] for each in result["clients"]]
            return (
                f"top eigenvalue {_number(whole['eigenvalues'][0])} (clients up to {_number(max(tops))}), "
                f"trace {_number(whole['trace'])} ± {_number(whole['trace_error'])}"
            )
        case "surface" | "plane":
            grid = result["train" if name == "surface" else "loss"]
            losses = _known(each for row in grid for each in row)
            low, high = min(losses, default=None), max(losses, default=None)
            return f"training loss {_number(low)} … {_number(high)} on {len(losses)} points"
        case "line":
            return (
                f"largest training loss on the way {_number(max(_known(result['train_loss']), default=None))}"
            )
        case "theory":
            return ", ".join(f"{key} {_number(value)}" for key, value in result["constants"].items())
    raise FlatfedError(f"{name}: no such diagnostic")


def _known(values: Iterable[float | None]) -> list[float]:
    """Without those that were not finite."""
    return [value for value in values if value is not None]


def _mean(values: Iterable[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _shown(key: str, value: Any) -> str:
    if value is None:
        return "all" if key in {"samples", "clients"} else "the run's"
    return str(value)


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"
