"""Pictures of synthetic samples, which need Pillow (the `images` extra)."""

import io
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from flatfed.core.algorithm import short_names
from flatfed.core.state import State
from flatfed.parts.synthetic import samples_of
from flatfed.runs.files import write_atomically
from flatfed.training.loop import Progress

ENLARGED = 3
GAP = 1


class SyntheticPicture:
    """A callback that draws the server's synthetic samples into FOLDER/synthetic.png when it has learnt some.

    Nothing is drawn if they are not images or Pillow is not installed.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def __call__(self, progress: Progress) -> None:
        if "matching_loss" not in progress.record:
            return
        dimensions = progress.dimensions
        names = short_names(progress.server)
        vectors = {names[key]: value for key, value in progress.server.items()}
        picture = synthetic_picture(vectors, dimensions.input_shape, dimensions.classes)
        if picture is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            write_atomically(self.folder / "synthetic.png", picture)


def synthetic_picture(vectors: State, input_shape: tuple[int, ...], classes: int) -> bytes | None:
    """The server's synthetic samples as a PNG, one class per row; None if they cannot be drawn."""
    image = input_shape if len(input_shape) == 3 else (1, *input_shape)
    if len(image) != 3 or image[0] not in {1, 3} or find_spec("PIL") is None:
        return None
    from PIL import Image  # noqa: PLC0415  (an extra)

    inputs = samples_of(vectors, input_shape)[0]
    pixels = _grid(inputs.reshape(-1, *image).cpu().float(), classes)
    stored = io.BytesIO()
    Image.fromarray(pixels.squeeze(2).numpy()).save(stored, format="PNG")
    return stored.getvalue()


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
