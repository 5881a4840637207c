"""LEAF's JSON files, `train/*.json` and `test/*.json`, each with the samples of some users; and FEMNIST.

FEMNIST is grey handwritten characters of 28×28 pixels by about 3,500 writers, 62 classes. LEAF's own script
makes its files (split by sample); `groups` are the writers. LEAF stores pixel/255, ink dark on white; models
see exactly those numbers.
"""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Labelled, TrainTest, image_set
from flatfed.data.datasets.catalog import DatasetInfo, Folder, register
from flatfed.data.files import check_largest

FEMNIST = DatasetInfo(
    "femnist",
    "grey handwritten characters 28×28 by writer, 62 classes",
    folders=("femnist", "femnist/data"),
    markers=("train/*.json",),
    script="run LEAF's data/femnist/preprocess.sh with `-s niid --sf 1.0 -k 0 -t sample`",
)
CLASSES = 62
PIXELS = 28 * 28
LONGEST_NAME = 200


class UserSamples(NamedTuple):
    """One user's samples in one file."""

    path: Path
    user: str
    inputs: list[Any]
    targets: list[Any]


def read_users(info: DatasetInfo, folder: Path) -> Iterator[UserSamples]:
    """Every user of every file, one file in memory at a time."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FlatfedError(f"{folder}: no .json files; {info.remedy} or put the files there")
    for path in paths:
        content = info.read(path)
        # What Python makes of the text is many times as large.
        lists, numbers, texts = (sum(map(content.count, signs)) for signs in ((b"[", b"{"), (b",",), (b'"',)))
        check_largest(path, 64 * lists + 32 * numbers + 48 * texts)
        try:
            users = sorted(json.loads(content, object_pairs_hook=_without_repetitions)["user_data"].items())
            samples = [UserSamples(path, user, values["x"], values["y"]) for user, values in users]
        except _RepeatedKeyError as error:
            raise info.damaged(path, f"has two entries {error}") from None
        except (ValueError, RecursionError):  # not JSON, not text, nested too deeply or endless numbers
            raise info.damaged(path, "truncated or not JSON") from None
        except (KeyError, TypeError, AttributeError):
            raise info.damaged(path, "has no user_data with x and y of each user") from None
        for _, user, inputs, targets in samples:
            # Names become arrays of text, as wide as the longest and without zeros at their ends.
            if len(user) > LONGEST_NAME or not user.isprintable():
                raise info.damaged(path, f"the name of user {user[:20]!r} is too long or not printable")
            if not isinstance(inputs, list) or not isinstance(targets, list):
                raise info.damaged(path, f"x or y of user {user!r} is not a list")
            if len(inputs) != len(targets):
                raise info.damaged(path, f"user {user!r} has {len(inputs)} inputs but {len(targets)} targets")
        yield from samples


class _RepeatedKeyError(Exception):
    """An entry that stands twice in a JSON table."""


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        (repeated, _), *_ = Counter(key for key, _ in pairs).most_common(1)
        raise _RepeatedKeyError(repr(repeated)[:60])
    return table


@register(FEMNIST)
def load_femnist(folder: Folder = None) -> TrainTest:
    """Load FEMNIST as uint8 [samples, 1, 28, 28] with the writer of each."""
    located = FEMNIST.find(folder)
    parts = []
    for path in (located / "train", located / "test"):
        writers = [_characters(writer) for writer in read_users(FEMNIST, path) if writer.targets]
        if not writers:
            raise FEMNIST.damaged(path, "no samples")
        parts.append(Labelled.joined(writers))
    return image_set("femnist", parts[0], parts[1], CLASSES, (0.0,), (1.0,))


def _characters(writer: UserSamples) -> Labelled:
    path, user, inputs, targets = writer
    try:
        scaled = np.array(inputs, np.float64) * 255
    except (ValueError, TypeError, OverflowError):
        scaled = np.empty(0)
    if scaled.shape != (len(targets), PIXELS):
        raise FEMNIST.damaged(path, f"an image of writer {user!r} has not {PIXELS} numbers")
    pixels = np.rint(scaled)
    if not (np.isfinite(scaled) & (np.abs(scaled - pixels) < 0.01) & (pixels >= 0) & (pixels <= 255)).all():
        raise FEMNIST.damaged(path, f"a pixel of writer {user!r} is not one of 0/255 … 255/255")
    labels = np.asarray(targets)
    if labels.shape != (len(targets),) or labels.dtype.kind not in "iu":
        raise FEMNIST.damaged(path, f"a label of writer {user!r} is not a whole number")
    labels = FEMNIST.checked_labels(path, labels, CLASSES)
    return Labelled(pixels.astype(np.uint8).reshape(-1, 1, 28, 28), labels, np.repeat(user, len(targets)))
