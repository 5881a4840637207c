"""Data sets from arrays in memory, whoever made them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Array, Bytes, Labelled, TrainTest, image_set, train_test
from flatfed.data.transform import Augmentation


def from_arrays(
    name: str,
    source: str,
    train: Labelled,
    test: Labelled,
    classes: int | None = None,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TrainTest:
    """A data set from arrays; errors say that they came from `source`."""
    if train.groups is None:
        test = test._replace(groups=None)
    for part, samples in (("train", train), ("test", test)):
        _check_part(source, part, samples)
    if train.inputs.shape[1:] != test.inputs.shape[1:] or train.inputs.dtype.kind != test.inputs.dtype.kind:
        raise FlatfedError(
            f"{source}: test_inputs are {test.inputs.dtype} {list(test.inputs.shape[1:])}, train_inputs "
            f"{train.inputs.dtype} {list(train.inputs.shape[1:])}; make them alike"
        )
    highest = int(max(train.labels.max(), test.labels.max()))
    if classes is not None and highest >= classes:
        raise FlatfedError(
            f"{source}: label {highest} is outside 0 … {classes - 1}; give classes={highest + 1}"
        )
    classes = classes or highest + 1
    if train.inputs.dtype == np.uint8:
        train, test = (part._replace(inputs=_as_images(source, part.inputs)) for part in (train, test))
        return image_set(name, train, test, classes, mean, std, augmentation)
    if augmentation != "none" or mean is not None or std is not None:
        raise FlatfedError(f"{source}: only uint8 images are normalised or augmented; leave out the option")
    train, test = (part._replace(inputs=_as_numbers(part.inputs)) for part in (train, test))
    return train_test(name, train, test, classes)


def _check_part(source: str, part: str, samples: Labelled) -> None:
    inputs, labels, groups = samples
    if inputs.ndim < 2 or inputs.dtype.kind not in "fiub" or len(inputs) == 0:
        raise FlatfedError(
            f"{source}: {part}_inputs are {inputs.dtype} {list(inputs.shape)}; give numbers [samples, …]"
        )
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        raise FlatfedError(f"{source}: {part}_inputs contain NaN or infinity; clean the data first")
    if labels.shape != (len(inputs),) or labels.dtype.kind not in "iu":
        raise FlatfedError(
            f"{source}: {part}_targets are {labels.dtype} {list(labels.shape)}; give one whole number for "
            f"each of the {len(inputs)} inputs"
        )
    if int(labels.min()) < 0:
        raise FlatfedError(f"{source}: {part}_targets hold {int(labels.min())}; labels count from 0")
    if groups is not None and (groups.shape != (len(inputs),) or groups.dtype.kind not in "iuU"):
        raise FlatfedError(
            f"{source}: groups are {groups.dtype} {list(groups.shape)} for {len(inputs)} samples; give "
            "each sample one whole number or text"
        )


def _as_images(source: str, inputs: Array) -> Bytes:
    images = inputs[:, None] if inputs.ndim == 3 else inputs
    if images.ndim != 4 or images.shape[1] > 4:
        raise FlatfedError(
            f"{source}: uint8 inputs of {list(inputs.shape[1:])} are no images [channels, height, width]; "
            "move the axes or store another type"
        )
    return np.ascontiguousarray(images)


def _as_numbers(inputs: Array) -> Array:
    return np.ascontiguousarray(inputs, np.float32 if inputs.dtype.kind in "fb" else np.int64)
