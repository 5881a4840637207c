"""What follows `--set`, and the algorithms that `compare` is given."""

import json

import tomli_w
from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, command, scratch, unchanged
from test_config_files import BASE
from values import NAMES, keys, values

texts = st.text(max_size=40)
shown = values.map(lambda value: json.dumps(value, default=str)) | values.map(str) | texts
assignments = st.one_of(
    texts,
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
        config = folder / "config.toml"
        config.write_text(tomli_w.dumps(BASE))
        options = [part for word in words for part in ("--set", word)]
        runs = folder / "runs"
        with unchanged(config.parent / "mine"):
            command("run", config, *options, "--set", "execution.workers=1", "--folder", runs / "run")


@SOME
@given(methods)
def test_any_method(method):
    with scratch() as folder:
        config = folder / "config.toml"
        config.write_text(tomli_w.dumps(BASE))
        command("compare", "--config", config, "--runs", folder / "runs", "--seeds", "1", "--", method)
