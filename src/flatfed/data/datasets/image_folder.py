"""Images in folders: `train/CLASS/*` and `test/CLASS/*`, classes numbered by name.

All images must have one size. Without `mean` and `std` pixels are normalised by the mean and deviation of
the training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Folder, Labelled, TrainTest, image_set, root_folder
from flatfed.data.datasets.pictures import class_folders, picture_paths, read_pictures
from flatfed.data.transform import Augmentation


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
    train = read_classes(root / "train", names, channels)
    test = read_classes(root / "test", names, channels, (train[0].shape[2], train[0].shape[3]))
    return image_set("image_folder", train, test, len(names), mean, std, augmentation)


def read_classes(
    folder: Path, names: Sequence[str], channels: int = 3, size: tuple[int, int] | None = None
) -> Labelled:
    """The images in `folder/NAME/*`, labelled by the position of NAME."""
    paths: list[Path] = []
    labels: list[int] = []
    for path in class_folders(folder):
        if path.name not in names:
            raise FlatfedError(f"{path}: not a known class; remove it or add training images of that class")
        found = picture_paths(path)
        paths += found
        labels += [names.index(path.name)] * len(found)
    if not paths:
        raise FlatfedError(f"{folder}: no images; put them into {folder}/CLASS/")
    return read_pictures(paths, channels, size), np.array(labels)
