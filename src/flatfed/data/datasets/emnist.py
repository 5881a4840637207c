"""EMNIST: grey handwritten characters of 28×28 pixels, in idx files, compressed or not.

`letters` has 26 classes (upper and lower case together), `balanced` 47 and `byclass` 62. The files hold
every image transposed and count letters from 1; here images stand upright and classes count from 0.
Pixels are normalised by the mean and deviation of all training pixels of the classes in use.

`emnist_l` is the first ten letters: 48,000 training and 8,000 test images.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

import numpy as np

from flatfed.core.errors import FlatfedError, check_choice
from flatfed.data.datasets.base import Labelled, TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, archive, register
from flatfed.data.datasets.mnist import read_labelled

SplitName = Literal["letters", "balanced", "byclass"]


class _Split(NamedTuple):
    classes: int
    first_label: int
    train: int  # published numbers of samples
    test: int


SPLITS = {
    "letters": _Split(26, 1, 124_800, 20_800),
    "balanced": _Split(47, 0, 112_800, 18_800),
    "byclass": _Split(62, 0, 697_932, 116_323),
}
EMNIST = DatasetInfo(
    "emnist",
    "grey handwritten characters 28×28; letters 26 classes, balanced 47, byclass 62",
    folders=("emnist", "EMNIST/raw"),
    markers=("emnist-*-train-images-idx3-ubyte", "emnist-*-train-images-idx3-ubyte.gz"),
    downloads=archive(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "md5:58c8d27c78d21e728a6bc7b3cc06412e",
        561_753_746,
        "emnist-*",
    ),
    versions={f"emnist-{split}-train-images*": {"split": split} for split in SPLITS},
)
EMNIST_L = replace(
    EMNIST,
    name="emnist_l",
    title="the first ten letters of EMNIST, 48,000 + 8,000",
    markers=("emnist-letters-train-images-idx3-ubyte", "emnist-letters-train-images-idx3-ubyte.gz"),
    versions={},
)


@register(EMNIST)
def load_emnist(folder: Folder = None, split: SplitName = "letters", verify: bool = True) -> TrainTest:
    """Load a split of EMNIST as uint8 [samples, 1, 28, 28]."""
    check_choice("split", split, SPLITS)
    train, test = _read(EMNIST, folder, split, verify)
    return image_set("emnist", train, test, SPLITS[split].classes)


@register(EMNIST_L)
def load_emnist_l(folder: Folder = None, verify: bool = True) -> TrainTest:
    """Load the letters A to J of EMNIST as uint8 [samples, 1, 28, 28]."""
    train, test = (
        Labelled(part.inputs[part.labels < 10], part.labels[part.labels < 10])
        for part in _read(EMNIST_L, folder, "letters", verify)
    )
    if len(train.labels) == 0 or len(test.labels) == 0:
        raise FlatfedError("emnist_l: the files hold none of the first ten letters; give the letters split")
    return image_set("emnist_l", train, test, 10)


def _read(info: DatasetInfo, folder: Folder, name: str, verify: bool) -> list[Labelled]:
    located, split = info.find(folder), SPLITS[name]
    parts = []
    for part, published in (("train", split.train), ("test", split.test)):
        prefix = located / f"emnist-{name}-{part}"
        stored = read_labelled(info, prefix, split.classes, split.first_label)
        if verify:
            info.check_count(located / f"{prefix.name}-images-idx3-ubyte", len(stored.labels), published)
        parts.append(Labelled(np.ascontiguousarray(stored.inputs.swapaxes(2, 3)), stored.labels))
    return parts
