"""Tiny ImageNet: 110,000 colour images of 64×64 pixels, 200 classes, as JPEG files.

The published test images have no labels; the validation images are the test set here, as everywhere.
Classes are numbered in the order of their WordNet names.
"""

from pathlib import Path

from flatfed.data.datasets.base import TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, archive, register
from flatfed.data.datasets.image_folder import picture_paths, read_pictures
from flatfed.data.transform import Augmentation

TINY_IMAGENET = DatasetInfo(
    "tiny_imagenet",
    "colour images 64×64, 200 classes, 100,000 + 10,000",
    folders=("tiny-imagenet-200",),
    markers=("wnids.txt",),
    downloads=archive(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "md5:90528d7ca1a48142e341f4ef8d21d0de",
        248_100_043,
        "train",
        "val",
        "wnids.txt",
        "words.txt",
    ),
)
MEAN, STD = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
CLASSES, TRAIN, TEST = 200, 100_000, 10_000


@register(TINY_IMAGENET)
def load_tiny_imagenet(
    folder: Folder = None, augmentation: Augmentation = "none", verify: bool = True
) -> TrainTest:
    """Load Tiny ImageNet as uint8 [samples, 3, 64, 64]."""
    located = TINY_IMAGENET.find(folder)
    names = sorted(_read_text(located / "wnids.txt").split())
    if verify or not names:
        TINY_IMAGENET.check_count(located / "wnids.txt", len(names), CLASSES, "classes")
    train, test = _train_paths(located / "train", names), _test_paths(located / "val", names)
    if verify:
        TINY_IMAGENET.check_count(located / "train", len(train), TRAIN)
        TINY_IMAGENET.check_count(located / "val", len(test), TEST)
    images, test_images = (read_pictures(labelled, size=(64, 64)) for labelled in (train, test))
    return image_set("tiny_imagenet", images, test_images, len(names), MEAN, STD, augmentation)


def _train_paths(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    labelled: list[tuple[Path, int]] = []
    for number, name in enumerate(names):
        images = folder / name / "images"
        if not images.is_dir():
            raise TINY_IMAGENET.damaged(images, "not found, and wnids.txt names its class")
        labelled += [(path, number) for path in picture_paths(images)]
    if not labelled:
        raise TINY_IMAGENET.damaged(folder, "no images")
    return labelled


def _test_paths(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    table = folder / "val_annotations.txt"
    labelled = []
    for line in _read_text(table).splitlines():
        picture, name, *_ = [*line.split("\t"), ""]
        if name not in names or Path(picture).name != picture:
            raise TINY_IMAGENET.damaged(
                table, f"the line {line[:40]!r} names no image of a class in wnids.txt"
            )
        labelled.append((folder / "images" / picture, names.index(name)))
    if not labelled:
        raise TINY_IMAGENET.damaged(table, "no images")
    return labelled


def _read_text(path: Path) -> str:
    return TINY_IMAGENET.read(path).decode("utf-8", "replace")
