"""Checkpoints with flipped bits, cut off, edited or of another run: the same bits as ever, or an error."""

import atexit
import contextlib
import functools
import json
import shutil
import tempfile
import warnings
from pathlib import Path

from damage import Damage, bits, spoiled
from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, limits, scratch
from small_runs import assert_same, contents, interrupt, manifest, train
from values import values

import flatfed as ff
from flatfed.runs import environment
from flatfed.runs.files import write_sealed

ROUNDS = 6
environment.source_commit = lambda: None


@functools.cache
def whole() -> ff.Run:
    return train(None, ROUNDS)


@functools.cache
def runs() -> Path:
    """The run after four and after two rounds, one with another seed, and a complete, shorter one."""
    folder = Path(tempfile.mkdtemp(prefix="flatfed-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name, rounds, seed in (("four", 4, 0), ("two", 2, 0), ("other", 4, 1)):
        with contextlib.suppress(KeyboardInterrupt):
            train(folder / name, ROUNDS, seed=seed, callbacks=[interrupt(rounds + 1)])
    train(folder / "complete", 4)
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def check(run: Path) -> None:
    """The run goes on to the same bits, or is refused in one line and left as it is."""
    before = contents(run)
    with limits():
        try:
            resumed = train(run, ROUNDS)
        except ff.FlatfedError as error:
            assert "\n" not in str(error)
            assert str(run) in str(error)
            assert contents(run) == before
        else:
            assert_same(resumed, whole())
            assert_same(train(run, ROUNDS), whole())


starts, numbers = st.sampled_from(["four", "complete"]), st.integers(0, 99)


@SOME
@given(starts, st.lists(st.tuples(numbers, spoiled), min_size=1, max_size=3))
def test_damaged_files(start: str, damages: list[tuple[int, Damage]]):
    with scratch() as folder:
        run = folder / "run"
        shutil.copytree(runs() / start, run)
        for number, damage in damages:
            names = files_of(run)
            if names:
                damage(run / names[number % len(names)])
        check(run)


@SOME
@given(starts, numbers, bits)
def test_one_flipped_bit(start, number, flip):
    with scratch() as folder:
        run = folder / "run"
        shutil.copytree(runs() / start, run)
        names = files_of(run)
        flip(run / names[number % len(names)])
        check(run)


@SOME
@given(starts, st.sampled_from(["two", "other", "four", "complete"]), st.lists(numbers, max_size=12))
def test_files_of_another_run_or_round(start, source, chosen):
    with scratch() as folder:
        run, other = folder / "run", runs() / source
        shutil.copytree(runs() / start, run)
        names = files_of(other)
        for name in {names[number % len(names)] for number in chosen}:
            shutil.copy(other / name, run / name)
        check(run)


@SOME
@given(st.integers(0, 20), values, st.booleans())
def test_manifests_that_say_something_else(number, value, inner):
    """Even with a right checksum, which no accident gives them, they break nothing but their own run."""
    with scratch() as folder, warnings.catch_warnings():
        run = folder / "run"
        shutil.copytree(runs() / "four", run)
        content = manifest(run)
        del content["sha256"]
        table = content["server"] if inner else content
        table[sorted(table)[number % len(table)]] = json.loads(json.dumps(value, default=str))
        write_sealed(run / "checkpoint" / "manifest.json", content)
        with limits():
            try:
                train(run, ROUNDS)
            except ff.FlatfedError as error:
                assert "\n" not in str(error)
