"""Data sets of Hugging Face's `datasets` library, which is not imported here: its tables are Arrow's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatfed.core import random
from flatfed.core.errors import FlatfedError, brief, did_you_mean, shown
from flatfed.data.arrow import arrow_table
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
)
from flatfed.data.datasets.images import bytes_of
from flatfed.data.partition import Partition
from flatfed.data.partition.base import Indices
from flatfed.data.samples import Samples
from flatfed.data.tables import Column, Origin, Places, Table, Texts
from flatfed.data.transform import Augmentation

BLOCK = 4096  # rows that are turned into arrays at once


def read_huggingface(
    dataset: Any,
    inputs: ColumnNames,
    targets: ColumnNames,
    clients: str | int | Sequence[Sequence[int]],
    test: Any,
    partition: Partition,
    seed: int,
    categories: Categories,
    channels: int,
    augmentation: Augmentation,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> CollectedSamples:
    for option, columns in (("inputs", inputs), ("targets", targets)):
        check_columns(option, columns)
    check_categories(categories)
    if not isinstance(partition, Partition):
        raise FlatfedError(f"partition = {shown(partition)}: take one of flatfed's, PARTITIONS[NAME](…)")
    if channels not in (1, 3):
        raise FlatfedError(f"channels = {channels}: give 3 for colour or 1 for grey")
    reader = ColumnReader(inputs, targets, categories)
    _check_dataset("dataset", dataset, reader.names)
    separate = hasattr(test, "column_names")
    if separate:
        _check_dataset("test", test, reader.names)
    else:
        check_test_share(test)
    names, rows = _owned_rows(dataset, targets, clients, partition, seed)
    everyone = np.concatenate(rows)
    if isinstance(test, float) and len(np.unique(everyone)) < len(everyone):
        raise FlatfedError(
            f"test = {test:g}: rows belong to several clients or twice to one, so some would be trained on "
            "and tested; give other test samples"
        )
    masks = [
        own_test_rows(name, len(own), None if separate else test)
        for name, own in zip(names, rows, strict=True)
    ]
    trained = np.concatenate([own[~mask] for own, mask in zip(rows, masks, strict=True)])
    tested = np.concatenate([own[mask] for own, mask in zip(rows, masks, strict=True)])
    own_inputs, own_targets = _read(reader, "dataset", dataset, trained, channels)
    test_samples: Samples | None = None
    if separate or len(tested):
        where, rows_read = (test, np.arange(len(test))) if separate else (dataset, tested)
        test_samples = _read(reader, "test" if separate else "dataset", where, rows_read, channels)
    known = _class_names(dataset, reader.names) | reader.categories
    collected = CollectedSamples(
        own_inputs,
        own_targets,
        [int((~mask).sum()) for mask in masks],
        names,
        test_samples,
        None if separate or test is None else [int(mask.sum()) for mask in masks],
        known,
        number_of_classes(targets, own_targets, test_samples, known),
    )
    if not isinstance(clients, str):
        collected = replace(collected, names=())
    return with_transform(collected, augmentation, mean, std)


def _check_dataset(option: str, dataset: Any, names: Sequence[str]) -> None:
    if isinstance(dataset, Mapping):
        raise FlatfedError(f"{option}: several splits ({', '.join(map(str, dataset))}); give one of them")
    if not all(hasattr(dataset, name) for name in ("column_names", "features", "select", "with_format")):
        raise FlatfedError(f"{option} = {shown(type(dataset).__name__)}: give a datasets.Dataset")
    for name in names:
        _check_column(option, dataset, name)
    if len(dataset) == 0:
        raise FlatfedError(f"{option}: it has no rows; give it some")


def _check_column(option: str, dataset: Any, name: str) -> None:
    if name not in dataset.column_names:
        raise FlatfedError(f"{option}: no column {name!r}; {did_you_mean(name, dataset.column_names)}")


def _owned_rows(
    dataset: Any,
    targets: ColumnNames,
    clients: str | int | Sequence[Sequence[int]],
    partition: Partition,
    seed: int,
) -> tuple[tuple[str, ...], list[Indices]]:
    """The clients' names, or their numbers, and the rows of each."""
    if isinstance(clients, str):
        _check_column("dataset", dataset, clients)
        owners = _whole_column(dataset, clients)
        codes, names = (owners.codes, owners.words) if isinstance(owners, Texts) else _numbered(owners)
        order = sorted(range(len(names)), key=lambda number: names[number])
        if not isinstance(owners, Texts):
            order = list(range(len(names)))
        return tuple(names[number] for number in order), [np.flatnonzero(codes == number) for number in order]
    if isinstance(clients, int):
        labels = (
            _whole_column(dataset, targets) if isinstance(targets, str) else np.zeros(len(dataset), np.int64)
        )
        labels = labels.codes if isinstance(labels, Texts) else labels
        if labels.ndim != 1 or labels.dtype != np.int64:
            labels = np.zeros(len(dataset), np.int64)
        try:
            rows = partition.split(labels, clients, random.numpy_generator(seed, "partition"))
        except ValueError as error:
            raise FlatfedError(f"partition: {error}") from None
    else:
        try:
            given = [np.asarray(own) for own in clients]
        except (TypeError, ValueError, OverflowError):
            given = []
        if not given or any(own.dtype.kind not in "iu" for own in given if own.size):
            raise FlatfedError(
                f"clients = {shown(clients)}: give a column's name, a number, or each client's row numbers"
            )
        rows = [own.astype(np.int64) for own in given]
        for number, own in enumerate(rows):
            if own.ndim != 1 or len(own) == 0 or own.min() < 0 or own.max() >= len(dataset):
                raise FlatfedError(
                    f"clients[{number}] = {shown(own.tolist())}: give row numbers, 0 … {len(dataset) - 1}"
                )
    return tuple(str(number) for number in range(len(rows))), rows


def _numbered(owners: NDArray[Any]) -> tuple[NDArray[np.int64], list[str]]:
    if owners.ndim != 1 or owners.dtype != np.int64:
        raise FlatfedError("clients: the column has neither whole numbers nor texts; name another one")
    values, codes = np.unique(owners, return_inverse=True)
    return codes, [str(value) for value in values.tolist()]


def _whole_column(dataset: Any, name: str) -> Column:
    table = dataset.select_columns([name]).with_format("arrow")[:]
    return arrow_table("dataset", table, [name]).columns[name]


def _read(reader: ColumnReader, source: str, dataset: Any, rows: Indices, channels: int) -> Samples:
    """The columns of some rows, as many rows at a time as are worth it."""
    features = dataset.features
    images = [name for name in reader.names if type(features[name]).__name__ == "Image"]
    others = [name for name in reader.names if name not in images]
    samples = ReadSamples(reader, source)
    for start in range(0, len(rows), BLOCK):
        chosen = rows[start : start + BLOCK]
        block, places = dataset.select(chosen), Places("row", (chosen + 1).tolist())
        columns: dict[str, Column] = {}
        if others:
            table = block.select_columns(others).with_format("arrow")[:]
            columns |= arrow_table(source, table, others, places=places).columns
        for name in images:
            columns[name] = _pixels(Origin(source, name, places), block, channels)
        samples.add(reader.arrays(Table(source, columns, places)))
    return samples.tensors()


def _pixels(origin: Origin, block: Any, channels: int) -> Column:
    """A column of images as bytes [rows, C, H, W]."""
    plain = block.select_columns([origin.column]).with_format(None)
    pixels: NDArray[np.uint8] | None = None
    for row in range(len(plain)):
        try:
            image = bytes_of(plain[row][origin.column], channels)
        except Exception as error:  # what is no image, or a damaged one, can raise anything
            raise origin.error(f"not a readable image ({brief(error)}); replace it", row) from None
        if pixels is None:
            pixels = np.empty((len(plain), *image.shape), np.uint8)
        if image.shape != pixels.shape[1:]:
            sizes = f"{list(image.shape[1:])} pixels, and {list(pixels.shape[2:])} before"
            raise origin.error(f"{sizes}; make all images one size", row)
        pixels[row] = image
    assert pixels is not None, "a block has rows"
    return pixels


def _class_names(dataset: Any, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The names that the data set has for whole numbers."""
    class_names = {name: getattr(dataset.features[name], "names", None) for name in names}
    return {name: tuple(words) for name, words in class_names.items() if words}
