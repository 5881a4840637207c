"""CIFAR-100: 60,000 colour images of 32×32 pixels, 100 classes, from the binary or the Python version.

The targets are the 100 fine classes.
"""

from __future__ import annotations

from flatfed.data.datasets.base import Folder, Place, TrainTest, check_choice, image_set
from flatfed.data.datasets.cifar import SHARED, Constants, Normalisation, read_binary, read_pickled
from flatfed.data.transform import Augmentation

PLACE = Place(
    "cifar100",
    "colour images 32×32, 100 classes, 50,000 + 10,000",
    ("cifar-100-binary", "cifar-100-python"),
    ("train.bin", "train"),
)
NORMALISATIONS: dict[str, Constants] = {
    "feddyn": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)),
    "fedswa": SHARED,
}
RECORDS = {"train": 50_000, "test": 10_000}
CHECKSUMS = {
    "train.bin": "sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
    "test.bin": "sha1:8fb6623e830365ff53cf14adec797474f5478006",
    "train": "md5:16019d7e3df5f24257cddd939b257f8d",
    "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
}


def load_cifar100(
    folder: Folder = None,
    augmentation: Augmentation = "none",
    normalisation: Normalisation = "feddyn",
    verify: bool = True,
) -> TrainTest:
    """Load CIFAR-100 as uint8 [samples, 3, 32, 32]."""
    check_choice("normalisation", normalisation, NORMALISATIONS)
    found = PLACE.find(folder)
    checksums = CHECKSUMS if verify else {}
    binary = (found / "train.bin").is_file()
    train, test = (
        read_binary(PLACE, [found / f"{part}.bin"], 2, 100, RECORDS[part] if verify else None, checksums)
        if binary
        else read_pickled(
            PLACE, [found / part], "fine_labels", 100, RECORDS[part] if verify else None, checksums
        )
        for part in ("train", "test")
    )
    return image_set("cifar100", train, test, 100, *NORMALISATIONS[normalisation], augmentation)
