"""The samples of all clients as they were read from files or tables of the user's own."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import FlatfedError, shown
from flatfed.core.tree import Tree
from flatfed.data.columns import ColumnNames
from flatfed.data.samples import Samples
from flatfed.data.transform import AsStored, Augmentation, Transform, image_transform


@dataclass(frozen=True)
class CollectedSamples:
    """The samples of all clients behind each other, and what is known about them."""

    inputs: Tree
    targets: Tree
    sizes: list[int]
    """How many samples every client has."""
    names: tuple[str, ...]
    test: Samples | None
    test_sizes: list[int] | None = None
    """How many of the test samples are each client's own, where they were taken from the clients'."""
    categories: dict[str, tuple[str, ...]] = field(default_factory=dict)
    classes: int | None = None
    transform: Transform = AsStored()


MOST_CLASSES = 10**6
"""More are taken for numbers that count nothing, unless there are as many samples."""


def check_test_share(test: object) -> None:
    is_share = isinstance(test, float) and 0 < test < 1
    if test is not None and not is_share:
        raise FlatfedError(f"test = {shown(test)}: give a share of each client's samples, between 0 and 1")


def own_test_rows(name: str, samples: int, share: float | None) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Which samples of a client, or of a file of it, are for testing; at least one is left to train on."""
    chosen = np.zeros(samples, bool)
    if share is not None:
        generator = random.numpy_generator(0, "own test", zlib.crc32(name.encode("utf-8", "replace")))
        # Rounded at random: many clients with few samples give their share together.
        count = min(int(share * samples + generator.random()), samples - 1)
        chosen[generator.permutation(samples)[:count]] = True
    return chosen


def number_of_classes(
    targets: ColumnNames, values: Tree, test: Samples | None, categories: Mapping[str, Sequence[str]]
) -> int | None:
    """How many there are, where the targets are one label for every sample."""
    if isinstance(targets, str) and targets in categories:
        return len(categories[targets])
    if not isinstance(values, Tensor) or values.dim() != 1 or values.dtype != torch.int64:
        return None
    labels = [values, *([] if test is None else [test[1]])]
    classes = max(int(part.max()) for part in labels) + 1
    return None if classes > max(MOST_CLASSES, len(values)) else classes


def with_transform(
    data: CollectedSamples,
    augmentation: Augmentation,
    mean: Sequence[float] | None,
    std: Sequence[float] | None,
) -> CollectedSamples:
    """Images of bytes are normalised by the clients' pixels unless mean and deviation are given."""
    images = data.inputs
    if not isinstance(images, Tensor) or images.dtype != torch.uint8:
        if augmentation != "none" or mean is not None or std is not None:
            raise FlatfedError("augmentation, mean, std: only images of bytes have them; leave them out")
        return data
    test = data.test
    if images.dim() == 3:
        images, test = images[:, None], test and (test[0][:, None], test[1])
    if images.dim() != 4 or images.shape[1] > 4:
        raise FlatfedError(
            f"inputs: bytes {list(images.shape[1:])} are no images [channels, height, width]; move the axes "
            "or store another type"
        )
    transform = image_transform(images.numpy(), mean, std, augmentation)
    return replace(data, inputs=images, test=test, transform=transform)
