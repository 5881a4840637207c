"""From stored samples to what a model sees.

Images stay uint8 in memory; a batch is scaled, normalised and, in training only, augmented by the worker that
uses it. Augmentation draws from the client's own random stream. Evaluation is never augmented.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from flatfed.core.tree import Tree

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
        mean = torch.tensor(self.mean, device=inputs.device).view(-1, 1, 1)
        scale = (torch.tensor(self.std, device=inputs.device) * 255).view(-1, 1, 1)
        return (inputs.float() - mean * 255).div_(scale)


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
    batch = torch.arange(count)[:, None, None]
    # Indexing moves channels last: [B, H, W, C].
    chosen = padded.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None, :]]
    return chosen.permute(0, 3, 1, 2)
