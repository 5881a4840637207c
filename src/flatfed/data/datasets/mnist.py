"""MNIST: 70,000 grey handwritten digits of 28×28 pixels, 10 classes, in idx files, compressed or not."""

from __future__ import annotations

from flatfed.data.datasets.base import TrainTest
from flatfed.data.datasets.catalog import Folder, register
from flatfed.data.datasets.idx import IdxFile, load_mnist_files, mnist_info

FILES = (
    IdxFile("md5:6bbc9ace898e44ae57da46a324031adb", "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    IdxFile("md5:a25bea736e30d166cdddb491f175f624", "md5:d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    IdxFile("md5:2646ac647ad5339dbf082846283269ea", "md5:9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    IdxFile("md5:27ae3e4e09519cfbb04c329615203637", "md5:ec29112dd5afa0611ce80d1b7f02629c", 4_542),
)
MNIST = mnist_info(
    "mnist",
    "grey handwritten digits 28×28, 10 classes, 60,000 + 10,000",
    ("mnist", "MNIST/raw"),
    ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/"),
    FILES,
)
MEAN, STD = 0.1307, 0.3081


@register(MNIST)
def load_mnist(folder: Folder = None, verify: bool = True) -> TrainTest:
    """Load MNIST as uint8 [samples, 1, 28, 28]."""
    return load_mnist_files(MNIST, folder, FILES, verify, MEAN, STD)
