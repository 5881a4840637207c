"""The HTML report: report, and the ends of demo, compare and reproduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from flatfed.cli.terminal import RUNS, Root, app, command_of, complain, say, tell
from flatfed.core.errors import FlatfedError

if TYPE_CHECKING:
    from flatfed.diagnostics.figures import Figure, Table
    from flatfed.runs.compare import LabelledRuns


@command_of(app, "an earlier report is left as it was")
def report(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUN…",
            help="Run folders, or folders of them; or a config file or my_task.py:make, for its runs.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    targets: Annotated[
        list[float] | None,
        typer.Option("--target", min=0, max=1, help="Accuracy to count rounds to. Repeatable."),
    ] = None,
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="With a config or task: only runs with this setting, e.g. task.width=64. Repeatable.",
        ),
    ] = None,
    root: Root = RUNS,
) -> None:
    """Write a self-contained HTML page about one run or a comparison of several."""
    from flatfed.runs.overview import is_reference, runs_of

    if any(map(math.isnan, targets or [])):
        raise FlatfedError("--target nan: give an accuracy between 0 and 1")
    if assignments and not all(map(is_reference, runs)):
        raise FlatfedError(f"--set {assignments[0]}: only with config files or my_task.py:make; leave it out")
    folders: list[Path] = []
    for path in runs:
        folders += runs_of(path, root, assignments or []) if is_reference(path) else [path]
    _write(folders, output, targets=sorted(targets or []))


def end_with_report(
    runs: LabelledRuns,
    root: Path,
    damaged: Sequence[Path],
    name: str = "report.html",
    *,
    targets: Sequence[float] = (),
    title: str = "",
    tables: Sequence[Table] = (),
    figures: Sequence[Figure] = (),
) -> None:
    """Reports on a command's runs, without damaged ones and those that diverged in their first round."""
    from flatfed.runs.compare import run_folder
    from flatfed.runs.folder import RunFolder

    labels = {run_folder(config, root): label for label, configs in runs for config in configs}
    begun = [folder for folder in labels if folder not in damaged and RunFolder(folder).read_history()]
    if begun:
        _write(
            begun, root / name, targets=targets, labels=labels, title=title, tables=tables, figures=figures
        )


def _write(runs: Sequence[Path], output: Path, **options: Any) -> None:
    from flatfed.report import write_report

    with complain.status("report") as status:
        notes = write_report(runs, output, watch=lambda step: status.update(Text(step)), **options)
    for note in notes:
        say("note", note)
    tell(f"Report: {output}")
