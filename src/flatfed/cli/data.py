"""The command line for data sets: `flatfed data list | get | check`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from flatfed.cli.terminal import AsJson, app, command_of, console, print_json, say, tell
from flatfed.core.errors import FlatfedError, did_you_mean, printable

if TYPE_CHECKING:
    from flatfed.data.datasets.catalog import DatasetInfo
    from flatfed.data.download import ReportProgress

data_app = typer.Typer(
    help="List, fetch and check data sets.", no_args_is_help=True, pretty_exceptions_enable=False
)

app.add_typer(data_app, name="data")

FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help="Where data sets live; $FLATFED_DATA or the cache folder if not given."),
]

command = command_of(data_app, "no half file is left")


@command
def list_(folder: FolderOption = None, as_json: AsJson = False) -> None:
    """List the data sets and where they are."""
    from flatfed.data.datasets.catalog import CATALOG, root_folder

    if as_json:
        print_json(
            {
                name: {
                    "title": info.title,
                    "origin": info.origin,
                    "download_bytes": sum(file.size for file in info.downloads),
                    "folder": None if info.origin or not (where := info.locate(folder)) else str(where),
                }
                for name, info in sorted(CATALOG.items())
            }
        )
        return
    table = Table("name", "what it is", "download", "where")
    for name, info in sorted(CATALOG.items()):
        megabytes = sum(file.size for file in info.downloads) / 1e6
        located = info.origin or info.locate(folder)
        table.add_row(
            name,
            info.title,
            f"{megabytes:,.0f} MB" if info.downloads else "–",
            printable(str(located)) if located else "not here",
        )
    console.print(table)
    tell(f"data folder: {root_folder(folder)}")


@command
def get(
    name: Annotated[str, typer.Argument(help="A data set's name; see flatfed data list.")],
    folder: FolderOption = None,
    force: Annotated[bool, typer.Option(help="Fetch it even if it is there.")] = False,
) -> None:
    """Download a data set from where it is published."""
    from flatfed.data import download
    from flatfed.data.datasets.catalog import CATALOG

    info = CATALOG.get(name)
    located = info.locate(folder) if info else None
    if info and info.origin:
        line = f"{name} needs no download: {info.origin}."
    elif located and not force:
        line = f"{name} is in {located}; flatfed data check {name} looks at it, --force fetches it again."
    else:
        with _progress() as report:
            located = download.get(name, folder, report)
        line = f"{name} is in {located}; flatfed data check {name} loads it and looks at every file."
    tell(line)


@command
def check(
    name: Annotated[
        str | None, typer.Argument(help="A data set's name; if not given, all that are here.")
    ] = None,
    folder: FolderOption = None,
) -> None:
    """Load data sets and compare their files with the published checksums or counts."""
    from flatfed.data.datasets.catalog import CATALOG

    with_files = {info.name: info for info in CATALOG.values() if not info.origin}
    if name is not None:
        if name not in with_files:
            problem = "needs no check" if name in CATALOG else "unknown"
            raise FlatfedError(f"{name}: {problem}; {did_you_mean(name, with_files)}")
        _check(with_files[name], folder)
        return
    damaged = 0
    for info in with_files.values():
        if info.locate(folder) is None:
            console.print(f"{info.name}: not here", style="dim")
            continue
        try:
            _check(info, folder)
        except FlatfedError as error:
            damaged += 1
            say(info.name, str(error), "red")
    if damaged:
        raise typer.Exit(1)


def _check(info: DatasetInfo, folder: Path | None) -> None:
    from flatfed.data.datasets.cache import bypassed
    from flatfed.data.datasets.catalog import DATASETS

    located = info.find(folder)
    versions = [options for pattern, options in info.versions.items() if any(located.glob(pattern))]
    for options in versions or [{}]:
        start = time.perf_counter()
        with bypassed():
            data = DATASETS[info.name](folder=folder, **options)
        seconds = time.perf_counter() - start
        label = " ".join([info.name, *map(str, options.values())])
        clients = f", {len(data.group_names):,} natural clients" if data.group_names else ""
        tell(
            f"{label}: {len(data.train_targets):,} training and {len(data.test_targets):,} test samples, "
            f"{data.classes} classes{clients}, in {located} ({seconds:.1f} s)"
        )


@contextmanager
def _progress() -> Iterator[ReportProgress]:
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress("{task.description}", *columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def report(step: str, done: int, total: int | None) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=total)
            progress.update(tasks[step], completed=done, total=total)

        yield report
