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

from __future__ import annotations

import string
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import numpy as np
import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Bytes, Folder, Place, TrainTest
from flatfed.data.datasets.leaf import UserSamples, read_users

ALPHABET = "".join(sorted("\n !\"&'(),-.:;>?[]}" + string.digits + string.ascii_letters))
WINDOW = 80
PLAYS = 37
TRAIN_PERCENT = 80
PLACE = Place(
    "shakespeare",
    "next character in Shakespeare's plays by role, 80 classes, 100 roles of 2,000 + 400",
    ("shakespeare", "shakespeare/data", "shaks200"),
    ("*.xml", "train/*.json"),
)


@dataclass(frozen=True)
class CharacterNumbers:
    """Characters are stored as bytes; models that embed them want int64."""

    draws = False

    def train(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return inputs.long()

    def evaluate(self, inputs: Tensor) -> Tensor:
        return inputs.long()


class Samples(NamedTuple):
    """Windows [n, 80] and the character after each [n]."""

    windows: Bytes
    following: Bytes


Roles = dict[str, tuple[Samples, Samples]]  # training and test samples by role


def load_shakespeare(
    folder: Folder = None,
    roles: int = 100,
    train_samples: int = 2000,
    test_samples: int = 400,
    crop_seed: int = 0,
    verify: bool = True,
) -> TrainTest:
    """Load Shakespeare as uint8 [samples, 80] with the role of each.

    0 for `roles`, `train_samples` or `test_samples` takes all there are.
    """
    for option, value in (("roles", roles), ("train_samples", train_samples), ("test_samples", test_samples)):
        if value < 0:
            raise FlatfedError(f"{option} = {value}: must be 0 (all) or more")
    found = PLACE.find(folder)
    is_leaf = any(found.glob("train/*.json"))
    known = _roles_from_json(found) if is_leaf else _roles_from_plays(found, verify)
    return _cropped(known, roles, train_samples, test_samples, crop_seed)


def encode(text: str) -> Bytes:
    """Each character's number in the alphabet."""
    return _NUMBERS[np.minimum(np.frombuffer(text.encode("utf-32-le"), np.uint32), 255)]


def _alphabet_table() -> Bytes:
    table = np.full(256, len(ALPHABET) - 1, np.uint8)
    table[[ord(character) for character in ALPHABET]] = np.arange(len(ALPHABET))
    return table


_NUMBERS = _alphabet_table()


def windows(text: str) -> Samples:
    """All samples of a text, in order."""
    codes = encode(text)
    if len(codes) <= WINDOW:
        return Samples(np.empty((0, WINDOW), np.uint8), np.empty(0, np.uint8))
    return Samples(np.lib.stride_tricks.sliding_window_view(codes[:-1], WINDOW), codes[WINDOW:])


def _split_in_time(samples: Samples) -> tuple[Samples, Samples]:
    cut = len(samples.following) * TRAIN_PERCENT // 100
    resume = cut + WINDOW
    return (
        Samples(samples.windows[:cut], samples.following[:cut]),
        Samples(samples.windows[resume:], samples.following[resume:]),
    )


def _roles_from_plays(folder: Path, verify: bool) -> Roles:
    paths = sorted(folder.glob("*.xml"))
    if verify and len(paths) != PLAYS:
        raise FlatfedError(
            f"{folder}: {len(paths)} .xml files where {PLAYS} plays are published; {PLACE.remedy} or load "
            "with verify=False"
        )
    texts: dict[str, list[str]] = {}
    for path in paths:
        for role, text in speeches(path):
            texts.setdefault(role, []).append(text)
    return {role: _split_in_time(windows(" ".join(parts))) for role, parts in texts.items()}


def speeches(path: Path) -> list[tuple[str, str]]:
    """(role, text) of each speech of a play, in order."""
    try:
        play = ElementTree.fromstring(PLACE.read(path))
    except ElementTree.ParseError as error:
        raise PLACE.damaged(path, f"truncated or not XML ({error})") from None
    title = play.findtext("TITLE")
    if play.tag != "PLAY" or not title:
        raise PLACE.damaged(path, f"is a <{play.tag}>, not a <PLAY> with a <TITLE>")
    found = []
    for speech in play.iter("SPEECH"):
        text = " ".join(filter(None, (_spoken(line) for line in speech.iter("LINE"))))
        for speaker in speech.findall("SPEAKER"):
            name = " ".join((speaker.text or "").split())
            if name and text:
                found.append((f"{title}: {name}", text))
    if not found:
        raise PLACE.damaged(path, "no <SPEECH> with a <SPEAKER> and a <LINE>")
    return found


def _spoken(line: ElementTree.Element) -> str:
    """A line's text without the stage directions inside it."""
    parts = [line.text or "", *(child.tail or "" for child in line)]
    return " ".join(" ".join(parts).split())


def _roles_from_json(folder: Path) -> Roles:
    parts = []
    for part in ("train", "test"):
        found: dict[str, list[Samples]] = {}
        for each in read_users(PLACE, folder / part):
            found.setdefault(each.user, []).append(_encoded(each))
        parts.append({role: _joined(several) for role, several in found.items()})
    train, test = parts
    return {role: (train[role], test[role]) for role in train.keys() & test.keys()}


def _joined(several: list[Samples]) -> Samples:
    return Samples(
        np.concatenate([each.windows for each in several]),
        np.concatenate([each.following for each in several]),
    )


def _encoded(each: UserSamples) -> Samples:
    inputs, targets = each.inputs, each.targets
    if not all(isinstance(text, str) and len(text) == WINDOW for text in inputs):
        raise PLACE.damaged(each.path, f"an input of role {each.user!r} has not {WINDOW} characters")
    if not all(isinstance(text, str) and len(text) == 1 for text in targets):
        raise PLACE.damaged(each.path, f"a target of role {each.user!r} is not one character")
    return Samples(encode("".join(inputs)).reshape(-1, WINDOW), encode("".join(targets)))


def _cropped(known: Roles, roles: int, train_samples: int, test_samples: int, seed: int) -> TrainTest:
    eligible = sorted(
        role
        for role, (train, test) in known.items()
        if len(train.following) > train_samples and len(test.following) > test_samples
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
    train = [_stretch(known[role][0], train_samples, generator) for role in eligible]
    test = [_stretch(known[role][1], test_samples, generator) for role in eligible]
    train_all, test_all = _joined(train), _joined(test)
    return TrainTest(
        train_inputs=torch.from_numpy(train_all.windows),
        train_targets=torch.from_numpy(train_all.following.astype(np.int64)),
        test_inputs=torch.from_numpy(test_all.windows),
        test_targets=torch.from_numpy(test_all.following.astype(np.int64)),
        classes=len(ALPHABET),
        name="shakespeare",
        transform=CharacterNumbers(),
        groups=np.repeat(np.arange(len(eligible)), [len(each.following) for each in train]),
        test_groups=np.repeat(np.arange(len(eligible)), [len(each.following) for each in test]),
        group_names=tuple(eligible),
    )


def _stretch(samples: Samples, length: int, generator: np.random.Generator) -> Samples:
    """A random contiguous part, or everything if the length is 0."""
    if not length:
        return samples
    start = int(generator.integers(len(samples.following) - length + 1))
    return Samples(samples.windows[start : start + length], samples.following[start : start + length])
