"""Images in files: a folder of one's own, CINIC-10 and Tiny ImageNet.

One's own lie in `train/CLASS/*` and `test/CLASS/*`, classes numbered by name. All images must have one size.
Without `mean` and `std` pixels are normalised by the mean and deviation of the training images. Files are
read by Pillow, which only data sets of image files need.

CINIC-10: 270,000 colour images of 32×32 pixels, 10 classes, as PNG files in three equal parts. `train` is the
training set and `test` the test set; `with_validation` adds `valid` to the training set.

Tiny ImageNet: 110,000 colour images of 64×64 pixels, 200 classes, as JPEG files. The published test images
have no labels; the validation images are the test set here, as everywhere. Classes are numbered in the order
of their WordNet names.
"""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Bytes, Labelled, TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, archive, brief, register, root_folder
from flatfed.data.transform import Augmentation

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
OWN_IMAGES = DatasetInfo(
    "image_folder", "images in train/CLASS/ and test/CLASS/", origin="your own images: folder = …"
)
CINIC10 = DatasetInfo(
    "cinic10",
    "colour images 32×32, 10 classes, 90,000 + 90,000 and 90,000 for validation",
    folders=("CINIC-10",),
    markers=("train/airplane/*.png",),
    downloads=archive(
        "https://datashare.ed.ac.uk/bitstream/handle/10283/3192/CINIC-10.tar.gz",
        "md5:6ee4d0c996905fe93221de577967a372",
        687_544_992,
        *("train", "valid", "test"),
    ),
)
CINIC10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
CINIC10_IMAGES = 90_000  # in each part
TINY_IMAGENET = DatasetInfo(
    "tiny_imagenet",
    "colour images 64×64, 200 classes, 100,000 + 10,000",
    folders=("tiny-imagenet-200",),
    markers=("wnids.txt",),
    downloads=archive(
        "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
        "md5:90528d7ca1a48142e341f4ef8d21d0de",
        248_100_043,
        *("train", "val", "wnids.txt", "words.txt"),
    ),
)


@register(OWN_IMAGES)
def load_image_folder(
    folder: Folder = None,
    augmentation: Augmentation = "none",
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    channels: Literal[1, 3] = 3,
) -> TrainTest:
    """Load a folder of images as uint8 [samples, channels, height, width]."""
    if folder is None:
        raise FlatfedError("image_folder: folder is missing; give the folder that holds train/ and test/")
    root = root_folder(folder)
    names = [path.name for path in class_folders(root / "train")]
    if not names:
        raise FlatfedError(f"{root / 'train'}: no class folders; put the images into train/CLASS/")
    train = read_class_folders(root / "train", names, channels)
    _, _, height, width = train.inputs.shape
    test = read_class_folders(root / "test", names, channels, (height, width))
    return image_set("image_folder", train, test, len(names), mean, std, augmentation)


@register(CINIC10)
def load_cinic10(
    folder: Folder = None,
    augmentation: Augmentation = "none",
    with_validation: bool = False,
    verify: bool = True,
) -> TrainTest:
    """Load CINIC-10 as uint8 [samples, 3, 32, 32]."""
    located = CINIC10.find(folder)
    parts = []
    for part in ("train", "test", "valid") if with_validation else ("train", "test"):
        parts.append(read_class_folders(located / part, CINIC10_CLASSES, size=(32, 32)))
        if verify:
            CINIC10.check_count(located / part, len(parts[-1].labels), CINIC10_IMAGES)
    train, test, *validation = parts
    if validation:
        train = Labelled.joined([train, *validation])
    mean, std = (0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587)
    return image_set("cinic10", train, test, len(CINIC10_CLASSES), mean, std, augmentation)


@register(TINY_IMAGENET)
def load_tiny_imagenet(
    folder: Folder = None, augmentation: Augmentation = "none", verify: bool = True
) -> TrainTest:
    """Load Tiny ImageNet as uint8 [samples, 3, 64, 64]."""
    located = TINY_IMAGENET.find(folder)
    names = sorted(_read_text(located / "wnids.txt").split())
    if verify or not names:
        TINY_IMAGENET.check_count(located / "wnids.txt", len(names), 200, "classes")
    train, test = _train_paths(located / "train", names), _test_paths(located / "val", names)
    if verify:
        TINY_IMAGENET.check_count(located / "train", len(train), 100_000)
        TINY_IMAGENET.check_count(located / "val", len(test), 10_000)
    images = read_pictures(located / "train", train, size=(64, 64))
    test_images = read_pictures(located / "val" / "val_annotations.txt", test, size=(64, 64))
    mean, std = (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)
    return image_set("tiny_imagenet", images, test_images, len(names), mean, std, augmentation)


def _train_paths(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    labelled: list[tuple[Path, int]] = []
    for number, name in enumerate(names):
        images = folder / name / "images"
        if not images.is_dir():
            raise TINY_IMAGENET.damaged(images, "not found, and wnids.txt names its class")
        labelled += [(path, number) for path in picture_paths(images)]
    return labelled


def _test_paths(folder: Path, names: list[str]) -> list[tuple[Path, int]]:
    table = folder / "val_annotations.txt"
    labelled = []
    for line in _read_text(table).splitlines():
        picture, name, *_ = [*line.split("\t"), ""]
        if name not in names or Path(picture).name != picture:
            problem = f"the line {line[:40]!r} names no image of a class in wnids.txt"
            raise TINY_IMAGENET.damaged(table, problem)
        labelled.append((folder / "images" / picture, names.index(name)))
    return labelled


def _read_text(path: Path) -> str:
    return TINY_IMAGENET.read(path).decode("utf-8", "replace")


def picture_paths(folder: Path) -> list[Path]:
    """The image files directly in a folder, by name; hidden ones are left by operating systems."""
    return sorted(
        path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and not path.name.startswith(".")
    )


def class_folders(folder: Path) -> list[Path]:
    """The sub-folders of a folder, by name; hidden ones are not classes."""
    try:
        return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))
    except OSError as error:
        raise FlatfedError(
            f"{folder}: cannot be read ({error.strerror}); give a folder with one sub-folder per class"
        ) from None


def read_class_folders(
    folder: Path, names: Sequence[str], channels: int = 3, size: tuple[int, int] | None = None
) -> Labelled:
    """The images in `folder/NAME/*`, labelled by the position of NAME."""
    labelled: list[tuple[Path, int]] = []
    for path in class_folders(folder):
        if path.name not in names:
            raise FlatfedError(f"{path}: not a known class; remove it or add training images of that class")
        labelled += [(picture, names.index(path.name)) for picture in picture_paths(path)]
    return read_pictures(folder, labelled, channels, size)


def read_pictures(
    folder: Path,
    labelled: Sequence[tuple[Path, int]],
    channels: int = 3,
    size: tuple[int, int] | None = None,
) -> Labelled:
    """Images as uint8 [n, C, H, W], all of `size` (height, width) or of the first one's, and their labels."""
    if not labelled:
        raise FlatfedError(f"{folder}: no images; put them there")
    try:
        from PIL import Image  # noqa: PLC0415 (optional)
    except ImportError:
        raise FlatfedError("Pillow: missing, and image files need it; run `pip install Pillow`") from None
    mode = {1: "L", 3: "RGB"}[channels]

    def read(path: Path) -> Bytes:
        try:
            with Image.open(path) as image:
                pixels = np.asarray(image.convert(mode))
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            raise FlatfedError(f"{path}: not a readable image ({brief(error)}); replace it") from None
        return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)

    height, width = size or read(labelled[0][0]).shape[1:]
    paths, labels = zip(*labelled, strict=True)
    images = np.empty((len(paths), channels, height, width), np.uint8)
    # Decoding leaves the interpreter lock free.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for number, pixels in enumerate(pool.map(read, paths)):
            if pixels.shape[1:] != (height, width):
                raise FlatfedError(
                    f"{paths[number]}: {list(pixels.shape[1:])} pixels where {[height, width]} are expected; "
                    "make all images one size"
                )
            images[number] = pixels
    return Labelled(images, np.array(labels))
