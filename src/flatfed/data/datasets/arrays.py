"""Data sets of one's own from arrays, in a numpy archive or in memory.

The .npz file holds `train_inputs`, `train_targets`, `test_inputs`, `test_targets` and, if the data have
natural clients, `train_groups` (and `test_groups`): one whole number or text per sample. uint8 inputs are
images [n, C, H, W] or [n, H, W]; they are normalised by the mean and deviation of the training images unless
`mean` and `std` are given. Floats are used as float32 and other whole numbers as int64, as they are.

A data set of Hugging Face's `datasets` library is read without importing that library: a `DatasetDict` is
only asked for `[split]`, a split for `[column]`, and its `features` if it has any.
"""

import io
import math
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, SkipValidation

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.data.datasets.base import Array, Bytes, Labelled, TrainTest, image_set, train_test
from flatfed.data.datasets.catalog import DatasetInfo, Folder, brief, checked_options, register
from flatfed.data.files import RegularFile, check_largest, expanded, read_up_to
from flatfed.data.transform import Augmentation

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
    """The arrays of an archive; each header is looked at before there is room for the numbers."""
    try:
        with RegularFile(path) as file:
            check_largest(path, path.stat().st_size)
            if file.read(6) == np.lib.format.MAGIC_PREFIX:
                raise FlatfedError(f"{path}: one array, not an archive; save it with numpy.savez")
            with zipfile.ZipFile(file) as archive:
                names = archive.namelist()
                arrays: dict[str, Array] = {}
                for name in (*ARRAYS, "train_groups", "test_groups"):
                    if (count := names.count(f"{name}.npy")) > 1:
                        raise ValueError(f"{count} arrays {name}")
                    if count:
                        arrays[name] = _read_array(path, archive, name, arrays.values())
                return arrays
    except FileNotFoundError:
        raise FlatfedError(f"{path}: not found; save it with numpy.savez or give another file") from None
    except (FlatfedError, MemoryError):
        raise
    except Exception as error:  # damaged archives and headers can raise anything
        raise FlatfedError(f"{path}: not a readable .npz archive ({brief(error)}); save it again") from None


def _read_array(path: Path, archive: zipfile.ZipFile, name: str, others: Iterable[Array]) -> Array:
    entry = archive.getinfo(f"{name}.npy")
    if entry.flag_bits & 1 or entry.compress_type not in {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
        raise ValueError(f"{name} is encrypted or compressed in a way that numpy does not use")
    with archive.open(entry) as stream:
        start = io.BytesIO(stream.read(2**14))  # a header says how long it is, but not for more than this
        version = np.lib.format.read_magic(start)
        if version > (2, 0):
            raise ValueError(f"{name} has the format {version[0]}.{version[1]}, which only records need")
        shape, columns_first, dtype = (
            np.lib.format.read_array_header_1_0(start)
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0(start)
        )
        if dtype.hasobject:
            raise ValueError(f"{name} holds Python objects, which are not unpickled; store numbers")
        if dtype.kind not in "fiubU" or dtype.itemsize == 0 or min(shape, default=0) < 0:
            raise ValueError(f"{name} is {dtype} {list(shape)}")
        count, size = math.prod(shape), math.prod(shape) * dtype.itemsize
        # Numbers other than bytes and floats are widened to eight bytes.
        widened = count * max(dtype.itemsize, 1 if dtype == np.uint8 or dtype.kind == "f" else 8)
        check_largest(f"{path}: {name} and what is before it", widened + sum(each.nbytes for each in others))
        content = bytearray(start.read())
        content += read_up_to(stream, size + 1 - len(content))
    if len(content) != size:
        raise ValueError(f"{name} has not the {size:,} bytes that its header says")
    return np.ndarray(shape, dtype, content, order="F" if columns_first else "C")


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
        except (KeyError, TypeError, IndexError):
            known = dataset_dict if isinstance(dataset_dict, Iterable) else ()
            hint = did_you_mean(split, map(str, known))
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
