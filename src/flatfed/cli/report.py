"""The HTML report: report, and the ends of demo, compare and reproduce."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from flatfed.cli.terminal import app, command_of, complain, console
from flatfed.report import write_report
from flatfed.report.content import Table

command = command_of(app, "an earlier report is left as it was")


@command
def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run folders, or folders of them.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")] = Path("report.html"),
    targets: Annotated[
        list[float] | None,
        typer.Option("--target", min=0, max=1, help="Accuracy to count rounds to. Repeatable."),
    ] = None,
) -> None:
    """Write a self-contained HTML page about one run or a comparison of several."""
    report_on(runs, output, targets=targets or [])


def report_on(
    runs: Sequence[Path],
    output: Path,
    *,
    targets: Sequence[float] = (),
    labels: Mapping[Path, str] | None = None,
    title: str = "",
    tables: Sequence[Table] = (),
) -> None:
    """Writes a report and says where; what it had to leave out is said too."""
    with complain.status("report") as status:
        notes = write_report(
            runs,
            output,
            targets=sorted(targets),
            labels=labels,
            title=title,
            tables=tables,
            watch=lambda doing: status.update(f"report: {doing}"),
        )
    for note in notes:
        complain.print(f"[yellow]note:[/] {escape(note)}", highlight=False)
    console.print(f"Report: {escape(str(output))}", highlight=False, soft_wrap=True)
