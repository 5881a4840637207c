"""Shakespeare by role: given 80 characters of a role's text, predict the next one.

From Jon Bosak's XML of the Moby text (one file a play) or from LEAF's JSON (`train/` and `test/`).

A role is a speaker of one play; its text is all its lines, without stage directions, joined by spaces. A
speech of several speakers belongs to each of them. Sample i of a text is its characters i … i+79 and, as the
target, character i+80. Characters are numbered by LEAF's alphabet of 80; others count as its last, `}`.

The first 80 % of a role's samples in order are for training; the next 80 are dropped, so that no test sample
shares a character with training text; the rest is for testing. (LEAF's split drops 79.)

The FedSAGD setting, which is the default: of the roles with more than 2000 training and 400 test samples,
100 drawn at random; of each, a random contiguous stretch of 2000 training and one of 400 test samples.
`groups` are the roles.
"""

import string
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Annotated
from xml.etree import ElementTree

import numpy as np
from pydantic import Field
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import FlatfedError, brief
from flatfed.core.types import Seed
from flatfed.data.datasets.base import Labelled, TrainTest, train_test
from flatfed.data.datasets.catalog import DatasetInfo, Folder, archive, register
from flatfed.data.datasets.leaf import UserSamples, read_users
from flatfed.data.transform import AsStored, Bytes

ALPHABET = "".join(sorted("\n !\"&'(),-.:;>?[]}" + string.digits + string.ascii_letters))
WINDOW = 80
PLAYS = 37
TRAIN_PERCENT = 80
LARGEST_PLAY = 2**23  # bytes; the longest has 300,000
SHAKESPEARE = DatasetInfo(
    "shakespeare",
    "next character in Shakespeare's plays by role, 80 classes, 100 roles of 2,000 + 400",
    folders=("shakespeare", "shakespeare/data", "shaks200"),
    markers=("*.xml", "train/*.json"),
    downloads=archive("https://www.ibiblio.org/bosak/xml/eg/shaks200.zip", None, 2_200_000, "*.xml"),
)

NumberOrAll = Annotated[int, Field(ge=0, le=10**9)]  # 0: all
# Samples are bytes [n, 81]: 80 characters and the one after them. Training and test samples by role.
Roles = dict[str, tuple[Bytes, Bytes]]


class CharacterNumbers(AsStored):
    """Characters are stored as bytes; models that embed them want int64."""

    def evaluate(self, inputs: Tensor) -> Tensor:
        return inputs.long()


@register(SHAKESPEARE)
def load_shakespeare(
    folder: Folder = None,
    roles: NumberOrAll = 100,
    train_samples: NumberOrAll = 2000,
    test_samples: NumberOrAll = 400,
    crop_seed: Seed = 0,
    verify: bool = True,
) -> TrainTest:
    """Load Shakespeare as uint8 [samples, 80] with the role of each.

    0 for `roles`, `train_samples` or `test_samples` takes all there are.
    """
    located = SHAKESPEARE.find(folder)
    is_leaf = any(located.glob("train/*.json"))
    all_roles = _roles_from_json(located) if is_leaf else _roles_from_plays(located, verify)
    return _cropped(all_roles, roles, train_samples, test_samples, crop_seed)


def encode(text: str) -> Bytes:
    """Each character's number in the alphabet."""
    return _NUMBERS[np.minimum(np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32), 255)]


_NUMBERS = np.full(256, len(ALPHABET) - 1, np.uint8)
_NUMBERS[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))


def samples_of(text: str) -> Bytes:
    """All samples of a text, in order."""
    codes = encode(text)
    if len(codes) <= WINDOW:
        return np.empty((0, WINDOW + 1), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(codes, WINDOW + 1)


def _roles_from_plays(folder: Path, verify: bool) -> Roles:
    paths = sorted(folder.glob("*.xml"))
    if verify:
        SHAKESPEARE.check_count(folder, len(paths), PLAYS, ".xml files")
    texts = defaultdict(list)
    for path in paths:
        for role, text in speeches(path):
            texts[role].append(text)
    roles = {}
    for role, parts in texts.items():
        samples = samples_of(" ".join(parts))
        cut = len(samples) * TRAIN_PERCENT // 100
        roles[role] = samples[:cut], samples[cut + WINDOW :]
    return roles


def speeches(path: Path) -> list[tuple[str, str]]:
    """(role, text) of each speech of a play, in order."""
    content = SHAKESPEARE.read(path, largest=LARGEST_PLAY)
    # Entities of entities unfold to any length, and in wide characters they could hide.
    if b"<!ENTITY" in content or b"\0" in content:
        raise SHAKESPEARE.damaged(path, "declares entities or has zeros, of which plays have none")
    try:
        play = ElementTree.fromstring(bytes(content))
    except (ElementTree.ParseError, LookupError, ValueError) as error:  # the latter for unknown encodings
        raise SHAKESPEARE.damaged(path, f"truncated or not XML ({brief(error)})") from None
    title = play.findtext("TITLE")
    if play.tag != "PLAY" or not title:
        raise SHAKESPEARE.damaged(path, f"is a <{play.tag[:40]}>, not a <PLAY> with a <TITLE>")
    if play.find(".//SPEECH//SPEECH") is not None:
        raise SHAKESPEARE.damaged(path, "has a <SPEECH> inside a <SPEECH>")
    spoken, characters = [], 0
    for speech in play.iter("SPEECH"):
        text = " ".join(filter(None, (_line_text(line) for line in speech.iter("LINE"))))
        for speaker in speech.findall("SPEAKER"):
            name = " ".join((speaker.text or "").split())
            characters += len(title) + len(name) + len(text)
            if characters > 16 * len(content):
                raise SHAKESPEARE.damaged(path, "its titles or speakers repeat more text than a play does")
            if name and text:
                spoken.append((f"{title}: {name}", text))
    if not spoken:
        raise SHAKESPEARE.damaged(path, "no <SPEECH> with a <SPEAKER> and a <LINE>")
    return spoken


def _line_text(line: ElementTree.Element) -> str:
    """A line's text without the stage directions inside it."""
    parts = [line.text or "", *(child.tail or "" for child in line)]
    return " ".join(" ".join(parts).split())


def _roles_from_json(folder: Path) -> Roles:
    train: dict[str, list[Bytes]] = defaultdict(list)
    test: dict[str, list[Bytes]] = defaultdict(list)
    for part, samples in (("train", train), ("test", test)):
        for role in read_users(SHAKESPEARE, folder / part):
            samples[role.user].append(_encoded(role))
    return {
        role: (np.concatenate(train[role]), np.concatenate(test[role])) for role in train.keys() & test.keys()
    }


def _encoded(role: UserSamples) -> Bytes:
    if not all(isinstance(text, str) and len(text) == WINDOW for text in role.inputs):
        raise SHAKESPEARE.damaged(role.path, f"an input of role {role.user!r} has not {WINDOW} characters")
    if not all(isinstance(text, str) and len(text) == 1 for text in role.targets):
        raise SHAKESPEARE.damaged(role.path, f"a target of role {role.user!r} is not one character")
    text = "".join(window + following for window, following in zip(role.inputs, role.targets, strict=True))
    return encode(text).reshape(-1, WINDOW + 1)


def _cropped(all_roles: Roles, roles: int, train_samples: int, test_samples: int, seed: int) -> TrainTest:
    eligible = sorted(
        role
        for role, (train, test) in all_roles.items()
        if len(train) > train_samples and len(test) > test_samples
    )
    if len(eligible) < max(roles, 1):
        raise FlatfedError(
            f"roles = {roles}: only {len(eligible)} roles have more than {train_samples} training and "
            f"{test_samples} test samples; ask for fewer roles or samples"
        )
    generator = random.numpy_generator(seed, "shakespeare")
    if roles:
        chosen = np.sort(generator.choice(len(eligible), roles, replace=False))
        eligible = [eligible[number] for number in chosen]
    train = [_stretch(all_roles[role][0], train_samples, generator) for role in eligible]
    test = [_stretch(all_roles[role][1], test_samples, generator) for role in eligible]
    data = train_test("shakespeare", _labelled(train), _labelled(test), len(ALPHABET), CharacterNumbers())
    return replace(data, group_names=tuple(eligible))


def _stretch(samples: Bytes, length: int, generator: np.random.Generator) -> Bytes:
    """A random contiguous part, or everything if the length is 0."""
    if not length:
        return samples
    start = int(generator.integers(len(samples) - length + 1))
    return samples[start : start + length]


def _labelled(roles: list[Bytes]) -> Labelled:
    inputs = np.concatenate([samples[:, :WINDOW] for samples in roles])
    labels = np.concatenate([samples[:, WINDOW] for samples in roles])
    return Labelled(inputs, labels, np.repeat(np.arange(len(roles)), [len(samples) for samples in roles]))
