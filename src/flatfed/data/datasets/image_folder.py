"""Images in folders: `train/CLASS/*` and `test/CLASS/*`, classes numbered by name.

All images must have one size. Without `mean` and `std` pixels are normalised by the mean and deviation of
the training images.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, register, root_folder
from flatfed.data.datasets.pictures import class_folders, read_class_folders
from flatfed.data.transform import Augmentation


@register(
    DatasetInfo(
        "image_folder", "images in train/CLASS/ and test/CLASS/", origin="your own images: folder = …"
    )
)
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
