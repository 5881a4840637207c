"""Any data set of Hugging Face's `datasets` library, without importing that library.

A `DatasetDict` is only asked for `[split]`, a split for `[column]`, and its `features` if it has any.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.data.datasets.arrays import from_arrays
from flatfed.data.datasets.base import Array, Labelled, TrainTest
from flatfed.data.transform import Augmentation


def from_huggingface(
    dataset_dict: Mapping[str, Any],
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
        groups = None if group_column is None else _array(rows, split, group_column)
        parts.append(Labelled(_array(rows, split, input_column), _array(rows, split, target_column), groups))
    feature = (getattr(dataset_dict[train], "features", None) or {}).get(target_column)
    classes = getattr(feature, "num_classes", None)
    return from_arrays(name, name, parts[0], parts[1], classes, augmentation, mean, std)


def _array(rows: Any, split: str, column: str) -> Array:
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
