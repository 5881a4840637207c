"""LEAF's JSON files: `train/*.json` and `test/*.json`, each with the samples of some users."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets.catalog import DatasetInfo


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
        try:
            users = sorted(json.loads(info.read(path))["user_data"].items())
            samples = [UserSamples(path, user, values["x"], values["y"]) for user, values in users]
        except (json.JSONDecodeError, UnicodeDecodeError):
            raise info.damaged(path, "truncated or not JSON") from None
        except (KeyError, TypeError, AttributeError):
            raise info.damaged(path, "has no user_data with x and y of each user") from None
        for _, user, inputs, targets in samples:
            if not isinstance(inputs, list) or not isinstance(targets, list):
                raise info.damaged(path, f"x or y of user {user!r} is not a list")
            if len(inputs) != len(targets):
                raise info.damaged(path, f"user {user!r} has {len(inputs)} inputs but {len(targets)} targets")
        yield from samples
