"""Data sets of one's own from arrays, in a numpy archive or in memory.

The .npz file holds `train_inputs`, `train_targets`, `test_inputs`, `test_targets` and, if the data have
natural clients, `train_groups` (and `test_groups`): one whole number or text per sample. uint8 inputs are
images [n, C, H, W] or [n, H, W]; they are normalised by the mean and deviation of the training images unless
`mean` and `std` are given. Floats are used as float32 and other whole numbers as int64, as they are.

A data set of Hugging Face's `datasets` library is read without importing that library: a `DatasetDict` is
only asked for `[split]`, a split for `[column]`, and its `features` if it has any.
"""

import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import SkipValidation

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.data.datasets.base import Array, Bytes, Labelled, TrainTest, image_set, train_test
from flatfed.data.datasets.catalog import DatasetInfo, Folder, brief, checked_options, register
from flatfed.data.transform import Augmentation

ARRAYS = ("train_inputs", "train_targets", "test_inputs", "test_targets")


@register(DatasetInfo("npz", f"a numpy archive with {', '.join(ARRAYS)}", origin="your own arrays: file = …"))
def load_npz(
    file: Path | str = "data.npz",
    folder: Folder = None,
    classes: int | None = None,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
) -> TrainTest:
    """Load `file`, which is relative to `folder` or else to the current one."""
    path = Path(folder or ".").expanduser() / Path(file).expanduser()
    arrays = _read(path)
    for name in ARRAYS:
        if name not in arrays:
            raise FlatfedError(f"{path}: no array {name}; save {', '.join(ARRAYS)}")
    train, test = (
        Labelled(arrays[f"{part}_inputs"], arrays[f"{part}_targets"], arrays.get(f"{part}_groups"))
        for part in ("train", "test")
    )
    return from_arrays(path.stem, str(path), train, test, classes, augmentation, mean, std)


def _read(path: Path) -> dict[str, Array]:
    try:
        loaded = np.load(path, allow_pickle=False)
        if not isinstance(loaded, np.lib.npyio.NpzFile):
            raise FlatfedError(f"{path}: one array, not an archive; save it with numpy.savez")
        with loaded as archive:
            return {name: archive[name] for name in archive.files}
    except FileNotFoundError:
        raise FlatfedError(f"{path}: not found; save it with numpy.savez or give another file") from None
    except FlatfedError:
        raise
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise FlatfedError(f"{path}: not a readable .npz archive ({brief(error)}); save it again") from None


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
    kind = np.float32 if train.inputs.dtype.kind in "fb" else np.int64
    train, test = (part._replace(inputs=np.ascontiguousarray(part.inputs, kind)) for part in (train, test))
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


@checked_options("from_huggingface")
def from_huggingface(
    dataset_dict: Annotated[Mapping[str, Any], SkipValidation],
    input_column: str,
    target_column: str,
    *,
    train: str = "train",
    test: str = "test",
    group_column: str | None = None,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    name: str = "huggingface",
) -> TrainTest:
    """A data set from two splits; images become uint8 [n, C, H, W], columns of numbers stay numbers.

    `group_column` names the natural client of each sample, a writer or a user.
    """
    parts = []
    for split in (train, test):
        try:
            rows = dataset_dict[split]
        except KeyError:
            hint = did_you_mean(split, dataset_dict)
            raise FlatfedError(f"dataset_dict: no split {split!r}; {hint}") from None
        columns = (input_column, target_column, group_column)
        parts.append(Labelled(*(_column(rows, split, column) for column in columns if column is not None)))
    feature = (getattr(dataset_dict[train], "features", None) or {}).get(target_column)
    classes = getattr(feature, "num_classes", None)
    return from_arrays(name, name, parts[0], parts[1], classes, augmentation, mean, std)


def _column(rows: Any, split: str, column: str) -> Array:
    try:
        values = list(rows[column])
    except (KeyError, TypeError):
        names = getattr(rows, "column_names", None) or list(getattr(rows, "features", None) or rows)
        hint = did_you_mean(column, map(str, names))
        raise FlatfedError(f"{split}.{column}: no such column; {hint}") from None
    are_pictures = bool(values) and hasattr(values[0], "convert") and hasattr(values[0], "mode")
    if are_pictures:
        # Pillow images; one colour image among grey ones makes all of them colour.
        mode = "L" if all(image.mode in {"1", "L"} for image in values) else "RGB"
        values = [np.asarray(image.convert(mode)) for image in values]
    try:
        array = np.asarray(values)
    except (ValueError, TypeError):
        raise FlatfedError(f"{split}.{column}: its values differ in shape; make them alike") from None
    if array.dtype == object:
        raise FlatfedError(f"{split}.{column}: its values are not numbers; turn them into numbers first")
    return array.transpose(0, 3, 1, 2) if are_pictures and array.ndim == 4 else array
