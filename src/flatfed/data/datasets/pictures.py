"""Image files, read by Pillow, which is needed for these data sets only."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Bytes, Labelled
from flatfed.data.datasets.catalog import brief

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
            f"{folder}: cannot be read ({error.strerror}); give a folder with one sub-folder per class"
        ) from None


def read_class_folders(
    folder: Path, names: Sequence[str], channels: int = 3, size: tuple[int, int] | None = None
) -> Labelled:
    """The images in `folder/NAME/*`, labelled by the position of NAME."""
    labelled: list[tuple[Path, int]] = []
    for path in class_folders(folder):
        if path.name not in names:
            raise FlatfedError(f"{path}: not a known class; remove it or add training images of that class")
        labelled += [(picture, names.index(path.name)) for picture in picture_paths(path)]
    if not labelled:
        raise FlatfedError(f"{folder}: no images; put them into {folder}/CLASS/")
    return read_pictures(labelled, channels, size)


def read_pictures(
    labelled: Sequence[tuple[Path, int]], channels: int = 3, size: tuple[int, int] | None = None
) -> Labelled:
    """Images as uint8 [n, C, H, W], all of `size` (height, width) or of the first one's, and their labels."""
    pillow = _pillow()
    mode = {1: "L", 3: "RGB"}[channels]

    def read(path: Path) -> Bytes:
        try:
            with pillow.open(path) as image:
                pixels = np.asarray(image.convert(mode))
        except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
            raise FlatfedError(f"{path}: not a readable image ({brief(error)}); replace it") from None
        return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)

    height, width = size or read(labelled[0][0]).shape[1:]
    images = np.empty((len(labelled), channels, height, width), np.uint8)

    def store(number: int) -> None:
        path, _ = labelled[number]
        pixels = read(path)
        if pixels.shape[1:] != (height, width):
            raise FlatfedError(
                f"{path}: {list(pixels.shape[1:])} pixels where {[height, width]} are expected; "
                "make all images one size"
            )
        images[number] = pixels

    # Decoding leaves the interpreter lock free.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for _ in pool.map(store, range(len(labelled))):
            pass
    return Labelled(images, np.array([label for _, label in labelled]))


def _pillow() -> Any:
    try:
        from PIL import Image  # noqa: PLC0415 (optional)
    except ImportError:
        raise FlatfedError("Pillow: missing, and image files need it; run `pip install Pillow`") from None
    return Image
