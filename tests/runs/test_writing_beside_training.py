"""Checkpoints are written while training goes on, and nothing is lost by it."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from small_runs import assert_same, manifest, train

import flatfed as ff
from flatfed.runs.checkpoint import Checkpoints
from flatfed.runs.files import BackgroundWriter

PATIENCE = 20.0


def test_the_next_round_does_not_wait_for_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    third_round, really_save = threading.Event(), Checkpoints.save
    waited: list[bool] = []

    def slow_save(self: Checkpoints, *arguments: Any) -> None:
        waited.append(third_round.wait(PATIENCE))
        really_save(self, *arguments)

    def tell(progress: ff.Progress) -> None:
        if progress.round == 3:
            third_round.set()

    monkeypatch.setattr(Checkpoints, "save", slow_save)
    train(tmp_path / "run", 4, checkpoint_every=2, callbacks=[tell])
    assert waited == [True, True]
    assert manifest(tmp_path / "run")["round"] == 4


def test_a_checkpoint_of_every_round_is_there_before_the_next(tmp_path: Path) -> None:
    seen: list[int] = []

    def look(progress: ff.Progress) -> None:
        seen.append(manifest(tmp_path / "run")["round"])

    train(tmp_path / "run", 4, checkpoint_every=1, callbacks=[look])
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("moment", ["before", "after"])
def test_an_interrupt_around_the_hand_over_loses_no_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    really_start, interrupted = BackgroundWriter.start, []

    def start(self: BackgroundWriter, write: Any) -> None:
        first = not interrupted
        interrupted.append(True)
        if first and moment == "before":
            raise KeyboardInterrupt
        really_start(self, write)
        if first:
            raise KeyboardInterrupt

    monkeypatch.setattr(BackgroundWriter, "start", start)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "run", 6)
    assert manifest(tmp_path / "run")["round"] == 2
    assert_same(train(tmp_path / "run", 6), train(None, 6))


def test_a_write_that_fails_ends_the_training_with_the_last_checkpoint_intact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really_save, saved = Checkpoints.save, []

    def save(self: Checkpoints, *arguments: Any) -> None:
        saved.append(True)
        if len(saved) == 2:
            raise OSError(28, "No space left on device")
        really_save(self, *arguments)

    monkeypatch.setattr(Checkpoints, "save", save)
    with pytest.raises(OSError, match="No space left"):
        train(tmp_path / "run", 8)
    assert manifest(tmp_path / "run")["round"] == 2
    assert_same(train(tmp_path / "run", 8), train(None, 8))
