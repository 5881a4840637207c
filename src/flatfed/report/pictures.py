"""Pictures of synthetic samples, for those who have Pillow (the `images` extra)."""

from __future__ import annotations

import io
from importlib.util import find_spec

import torch
from torch import Tensor

from flatfed.core.state import State
from flatfed.parts.synthetic import samples_of

ENLARGED = 3
GAP = 1


def synthetic_picture(server: State, input_shape: tuple[int, ...], classes: int) -> bytes | None:
    """The server's synthetic samples as a PNG, one class per row; None if they are not images."""
    image = input_shape if len(input_shape) == 3 else (1, *input_shape)
    if len(image) != 3 or image[0] not in {1, 3} or find_spec("PIL") is None:
        return None
    inputs = samples_of(server, input_shape)[0]
    return _png(_grid(inputs.reshape(-1, *image).cpu().float(), classes))


def _grid(images: Tensor, classes: int) -> Tensor:
    """Images [n, channels, height, width] as one of bytes, [height, width, channels], a class per row."""
    some = images.flatten()[:: max(1, images.numel() // 1_000_000)]
    low, high = torch.quantile(some, torch.tensor([0.01, 0.99]))  # a few extremes would darken all the rest
    shades = ((images - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).mul(255).round().to(torch.uint8)
    tiles = shades.repeat_interleave(ENLARGED, 2).repeat_interleave(ENLARGED, 3)
    tiles = torch.nn.functional.pad(tiles, (GAP, GAP, GAP, GAP), value=255)
    count, channels, height, width = tiles.shape
    columns = tiles.view(count // classes, classes, channels, height, width)
    return columns.permute(1, 3, 0, 4, 2).reshape(classes * height, -1, channels)


def _png(picture: Tensor) -> bytes:
    from PIL import Image  # noqa: PLC0415  (an extra)

    stored = io.BytesIO()
    Image.fromarray(picture.squeeze(2).numpy()).save(stored, format="PNG")
    return stored.getvalue()
