"""ResNet-18 with group normalisation."""

import functools
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.errors import check_choice
from flatfed.core.types import Count
from flatfed.models import image_shape, register

Stem = Literal["cifar", "imagenet"]
Norm = Literal["group", "batch"]
_group_norm = functools.partial(nn.GroupNorm, 2)


@register
def resnet18(
    input_shape: Sequence[int], classes: int, stem: Stem = "cifar", norm: Norm = "group", width: Count = 64
) -> nn.Module:
    """ResNet-18 with GroupNorm(2) in place of batch normalisation.

    `stem="cifar"` starts with a 3×3 convolution of stride 1 and no pooling (FedSWA, FedNSAM, FedACG):
    11,173,962 parameters with 10 classes, 11,220,132 with 100 and 11,271,432 with 200.
    `stem="imagenet"` starts with a 7×7 convolution of stride 2 and a max-pooling (FedDyn, FedSAGD):
    11,181,642 with 10 classes and 11,227,812 with 100; as in torchvision, its convolutions start from He's
    normal distribution. `norm="batch"` has batch normalisation in the blocks and GroupNorm(2) after the stem,
    as FedSWA's later code does; the server averages the running statistics, and clients train one by one.
    """
    channels, *_ = image_shape(input_shape)
    check_choice("stem", stem, get_args(Stem))
    check_choice("norm", norm, get_args(Norm))
    block_norm = _group_norm if norm == "group" else nn.BatchNorm2d
    kernel, stride = (3, 1) if stem == "cifar" else (7, 2)
    convolution = nn.Conv2d(channels, width, kernel, stride, padding=kernel // 2, bias=False)
    layers: list[nn.Module] = [convolution, _group_norm(width), nn.ReLU()]
    if stem == "imagenet":
        layers.append(nn.MaxPool2d(3, stride=2, padding=1))
    before = width
    for stage in range(4):
        after = width * 2**stage
        layers += [
            ResidualBlock(before, after, 1 if stage == 0 else 2, block_norm),
            ResidualBlock(after, after, 1, block_norm),
        ]
        before = after
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, classes))
    if stem == "imagenet":
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return model


class ResidualBlock(nn.Module):
    """Two 3×3 convolutions beside a shortcut, which is a 1×1 convolution where the shape changes."""

    def __init__(self, before: int, after: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, padding=1, bias=False),
            norm(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, padding=1, bias=False),
            norm(after),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.shortcut = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), norm(after))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.residual(inputs) + self.shortcut(inputs))
