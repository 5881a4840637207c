"""Image files, read by Pillow, which is needed for these data sets only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Bytes, brief

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}


def picture_paths(folder: Path) -> list[Path]:
    """The image files directly in a folder, by name; hidden ones are left by operating systems."""
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def class_folders(folder: Path) -> list[Path]:
    """The sub-folders of a folder, by name; hidden ones are not classes."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise FlatfedError(
            f"{folder}: cannot be read ({error.strerror}); give a folder with one sub-folder a class"
        ) from None


def read_pictures(paths: Sequence[Path], channels: int = 3, size: tuple[int, int] | None = None) -> Bytes:
    """Images as uint8 [n, C, H, W], each of `size` (height, width) or of the first one's."""
    image_module = _pillow()
    mode = {1: "L", 3: "RGB"}[channels]

    def read(path: Path) -> Bytes:
        try:
            with image_module.open(path) as image:
                pixels = np.asarray(image.convert(mode))
        except (OSError, ValueError, SyntaxError, image_module.DecompressionBombError) as error:
            raise FlatfedError(f"{path}: not a readable image ({brief(error)}); replace it") from None
        return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)

    height, width = size or read(paths[0]).shape[1:]
    images = np.empty((len(paths), channels, height, width), np.uint8)

    def place(number: int) -> None:
        pixels = read(paths[number])
        if pixels.shape[1:] != (height, width):
            raise FlatfedError(
                f"{paths[number]}: {list(pixels.shape[1:])} pixels where {[height, width]} are expected; "
                "make all images one size"
            )
        images[number] = pixels

    # Decoding leaves the interpreter lock free.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(place, range(len(paths))):
            pass
    return images


def _pillow() -> Any:
    try:
        from PIL import Image  # noqa: PLC0415 (optional)
    except ImportError:
        raise FlatfedError("Pillow: missing, and image files need it; run `pip install Pillow`") from None
    return Image
