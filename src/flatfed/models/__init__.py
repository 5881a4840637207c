"""Plain modules by name: each is a function of the input shape and the number of classes."""

from collections.abc import Callable

from torch import nn

from flatfed.models.convolutional import convnet, emnist_cnn, feddyn_cnn, femnist_cnn, lenet5
from flatfed.models.linear import logistic_regression, mlp
from flatfed.models.recurrent import char_lstm
from flatfed.models.resnet import resnet18
from flatfed.models.transformer import swin_base, swin_small, vit_base
from flatfed.models.vgg import vgg11

MODELS: dict[str, Callable[..., nn.Module]] = {
    "char_lstm": char_lstm,
    "convnet": convnet,
    "emnist_cnn": emnist_cnn,
    "feddyn_cnn": feddyn_cnn,
    "femnist_cnn": femnist_cnn,
    "lenet5": lenet5,
    "logistic_regression": logistic_regression,
    "mlp": mlp,
    "resnet18": resnet18,
    "swin_base": swin_base,
    "swin_small": swin_small,
    "vgg11": vgg11,
    "vit_base": vit_base,
}

__all__ = [
    "MODELS",
    "char_lstm",
    "convnet",
    "emnist_cnn",
    "feddyn_cnn",
    "femnist_cnn",
    "lenet5",
    "logistic_regression",
    "mlp",
    "resnet18",
    "swin_base",
    "swin_small",
    "vgg11",
    "vit_base",
]
