"""VGG for small images."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from flatfed.models.base import image_shape, register, with_classifier

# Channels of the 3×3 convolutions, in multiples of the width; each stage ends with a max-pooling.
_STAGES = ((1,), (2,), (4, 4), (8, 8), (8, 8))


@register
def vgg11(input_shape: Sequence[int], classes: int, hidden: int | None = None, width: int = 64) -> nn.Module:
    """VGG-11 without normalisation and with one hidden layer, as in the FedSWA and FedNSAM papers.

    On 3×32×32 9,272,790 parameters with 10 classes (100 hidden units) and 9,377,508 with 100 (256 hidden
    units). `hidden` is 100 for up to ten classes and 256 for more, unless given.
    """
    before, *_ = image_shape(input_shape)
    features: list[nn.Module] = []
    for stage in _STAGES:
        for multiple in stage:
            features += [nn.Conv2d(before, multiple * width, 3, padding=1), nn.ReLU()]
            before = multiple * width
        features.append(nn.MaxPool2d(2))
    return with_classifier(features, input_shape, (hidden or (100 if classes <= 10 else 256),), classes)
