"""Run folders with damaged files and absurd values, through `flatfed report` and `flatfed diagnose`."""

import functools
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, command, scratch, unchanged
from values import values as config_values

from flatfed.diagnostics import DIAGNOSTICS, diagnose
from flatfed.runs.train import run_config
from flatfed.training.config import Config

CONFIG = {
    "data": {"dataset": "digits", "clients": 6, "client_tests": 4},
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 3, "participants": 3, "local_steps": 2, "batch_size": 8},
    "execution": {"workers": 1},
}
QUICK = {"samples": 40, "clients": 2, "points": 3, "probes": 1, "steps": 2, "replacements": 1, "rounds": 2}
MEASURED = ("sharpness", "clients")
"""What is diagnosed again."""


@functools.cache
def whole_run() -> Path:
    """A small run on which everything was measured."""
    folder = Path(tempfile.mkdtemp(prefix="flatfed-fuzz-run-")) / "run"
    run_config(Config.checked(CONFIG), folder)
    diagnose(folder, list(DIAGNOSTICS), {**QUICK, "other": str(folder)})
    return folder


FILES = (
    *("config.json", "identity.json", "environment.json", "history.jsonl", "clients.json", "diverged.json"),
    *("stopped.json", "model.safetensors", "checkpoint", "checkpoint/manifest.json", "checkpoint/.lock"),
    *("diagnostics", *(f"diagnostics/{name}.json" for name in DIAGNOSTICS)),
)
JSON_FILES = [name for name in FILES if name.endswith(("json", "jsonl"))] + 4 * [
    "history.jsonl",
    "config.json",
]


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def replaced_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        remove(path)
        path.parent.mkdir(exist_ok=True)
        make(path)

    return damage


def cut(share: float) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        if path.is_file():
            content = path.read_bytes()
            path.write_bytes(content[: int(share * len(content))])

    return damage


def flipped(place: float, bit: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        if path.is_file() and (content := bytearray(path.read_bytes())):
            content[int(place * (len(content) - 1))] ^= 1 << bit
            path.write_bytes(content)

    return damage


shares = st.floats(0, 1)
contents = st.binary(max_size=60) | st.sampled_from(
    [
        b"",
        b"\0",
        b"\xff\xfe",
        b"null",
        b"[]",
        b"{}",
        b"[{}]",
        b'""',
        b"0",
        b"NaN",
        b"1" * 5000,
        b"[" * 100_000,
    ]
)
damages = st.one_of(
    st.just(remove),
    contents.map(lambda content: replaced_by(lambda path: path.write_bytes(content))),
    st.just(replaced_by(os.mkfifo)),
    st.just(replaced_by(Path.mkdir)),
    st.just(replaced_by(lambda path: path.symlink_to(path.name))),
    st.just(replaced_by(lambda path: path.symlink_to("nowhere"))),
    shares.map(cut),
    st.builds(flipped, shares, st.integers(0, 7)),
)


def nested(depth: int) -> Any:
    value: Any = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    return value


json_values: st.SearchStrategy[Any] = st.one_of(
    st.sampled_from([None, True, "", "[/b]", "<script>", "\ud800", "\x1b[31m\n", [], {}, [[]], {"": {}}]),
    st.sampled_from([10**400, -(10**400), 2**64, 1e308, -1e308, 1e-320, 0, -1, 0.5, 1.5, -0.0]),
    st.sampled_from([float("nan"), float("inf"), float("-inf"), "nan", "1", "x" * 5000]),
    st.sampled_from([nested(200), nested(600), ["x"] * 300, [1e308] * 4, [None] * 4]),
    config_values.map(lambda value: json.loads(json.dumps(value, default=str))),
)


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All containers of a JSON value with each of their keys."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def with_change(content: Any, place: float, kind: str, value: Any) -> Any:
    known = list(places(content))
    if not known or kind == "all":
        return value
    container, key = known[int(place * (len(known) - 1))]
    if kind == "remove":
        del container[key]
    elif kind == "add" and isinstance(container, dict):
        container[f"{key} more"] = value
    else:
        container[key] = value
    return content


@SOME
@given(st.lists(st.tuples(st.sampled_from(FILES), damages), min_size=1, max_size=3), st.booleans())
def test_any_damaged_files(changes, beside):
    with scratch() as folder:
        shutil.copytree(whole_run(), folder / "run")
        for name, damage in changes:
            if (folder / "run" / name).parent.is_dir():
                damage(folder / "run" / name)
        check(folder, beside)


@SOME
@given(
    st.lists(
        st.tuples(
            st.sampled_from(JSON_FILES),
            shares,
            st.sampled_from(["set", "set", "set", "remove", "add", "all"]),
            json_values,
        ),
        min_size=1,
        max_size=4,
    ),
    st.booleans(),
)
def test_any_value_in_any_file(changes, beside):
    with scratch() as folder:
        shutil.copytree(whole_run(), folder / "run")
        for name, place, kind, value in changes:
            path = folder / "run" / name
            if not path.exists():
                path.write_text(json.dumps(value))
            elif name.endswith(".jsonl"):
                lines = [json.loads(line) for line in path.read_text().splitlines()]
                changed = with_change(lines, place, kind, value)
                path.write_text("".join(f"{json.dumps(line)}\n" for line in changed or [value]))
            else:
                path.write_text(json.dumps(with_change(json.loads(path.read_text()), place, kind, value)))
        check(folder, beside)


def check(folder: Path, beside: bool) -> None:
    """Reports on the run, alone or `beside` a whole one, and measures it again."""
    runs = [folder / "run"]
    if beside:
        shutil.copytree(whole_run(), folder / "whole")
        runs.append(folder / "whole")
    with unchanged(folder / "run"):
        answer = command("report", *runs, "--output", folder / "page.html")
    assert (answer.code == 0) == (folder / "page.html").is_file()
    assert answer.code == 0 or not beside, "one damaged folder cost the report on the others"
    with unchanged(folder / "whole"):
        command("diagnose", folder / "run", *MEASURED, "--set", "samples=40", "--set", "clients=2")
