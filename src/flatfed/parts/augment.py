"""Random, differentiable changes of images: colour, crop, cutout, flip, scale, rotation (Zhao, Bilen, 2021).

One kind is drawn for a batch, its strength for every image. Gradients reach the images through all of them.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

BRIGHTNESS, SATURATION, CONTRAST = 1.0, 2.0, 0.5
SHIFT, HOLE, SCALE, DEGREES = 0.125, 0.5, 1.2, 15.0


def augmented(images: Tensor, generator: torch.Generator) -> Tensor:
    """A batch [n, channels, height, width] after one random kind of change; other inputs stay as they are."""
    if images.dim() != 4:
        return images
    kind = _KINDS[int(torch.randint(len(_KINDS), (), generator=generator))]

    def draw(*shape: int) -> Tensor:
        """Uniform in [0, 1), one row per image."""
        return torch.rand(len(images), *shape, generator=generator).to(images)

    return kind(images, draw)


Draw = Callable[..., Tensor]


def _colour(images: Tensor, draw: Draw) -> Tensor:
    brighter = images + BRIGHTNESS * (draw(1, 1, 1) - 0.5)
    grey = brighter.mean(1, keepdim=True)
    saturated = grey + SATURATION * draw(1, 1, 1) * (brighter - grey)
    mean = saturated.mean((1, 2, 3), keepdim=True)
    return mean + (draw(1, 1, 1) + CONTRAST) * (saturated - mean)


def _crop(images: Tensor, draw: Draw) -> Tensor:
    """Moved by whole pixels, with zeros where nothing was."""
    height, width = images.shape[-2:]
    largest = images.new_tensor([SHIFT * width, SHIFT * height]).round()
    pixels = torch.floor((2 * largest + 1) * draw(2)) - largest
    offset = 2 * pixels / images.new_tensor([width, height])
    return _mapped(images, torch.eye(2).to(images).expand(len(images), 2, 2), offset)


def _cutout(images: Tensor, draw: Draw) -> Tensor:
    """A square of half the side set to zero around any pixel, so that part of it may fall outside."""
    hole = torch.ones_like(images[:, :1])
    for axis in (2, 3):
        size = images.shape[axis]
        width = round(HOLE * size)
        place = torch.arange(size).to(images).view([-1 if other == axis else 1 for other in range(4)])
        start = torch.floor(draw(1, 1, 1) * size) - width // 2
        hole = hole * ((place >= start) & (place < start + width))
    return images * (1 - hole)


def _flip(images: Tensor, draw: Draw) -> Tensor:
    return torch.where(draw(1, 1, 1) < 0.5, images.flip(3), images)


def _scale(images: Tensor, draw: Draw) -> Tensor:
    factors = 1 / SCALE + (SCALE - 1 / SCALE) * draw(2)
    return _mapped(images, torch.diag_embed(factors))


def _rotate(images: Tensor, draw: Draw) -> Tensor:
    angle = math.radians(DEGREES) * (2 * draw() - 1)
    rows = [torch.stack([angle.cos(), -angle.sin()], 1), torch.stack([angle.sin(), angle.cos()], 1)]
    return _mapped(images, torch.stack(rows, 1))


def _mapped(images: Tensor, matrices: Tensor, offsets: Tensor | None = None) -> Tensor:
    """Every image sampled at affinely mapped places, [n, 2, 2] and [n, 2] in units of half its side."""
    shift = torch.zeros_like(matrices[:, :, 0]) if offsets is None else offsets
    grid = F.affine_grid(torch.cat([matrices, shift[:, :, None]], 2), list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False)


_KINDS: tuple[Callable[[Tensor, Draw], Tensor], ...] = (_colour, _crop, _cutout, _flip, _scale, _rotate)
