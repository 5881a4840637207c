"""MNIST: 70,000 grey handwritten digits of 28×28 pixels, 10 classes, in idx files, packed or not."""

from __future__ import annotations

from flatfed.data.datasets.base import Folder, Place, TrainTest
from flatfed.data.datasets.idx import load_ten_classes

PLACE = Place(
    "mnist",
    "grey handwritten digits 28×28, 10 classes, 60,000 + 10,000",
    ("mnist", "MNIST/raw"),
    ("train-images-idx3-ubyte", "train-images-idx3-ubyte.gz"),
)
MEAN, STD = 0.1307, 0.3081
CHECKSUMS = {  # of the unpacked files
    "train-images-idx3-ubyte": "md5:6bbc9ace898e44ae57da46a324031adb",
    "train-labels-idx1-ubyte": "md5:a25bea736e30d166cdddb491f175f624",
    "t10k-images-idx3-ubyte": "md5:2646ac647ad5339dbf082846283269ea",
    "t10k-labels-idx1-ubyte": "md5:27ae3e4e09519cfbb04c329615203637",
}


def load_mnist(folder: Folder = None, verify: bool = True) -> TrainTest:
    """Load MNIST as uint8 [samples, 1, 28, 28]."""
    return load_ten_classes(PLACE, folder, CHECKSUMS if verify else {}, MEAN, STD)
