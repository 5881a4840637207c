"""Models without convolutions: logistic regression and the multi-layer perceptron."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import nn


def logistic_regression(input_shape: Sequence[int], classes: int) -> nn.Module:
    """One linear layer with bias; 784 inputs and 10 classes make 7,850 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(input_shape), classes))


def mlp(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (128, 128)) -> nn.Module:
    """Linear layers with ReLU between them; 784 inputs, (128, 128), 10 classes make 118,282 parameters."""
    layers: list[nn.Module] = [nn.Flatten()]
    for before, after in itertools.pairwise([math.prod(input_shape), *hidden]):
        layers += [nn.Linear(before, after), nn.ReLU()]
    last = hidden[-1] if hidden else math.prod(input_shape)
    return nn.Sequential(*layers, nn.Linear(last, classes))
