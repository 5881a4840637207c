"""Fashion-MNIST: 70,000 grey pictures of clothes of 28×28 pixels, 10 classes, in idx files, packed or not.

Debian's package `dataset-fashion-mnist` is found where it installs itself, unless a folder is given.
"""

from __future__ import annotations

from typing import Literal

from flatfed.data.datasets import mnist
from flatfed.data.datasets.base import Folder, Place, TrainTest, check_choice
from flatfed.data.datasets.idx import load_ten_classes

Normalisation = Literal["own", "mnist"]

PLACE = Place(
    "fashion_mnist",
    "grey pictures of clothes 28×28, 10 classes, 60,000 + 10,000",
    ("fashion-mnist", "FashionMNIST/raw"),
    ("train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"),
    system=("/usr/share/datasets/fashion-mnist",),
)
NORMALISATIONS = {
    "own": (0.2860, 0.3530),
    "mnist": (mnist.MEAN, mnist.STD),  # DynaFed's code treats both data sets alike
}
CHECKSUMS = {  # of the unpacked files; Debian packs them anew
    "train-images-idx3-ubyte": "md5:f4a8712d7a061bf5bd6d2ca38dc4d50a",
    "train-labels-idx1-ubyte": "md5:9018921c3c673c538a1fc5bad174d6f9",
    "t10k-images-idx3-ubyte": "md5:8181f5470baa50b63fa0f6fddb340f0a",
    "t10k-labels-idx1-ubyte": "md5:15d484375f8d13e6eb1aabb0c3f46965",
}


def load_fashion_mnist(
    folder: Folder = None, normalisation: Normalisation = "own", verify: bool = True
) -> TrainTest:
    """Load Fashion-MNIST as uint8 [samples, 1, 28, 28]."""
    check_choice("normalisation", normalisation, NORMALISATIONS)
    mean, std = NORMALISATIONS[normalisation]
    return load_ten_classes(PLACE, folder, CHECKSUMS if verify else {}, mean, std)
