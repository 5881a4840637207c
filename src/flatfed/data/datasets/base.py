"""The form in which data sets reach the rest of the program, and how loaders build it from arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flatfed.data.transform import AsStored, Augmentation, Transform, image_transform

Array = NDArray[Any]


class Labelled(NamedTuple):
    """The training or the test samples of a data set."""

    inputs: Array  # [n, …]; images are uint8 [n, C, H, W]
    labels: Array  # [n]
    groups: Array | None = None  # [n] the natural client of each sample, a number or a name

    @classmethod
    def joined(cls, parts: Sequence["Labelled"]) -> "Labelled":
        """The samples of several parts, one part after the other."""
        groups = [part.groups for part in parts if part.groups is not None]
        return cls(
            np.concatenate([part.inputs for part in parts]),
            np.concatenate([part.labels for part in parts]),
            np.concatenate(groups) if groups else None,
        )


# Tensors have no single truth value to compare by, so two data sets are equal only if identical.
@dataclass(frozen=True, eq=False)
class TrainTest:
    """A classification data set in memory, split into training and test samples."""

    train_inputs: Tensor  # [train samples, ...] as stored: images uint8 [n, C, H, W], the rest as it comes
    train_targets: Tensor  # [train samples] int64, 0..classes-1
    test_inputs: Tensor
    test_targets: Tensor
    classes: int
    name: str
    transform: Transform = AsStored()  # from stored inputs to what a model sees
    groups: NDArray[np.int64] | None = None  # [train samples] number of the natural client
    test_groups: NDArray[np.int64] | None = None  # [test samples] in the same numbering
    group_names: tuple[str, ...] = ()  # of natural client 0, 1, …


def train_test(
    name: str, train: Labelled, test: Labelled, classes: int, transform: Transform | None = None
) -> TrainTest:
    """A data set from arrays, its natural clients numbered in the order of their names."""
    groups, test_groups = None, None
    group_names: tuple[str, ...] = ()
    if train.groups is not None:
        given = [part.groups for part in (train, test) if part.groups is not None]
        unique, numbers = np.unique(np.concatenate(given), return_inverse=True)
        groups, rest = np.split(numbers.astype(np.int64), [len(train.groups)])
        test_groups = None if test.groups is None else rest
        group_names = tuple(map(str, unique.tolist()))
    return TrainTest(
        train_inputs=torch.from_numpy(train.inputs),
        train_targets=torch.from_numpy(train.labels.astype(np.int64)),
        test_inputs=torch.from_numpy(test.inputs),
        test_targets=torch.from_numpy(test.labels.astype(np.int64)),
        classes=classes,
        name=name,
        transform=transform or AsStored(),
        groups=groups,
        test_groups=test_groups,
        group_names=group_names,
    )


def image_set(
    name: str,
    train: Labelled,
    test: Labelled,
    classes: int,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    augmentation: Augmentation = "none",
) -> TrainTest:
    """uint8 images and their transform; a mean or deviation not given is that of the training set."""
    transform = image_transform(train.inputs, mean, std, augmentation)
    return train_test(name, train, test, classes, transform)
