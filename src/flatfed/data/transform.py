"""From stored samples to what a model sees.

Images stay uint8 in memory; a batch is scaled, normalised and, in training only, augmented by the worker that
uses it. Augmentation draws from the client's own random stream. Evaluation is never augmented.
"""

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from flatfed.core.errors import FlatfedError
from flatfed.core.flat import all_finite
from flatfed.core.tree import Tree

Bytes = NDArray[np.uint8]

Augmentation = Literal["none", "crop_flip", "half_crop_flip"]
PADDING = 4


class Transform(ABC):
    """How a batch of stored inputs becomes a batch of model inputs."""

    @property
    def draws(self) -> bool:
        """Whether training inputs depend on random draws."""
        return False

    def train(self, inputs: Tree, generator: torch.Generator | None) -> Tree:
        return self.evaluate(inputs)

    @abstractmethod
    def evaluate(self, inputs: Tree) -> Tree: ...


@dataclass(frozen=True)
class AsStored(Transform):
    """Inputs are used as they are stored."""

    def evaluate(self, inputs: Tree) -> Tree:
        return inputs


@dataclass(frozen=True)
class ImageTransform(Transform):
    """uint8 images [B, C, H, W] to floats: (pixel/255 − mean)/std per channel, augmented in training.

    `crop_flip` always crops at random from the image padded with four zero pixels and mirrors half of the
    images (the FedSWA and FedNSAM settings); `half_crop_flip` crops only half of them (the FedDyn code).
    Zeros are put in before normalisation, as black.
    """

    mean: tuple[float, ...]
    std: tuple[float, ...]
    augmentation: Augmentation = "none"

    @property
    def draws(self) -> bool:
        return self.augmentation != "none"

    def train(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        if self.draws:
            assert generator is not None
            inputs = augmented(inputs, generator, crop_half=self.augmentation == "half_crop_flip")
        return self.evaluate(inputs)

    def evaluate(self, inputs: Tensor) -> Tensor:
        return (inputs.float() - _pixels(tuple(self.mean), inputs.device)).div_(
            _pixels(tuple(self.std), inputs.device)
        )


@functools.lru_cache(maxsize=64)
def _pixels(shares: tuple[float, ...], device: torch.device) -> Tensor:
    """Shares of white as pixel values [C, 1, 1], which travel to an accelerator only once."""
    return (torch.tensor(shares, device=device) * 255).view(-1, 1, 1)


def augmented(images: Tensor, generator: torch.Generator, crop_half: bool) -> Tensor:
    """Each image of [B, C, H, W] cropped from its padded self at random and mirrored with probability ½."""
    count, _, height, width = images.shape
    shifts = torch.randint(0, 2 * PADDING + 1, (2, count), generator=generator)
    flips = torch.rand(count, generator=generator) < 0.5
    if crop_half:
        shifts[:, torch.rand(count, generator=generator) < 0.5] = PADDING
    padded = F.pad(images, (PADDING,) * 4)
    rows = shifts[0, :, None] + torch.arange(height)  # [B, H]
    columns = shifts[1, :, None] + torch.arange(width)  # [B, W]
    columns[flips] = columns[flips].flip(1)
    rows, columns = torch.cat([rows, columns], 1).to(images.device).split([height, width], 1)
    batch = torch.arange(count, device=images.device)[:, None, None]
    # Indexing moves channels last: [B, H, W, C].
    chosen = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2)


def image_transform(
    images: Bytes, mean: Sequence[float] | None, std: Sequence[float] | None, augmentation: Augmentation
) -> ImageTransform:
    """How images [n, C, H, W] are seen; a mean or deviation not given is that of all of them."""
    channels = images.shape[1]
    if mean is None and std is None:
        mean, std = pixel_statistics(images)
    if mean is None or std is None:
        given, missing = ("mean", "std") if std is None else ("std", "mean")
        raise FlatfedError(f"{given}: it is given without {missing}; give both or neither")
    for option, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise FlatfedError(
                f"{option} = {list(values)}: the images have {channels} channels; give as many"
            )
    if min(std) <= 0:
        raise FlatfedError(f"std = {list(std)}: must be positive")
    transform = ImageTransform(tuple(map(float, mean)), tuple(map(float, std)), augmentation)
    darkest_and_brightest = torch.tensor([0, 255], dtype=torch.uint8).expand(1, channels, 1, 2)
    if not all_finite(transform.evaluate(darkest_and_brightest)):
        raise FlatfedError(f"mean = {list(mean)}, std = {list(std)}: pixels become infinite; give others")
    return transform


def pixel_statistics(images: Bytes) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of pixel/255 per channel of [n, C, H, W].

    Sums are whole numbers, so the result does not depend on the platform or on the order of the images.
    """
    total = np.zeros(images.shape[1], np.int64)
    squares = np.zeros(images.shape[1], np.int64)
    for start in range(0, len(images), 4096):  # a chunk's squares need twice its memory
        chunk = images[start : start + 4096]
        total += chunk.sum((0, 2, 3), dtype=np.int64)
        squares += np.square(chunk, dtype=np.uint16).sum((0, 2, 3), dtype=np.int64)
    count = images.size // images.shape[1]
    mean = total / count
    deviation = np.sqrt(np.maximum(squares / count - mean**2, 0))
    deviation[deviation == 0] = 255.0  # a constant channel carries nothing; leave it finite
    return tuple((mean / 255).tolist()), tuple((deviation / 255).tolist())
