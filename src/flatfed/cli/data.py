"""The command line for data sets: `flatfed data list | get | check`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Table

from flatfed.cli.terminal import app, command_of, console
from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.data import download
from flatfed.data.datasets import DATASETS, PLACES
from flatfed.data.datasets.base import TrainTest, root_folder
from flatfed.data.datasets.emnist import SPLITS

data_app = typer.Typer(
    help="List, fetch and check data sets.", no_args_is_help=True, pretty_exceptions_enable=False
)

app.add_typer(data_app, name="data")

FolderOption = Annotated[
    Path | None,
    typer.Option("--folder", help="Where data sets live; $FLATFED_DATA or the cache folder if not given."),
]
NO_FILES = {
    "digits": "inside scikit-learn",
    "image_folder": "your own images: folder = …",
    "npz": "your own arrays: file = …",
}
TITLES = {
    "digits": "grey handwritten digits 8×8, 10 classes, 1,442 + 355",
    "image_folder": "images in train/CLASS/ and test/CLASS/",
    "npz": "a numpy archive with train_inputs, train_targets, test_inputs, test_targets",
}


command = command_of(data_app, "no half file is left")


@command
def list_(folder: FolderOption = None) -> None:
    """List the data sets and where they are."""
    table = Table("name", "what it is", "download", "where")
    for name in sorted(DATASETS):
        if name in PLACES:
            place = PLACES[name]
            sources = download.SOURCES.get(place.download or name, ())
            size = f"{sum(source.size for source in sources) / 1e6:,.0f} MB" if sources else "–"
            found = place.locate(folder)
            table.add_row(name, place.title, size, escape(str(found)) if found else "[dim]not here")
        else:
            table.add_row(name, TITLES[name], "–", NO_FILES[name])
    console.print(table)
    console.print(f"data folder: {escape(str(root_folder(folder)))}", highlight=False)


@command
def get(
    name: Annotated[str, typer.Argument(help="A data set's name; see flatfed data list.")],
    folder: FolderOption = None,
    force: Annotated[bool, typer.Option(help="Fetch it even if it is there.")] = False,
) -> None:
    """Download a data set from where it is published."""
    found = PLACES[name].locate(folder) if name in PLACES else None
    if found and not force:
        line = f"{name} is in {found}; flatfed data check {name} looks at it, --force fetches it again."
    elif name in NO_FILES:
        line = f"{name} needs no download: {NO_FILES[name]}."
    else:
        with _progress() as watch:
            found = download.get(name, folder, watch)
        line = f"{name} is in {found}; flatfed data check {name} loads it and looks at every file."
    console.print(escape(line), highlight=False, soft_wrap=True)


@command
def check(
    name: Annotated[
        str | None, typer.Argument(help="A data set's name; if not given, all that are here.")
    ] = None,
    folder: FolderOption = None,
) -> None:
    """Load data sets and compare their files with the published checksums or counts."""
    if name is not None:
        if name not in PLACES:
            known = "needs no check" if name in DATASETS else "unknown"
            raise FlatfedError(f"{name}: {known}; {did_you_mean(name, PLACES)}")
        _check(name, folder)
        return
    damaged = 0
    for each, place in PLACES.items():
        if place.locate(folder) is None:
            console.print(f"[dim]{each}: not here", highlight=False)
            continue
        try:
            _check(each, folder)
        except FlatfedError as error:
            damaged += 1
            console.print(f"[red]{each}:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
    if damaged:
        raise typer.Exit(1)


def _check(name: str, folder: Path | None) -> None:
    found = PLACES[name].find(folder)
    choices: list[dict[str, Any]] = [{}]
    if name == "emnist":
        here = [split for split in SPLITS if any(found.glob(f"emnist-{split}-train-images*"))]
        choices = [{"split": split} for split in here]
    for options in choices:
        start = time.perf_counter()
        loaded = DATASETS[name](folder=folder, **options)
        seconds = time.perf_counter() - start
        label = " ".join([name, *map(str, options.values())])
        console.print(
            f"{label}: {_counts(loaded)}, in {escape(str(found))} ({seconds:.1f} s)",
            highlight=False,
            soft_wrap=True,
        )


def _counts(loaded: TrainTest) -> str:
    clients = f", {len(loaded.group_names):,} natural clients" if loaded.group_names else ""
    return (
        f"{len(loaded.train_targets):,} training and {len(loaded.test_targets):,} test samples, "
        f"{loaded.classes} classes{clients}"
    )


@contextmanager
def _progress() -> Iterator[download.Watch]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        tasks: dict[str, TaskID] = {}

        def watch(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total)
            progress.update(tasks[what], completed=done, total=total)

        yield watch
