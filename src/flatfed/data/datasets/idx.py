"""Grey images of 28×28 pixels in idx files, packed or not: MNIST, Fashion-MNIST and EMNIST.

The idx format is a magic number, the shape, then the bytes. Debian's package `dataset-fashion-mnist` is found
where it installs itself, unless a folder is given.

EMNIST's split `letters` has 26 classes (upper and lower case together), `balanced` 47 and `byclass` 62. Its
files hold every image transposed and count letters from 1; here images stand upright and classes count from
0. Pixels are normalised by the mean and deviation of all training pixels of the classes in use. `emnist_l` is
its first ten letters: 48,000 training and 8,000 test images.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Labelled, TrainTest, image_set
from flatfed.data.datasets.cache import Arrays, arrays_of, cached, samples_of
from flatfed.data.datasets.catalog import DatasetInfo, Download, Folder, archive, register
from flatfed.data.files import CHUNK
from flatfed.data.transform import Bytes, pixel_statistics

UNSIGNED_BYTE = 8  # the only one of the format's types that these data sets use

NAMES = [f"{part}-{kind}-ubyte" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
MEAN, STD = 0.1307, 0.3081
FASHION_NORMALISATIONS = {
    "own": (0.2860, 0.3530),
    "mnist": (MEAN, STD),  # DynaFed's code treats both data sets alike
}

# Of each of the four files, in the order of `NAMES`: the checksum of its content, because Debian packs the
# files anew, and the checksum and size of the published file.
Files = tuple[tuple[str, str, int], ...]
MNIST_FILES = (
    ("md5:6bbc9ace898e44ae57da46a324031adb", "md5:f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
    ("md5:a25bea736e30d166cdddb491f175f624", "md5:d53e105ee54ea40749a09fcbcd1e9432", 28_881),
    ("md5:2646ac647ad5339dbf082846283269ea", "md5:9fb629c4189551a2d022fa330f9573f3", 1_648_877),
    ("md5:27ae3e4e09519cfbb04c329615203637", "md5:ec29112dd5afa0611ce80d1b7f02629c", 4_542),
)
FASHION_FILES = (
    ("md5:f4a8712d7a061bf5bd6d2ca38dc4d50a", "md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
    ("md5:9018921c3c673c538a1fc5bad174d6f9", "md5:25c81989df183df01b3e8a0aad5dffbe", 29_515),
    ("md5:8181f5470baa50b63fa0f6fddb340f0a", "md5:bef4ecab320f06d8554ea6380940ec79", 4_422_102),
    ("md5:15d484375f8d13e6eb1aabb0c3f46965", "md5:bb300cfdad3c16e7a12a480ee83cd310", 5_148),
)


def _downloads(files: Files, *urls: str) -> tuple[Download, ...]:
    return tuple(
        Download(tuple(f"{url}{name}.gz" for url in urls), checksum, size)
        for name, (_, checksum, size) in zip(NAMES, files, strict=True)
    )


MNIST = DatasetInfo(
    "mnist",
    "grey handwritten digits 28×28, 10 classes, 60,000 + 10,000",
    folders=("mnist", "MNIST/raw"),
    markers=(NAMES[0], f"{NAMES[0]}.gz"),
    downloads=_downloads(
        MNIST_FILES,
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
)
FASHION_MNIST = replace(
    MNIST,
    name="fashion_mnist",
    title="grey pictures of clothes 28×28, 10 classes, 60,000 + 10,000",
    folders=("fashion-mnist", "FashionMNIST/raw"),
    system_folders=("/usr/share/datasets/fashion-mnist",),
    downloads=_downloads(FASHION_FILES, "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
)


class _Split(NamedTuple):
    classes: int
    first_label: int
    train: int  # published numbers of samples
    test: int


SPLITS = {
    "letters": _Split(26, 1, 124_800, 20_800),
    "balanced": _Split(47, 0, 112_800, 18_800),
    "byclass": _Split(62, 0, 697_932, 116_323),
}
EMNIST = DatasetInfo(
    "emnist",
    "grey handwritten characters 28×28; letters 26 classes, balanced 47, byclass 62",
    folders=("emnist", "EMNIST/raw"),
    markers=("emnist-*-train-images-idx3-ubyte", "emnist-*-train-images-idx3-ubyte.gz"),
    downloads=archive(
        "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip",
        "md5:58c8d27c78d21e728a6bc7b3cc06412e",
        561_753_746,
        "emnist-*",
    ),
    versions={f"emnist-{split}-train-images*": {"split": split} for split in SPLITS},
)
EMNIST_L = replace(
    EMNIST,
    name="emnist_l",
    title="the first ten letters of EMNIST, 48,000 + 8,000",
    markers=("emnist-letters-train-images-idx3-ubyte", "emnist-letters-train-images-idx3-ubyte.gz"),
    versions={},
)


@register(MNIST)
def load_mnist(folder: Folder = None, verify: bool = True) -> TrainTest:
    """Load MNIST as uint8 [samples, 1, 28, 28]."""
    return _load(MNIST, folder, MNIST_FILES if verify else (), MEAN, STD)


@register(FASHION_MNIST)
def load_fashion_mnist(
    folder: Folder = None, normalisation: Literal["own", "mnist"] = "own", verify: bool = True
) -> TrainTest:
    """Load Fashion-MNIST as uint8 [samples, 1, 28, 28]."""
    mean, std = FASHION_NORMALISATIONS[normalisation]
    return _load(FASHION_MNIST, folder, FASHION_FILES if verify else (), mean, std)


def _load(info: DatasetInfo, folder: Folder, files: Files, mean: float, std: float) -> TrainTest:
    located = info.find(folder)
    checksums = dict(zip(NAMES, (content for content, _, _ in files), strict=False))

    def read() -> Arrays:
        train, test = (_read_labelled(info, located / part, 10, checksums) for part in ("train", "t10k"))
        return arrays_of(train, test)

    arrays = cached(info.name, [_stored(located / name) for name in NAMES], read) if files else read()
    return image_set(info.name, *samples_of(arrays), 10, (mean,), (std,))


@register(EMNIST)
def load_emnist(
    folder: Folder = None, split: Literal["letters", "balanced", "byclass"] = "letters", verify: bool = True
) -> TrainTest:
    """Load a split of EMNIST as uint8 [samples, 1, 28, 28]."""
    return _load_emnist(EMNIST, folder, split, SPLITS[split].classes, verify)


@register(EMNIST_L)
def load_emnist_l(folder: Folder = None, verify: bool = True) -> TrainTest:
    """Load the letters A to J of EMNIST as uint8 [samples, 1, 28, 28]."""
    return _load_emnist(EMNIST_L, folder, "letters", 10, verify)


def _load_emnist(info: DatasetInfo, folder: Folder, split: str, classes: int, verify: bool) -> TrainTest:
    """The samples of the first classes of a split, with their own normalisation."""
    located = info.find(folder)

    def read() -> Arrays:
        train, test = _read_emnist(info, located, split, classes, verify)
        mean, std = pixel_statistics(train.inputs)
        return arrays_of(train, test) | {"mean": np.array(mean), "std": np.array(std)}

    names = [f"emnist-{split}-{name.replace('t10k', 'test')}" for name in NAMES]
    name = info.name if info is EMNIST_L else f"emnist-{split}"
    arrays = cached(name, [_stored(located / file) for file in names], read) if verify else read()
    mean, std = (arrays[key].tolist() for key in ("mean", "std"))
    return image_set(info.name, *samples_of(arrays), classes, mean, std)


def _read_emnist(
    info: DatasetInfo, located: Path, name: str, classes: int, verify: bool
) -> tuple[Labelled, Labelled]:
    split = SPLITS[name]
    parts = []
    for part, published in (("train", split.train), ("test", split.test)):
        prefix = located / f"emnist-{name}-{part}"
        stored = _read_labelled(info, prefix, split.classes, {}, split.first_label)
        if verify:
            info.check_count(located / f"{prefix.name}-images-idx3-ubyte", len(stored.labels), published)
        upright = Labelled(np.ascontiguousarray(stored.inputs.swapaxes(2, 3)), stored.labels)
        parts.append(upright if classes == split.classes else _first_classes(upright, classes))
    train, test = parts
    if len(train.labels) == 0 or len(test.labels) == 0:
        raise FlatfedError("emnist_l: the files hold none of the first ten letters; give the letters split")
    return train, test


def _first_classes(samples: Labelled, classes: int) -> Labelled:
    chosen = samples.labels < classes
    return Labelled(samples.inputs[chosen], samples.labels[chosen])


def _read_labelled(
    info: DatasetInfo, prefix: Path, classes: int, checksums: Mapping[str, str], first_label: int = 0
) -> Labelled:
    """Images [n, 1, 28, 28] and labels counted from 0, from two files whose paths start with `prefix`."""
    images_path = prefix.with_name(f"{prefix.name}-images-idx3-ubyte")
    labels_path = prefix.with_name(f"{prefix.name}-labels-idx1-ubyte")
    images = _read_idx(info, images_path, 3, checksums)
    # Labels are widened from a byte to eight: far more than there are images are not even unpacked.
    labels = _read_idx(info, labels_path, 1, checksums, largest=2 * len(images) + CHUNK)
    if images.shape[1:] != (28, 28):
        raise info.damaged(images_path, f"images of {list(images.shape[1:])} pixels, not [28, 28]")
    if len(images) != len(labels):
        raise info.damaged(labels_path, f"{len(labels):,} labels for {len(images):,} images")
    numbers = info.checked_labels(labels_path, labels.astype(np.int64) - first_label, classes)
    return Labelled(images[:, None], numbers)


def _read_idx(
    info: DatasetInfo,
    path: Path,
    dimensions: int,
    checksums: Mapping[str, str],
    largest: int | None = None,
) -> Bytes:
    """The array in the file or in the compressed file beside it; checksums are of the content."""
    checksum, path = checksums.get(path.name), _stored(path)
    content = info.read(path, checksum, largest=largest)
    header = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, UNSIGNED_BYTE, dimensions)):
        raise info.damaged(path, f"starts with {content[:4].hex(' ')}, not as an idx{dimensions}-ubyte file")
    if len(content) < header:
        raise info.damaged(path, f"truncated, {len(content)} bytes")
    shape = np.frombuffer(content[4:header], ">u4").tolist()
    size = header + math.prod(shape)
    info.check_size(path, content, size, f"its header says {size:,}")
    if size == header:
        raise info.damaged(path, "no samples")
    return np.frombuffer(content, np.uint8, size - header, header).reshape(shape)


def _stored(path: Path) -> Path:
    """The file, or the compressed one beside it where there is none."""
    return path if path.is_file() else path.with_name(f"{path.name}.gz")
