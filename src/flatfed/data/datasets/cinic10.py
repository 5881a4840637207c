"""CINIC-10: 270,000 colour images of 32×32 pixels, 10 classes, as PNG files in three equal parts.

`train` is the training set and `test` the test set; `with_validation` adds `valid` to the training set.
"""

from __future__ import annotations

import numpy as np

from flatfed.data.datasets.base import Folder, Labelled, Place, TrainTest, image_set
from flatfed.data.datasets.image_folder import read_classes
from flatfed.data.transform import Augmentation

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
PLACE = Place(
    "cinic10",
    "colour images 32×32, 10 classes, 90,000 + 90,000 and 90,000 for validation",
    ("CINIC-10",),
    ("train/airplane/*.png",),
)
MEAN, STD = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
IMAGES = 90_000  # in each part


def load_cinic10(
    folder: Folder = None,
    augmentation: Augmentation = "none",
    with_validation: bool = False,
    verify: bool = True,
) -> TrainTest:
    """Load CINIC-10 as uint8 [samples, 3, 32, 32]."""
    found = PLACE.find(folder)

    def read(part: str) -> Labelled:
        images, labels = read_classes(found / part, CLASSES, size=(32, 32))
        if verify and len(images) != IMAGES:
            raise PLACE.damaged(found / part, f"{len(images):,} images where {IMAGES:,} are published")
        return images, labels

    train = read("train")
    if with_validation:
        valid = read("valid")
        train = np.concatenate([train[0], valid[0]]), np.concatenate([train[1], valid[1]])
    return image_set("cinic10", train, read("test"), len(CLASSES), MEAN, STD, augmentation)
