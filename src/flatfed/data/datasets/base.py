"""The form in which data sets reach the rest of the program."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


# Tensors have no single truth value to compare by, so two data sets are equal only if identical.
@dataclass(frozen=True, eq=False)
class TrainTest:
    """A classification data set in memory, split into training and test samples."""

    train_inputs: Tensor  # [train samples, ...] float32
    train_targets: Tensor  # [train samples] int64, 0..classes-1
    test_inputs: Tensor
    test_targets: Tensor
    classes: int
    name: str
