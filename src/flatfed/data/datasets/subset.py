"""A share of a data set, for papers that use less than all of it."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import TrainTest


def check_share(field: str, share: Any) -> None:
    number = isinstance(share, int | float) and not isinstance(share, bool)
    if not number or not 0 < share <= 1:
        raise FlatfedError(f"{field} = {share!r}: must be a share of the samples, above 0 and at most 1")


def subset(data: TrainTest, share: float) -> TrainTest:
    """That share of the training and of the test samples, in their order; of all runs the same ones.

    Inputs are normalised as those of the whole data set. Natural clients without samples keep their numbers.
    """
    if share == 1:
        return data
    train, test = (_rows(len(targets), share) for targets in (data.train_targets, data.test_targets))
    return replace(
        data,
        train_inputs=data.train_inputs[torch.from_numpy(train)],
        train_targets=data.train_targets[torch.from_numpy(train)],
        test_inputs=data.test_inputs[torch.from_numpy(test)],
        test_targets=data.test_targets[torch.from_numpy(test)],
        groups=None if data.groups is None else data.groups[train],
        test_groups=None if data.test_groups is None else data.test_groups[test],
    )


def _rows(samples: int, share: float) -> np.ndarray[Any, np.dtype[np.int64]]:
    count = max(1, math.floor(share * samples + 0.5))
    return np.sort(np.random.default_rng(0).permutation(samples)[:count]).astype(np.int64)
