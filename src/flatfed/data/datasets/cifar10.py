"""CIFAR-10: 60,000 colour images of 32×32 pixels, 10 classes, from the binary or the Python version."""

from __future__ import annotations

from flatfed.data.datasets.base import Folder, Place, TrainTest, check_choice, image_set
from flatfed.data.datasets.cifar import SHARED, Constants, Normalisation, read_binary, read_pickled
from flatfed.data.transform import Augmentation

PLACE = Place(
    "cifar10",
    "colour images 32×32, 10 classes, 50,000 + 10,000",
    ("cifar-10-batches-bin", "cifar-10-batches-py"),
    ("data_batch_1.bin", "data_batch_1"),
)
NORMALISATIONS: dict[str, Constants] = {
    "feddyn": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)),
    "fedswa": SHARED,
}
BATCHES = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
RECORDS = 10_000  # in each file
CHECKSUMS = {
    "data_batch_1.bin": "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_2.bin": "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
    "data_batch_3.bin": "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
    "data_batch_4.bin": "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
    "data_batch_5.bin": "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch.bin": "sha1:67eb016db431130d61cd03c7ad570b013799c88c",
    "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
    "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
    "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
    "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
    "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
    "test_batch": "md5:40351d587109b95175f43aff81a1287e",
}


def load_cifar10(
    folder: Folder = None,
    augmentation: Augmentation = "none",
    normalisation: Normalisation = "feddyn",
    verify: bool = True,
) -> TrainTest:
    """Load CIFAR-10 as uint8 [samples, 3, 32, 32]."""
    check_choice("normalisation", normalisation, NORMALISATIONS)
    found = PLACE.find(folder)
    checksums, records = (CHECKSUMS, RECORDS) if verify else ({}, None)
    if (found / "data_batch_1.bin").is_file():
        paths = [found / f"{batch}.bin" for batch in BATCHES]
        train, test = (
            read_binary(PLACE, part, 1, 10, records, checksums) for part in (paths[:-1], paths[-1:])
        )
    else:
        paths = [found / batch for batch in BATCHES]
        train, test = (
            read_pickled(PLACE, part, "labels", 10, records, checksums) for part in (paths[:-1], paths[-1:])
        )
    return image_set("cifar10", train, test, 10, *NORMALISATIONS[normalisation], augmentation)
