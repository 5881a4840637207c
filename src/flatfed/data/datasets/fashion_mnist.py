"""Fashion-MNIST: 70,000 grey pictures of clothes of 28×28 pixels, 10 classes, in idx files, packed or not.

Debian's package `dataset-fashion-mnist` is found where it installs itself, unless a folder is given.
"""

from __future__ import annotations

from typing import Literal

from flatfed.core.errors import check_choice
from flatfed.data.datasets import mnist
from flatfed.data.datasets.base import TrainTest
from flatfed.data.datasets.catalog import Folder, register
from flatfed.data.datasets.idx import IdxFile, load_mnist_files, mnist_info

Normalisation = Literal["own", "mnist"]

FILES = (
    IdxFile("md5:f4a8712d7a061bf5bd6d2ca38dc4d50a", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    IdxFile("md5:9018921c3c673c538a1fc5bad174d6f9", "md5:25c81989df183df01b3e8a0aad5dffbe", 29_515),
    IdxFile("md5:8181f5470baa50b63fa0f6fddb340f0a", "md5:bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    IdxFile("md5:15d484375f8d13e6eb1aabb0c3f46965", "md5:bb300cfdad3c16e7a12a480ee83cd310", 5_148),
)
FASHION_MNIST = mnist_info(
    "fashion_mnist",
    "grey pictures of clothes 28×28, 10 classes, 60,000 + 10,000",
    ("fashion-mnist", "FashionMNIST/raw"),
    ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
    FILES,
    system_folders=("/usr/share/datasets/fashion-mnist",),
)
NORMALISATIONS = {
    "own": (0.2860, 0.3530),
    "mnist": (mnist.MEAN, mnist.STD),  # DynaFed's code treats both data sets alike
}


@register(FASHION_MNIST)
def load_fashion_mnist(
    folder: Folder = None, normalisation: Normalisation = "own", verify: bool = True
) -> TrainTest:
    """Load Fashion-MNIST as uint8 [samples, 1, 28, 28]."""
    check_choice("normalisation", normalisation, NORMALISATIONS)
    return load_mnist_files(FASHION_MNIST, folder, FILES, verify, *NORMALISATIONS[normalisation])
