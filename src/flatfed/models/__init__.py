"""Plain modules by name: each is a function of the input shape and the number of classes."""

from collections.abc import Callable

from torch import nn

from flatfed.models.linear import logistic_regression, mlp

MODELS: dict[str, Callable[..., nn.Module]] = {
    "logistic_regression": logistic_regression,
    "mlp": mlp,
}

__all__ = ["MODELS", "logistic_regression", "mlp"]
