"""Data sets of one's own from arrays, in a numpy archive or in memory.

The .npz file holds `train_inputs`, `train_targets`, `test_inputs`, `test_targets` and, if the data have
natural clients, `train_groups` (and `test_groups`): one whole number or text per sample. uint8 inputs are
images [n, C, H, W] or [n, H, W]; they are normalised by the mean and deviation of the training images unless
`mean` and `std` are given. Floats are used as float32 and other whole numbers as int64, as they are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Array, Labelled, TrainTest, image_set, train_test
from flatfed.data.datasets.catalog import DatasetInfo, Folder, register
from flatfed.data.files import expanded
from flatfed.data.npz import read_npz
from flatfed.data.transform import Augmentation, Bytes

MOST_CLASSES = 10**6  # labels beyond are no classes, and a model would have an output for each
Classes = Annotated[int, Field(ge=1, le=MOST_CLASSES)]
ARRAYS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@register(DatasetInfo("npz", f"a numpy archive with {', '.join(ARRAYS)}", origin="your own arrays: file = …"))
def load_npz(
    file: Path | str = "data.npz",
    folder: Folder = None,
    classes: Classes | None = None,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TrainTest:
    """Load `file`, which is relative to `folder` or else to the current one."""
    path = expanded("folder", folder or ".") / expanded("file", file)
    known = (*ARRAYS, "train_groups", "test_groups")
    arrays = read_npz(path, lambda present: [name for name in known if name in present])
    for name in ARRAYS:
        if name not in arrays:
            raise FlatfedError(f"{path}: no array {name}; save {', '.join(ARRAYS)}")
    train, test = (
        Labelled(arrays[f"{part}_inputs"], arrays[f"{part}_targets"], arrays.get(f"{part}_groups"))
        for part in ("train", "test")
    )
    return from_arrays(path.stem, str(path), train, test, classes, augmentation, mean, std)


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
    if highest >= MOST_CLASSES:
        raise FlatfedError(f"{source}: label {highest} is too high; number the classes from 0")
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
    kind = np.float32 if train.inputs.dtype.kind in "fb" else np.int64
    converted = []
    for part, samples in (("train", train), ("test", test)):
        with np.errstate(over="ignore"):  # said in the next lines
            inputs = np.ascontiguousarray(samples.inputs, kind)
        if not np.isfinite(inputs).all():
            raise FlatfedError(f"{source}: {part}_inputs are too large for float32; scale the data first")
        converted.append(samples._replace(inputs=inputs))
    return train_test(name, converted[0], converted[1], classes)


def _check_part(source: str, part: str, samples: Labelled) -> None:
    inputs, labels, groups = samples
    if inputs.ndim < 2 or inputs.dtype.kind not in "fiub" or inputs.size == 0:
        raise FlatfedError(
            f"{source}: {part}_inputs are {inputs.dtype} {list(inputs.shape)}; give numbers [samples, …]"
        )
    if inputs.dtype.kind == "f" and not np.isfinite(inputs).all():
        raise FlatfedError(f"{source}: {part}_inputs contain NaN or infinity; clean the data first")
    if inputs.dtype == np.uint64 and int(inputs.max()) >= 2**63:
        raise FlatfedError(f"{source}: {part}_inputs hold {int(inputs.max())}; use numbers below 2**63")
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
