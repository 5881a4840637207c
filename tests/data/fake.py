"""Tiny files in the formats in which data sets are published, filled with known random content.

And the two questions that every test of a loader asks.
"""

from __future__ import annotations

import gzip
import json
import pickle
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.images import CINIC10_CLASSES as CINIC10

CIFAR10_FILES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


@contextmanager
def refused(*parts):
    """The block raises a one-line error that holds all the parts."""
    with pytest.raises(FlatfedError) as caught:
        yield caught
    text = str(caught.value)
    assert "\n" not in text
    for part in parts:
        assert str(part) in text, text


def assert_holds(loaded, written, classes):
    (train, train_labels), (test, test_labels) = written
    for inputs, targets, images, labels in (
        (loaded.train_inputs, loaded.train_targets, train, train_labels),
        (loaded.test_inputs, loaded.test_targets, test, test_labels),
    ):
        assert inputs.dtype == torch.uint8 and targets.dtype == torch.int64
        np.testing.assert_array_equal(inputs.numpy(), images)
        np.testing.assert_array_equal(targets.numpy(), labels)
    assert loaded.classes == classes


def images_and_labels(generator, count, classes, shape=(3, 32, 32)):
    return (
        generator.integers(0, 256, (count, *shape), dtype=np.uint8),
        generator.integers(0, classes, count, dtype=np.uint8),
    )


def split_parts(parts):
    """((train images, labels), (test images, labels)) of parts whose last one is the test set."""
    train = tuple(np.concatenate(each) for each in zip(*parts[:-1], strict=True))
    return train, parts[-1]


def write_cifar10(root: Path, per_file=3, seed=0, classes=10):
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    parts = [images_and_labels(generator, per_file, classes) for _ in CIFAR10_FILES]
    for name, (images, labels) in zip(CIFAR10_FILES, parts, strict=True):
        # Byte by byte, as the format is described: a label, then 1024 red, green and blue pixels by row.
        content = b"".join(
            bytes([label]) + b"".join(bytes(plane[row].tolist()) for plane in image for row in range(32))
            for image, label in zip(images, labels.tolist(), strict=True)
        )
        (folder / f"{name}.bin").write_bytes(content)
    return split_parts(parts)


def write_cifar10_python(root: Path, per_file=3, seed=0):
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    parts = [images_and_labels(generator, per_file, 10) for _ in CIFAR10_FILES]
    for name, (images, labels) in zip(CIFAR10_FILES, parts, strict=True):
        batch = {
            b"batch_label": b"a batch",
            b"labels": labels.tolist(),
            b"data": images.reshape(len(images), -1),
            b"filenames": [b"a.png"] * len(images),
        }
        (folder / name).write_bytes(pickle.dumps(batch, protocol=2))
    return split_parts(parts)


def write_cifar100(root: Path, train=5, test=3, seed=0, classes=100):
    folder = root / "cifar-100-binary"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    parts = [images_and_labels(generator, count, classes) for count in (train, test)]
    for name, (images, labels) in zip(("train", "test"), parts, strict=True):
        rows = [
            bytes([label // 5, label]) + image.tobytes() for image, label in zip(images, labels, strict=True)
        ]
        (folder / f"{name}.bin").write_bytes(b"".join(rows))
    return split_parts(parts)


def write_cifar100_python(root: Path, train=5, test=3, seed=0):
    folder = root / "cifar-100-python"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    parts = [images_and_labels(generator, count, 100) for count in (train, test)]
    for name, (images, labels) in zip(("train", "test"), parts, strict=True):
        batch = {
            "fine_labels": labels.tolist(),
            "coarse_labels": (labels // 5).tolist(),
            "data": images.reshape(len(images), -1),
        }
        (folder / name).write_bytes(pickle.dumps(batch))
    return split_parts(parts)


def idx_bytes(array):
    header = bytes([0, 0, 8, array.ndim]) + b"".join(size.to_bytes(4, "big") for size in array.shape)
    return header + array.astype(np.uint8).tobytes()


def write_idx(path: Path, array, packed=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = idx_bytes(array)
    if packed:
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(content, 1))
    else:
        path.write_bytes(content)


def write_mnist(folder: Path, train=7, test=4, packed=False, seed=0):
    generator = np.random.default_rng(seed)
    parts = []
    for part, count in (("train", train), ("t10k", test)):
        images, labels = images_and_labels(generator, count, 10, (1, 28, 28))
        write_idx(folder / f"{part}-images-idx3-ubyte", images[:, 0], packed)
        write_idx(folder / f"{part}-labels-idx1-ubyte", labels, packed)
        parts.append((images, labels))
    return tuple(parts)


def write_emnist(folder: Path, split="letters", train=60, test=40, packed=True, seed=0, classes=None):
    """Returns upright images and classes from 0; the files hold them transposed, letters from 1."""
    known, first = {"letters": (26, 1), "balanced": (47, 0), "byclass": (62, 0)}[split]
    generator = np.random.default_rng(seed)
    parts = []
    for part, count in (("train", train), ("test", test)):
        images, labels = images_and_labels(generator, count, classes or known, (1, 28, 28))
        columns_first = np.stack([image[0].T for image in images])
        write_idx(folder / f"emnist-{split}-{part}-images-idx3-ubyte", columns_first, packed)
        write_idx(folder / f"emnist-{split}-{part}-labels-idx1-ubyte", labels + first, packed)
        parts.append((images, labels))
    return tuple(parts)


def write_leaf(folder: Path, files):
    """`files` is a list of {user: (inputs, targets)}, one a JSON file."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, users in enumerate(files):
        content = {
            "users": list(users),
            "num_samples": [len(targets) for _, targets in users.values()],
            "user_data": {user: {"x": inputs, "y": targets} for user, (inputs, targets) in users.items()},
        }
        (folder / f"all_data_{number}.json").write_text(json.dumps(content))


def write_play(path: Path, title, speeches):
    """`speeches` is a list of (speakers, XML of the lines)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "".join(
        "<SPEECH>" + "".join(f"<SPEAKER>{name}</SPEAKER>" for name in speakers) + lines + "</SPEECH>\n"
        for speakers, lines in speeches
    )
    path.write_text(
        f'<?xml version="1.0"?>\n<!DOCTYPE PLAY SYSTEM "play.dtd">\n<PLAY><TITLE>{title}</TITLE>\n'
        f"<ACT><SCENE><STAGEDIR>Enter all</STAGEDIR>{body}</SCENE></ACT></PLAY>"
    )


def write_picture(path: Path, image):
    """A lossless PNG, whatever the file is called; Pillow goes by the content."""
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image.transpose(1, 2, 0) if image.shape[0] == 3 else image[0]).save(path, format="PNG")


def write_image_folder(root: Path, classes, parts=(("train", 4), ("test", 2)), shape=(3, 6, 5), seed=0):
    """Returns for each part the images in the order of class and file name, and the classes' numbers."""
    generator = np.random.default_rng(seed)
    written = []
    for part, count in parts:
        images = generator.integers(0, 256, (len(classes) * count, *shape), dtype=np.uint8)
        labels = np.repeat(np.arange(len(classes)), count)
        for number, (image, label) in enumerate(zip(images, labels, strict=True)):
            write_picture(root / part / classes[label] / f"{number:03}.png", image)
        written.append((images, labels))
    return tuple(written)


def write_tiny_imagenet(root: Path, names=("n02", "n01"), train=3, test=4, seed=0):
    folder = root / "tiny-imagenet-200"
    folder.mkdir(parents=True)
    (folder / "wnids.txt").write_text("\n".join(names) + "\n")
    generator = np.random.default_rng(seed)
    ordered = sorted(names)
    images = generator.integers(0, 256, (len(names) * train, 3, 64, 64), dtype=np.uint8)
    labels = np.repeat(np.arange(len(names)), train)
    for number, (image, label) in enumerate(zip(images, labels, strict=True)):
        name = ordered[label]
        write_picture(folder / "train" / name / "images" / f"{name}_{number:03}.JPEG", image)
    test_images, test_labels = images_and_labels(generator, test, len(names), (3, 64, 64))
    lines = []
    for number, (image, label) in enumerate(zip(test_images, test_labels, strict=True)):
        write_picture(folder / "val" / "images" / f"val_{number}.JPEG", image)
        lines.append(f"val_{number}.JPEG\t{ordered[label]}\t0\t0\t63\t63\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    return (images, labels), (test_images, test_labels)


def write_femnist(root: Path, writers=4, train=4, test=2, seed=0):
    """Every writer has `train` and `test` characters of its own."""
    generator = np.random.default_rng(seed)
    for part, count in (("train", train), ("test", test)):
        users = {}
        for writer in range(writers):
            pixels = generator.integers(0, 256, (count, 28 * 28)) / 255
            labels = generator.integers(0, 62, count)
            users[f"f{writer:04}_00"] = (np.round(pixels, 6).tolist(), labels.tolist())
        write_leaf(root / "femnist" / part, [users])


def write_shakespeare(root: Path, roles=4, characters=600, seed=0):
    """One play; each role says `characters` random letters."""
    generator = np.random.default_rng(seed)
    letters = list("abcdefghijklmnopqrstuvwxyz")
    speeches = [
        ([f"ROLE {role}"], f"<LINE>{''.join(generator.choice(letters, characters))}</LINE>")
        for role in range(roles)
    ]
    write_play(root / "shakespeare" / "play.xml", "The Play", speeches)


def write_everything(root: Path):
    """A few samples of every data set that the papers' tables use, in the folders where loaders look.

    Where clients are given test samples like their own, only two classes occur, so that there are some.
    """
    write_cifar10(root, per_file=4, classes=2)
    write_cifar100(root, train=20, test=4, classes=2)
    write_emnist(root / "emnist", "letters", train=80, test=20, packed=False)
    write_emnist(root / "emnist", "byclass", train=20, test=4, packed=False, classes=2)
    write_tiny_imagenet(root, train=8, test=2)
    write_mnist(root / "fashion-mnist", train=40, test=10)
    write_image_folder(root / "CINIC-10", CINIC10, parts=(("train", 4), ("test", 1)), shape=(3, 32, 32))
    write_femnist(root)
    write_shakespeare(root)


# How to write a few samples of every registered data set, and the options that load so few.
def write_client_folder(root: Path):
    for name, rows in {"ann": 4, "bob": 3, "test": 2}.items():
        lines = [f"{row / 2},{len(name) - row},{'yes' if row % 2 else 'no'}" for row in range(rows)]
        (root / f"{name}.csv").write_text("\n".join(["age,height,label", *lines, ""]))


WRITERS = {
    "cifar10": write_cifar10,
    "cifar100": write_cifar100,
    "cinic10": lambda root: write_image_folder(root / "CINIC-10", CINIC10, shape=(3, 32, 32)),
    "digits": lambda root: None,
    "emnist": lambda root: write_emnist(root / "emnist"),
    "emnist_l": lambda root: write_emnist(root / "emnist"),
    "fashion_mnist": lambda root: write_mnist(root / "fashion-mnist"),
    "femnist": write_femnist,
    "folder": write_client_folder,
    "image_folder": lambda root: write_image_folder(root, ["ant", "bee"]),
    "mnist": lambda root: write_mnist(root / "mnist"),
    "npz": lambda root: write_npz(root / "data.npz"),
    "shakespeare": write_shakespeare,
    "tiny_imagenet": write_tiny_imagenet,
}
SMALL_OPTIONS = {
    "folder": {"targets": "label"},
    "shakespeare": {"roles": 2, "train_samples": 8, "test_samples": 8},
}


def write_npz(path: Path):
    parts = {"train": 6, "test": 2}
    inputs = {f"{part}_inputs": np.ones((count, 3)) for part, count in parts.items()}
    np.savez(path, **inputs, **{f"{part}_targets": np.arange(count) % 2 for part, count in parts.items()})


def write_client_tables(root, suffix):
    """A table for each of two clients, and one of test samples."""
    for name in ("ann", "bob", "test"):
        columns = {"age": [1.5, 2.0, 3.25], "score": [3, 1, 2], "label": [0, 1, 2]}
        path = root / f"{name}.{suffix}"
        if suffix == "csv":
            lines = [
                ",".join(columns),
                *(",".join(map(str, row)) for row in zip(*columns.values(), strict=True)),
            ]
            path.write_text("\n".join(lines) + "\n")
        elif suffix == "npz":
            np.savez(path, **columns)
        else:
            import pyarrow
            from pyarrow import parquet

            parquet.write_table(pyarrow.table(columns), path)
