"""What a training from Python shows of itself, and to whom."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import small_runs
import torch
from torch import nn

import flatfed as ff

TRAINING = ff.Training(rounds=20, participants=2, local_steps=1, batch_size=4)


def train(**options):
    torch.manual_seed(0)
    task = ff.Task(nn.Linear(small_runs.FEATURES, small_runs.CLASSES), small_runs.federation())
    return ff.train(task, ff.fedavg(), TRAINING, ff.Execution(workers=1), **options)


class Terminal:
    """Stands for a terminal behind stderr, and keeps what is written to it."""

    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> int:
        self.text += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


def test_nothing_is_shown_where_nobody_watches(capfd):
    train()
    assert capfd.readouterr() == ("", "")


def test_a_terminal_shows_a_bar_unless_told_not_to(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    for progress, shown in ((None, True), (True, True), (False, False)):
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        train(progress=progress)
        assert ("fedavg" in terminal.text and "20/20" in terminal.text and "loss" in terminal.text) is shown
        assert bool(terminal.text) is shown


def test_it_can_be_written_anywhere_a_line_for_each_tenth(capfd):
    train(progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 10 and lines[0].startswith("fedavg 2 of 20 rounds, loss ")
    assert lines[-1].startswith("fedavg 20 of 20 rounds, loss ")


def test_a_notebook_gets_a_line_that_is_written_over(monkeypatch, capfd):
    kernel = type("ZMQInteractiveShell", (), {})()
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: kernel))
    train()
    text = capfd.readouterr().err
    assert "\r" in text and text.count("\n") == 1 and "fedavg 20 of 20 rounds" in text
    train(progress=False)
    assert capfd.readouterr().err == ""


def test_it_changes_no_number_and_ends_with_the_training(capfd):
    shown, quiet = train(progress=True), train()
    assert torch.equal(shown.server["model"], quiet.server["model"])

    def stop(progress: ff.Progress) -> None:
        raise ff.FlatfedError("enough")

    with pytest.raises(ff.FlatfedError, match="enough"):
        train(progress=True, callbacks=[stop])
    with pytest.raises(ff.FlatfedError, match="progress = 'yes': give True, False, or None"):
        train(progress="yes")
