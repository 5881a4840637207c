"""Perceptrons, and small convolutional networks of the federated and the dataset-distillation literature."""

import copy
from collections.abc import Sequence

import torch
from torch import nn

from flatfed.core.errors import FlatfedError
from flatfed.core.types import Count
from flatfed.models import Layers, image_shape, register

# Channels of the 3×3 convolutions, in multiples of the width; each stage ends with a max-pooling.
_VGG11_STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))


@register
def logistic_regression(input_shape: Sequence[int], classes: int) -> nn.Module:
    """One linear layer with bias; 784 inputs and 10 classes make 7,850 parameters."""
    return mlp(input_shape, classes, hidden=())


@register
def mlp(input_shape: Sequence[int], classes: int, hidden: Sequence[Count] = (128, 128)) -> nn.Module:
    """Linear layers with ReLU between them; 784 inputs, (128, 128), 10 classes make 118,282 parameters."""
    return with_classifier([], input_shape, hidden, classes)


def _block(before: int, after: int, padding: int = 0) -> list[nn.Module]:
    """A 5×5 convolution, ReLU and max-pooling."""
    return [nn.Conv2d(before, after, 5, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]


@register
def feddyn_cnn(input_shape: Sequence[int], classes: int, width: Count = 64) -> nn.Module:
    """The CNN of FedDyn's CIFAR experiments; the FedSWA and FedNSAM papers call it LeNet-5.

    797,962 parameters on 3×32×32 with 10 classes, 815,332 with 100. `width` is the channels of its
    convolutions; its linear layers go with them.
    """
    channels, *_ = image_shape(input_shape)
    features = _block(channels, width) + _block(width, width)
    return with_classifier(features, input_shape, (6 * width, 3 * width), classes)


@register
def lenet5(input_shape: Sequence[int], classes: int) -> nn.Module:
    """LeCun's LeNet-5 with ReLU and max-pooling; 28×28 images are padded to 32×32.

    With 10 classes 61,706 parameters on 1×28×28 and 62,006 on 3×32×32.
    """
    channels, *sides = image_shape(input_shape)
    first = _block(channels, 6, padding=2 if sides == [28, 28] else 0)
    return with_classifier(first + _block(6, 16), input_shape, (120, 84), classes)


@register
def femnist_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The FEMNIST network of LEAF (Caldas et al., 2018); the FedSAGD paper uses it.

    6,603,710 parameters on 1×28×28 with 62 classes.
    """
    channels, *_ = image_shape(input_shape)
    features = _block(channels, 32, padding=2) + _block(32, 64, padding=2)
    return with_classifier(features, input_shape, (2048,), classes)


@register
def emnist_cnn(input_shape: Sequence[int], classes: int) -> nn.Module:
    """The EMNIST network of Reddi et al. (2021), with dropout; the FedSAM paper uses it.

    1,206,590 parameters on 1×28×28 with 62 classes. Dropout draws random numbers, so clients train one by
    one.
    """
    channels, *_ = image_shape(input_shape)
    features = [nn.Conv2d(channels, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(
        *features,
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(flat_size(features, input_shape), 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


@register
def convnet(input_shape: Sequence[int], classes: int, width: Count = 128, depth: Layers = 3) -> nn.Module:
    """The ConvNet of dataset distillation, with instance norm; DynaFed and FedSynSAM use it.

    320,010 parameters on 3×32×32 with 10 classes, 317,706 on 1×28×28, which is padded to 32×32. Instance norm
    is group norm with one channel per group: it keeps no running statistics.
    """
    before, *sides = image_shape(input_shape)
    padding = 3 if [before, *sides] == [1, 28, 28] else 1
    features: list[nn.Module] = []
    for _ in range(depth):
        features += [
            nn.Conv2d(before, width, 3, padding=padding),
            nn.GroupNorm(width, width),
            nn.ReLU(),
            nn.AvgPool2d(2),
        ]
        before, padding = width, 1
    return with_classifier(features, input_shape, (), classes)


@register
def vgg11(
    input_shape: Sequence[int], classes: int, hidden: Count | None = None, width: Count = 64
) -> nn.Module:
    """VGG-11 without normalisation and with one hidden layer, as in the FedSWA and FedNSAM papers.

    On 3×32×32 9,272,790 parameters with 10 classes (100 hidden units) and 9,377,508 with 100 (256 hidden
    units). `hidden` is 100 for up to ten classes and 256 for more, unless given.
    """
    before, *_ = image_shape(input_shape)
    features: list[nn.Module] = []
    for stage in _VGG11_STAGES:
        for multiple in stage:
            features += [nn.Conv2d(before, multiple * width, 3, padding=1), nn.ReLU()]
            before = multiple * width
        features.append(nn.MaxPool2d(2))
    return with_classifier(features, input_shape, (hidden or (100 if classes <= 10 else 256),), classes)


def with_classifier(
    features: Sequence[nn.Module], input_shape: Sequence[int], hidden: Sequence[int], classes: int
) -> nn.Sequential:
    """Convolutional layers followed by linear ones: hidden layers of the given sizes, then the classes."""
    layers: list[nn.Module] = [*features, nn.Flatten()]
    before = flat_size(features, input_shape)
    for after in hidden:
        layers += [nn.Linear(before, after), nn.ReLU()]
        before = after
    return nn.Sequential(*layers, nn.Linear(before, classes))


def flat_size(features: Sequence[nn.Module], input_shape: Sequence[int]) -> int:
    """How many numbers the convolutional layers make of one image, without computing them."""
    try:
        on_meta = copy.deepcopy(nn.Sequential(*features)).to("meta")
        return int(on_meta(torch.empty(1, *input_shape, device="meta")).numel())
    except (RuntimeError, ValueError):
        raise FlatfedError(
            f"input_shape = {list(input_shape)}: the images are too small for this model; "
            "use larger images or a smaller model"
        ) from None
