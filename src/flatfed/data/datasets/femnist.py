"""FEMNIST: grey handwritten characters of 28×28 pixels by about 3,500 writers, 62 classes, as LEAF's JSON.

LEAF's own script makes `train/` and `test/` (split by sample); `groups` are the writers. LEAF stores
pixel/255, ink dark on white; models see exactly those numbers.
"""

import numpy as np

from flatfed.data.datasets.base import Labelled, TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, register
from flatfed.data.datasets.leaf import UserSamples, read_users

FEMNIST = DatasetInfo(
    "femnist",
    "grey handwritten characters 28×28 by writer, 62 classes",
    folders=("femnist", "femnist/data"),
    markers=("train/*.json",),
    script="run LEAF's data/femnist/preprocess.sh with `-s niid --sf 1.0 -k 0 -t sample`",
)
CLASSES = 62
PIXELS = 28 * 28


@register(FEMNIST)
def load_femnist(folder: Folder = None) -> TrainTest:
    """Load FEMNIST as uint8 [samples, 1, 28, 28] with the writer of each."""
    located = FEMNIST.find(folder)
    parts = []
    for path in (located / "train", located / "test"):
        writers = [_samples(writer) for writer in read_users(FEMNIST, path) if writer.targets]
        if not writers:
            raise FEMNIST.damaged(path, "no samples")
        parts.append(Labelled.joined(writers))
    train, test = parts
    return image_set("femnist", train, test, CLASSES, (0.0,), (1.0,))


def _samples(writer: UserSamples) -> Labelled:
    path, user, inputs, targets = writer
    try:
        scaled = np.array(inputs, np.float64) * 255
    except (ValueError, TypeError):
        scaled = np.empty(0)
    if scaled.shape != (len(targets), PIXELS):
        raise FEMNIST.damaged(path, f"an image of writer {user!r} has not {PIXELS} numbers")
    pixels = np.rint(scaled)
    if not (np.abs(scaled - pixels) < 0.01).all() or pixels.min() < 0 or pixels.max() > 255:
        raise FEMNIST.damaged(path, f"a pixel of writer {user!r} is not one of 0/255 … 255/255")
    labels = np.asarray(targets)
    if labels.shape != (len(targets),) or labels.dtype.kind not in "iu":
        raise FEMNIST.damaged(path, f"a label of writer {user!r} is not a whole number")
    labels = FEMNIST.checked_labels(path, labels, CLASSES)
    images = pixels.astype(np.uint8).reshape(-1, 1, 28, 28)
    return Labelled(images, labels, np.repeat(user, len(targets)))
