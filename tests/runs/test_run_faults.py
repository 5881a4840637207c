"""Faults of the world around a run: signals, full and read-only disks, folders that vanish, two at once.

Each ends with the same bits after the run is resumed, or with a clear error and the last checkpoint intact.
"""

from __future__ import annotations

import errno
import os
import resource
import shutil
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from small_runs import CONFIG, assert_same, contents, refusal, train, wait_for_checkpoint
from typer.testing import CliRunner

import flatfed as ff
from flatfed.cli import app
from flatfed.engines.threads import single_threaded
from flatfed.runs import environment, lock

ROUNDS = 6


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(environment, "source_commit", lambda: None)
    with single_threaded():
        yield


@pytest.fixture(scope="module")
def whole() -> ff.Run:
    """The run without any fault."""
    return train(None, ROUNDS)


# -- signals ----------------------------------------------------------------------------------------------


def strike_at(kind: int, place: str, number: int) -> list[Callable[[ff.Progress], None]]:
    """Sends this process a signal the so-many-th time that something is written, made visible, or trained."""
    count = 0

    def strike(*_: Any) -> None:
        nonlocal count
        count += 1
        if count == number:
            os.kill(os.getpid(), kind)

    if place == "round":
        return [strike]
    real = getattr(os, place)

    def call(*arguments: Any, **options: Any) -> Any:
        strike()
        return real(*arguments, **options)

    setattr(os, place, call)
    return []


def in_a_process(folder: Path, kind: int, place: str, number: int) -> int:
    """The exit code of a run that a signal comes upon."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            # Whoever starts the tests in the background of a shell has them ignore it.
            signal.signal(signal.SIGINT, signal.default_int_handler)
            train(folder, ROUNDS, checkpoint_every=1, callbacks=strike_at(kind, place, number))
            code = 0
        except KeyboardInterrupt:
            code = 130
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# A run writes through to the disk some fifty times and has six rounds.
MOMENTS = [("fsync", number) for number in (1, 2, 5, 8, 9, 10, 11, 12, 14, 17, 23, 34, 47)]
MOMENTS += [("replace", number) for number in (1, 4, 5, 6, 7, 8, 20)]
MOMENTS += [("round", number) for number in (1, 2, 6)]


def struck(folder: Path, kind: int, moments: list[tuple[str, int]], begun: Path | None = None) -> list[Path]:
    """Runs that a signal has ended, each at another moment; copies of one that had begun, if there is one."""
    folders = [folder / f"{place}-{number}" for place, number in moments]
    for path in folders if begun else ():
        shutil.copytree(begun or path, path)
    ending = 130 if kind == signal.SIGINT else -kind
    for path, (place, number) in zip(folders, moments, strict=True):
        assert in_a_process(path, kind, place, number) == ending, path
    return folders


@pytest.mark.parametrize(
    ("kind", "moments"),
    [
        (signal.SIGKILL, MOMENTS),
        (signal.SIGINT, MOMENTS[::2]),
        (signal.SIGTERM, MOMENTS[::4]),
        (signal.SIGHUP, MOMENTS[1::4]),
    ],
)
def test_a_signal_at_any_moment_leaves_a_run_that_goes_on_to_the_same_bits(kind, moments, tmp_path, whole):
    for folder in struck(tmp_path, kind, moments):
        assert_same(train(folder, ROUNDS), whole)
        assert [path for path in folder.rglob(".*") if path.name != ".lock"] == [], "half a file is left"


def test_a_kill_while_a_complete_run_gets_more_rounds_loses_neither_model(tmp_path, whole):
    begun, longer = tmp_path / "begun", tmp_path / "longer"
    train(begun, 3)
    train(longer, ROUNDS)
    models = [(folder / "model.safetensors").read_bytes() for folder in (begun, longer)]
    # All of the beginning, where the config is replaced, and of the end, where the model is.
    moments = [("fsync", number) for number in (*range(1, 12), 15, 18, *range(31, 38))]
    seen = set()
    for folder in struck(tmp_path, signal.SIGKILL, moments, begun):
        model = (folder / "model.safetensors").read_bytes()
        assert model in models
        seen.add(models.index(model))
        assert_same(train(folder, ROUNDS), whole)
        assert (folder / "model.safetensors").read_bytes() == models[1]
    assert seen == {0, 1}


# -- disks ------------------------------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, name: str, number: int, code: int) -> None:
    """From the call of this number on, one of the system's functions fails."""
    real: Callable[..., Any] = getattr(os, name)
    calls = 0

    def call(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls >= number:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **options)

    monkeypatch.setattr(os, name, call)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize(("name", "number"), [("fsync", 1), ("fsync", 9), ("fsync", 16), ("replace", 7)])
def test_a_disk_that_fails_leaves_the_last_checkpoint(code, name, number, tmp_path, whole, monkeypatch):
    train(tmp_path, 2)
    before = contents(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, name, number, code)
        with pytest.raises(OSError, match=os.strerror(code)):
            train(tmp_path, ROUNDS)
    after = contents(tmp_path)
    assert after["model.safetensors"] == before["model.safetensors"]
    assert [name for name in after if name.rpartition("/")[2].startswith(".")] == []
    assert_same(train(tmp_path, ROUNDS), whole)


def test_the_command_line_says_that_the_disk_is_full(tmp_path, monkeypatch):
    config, folder = tmp_path / "config.toml", tmp_path / "run"
    config.write_text(CONFIG)
    with monkeypatch.context() as patch:
        failing(patch, "fsync", 12, errno.ENOSPC)
        result = CliRunner().invoke(app, ["run", str(config), "--folder", str(folder)])
    assert result.exit_code == 1
    line = result.stderr.splitlines()[-1]
    assert line.startswith("error: cannot read or write") and "No space left on device" in line
    assert CliRunner().invoke(app, ["resume", str(folder)]).exit_code == 0


def test_a_history_that_cannot_grow_is_no_lost_run(tmp_path, whole):
    """A real limit of the system: a line of the history is cut off in its middle."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    soft = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    history = tmp_path / "history.jsonl"

    def limit(progress: ff.Progress) -> None:
        if progress.round == 4:
            wait_for_checkpoint(tmp_path, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (history.stat().st_size + 50, hard))

    try:
        with pytest.raises(OSError, match="large"):
            train(tmp_path, ROUNDS, callbacks=[limit])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not history.read_bytes().endswith(b"\n")
    assert_same(train(tmp_path, ROUNDS), whole)


def can_ignore_permissions() -> bool:
    return os.geteuid() == 0


@pytest.mark.skipif(can_ignore_permissions(), reason="the superuser may write everywhere")
def test_a_read_only_folder_is_refused_and_left_as_it_is(tmp_path, whole):
    folder = tmp_path / "run"
    train(folder, 2)
    before = contents(folder)
    for path in (folder, folder / "checkpoint"):
        path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            train(folder, ROUNDS)
    finally:
        for path in (folder, folder / "checkpoint"):
            path.chmod(0o700)
    assert contents(folder) == before
    assert_same(train(folder, ROUNDS), whole)


# -- folders that vanish ----------------------------------------------------------------------------------


def at(folder: Path, round_number: int, act: Callable[[], object]) -> Callable[[ff.Progress], None]:
    """Acts in a round, once the checkpoint before it lies still: every second round has one."""

    def callback(progress: ff.Progress) -> None:
        if progress.round == round_number:
            wait_for_checkpoint(folder, (round_number - 1) // 2 * 2)
            act()

    return callback


@pytest.mark.parametrize("when", [1, 3, 4, 6])
def test_a_folder_that_is_renamed_under_a_run_goes_on_under_its_new_name(when, tmp_path, whole):
    folder, renamed = tmp_path / "run", tmp_path / "renamed"
    with pytest.raises(FileNotFoundError):
        train(folder, ROUNDS, callbacks=[at(folder, when, lambda: folder.rename(renamed))])
    assert not folder.exists()
    assert_same(train(renamed, ROUNDS), whole)


@pytest.mark.parametrize("when", [1, 4, 6])
def test_a_folder_that_is_deleted_under_a_run_is_not_made_again_in_part(when, tmp_path, whole):
    folder = tmp_path / "run"
    with pytest.raises(FileNotFoundError):
        train(folder, ROUNDS, callbacks=[at(folder, when, lambda: shutil.rmtree(folder))])
    assert not folder.exists()
    assert_same(train(folder, ROUNDS), whole)


def test_a_checkpoint_that_is_deleted_under_a_run_is_noticed(tmp_path):
    with pytest.raises(FileNotFoundError):
        train(tmp_path, ROUNDS, callbacks=[at(tmp_path, 3, lambda: shutil.rmtree(tmp_path / "checkpoint"))])
    assert "manifest.json: missing" in refusal(lambda: train(tmp_path, ROUNDS))


def test_a_history_that_is_deleted_under_a_run_is_noticed(tmp_path):
    with pytest.raises(FileNotFoundError):
        train(tmp_path, ROUNDS, callbacks=[at(tmp_path, 3, (tmp_path / "history.jsonl").unlink)])
    assert "history.jsonl" in refusal(lambda: train(tmp_path, ROUNDS))


# -- two at once ------------------------------------------------------------------------------------------


def test_two_processes_do_not_share_a_folder(tmp_path, whole, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    outcomes: list[int] = []

    def second() -> None:
        child = os.fork()
        if child == 0:
            try:
                message = refusal(lambda: train(tmp_path, ROUNDS))
                os._exit(0 if "another process is running it" in message else 2)
            finally:
                os._exit(1)
        outcomes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    first = train(tmp_path, ROUNDS, callbacks=[lambda _: second()])
    assert outcomes == [0] * ROUNDS
    assert_same(first, whole)
    assert_same(train(tmp_path, ROUNDS), whole)


def test_two_processes_that_begin_together_in_a_new_folder(tmp_path, whole):
    """One trains, the other is refused or finds the run complete; nothing is mixed."""
    folder = tmp_path / "run"
    children = []
    for _ in range(2):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(folder, ROUNDS)
                code = 0
            except ff.FlatfedError as error:
                code = 3 if "another process is running it" in str(error) else 1
            finally:
                os._exit(code)
        children.append(child)
    codes = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
    assert codes in ([0, 0], [0, 3])
    assert_same(train(folder, ROUNDS), whole)
