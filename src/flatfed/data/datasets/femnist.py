"""FEMNIST: grey handwritten characters of 28×28 pixels by about 3,500 writers, 62 classes, as LEAF's JSON.

LEAF's own script makes `train/` and `test/` (split by sample); `groups` are the writers. LEAF stores
pixel/255, ink dark on white; models see exactly those numbers.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from flatfed.data.datasets.base import Bytes, Folder, Place, TrainTest, image_set, with_groups
from flatfed.data.datasets.leaf import UserSamples, read_users

PLACE = Place(
    "femnist",
    "grey handwritten characters 28×28 by writer, 62 classes",
    ("femnist", "femnist/data"),
    ("train/*.json",),
    script="run LEAF's data/femnist/preprocess.sh with `-s niid --sf 1.0 -k 0 -t sample`",
)
CLASSES = 62
PIXELS = 28 * 28


def load_femnist(folder: Folder = None) -> TrainTest:
    """Load FEMNIST as uint8 [samples, 1, 28, 28] with the writer of each."""
    found = PLACE.find(folder)
    (train, train_labels, train_writers), (test, test_labels, test_writers) = (
        _read(found / part) for part in ("train", "test")
    )
    made = image_set("femnist", (train, train_labels), (test, test_labels), CLASSES, (0.0,), (1.0,))
    return with_groups(made, str(found), train_writers, test_writers)


def _read(folder: Path) -> tuple[Bytes, np.ndarray, np.ndarray]:
    images: list[Bytes] = []
    labels: list[np.ndarray] = []
    writers: list[str] = []
    for each in read_users(PLACE, folder):
        if each.targets:
            images.append(_images(each))
            labels.append(_labels(each))
            writers += [each.user] * len(each.targets)
    if not images:
        raise PLACE.damaged(folder, "no samples")
    return np.concatenate(images), np.concatenate(labels), np.array(writers)


def _images(each: UserSamples) -> Bytes:
    try:
        scaled = np.array(each.inputs, np.float64) * 255
    except (ValueError, TypeError):
        scaled = np.empty(0)
    if scaled.shape != (len(each.targets), PIXELS):
        raise PLACE.damaged(each.path, f"an image of writer {each.user!r} has not {PIXELS} numbers")
    pixels = np.rint(scaled)
    if not (np.abs(scaled - pixels) < 0.01).all() or pixels.min() < 0 or pixels.max() > 255:
        raise PLACE.damaged(each.path, f"a pixel of writer {each.user!r} is not one of 0/255 … 255/255")
    return pixels.astype(np.uint8).reshape(-1, 1, 28, 28)


def _labels(each: UserSamples) -> np.ndarray:
    labels = np.asarray(each.targets)
    if labels.shape != (len(each.targets),) or labels.dtype.kind not in "iu":
        raise PLACE.damaged(each.path, f"a label of writer {each.user!r} is not a whole number")
    return PLACE.labels(each.path, labels, CLASSES)
