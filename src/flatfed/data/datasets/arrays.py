"""Data sets from arrays in memory, whoever made them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import TrainTest, image_set, with_groups
from flatfed.data.transform import Augmentation

Array = NDArray[Any]


def from_arrays(
    name: str,
    where: str,
    train: tuple[Array, Array],
    test: tuple[Array, Array],
    classes: int | None = None,
    groups: tuple[Array | None, Array | None] = (None, None),
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TrainTest:
    """A data set from (inputs, targets) of both parts; errors say that they came from `where`."""
    for part, (inputs, targets) in (("train", train), ("test", test)):
        _check_part(where, part, inputs, targets)
    if train[0].shape[1:] != test[0].shape[1:] or train[0].dtype.kind != test[0].dtype.kind:
        raise FlatfedError(
            f"{where}: test_inputs are {test[0].dtype} {list(test[0].shape[1:])}, train_inputs "
            f"{train[0].dtype} {list(train[0].shape[1:])}; make them alike"
        )
    highest = int(max(train[1].max(), test[1].max()))
    if classes is not None and highest >= classes:
        raise FlatfedError(
            f"{where}: label {highest} is outside 0 … {classes - 1}; give classes={highest + 1}"
        )
    found = classes or highest + 1
    if train[0].dtype == np.uint8:
        images = [_as_images(where, inputs) for inputs, _ in (train, test)]
        made = image_set(name, (images[0], train[1]), (images[1], test[1]), found, mean, std, augmentation)
    elif augmentation != "none" or mean is not None or std is not None:
        raise FlatfedError(f"{where}: only uint8 images are normalised or augmented; leave out the option")
    else:
        made = TrainTest(
            torch.from_numpy(_as_numbers(train[0])),
            torch.from_numpy(train[1].astype(np.int64)),
            torch.from_numpy(_as_numbers(test[0])),
            torch.from_numpy(test[1].astype(np.int64)),
            found,
            name,
        )
    return with_groups(made, where, *groups)


def _check_part(where: str, part: str, inputs: Array, targets: Array) -> None:
    if inputs.ndim < 2 or inputs.dtype.kind not in "fiub" or len(inputs) == 0:
        raise FlatfedError(
            f"{where}: {part}_inputs are {inputs.dtype} {list(inputs.shape)}; give numbers [samples, …]"
        )
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        raise FlatfedError(f"{where}: {part}_inputs contain NaN or infinity; clean the data first")
    if targets.shape != (len(inputs),) or targets.dtype.kind not in "iu":
        raise FlatfedError(
            f"{where}: {part}_targets are {targets.dtype} {list(targets.shape)}; give one whole number for "
            f"each of the {len(inputs)} inputs"
        )
    if int(targets.min()) < 0:
        raise FlatfedError(f"{where}: {part}_targets hold {int(targets.min())}; labels count from 0")


def _as_images(where: str, inputs: Array) -> NDArray[np.uint8]:
    images = inputs[:, None] if inputs.ndim == 3 else inputs
    if images.ndim != 4 or images.shape[1] > 4:
        raise FlatfedError(
            f"{where}: uint8 inputs of {list(inputs.shape[1:])} are no images [channels, height, width]; "
            "move the axes or store another type"
        )
    return np.ascontiguousarray(images)


def _as_numbers(inputs: Array) -> Array:
    return np.ascontiguousarray(inputs, np.float32 if inputs.dtype.kind in "fb" else np.int64)
