"""How far a training has come: a bar in a terminal, a line in a notebook, nothing where nobody watches."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flatfed.core.errors import FlatfedError, printable, shown

if TYPE_CHECKING:
    from flatfed.core.context import TaskStep
    from flatfed.training.loop import Callback
    from flatfed.training.loop import Progress as RoundProgress

LINE_SECONDS = 0.2
"""Between two states of a notebook's line; where lines are kept, there is one for each tenth of a run."""


@contextmanager
def watched(progress: bool | None, label: str, rounds: int) -> Iterator[list[Callback]]:
    """The callbacks that show a training's rounds, if somebody watches or `progress` is True."""
    if not isinstance(progress, bool | None):
        raise FlatfedError(
            f"progress = {shown(progress)}: give True, False, or None to show it to whoever watches"
        )
    notebook, terminal = _in_notebook(), sys.stderr.isatty()
    if progress is False or (progress is None and not (notebook or terminal)):
        yield []
    elif terminal and not notebook:
        with round_progress() as bars:
            yield [Watcher(bars, bars.add_task(label, total=rounds, note="", unit="rounds"), before=0)]
    else:
        line = LineWatcher(label, rounds, rewritten=notebook)
        try:
            yield [line]
        finally:
            line.end()


def _in_notebook() -> bool:
    """Whether this is a Jupyter kernel, without importing anything of it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


def round_progress() -> Progress:
    """A bar that counts rounds, with a note behind it."""
    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}", markup=False),
        console=Console(stderr=True),
    )


@dataclass(eq=False)
class Watcher:
    """A run's callback that moves a bar with its rounds, and shows the server's own tasks as another bar."""

    progress: Progress
    task: TaskID
    prefix: str = ""
    before: int | None = None
    """Where the bar stands when the run is at round 0; None moves it on from where it is."""
    _server_task: TaskID | None = field(default=None, init=False)

    def __call__(self, now: RoundProgress) -> None:
        if self._server_task is not None:
            self.progress.remove_task(self._server_task)
            self._server_task = None
        note = printable(self.prefix) + describe_round(now.record)
        if self.before is None:
            self.progress.update(self.task, advance=1, note=note)
        else:
            self.progress.update(self.task, completed=self.before + now.round, note=note)

    def task_step(self, step: TaskStep) -> None:
        if step.total == 1:
            return
        if self._server_task is None:
            self._server_task = self.progress.add_task("server", total=step.total, note="", unit="iterations")
        loss = f"matching loss {step.record['matching_loss']:.3f}" if "matching_loss" in step.record else ""
        self.progress.update(self._server_task, completed=step.done, note=loss)


@dataclass(eq=False)
class LineWatcher:
    """A run's callback that writes a line, over the last one where that is possible."""

    label: str
    rounds: int
    rewritten: bool
    _width: int = field(default=0, init=False)
    _written_at: float = field(default=0.0, init=False)

    def __call__(self, now: RoundProgress) -> None:
        line = f"{self.label} {now.round} of {self.rounds} rounds, {describe_round(now.record)}".rstrip()
        if not self.rewritten:
            if now.round == self.rounds or now.round % max(1, self.rounds // 10) == 0:
                sys.stderr.write(f"{line}\n")
        elif now.round == self.rounds or time.monotonic() - self._written_at > LINE_SECONDS:
            sys.stderr.write(f"\r{line.ljust(self._width)}")
            self._width, self._written_at = len(line), time.monotonic()

    def end(self) -> None:
        if self._width:
            sys.stderr.write("\n")


def describe_round(record: Mapping[str, Any]) -> str:
    """A round in a few words."""
    accuracy = f"accuracy {record['test_accuracy']:.1%}" if "test_accuracy" in record else ""
    validation = "validation_accuracy"
    validated = f", validation {record[validation]:.1%}" if validation in record else ""
    return f"loss {record['train_loss']:.3f} {accuracy}{validated}"
