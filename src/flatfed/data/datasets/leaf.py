"""LEAF's JSON files: `train/*.json` and `test/*.json`, each with the samples of some users."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.base import Place


class UserSamples(NamedTuple):
    """One user's samples in one file."""

    path: Path
    user: str
    inputs: list[Any]
    targets: list[Any]


def read_users(place: Place, folder: Path) -> Iterator[UserSamples]:
    """Every user of every file, one file in memory at a time."""
    paths = sorted(folder.glob("*.json"))
    if not paths:
        raise FlatfedError(f"{folder}: no .json files; {place.remedy} or put the files there")
    for path in paths:
        try:
            users = json.loads(place.read(path))["user_data"]
            samples = [
                UserSamples(path, user, values["x"], values["y"]) for user, values in sorted(users.items())
            ]
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise place.damaged(path, "truncated or not JSON") from None
        except (KeyError, TypeError, AttributeError):
            raise place.damaged(path, "has no user_data with x and y of each user") from None
        for each in samples:
            if not isinstance(each.inputs, list) or not isinstance(each.targets, list):
                raise place.damaged(path, f"x or y of user {each.user!r} is not a list")
            if len(each.inputs) != len(each.targets):
                raise place.damaged(
                    path, f"user {each.user!r} has {len(each.inputs)} inputs but {len(each.targets)} targets"
                )
        yield from samples
