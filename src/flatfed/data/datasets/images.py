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

import io
import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatfed.core.errors import FlatfedError, brief
from flatfed.data.datasets.base import Labelled, TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, archive, register, root_folder
from flatfed.data.files import check_largest, read_file
from flatfed.data.transform import Augmentation, Bytes

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"}
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")  # no others: Pillow starts programs for some
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
TINY_NORMALISATIONS = {
    "own": ((0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821)),
    "imagenet": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
}
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
    channels: int = 3,
) -> TrainTest:
    """Load a folder of images as uint8 [samples, channels, height, width]."""
    if folder is None:
        raise FlatfedError("image_folder: folder is missing; give the folder that holds train/ and test/")
    if channels not in (1, 3):
        raise FlatfedError(f"channels = {channels}: give 3 for colour or 1 for grey")
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
    folder: Folder = None,
    augmentation: Augmentation = "none",
    normalisation: Literal["own", "imagenet"] = "own",
    verify: bool = True,
) -> TrainTest:
    """Load Tiny ImageNet as uint8 [samples, 3, 64, 64].

    `normalisation` "imagenet" is that of models trained on the whole of it.
    """
    located = TINY_IMAGENET.find(folder)
    names = _class_names(located / "wnids.txt")
    if verify or not names:
        TINY_IMAGENET.check_count(located / "wnids.txt", len(names), 200, "classes")
    train, test = _train_paths(located / "train", names), _test_paths(located / "val", names)
    if verify:
        TINY_IMAGENET.check_count(located / "train", len(train), 100_000)
        TINY_IMAGENET.check_count(located / "val", len(test), 10_000)
    images = read_pictures(located / "train", train, size=(64, 64))
    test_images = read_pictures(located / "val" / "val_annotations.txt", test, size=(64, 64))
    mean, std = TINY_NORMALISATIONS[normalisation]
    return image_set("tiny_imagenet", images, test_images, len(names), mean, std, augmentation)


def _class_names(path: Path) -> dict[str, int]:
    names = sorted(_read_text(path).split())
    for name, following in itertools.zip_longest(names, names[1:]):
        if name == following or Path(name).name != name:
            raise TINY_IMAGENET.damaged(path, f"{name[:40]!r} is named twice or leads out of the folder")
    return {name: number for number, name in enumerate(names)}


def _train_paths(folder: Path, names: Mapping[str, int]) -> list[tuple[Path, int]]:
    labelled: list[tuple[Path, int]] = []
    for name, number in names.items():
        images = folder / name / "images"
        if not images.is_dir():
            raise TINY_IMAGENET.damaged(images, "not found, and wnids.txt names its class")
        labelled += [(path, number) for path in picture_paths(images)]
    return labelled


def _test_paths(folder: Path, names: Mapping[str, int]) -> list[tuple[Path, int]]:
    table = folder / "val_annotations.txt"
    labelled: dict[Path, int] = {}
    for line in _read_text(table).splitlines():
        picture, name, *_ = [*line.split("\t"), ""]
        path = folder / "images" / picture
        if name not in names or Path(picture).name != picture or path in labelled:
            problem = f"the line {line[:40]!r} names no image of a class in wnids.txt, or one again"
            raise TINY_IMAGENET.damaged(table, problem)
        labelled[path] = names[name]
    return list(labelled.items())


def _read_text(path: Path) -> str:
    return TINY_IMAGENET.read(path).decode("utf-8", "replace")


def visible(folder: Path) -> list[Path]:
    """What is in a folder, by name; hidden files are left by operating systems."""
    try:
        return sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    except OSError as error:
        raise FlatfedError(
            f"{folder}: cannot be read ({error.strerror}); give a folder with one sub-folder per class"
        ) from None


def picture_paths(folder: Path) -> list[Path]:
    return [path for path in visible(folder) if path.suffix.lower() in SUFFIXES]


def class_folders(folder: Path) -> list[Path]:
    return [path for path in visible(folder) if path.is_dir()]


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
        from PIL import Image, ImageFile  # noqa: PLC0415 (optional)
    except ImportError:
        raise FlatfedError("Pillow: missing, and image files need it; run `pip install Pillow`") from None

    def opened(path: Path) -> ImageFile.ImageFile:
        return Image.open(io.BytesIO(read_file(path)), formats=FORMATS)

    def read(path: Path) -> Bytes:
        try:
            with opened(path) as image:
                _check_size(path, image.size, size)
                pixels = bytes_of(image, channels)
        except FlatfedError:
            raise
        except Exception as error:  # what is no image, or a damaged one, can raise anything
            raise FlatfedError(f"{path}: not a readable image ({brief(error)}); replace it") from None
        _check_size(path, pixels.shape[:0:-1], size)
        return pixels

    if size is None:
        height, width = read(labelled[0][0]).shape[1:]
        size = (height, width)
        check_largest(folder, len(labelled) * channels * height * width)
    paths, labels = zip(*labelled, strict=True)
    images = np.empty((len(paths), channels, *size), np.uint8)
    # Decoding leaves the interpreter lock free.
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        for number, pixels in enumerate(pool.map(read, paths)):
            images[number] = pixels
    return Labelled(images, np.array(labels))


def bytes_of(image: Any, channels: int) -> Bytes:
    """The pixels [C, H, W] of an image of Pillow, colour or grey."""
    if image.mode[0] in "IF":  # which it would cut off, not scale
        raise ValueError(f"pixels of mode {image.mode}, not of 8 bits")
    pixels = np.asarray(image.convert({1: "L", 3: "RGB"}[channels]))
    return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1)


def _check_size(path: Path, width_and_height: tuple[int, ...], size: tuple[int, int] | None) -> None:
    pixels = list(width_and_height[::-1])
    if size is not None and pixels != list(size):
        raise FlatfedError(
            f"{path}: {pixels} pixels where {list(size)} are expected; make all images one size"
        )
