"""Small convolutional networks of the federated and the dataset-distillation literature."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import nn

from flatfed.core.errors import FlatfedError


def feddyn_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The CNN of FedDyn's CIFAR experiments; the FedSWA and FedNSAM papers call it LeNet-5.

    797,962 parameters on 3×32×32 with 10 classes, 815,332 with 100.
    """
    channels, *_ = image_shape(input_shape)
    features = nn.Sequential(
        nn.Conv2d(channels, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    return nn.Sequential(
        *features,
        nn.Flatten(),
        nn.Linear(flat_size(features, input_shape), 384),
        nn.ReLU(),
        nn.Linear(384, 192),
        nn.ReLU(),
        nn.Linear(192, classes),
    )


def lenet5(input_shape: Sequence[int], classes: int) -> nn.Module:
    """LeCun's LeNet-5 with ReLU and max-pooling; 28×28 images are padded to 32×32.

    With 10 classes 61,706 parameters on 1×28×28 and 62,006 on 3×32×32.
    """
    channels, *sides = image_shape(input_shape)
    features = nn.Sequential(
        nn.Conv2d(channels, 6, 5, padding=2 if sides == [28, 28] else 0),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    return nn.Sequential(
        *features,
        nn.Flatten(),
        nn.Linear(flat_size(features, input_shape), 120),
        nn.ReLU(),
        nn.Linear(120, 84),
        nn.ReLU(),
        nn.Linear(84, classes),
    )


def emnist_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The EMNIST network of Reddi et al. (2021), with dropout; the FedSAM paper uses it.

    1,206,590 parameters on 1×28×28 with 62 classes. Dropout draws random numbers, so clients train one by
    one.
    """
    channels, *_ = image_shape(input_shape)
    features = nn.Sequential(
        nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)
    )
    return nn.Sequential(
        *features,
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(flat_size(features, input_shape), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


def femnist_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The FEMNIST network of LEAF (Caldas et al., 2018); the FedSAGD paper uses it.

    6,603,710 parameters on 1×28×28 with 62 classes.
    """
    channels, *_ = image_shape(input_shape)
    features = nn.Sequential(
        nn.Conv2d(channels, 32, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding=2),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )
    return nn.Sequential(
        *features,
        nn.Flatten(),
        nn.Linear(flat_size(features, input_shape), 2048),
        nn.ReLU(),
        nn.Linear(2048, classes),
    )


def convnet(input_shape: Sequence[int], classes: int, width: int = 128, depth: int = 3) -> nn.Module:
    """The ConvNet of dataset distillation, with instance norm; DynaFed and FedSynSAM use it.

    320,010 parameters on 3×32×32 with 10 classes, 317,706 on 1×28×28, which is padded to 32×32. Instance norm
    is group norm with one channel a group: it keeps no running statistics.
    """
    channels, *sides = image_shape(input_shape)
    layers: list[nn.Module] = []
    for block in range(depth):
        padding = 3 if block == 0 and [channels, *sides] == [1, 28, 28] else 1
        layers += [
            nn.Conv2d(width if block else channels, width, 3, padding=padding),
            nn.GroupNorm(width, width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
    features = nn.Sequential(*layers)
    return nn.Sequential(*features, nn.Flatten(), nn.Linear(flat_size(features, input_shape), classes))


def image_shape(input_shape: Sequence[int]) -> tuple[int, int, int]:
    """The input shape as (channels, height, width)."""
    if len(input_shape) != 3:
        raise FlatfedError(
            f"input_shape = {list(input_shape)}: this model takes images [channels, height, width]; "
            "choose another model or reshape the inputs"
        )
    channels, height, width = input_shape
    return channels, height, width


def flat_size(features: nn.Module, input_shape: Sequence[int]) -> int:
    """How many numbers the convolutional part makes of one image; nothing is computed."""
    try:
        outputs = copy.deepcopy(features).to("meta")(torch.empty(1, *input_shape, device="meta"))
    except (RuntimeError, ValueError):
        raise FlatfedError(
            f"input_shape = {list(input_shape)}: the images are too small for this model; "
            "use larger images or a smaller model"
        ) from None
    return int(outputs.numel())
