"""Images in files: `train/CLASS/*` and `test/CLASS/*`, classes numbered by name.

All images must have one size. Without `mean` and `std` pixels are normalised by the mean and deviation of
the training images. Files are read by Pillow, which only data sets of image files need.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Bytes, Labelled, TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, brief, register, root_folder
from flatfed.data.transform import Augmentation

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TITLE = "images in train/CLASS/ and test/CLASS/"


@register(DatasetInfo("image_folder", TITLE, origin="your own images: folder = …"))
def load_image_folder(
    folder: Folder = None,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels: Literal[1, 3] = 3,
) -> TrainTest:
    """Load a folder of images as uint8 [samples, channels, height, width]."""
    if folder is None:
        raise FlatfedError("image_folder: folder is missing; give the folder that holds train/ and test/")
    if channels not in (1, 3):
        raise FlatfedError(f"channels = {channels!r}: give 3 for colour or 1 for grey")
    root = root_folder(folder)
    names = [path.name for path in class_folders(root / "train")]
    if not names:
        raise FlatfedError(f"{root / 'train'}: no class folders; put the images into train/CLASS/")
    train = read_class_folders(root / "train", names, channels)
    _, _, height, width = train.inputs.shape
    test = read_class_folders(root / "test", names, channels, (height, width))
    return image_set("image_folder", train, test, len(names), mean, std, augmentation)


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
    try:
        from PIL import Image  # noqa: PLC0415 (optional)
    except ImportError:
        raise FlatfedError("Pillow: missing, and image files need it; run `pip install Pillow`") from None
    mode = {1: "L", 3: "RGB"}[channels]

    def read(path: Path) -> Bytes:
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert(mode))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise FlatfedError(f"{path}: not a readable image ({brief(error)}); replace it") from None
        return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)

    height, width = size or read(labelled[0][0]).shape[1:]
    paths, labels = zip(*labelled, strict=True)
    images = np.empty((len(paths), channels, height, width), np.uint8)
    # Decoding leaves the interpreter lock free.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for number, pixels in enumerate(pool.map(read, paths)):
            if pixels.shape[1:] != (height, width):
                raise FlatfedError(
                    f"{paths[number]}: {list(pixels.shape[1:])} pixels where {[height, width]} are expected; "
                    "make all images one size"
                )
            images[number] = pixels
    return Labelled(images, np.array(labels))
