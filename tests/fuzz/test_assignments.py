"""What follows `--set`, and the algorithms that `compare` is given."""

import json
from typing import Any

import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, command, scratch, unchanged
from test_config_files import BASE
from values import NAMES, keys, plausible, values


def inline(value: Any) -> str:
    """A value as TOML writes it in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


texts = st.text(max_size=40)
shown = values.map(lambda value: json.dumps(value, default=str)) | values.map(str) | texts
assignments = st.one_of(
    texts,
    plausible.map(lambda change: f"{'.'.join(change[0]).rstrip('.')}={inline(change[1])}"),
    st.builds(lambda key, value: f"{key[0]}.{key[1]}={value}", keys, shown),
    st.builds(
        lambda key, index, value: f"{key[0]}.{key[1]}[{index}]={value}", keys, st.integers(-1, 9), shown
    ),
    st.builds(lambda key, value: f"{key}={value}", st.sampled_from([*BASE, "int", "x", "."]), shown),
)
methods = st.one_of(
    texts,
    st.sampled_from(NAMES),
    st.builds(lambda name, rest: f"{name}:{rest}", st.sampled_from(NAMES), texts),
    st.builds(
        lambda name, key, value: f"{name}:{key}={value}",
        st.sampled_from(NAMES),
        st.sampled_from(["radius", "radius[0]", "lr", "momentum", "compress", "clip", "local_steps", "seed"]),
        shown,
    ),
)


@SOME
@given(st.lists(assignments, min_size=1, max_size=3))
def test_any_assignment(words):
    with scratch() as folder:
        mine = folder / "mine"
        mine.mkdir()
        config = mine / "config.toml"
        config.write_text(tomli_w.dumps(BASE))
        options = [part for word in words for part in ("--set", word)]
        with unchanged(mine):
            command("run", config, *options, "--set", "execution.workers=1", "--folder", folder / "run")


@SOME
@given(methods)
def test_any_method(method):
    with scratch() as folder:
        config = folder / "config.toml"
        config.write_text(tomli_w.dumps(BASE))
        command("compare", "--config", config, "--runs", folder / "runs", "--seeds", "1", "--", method)
