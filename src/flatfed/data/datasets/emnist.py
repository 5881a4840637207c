"""EMNIST: grey handwritten characters of 28×28 pixels, in idx files, packed or not.

`letters` has 26 classes (upper and lower case together), `balanced` 47 and `byclass` 62. The files hold
every image transposed and count letters from 1; here images stand upright and classes count from 0.
Pixels are normalised by the mean and deviation of all training pixels of the classes in use.

`emnist_l` is the first ten letters: 48,000 training and 8,000 test images.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Folder, Labelled, Place, TrainTest, check_choice, image_set
from flatfed.data.datasets.idx import read_labelled

SplitName = Literal["letters", "balanced", "byclass"]


class _Split(NamedTuple):
    classes: int
    first: int  # the label of class 0
    train: int  # published numbers of samples
    test: int


SPLITS = {
    "letters": _Split(26, 1, 124_800, 20_800),
    "balanced": _Split(47, 0, 112_800, 18_800),
    "byclass": _Split(62, 0, 697_932, 116_323),
}
PLACE = Place(
    "emnist",
    "grey handwritten characters 28×28; letters 26 classes, balanced 47, byclass 62",
    ("emnist", "EMNIST/raw"),
    ("emnist-*-train-images-idx3-ubyte", "emnist-*-train-images-idx3-ubyte.gz"),
)
PLACE_L = Place(
    "emnist_l",
    "the first ten letters of EMNIST, 48,000 + 8,000",
    PLACE.folders,
    ("emnist-letters-train-images-idx3-ubyte", "emnist-letters-train-images-idx3-ubyte.gz"),
    download="emnist",
)


def load_emnist(folder: Folder = None, split: SplitName = "letters", verify: bool = True) -> TrainTest:
    """Load a split of EMNIST as uint8 [samples, 1, 28, 28]."""
    check_choice("split", split, SPLITS)
    train, test = _read(PLACE, folder, split, verify)
    return image_set("emnist", train, test, SPLITS[split].classes)


def load_emnist_l(folder: Folder = None, verify: bool = True) -> TrainTest:
    """Load the letters A to J of EMNIST as uint8 [samples, 1, 28, 28]."""
    train, test = (
        (images[labels < 10], labels[labels < 10])
        for images, labels in _read(PLACE_L, folder, "letters", verify)
    )
    if len(train[1]) == 0 or len(test[1]) == 0:
        raise FlatfedError("emnist_l: the files hold none of the first ten letters; give the letters split")
    return image_set("emnist_l", train, test, 10)


def _read(place: Place, folder: Folder, split: str, verify: bool) -> tuple[Labelled, Labelled]:
    found = place.find(folder)
    numbers = SPLITS[split]
    parts: list[Labelled] = []
    for part, published in (("train", numbers.train), ("test", numbers.test)):
        images_name = f"emnist-{split}-{part}-images-idx3-ubyte"
        labels_name = f"emnist-{split}-{part}-labels-idx1-ubyte"
        names = (images_name, labels_name)
        images, labels = read_labelled(place, found, names, numbers.classes, numbers.first, {})
        if verify and len(labels) != published:
            raise place.damaged(
                found / images_name, f"{len(labels):,} images where {published:,} are published"
            )
        parts.append((np.ascontiguousarray(images.swapaxes(2, 3)), labels))
    return parts[0], parts[1]
