"""Models without convolutions: logistic regression and the multi-layer perceptron."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flatfed.models.base import register, with_classifier


@register
def logistic_regression(input_shape: Sequence[int], classes: int) -> nn.Module:
    """One linear layer with bias; 784 inputs and 10 classes make 7,850 parameters."""
    return mlp(input_shape, classes, hidden=())


@register
def mlp(input_shape: Sequence[int], classes: int, hidden: Sequence[int] = (128, 128)) -> nn.Module:
    """Linear layers with ReLU between them; 784 inputs, (128, 128), 10 classes make 118,282 parameters."""
    return with_classifier([], input_shape, hidden, classes)
