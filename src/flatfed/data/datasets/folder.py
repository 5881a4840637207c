"""A folder with a file or a folder for every client.

    hospitals/alice.parquet       tables in parquet, CSV or npz files: a file is a client,
    hospitals/bob/part-1.parquet  or a folder is one, whose files are read one after the other
    hospitals/test.parquet        test samples, or a folder test/

    photos/alice/cat/1.png        or images, in a folder for every class
    photos/test/cat/7.png

Which columns are inputs and which are targets is said as in `data.columns`. Instead of `test`, a share of
each client's samples can be taken as its own test samples: which ones depends on the names of the client and
its files and on their numbers of samples, not on the other clients or on a run's seed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from flatfed.core.errors import FlatfedError, shown
from flatfed.core.tree import first_leaf, rows
from flatfed.data.collected import (
    CollectedSamples,
    check_test_share,
    number_of_classes,
    own_test_rows,
    with_transform,
)
from flatfed.data.columns import (
    Categories,
    ColumnNames,
    ColumnReader,
    ReadSamples,
    check_categories,
    check_columns,
    names_in,
)
from flatfed.data.datasets.base import TrainTest
from flatfed.data.datasets.catalog import DatasetInfo, Folder, data_folder, register
from flatfed.data.datasets.images import class_folders, picture_paths, read_pictures
from flatfed.data.files import expanded
from flatfed.data.table_files import SUFFIXES, column_names, read_table, suffix_of
from flatfed.data.transform import Augmentation

TEST = "test"
CLASS = "class"
"""What the classes of images are called among the categories."""
OWN_FOLDER = DatasetInfo(
    "folder",
    "a file or folder per client: parquet, csv, npz, images",
    origin="your own folder: folder = …",
    own_clients=True,
)


@dataclass(frozen=True)
class _Entry:
    """The files of one client, or of the test data."""

    name: str
    path: Path
    files: tuple[Path, ...]
    """Of tables; none for images."""


def read_folder(
    folder: Path | str,
    inputs: ColumnNames | None = None,
    targets: ColumnNames | None = None,
    test: float | None = None,
    categories: Categories | None = None,
    channels: int = 3,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> CollectedSamples:
    """Everything that is in a folder, and what is wrong with it in one line."""
    check_test_share(test)
    check_categories(categories or {})
    if channels not in (1, 3):
        raise FlatfedError(f"channels = {shown(channels)}: give 3 for colour or 1 for grey")
    root = expanded("folder", folder)
    try:
        data = _read(root, inputs, targets, test, categories or {}, channels)
    except OSError as error:  # what may be listed but not looked at
        raise FlatfedError(
            f"{error.filename or root}: cannot be read ({error.strerror}); check its permissions"
        ) from None
    return with_transform(data, augmentation, mean, std)


def _read(
    root: Path,
    inputs: ColumnNames | None,
    targets: ColumnNames | None,
    test: float | None,
    categories: Categories,
    channels: int,
) -> CollectedSamples:
    clients, test_entry = _entries(root)
    if test is not None and test_entry is not None:
        raise FlatfedError(f"test = {test:g}: there is {test_entry.path}; use either")
    entries = [*clients, *([] if test_entry is None else [test_entry])]
    if all(entry.files for entry in entries):
        return _read_tables(root, clients, test_entry, inputs, targets, test, categories)
    for option, value in (("inputs", inputs), ("targets", targets)):
        if value is not None:
            raise FlatfedError(f"{option} = {shown(value)}: {root} holds images; leave it out")
    for name in categories:
        if name != CLASS:
            raise FlatfedError(f"categories[{name!r}]: {root} holds images, which have {CLASS!r} alone")
    return _read_images(root, clients, test_entry, test, categories.get(CLASS), channels)


# -- which files are whose ---------------------------------------------------------------------------------


def _entries(root: Path) -> tuple[list[_Entry], _Entry | None]:
    """The clients in the order of their names, and the test data."""
    entries: dict[str, _Entry] = {}
    for path in _visible(root):
        entry = _entry(path)
        if entry.name in entries:
            raise FlatfedError(
                f"{path}: {entries[entry.name].path} is client {entry.name!r} already; rename one of them"
            )
        if entry.name != TEST and entry.name.lower() == TEST:
            raise FlatfedError(
                f"{path}: test data are called {TEST!r}; rename it, or give the client another name"
            )
        entries[entry.name] = entry
    with_files = [entry for entry in entries.values() if entry.files]
    if with_files and len(with_files) < len(entries):
        odd = next(entry for entry in entries.values() if not entry.files)
        raise FlatfedError(
            f"{odd.path}: images or nothing, and {with_files[0].path} holds tables; keep one kind in a folder"
        )
    test = entries.pop(TEST, None)
    if not entries:
        raise FlatfedError(
            f"{root}: no clients; put a file ({', '.join(SUFFIXES)}) or a folder for each there"
        )
    return list(entries.values()), test


def _entry(path: Path) -> _Entry:
    if path.is_dir():
        files = tuple(inner for inner in _visible(path) if not inner.is_dir())
        for file in files:
            if suffix_of(file) is None:
                raise _not_data(file)
        return _Entry(path.name, path, files)
    suffix = suffix_of(path)
    if suffix is None:
        raise _not_data(path)
    return _Entry(path.name[: -len(suffix)], path, (path,))


def _not_data(path: Path) -> FlatfedError:
    return FlatfedError(
        f"{path}: none of {', '.join(SUFFIXES)}, and no class folder; convert it or move it away"
    )


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, by name, client10 behind client9; hidden files are left by operating systems."""
    try:
        paths = [path for path in folder.iterdir() if not path.name.startswith(".")]
    except OSError as error:
        raise FlatfedError(
            f"{folder}: cannot be read ({error.strerror}); give a folder with a file or a folder per client"
        ) from None
    return sorted(paths, key=lambda path: _natural_order(path.name))


def _natural_order(name: str) -> tuple[tuple[str, int, str], ...]:
    return tuple(
        ("", int(part), part) if part.isdecimal() and len(part) < 19 else (part, 0, part)
        for part in re.split(r"([0-9]+)", name)
    )


# -- tables ------------------------------------------------------------------------------------------------


def _read_tables(
    root: Path,
    clients: Sequence[_Entry],
    test_entry: _Entry | None,
    inputs: ColumnNames | None,
    targets: ColumnNames | None,
    share: float | None,
    categories: Categories,
) -> CollectedSamples:
    first = clients[0].files[0]
    if targets is None:
        raise FlatfedError(
            f"targets: missing; name the column to predict, one of {', '.join(column_names(first))}"
        )
    check_columns("targets", targets)
    if inputs is None:
        others = [name for name in column_names(first) if name not in names_in(targets)]
        if not others:
            raise FlatfedError(f"{first}: no column besides the targets {shown(targets)}; add inputs")
        inputs = others[0] if len(others) == 1 else others
    check_columns("inputs", inputs)
    reader = ColumnReader(inputs, targets, categories)
    trained, tested = ReadSamples(reader, str(root)), ReadSamples(reader, str(root))
    sizes, test_sizes = [], []
    for entry in clients:
        before, tests_before = len(trained), len(tested)
        for file in entry.files:
            arrays = reader.arrays(read_table(file, reader.names, categories))
            held = own_test_rows(f"{entry.name}/{file.name}", len(first_leaf(arrays)), share)
            trained.add(rows(arrays, ~held) if held.any() else arrays)
            if held.any():
                tested.add(rows(arrays, held))
        sizes.append(len(trained) - before)
        test_sizes.append(len(tested) - tests_before)
    for file in () if test_entry is None else test_entry.files:
        tested.add(reader.arrays(read_table(file, reader.names, categories)))
    own_inputs, own_targets = trained.tensors()
    test = tested.tensors() if len(tested) else None
    return CollectedSamples(
        own_inputs,
        own_targets,
        sizes,
        tuple(entry.name for entry in clients),
        test,
        test_sizes if share is not None else None,
        reader.categories,
        number_of_classes(targets, own_targets, test, reader.categories),
    )


# -- images ------------------------------------------------------------------------------------------------


def _read_images(
    root: Path,
    clients: Sequence[_Entry],
    test_entry: _Entry | None,
    share: float | None,
    names: Sequence[str] | None,
    channels: int,
) -> CollectedSamples:
    names_of_folders = {path.name for entry in clients for path in class_folders(entry.path)}
    classes = sorted(names_of_folders) if names is None else list(names)
    trained: list[tuple[Path, int]] = []
    tested: list[tuple[Path, int]] = []
    sizes, test_sizes = [], []
    for entry in clients:
        pictures = _labelled_pictures(entry.path, classes)
        chosen = own_test_rows(entry.name, len(pictures), share)
        trained += [picture for picture, held in zip(pictures, chosen, strict=True) if not held]
        tested += [picture for picture, held in zip(pictures, chosen, strict=True) if held]
        test_sizes.append(int(chosen.sum()))
        sizes.append(len(pictures) - test_sizes[-1])
    if test_entry is not None:
        tested = _labelled_pictures(test_entry.path, classes)
    train = read_pictures(root, trained, channels)
    _, _, height, width = train.inputs.shape
    test = read_pictures(root, tested, channels, (height, width)) if tested else None
    return CollectedSamples(
        torch.from_numpy(train.inputs),
        torch.from_numpy(train.labels),
        sizes,
        tuple(entry.name for entry in clients),
        None if test is None else (torch.from_numpy(test.inputs), torch.from_numpy(test.labels)),
        test_sizes if share is not None else None,
        {CLASS: tuple(classes)},
        len(classes),
    )


def _labelled_pictures(folder: Path, classes: Sequence[str]) -> list[tuple[Path, int]]:
    labelled = []
    for path in class_folders(folder):
        if path.name not in classes:
            raise FlatfedError(
                f"{path}: no class {path.name!r}; remove it or add it to categories[{CLASS!r}]"
            )
        labelled += [(picture, classes.index(path.name)) for picture in picture_paths(path)]
    if not labelled:
        raise FlatfedError(f"{folder}: no images; put them into {folder / 'CLASS'}")
    return labelled


# -- as a data set of a config -----------------------------------------------------------------------------


@register(OWN_FOLDER)
def load_folder(
    folder: Folder = None,
    inputs: str | list[str] | None = None,
    targets: str | None = None,
    test: float | None = None,
    categories: dict[str, list[str]] | None = None,
    channels: int = 3,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TrainTest:
    """Load a folder whose samples have one tensor of inputs and one class each.

    A relative path that is not here is one beside the other data sets.
    """
    if folder is None:
        raise FlatfedError("folder: missing; give the folder that holds a file or a folder per client")
    folder = expanded("folder", folder)
    if not folder.exists() and (data_folder() / folder).exists():
        folder = data_folder() / folder
    data = read_folder(folder, inputs, targets, test, categories, channels, augmentation, mean, std)
    if data.classes is None:
        raise FlatfedError(
            f"targets = {shown(targets)}: not a class; for anything else write a task, flatfed new my-task"
        )
    for labels in (data.targets, *(() if data.test is None else data.test[1:])):
        if int(labels.min()) < 0:
            raise FlatfedError(
                f"targets = {shown(targets)}: {int(labels.min())} is no class, which are counted from 0"
            )
    if data.test is None:
        raise FlatfedError(
            f"{folder}: no test samples; put some into {TEST}, or take a share with test = 0.2"
        )
    groups = np.repeat(np.arange(len(data.sizes)), data.sizes)
    test_groups = None if data.test_sizes is None else np.repeat(np.arange(len(data.sizes)), data.test_sizes)
    return TrainTest(
        data.inputs,
        data.targets,
        *data.test,
        data.classes,
        Path(folder).name,
        data.transform,
        groups,
        test_groups,
        data.names,
    )
