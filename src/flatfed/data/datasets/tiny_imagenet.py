"""Tiny ImageNet: 110,000 colour images of 64×64 pixels, 200 classes, as JPEG files.

The published test images have no labels; the validation images are the test set here, as everywhere.
Classes are numbered in the order of their WordNet names.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flatfed.data.datasets.base import Folder, Labelled, Place, TrainTest, image_set
from flatfed.data.datasets.pictures import picture_paths, read_pictures
from flatfed.data.transform import Augmentation

PLACE = Place(
    "tiny_imagenet",
    "colour images 64×64, 200 classes, 100,000 + 10,000",
    ("tiny-imagenet-200",),
    ("wnids.txt",),
)
MEAN, STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
CLASSES, TRAIN, TEST = 200, 100_000, 10_000


def load_tiny_imagenet(
    folder: Folder = None, augmentation: Augmentation = "none", verify: bool = True
) -> TrainTest:
    """Load Tiny ImageNet as uint8 [samples, 3, 64, 64]."""
    found = PLACE.find(folder)
    names = sorted(PLACE.read(found / "wnids.txt").decode("utf-8", "replace").split())
    if not names or (verify and len(names) != CLASSES):
        raise PLACE.damaged(found / "wnids.txt", f"{len(names)} classes where {CLASSES} are published")
    train, test = _train(found, names), _test(found, names)
    for part, labelled, published in (("train", train, TRAIN), ("val", test, TEST)):
        if verify and len(labelled[1]) != published:
            raise PLACE.damaged(
                found / part, f"{len(labelled[1]):,} images where {published:,} are published"
            )
    return image_set("tiny_imagenet", train, test, len(names), MEAN, STD, augmentation)


def _train(found: Path, names: list[str]) -> Labelled:
    paths: list[Path] = []
    labels: list[int] = []
    for number, name in enumerate(names):
        folder = found / "train" / name / "images"
        if not folder.is_dir():
            raise PLACE.damaged(folder, "not found, and wnids.txt names its class")
        pictures = picture_paths(folder)
        paths += pictures
        labels += [number] * len(pictures)
    if not paths:
        raise PLACE.damaged(found / "train", "no images")
    return read_pictures(paths, size=(64, 64)), np.array(labels)


def _test(found: Path, names: list[str]) -> Labelled:
    table = found / "val" / "val_annotations.txt"
    numbers = {name: number for number, name in enumerate(names)}
    paths: list[Path] = []
    labels: list[int] = []
    for line in PLACE.read(table).decode("utf-8", "replace").splitlines():
        picture, _, rest = line.partition("\t")
        name = rest.partition("\t")[0]
        if name not in numbers or Path(picture).name != picture:
            raise PLACE.damaged(table, f"the line {line[:40]!r} names no image of a class in wnids.txt")
        paths.append(found / "val" / "images" / picture)
        labels.append(numbers[name])
    if not paths:
        raise PLACE.damaged(table, "no images")
    return read_pictures(paths, size=(64, 64)), np.array(labels)
