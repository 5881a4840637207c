"""Config files: any bytes, and good configs with anything in any field, through `flatfed run`."""

import copy
from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, command, scratch, unchanged
from values import keys, plausible, values, words

BASE: dict[str, Any] = {
    "data": {"dataset": "digits", "clients": 10},
    "partition": {"name": "dirichlet_client", "concentration": 1.0},
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 1, "participants": 2, "local_steps": 1, "batch_size": 4, "lr": 0.1},
    "execution": {"workers": 1},
}


def run(content: bytes, folder: Path) -> None:
    """Trains by the config among files of the user's, which must stay as they are."""
    mine = folder / "mine"
    mine.mkdir()
    (mine / "config.toml").write_bytes(content)
    (mine / "model.safetensors").write_bytes(b"weights of mine")
    with unchanged(mine):
        command("run", mine / "config.toml", "--folder", folder / "run", "--set", "execution.workers=1")


@SOME
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode(errors="replace")))
def test_any_file_as_a_config(content):
    with scratch() as folder:
        run(content, folder)


def changed(changes: list[tuple[tuple[str, str], Any]]) -> dict[str, Any]:
    config = copy.deepcopy(BASE)
    for (table, key), value in changes:
        if not key:
            config[table] = value
            continue
        *tables, last = (table, *key.split("."))
        place: Any = config
        for name in tables:
            place = place.setdefault(name, {}) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place[last] = value
    training = config["training"]
    if isinstance(training, dict):
        for one, other in (("participation", "participants"), ("local_epochs", "local_steps")):
            if one in training:
                training.pop(other, None)
        if isinstance(training.get("rounds"), int) and 3 < training["rounds"] < 2**63:
            training["rounds"] = 3  # a million of them is no hang, but what was asked for
        if training.get("local_steps") == 10**6:
            training["local_steps"] = 1000  # the most that is accepted, and as many as asked for
    return config


@SOME
@given(st.lists(plausible, min_size=1, max_size=4))
def test_settings_at_the_edge(changes):
    with scratch() as folder:
        run(tomli_w.dumps(changed(changes)).encode(errors="replace"), folder)


@SOME
@given(st.lists(st.tuples(keys, values), min_size=1, max_size=3))
def test_any_value_in_any_field(changes):
    with scratch() as folder:
        run(tomli_w.dumps(changed(changes)).encode(errors="replace"), folder)


@SOME
@given(st.dictionaries(words | st.sampled_from(list(BASE)), values, max_size=3))
def test_any_table(tables):
    with scratch() as folder:
        run(tomli_w.dumps({**BASE, **tables}).encode(errors="replace"), folder)


@SOME
@given(st.integers(1, 20000), st.sampled_from(["[", "{a=", "[[", "a.", '"', "'''"]))
def test_deep_nesting(depth, opening):
    with scratch() as folder:
        run(f"x = {opening * depth}".encode(), folder)
