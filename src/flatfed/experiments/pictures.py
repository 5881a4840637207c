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


def synthetic_picture(server: State, input_shape: tuple[int, ...]) -> bytes | None:
    """The server's synthetic samples as a PNG, one class per column; None if they are not images."""
    image = input_shape if len(input_shape) == 3 else (1, *input_shape)
    if len(image) != 3 or image[0] not in {1, 3} or find_spec("PIL") is None:
        return None
    inputs, targets = samples_of(server, input_shape)
    classes = int((targets.argmax(1) if targets.dim() > 1 else targets).max()) + 1
    return _png(_grid(inputs.reshape(-1, *image).cpu().float(), classes))


def _grid(images: Tensor, columns: int) -> Tensor:
    """[n, channels, height, width] as one picture of bytes, [rows, columns, channels], the outermost 1 % cut."""
    low, high = torch.quantile(
        images.flatten()[:: max(1, images.numel() // 1_000_000)], torch.tensor([0.01, 0.99])
    )
    shades = ((images - low) / (high - low).clamp(min=1e-12)).clamp(0, 1).mul(255).round().to(torch.uint8)
    tiles = shades.repeat_interleave(ENLARGED, 2).repeat_interleave(ENLARGED, 3)
    tiles = torch.nn.functional.pad(tiles, (GAP, GAP, GAP, GAP), value=255)
    count, channels, height, width = tiles.shape
    rows = tiles.view(count // columns, columns, channels, height, width)
    return rows.permute(0, 3, 1, 4, 2).reshape(rows.shape[0] * height, columns * width, channels)


def _png(picture: Tensor) -> bytes:
    from PIL import Image  # noqa: PLC0415  (an extra)

    stored = io.BytesIO()
    Image.fromarray(picture.squeeze(2).numpy()).save(stored, format="PNG")
    return stored.getvalue()
