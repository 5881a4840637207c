"""What all commands share: the terminal, errors in one line, progress bars.

Commands import the rooms that they need when they run: torch takes a second, and help is printed without it.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, printable

if TYPE_CHECKING:
    from flatfed.core.context import TaskStep
    from flatfed.training.loop import Callback
    from flatfed.training.loop import Progress as RoundProgress

app = typer.Typer(
    help="Federated learning that finds flat, stable minima.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Without a terminal there is no width to fit; tables then take the room that they need.
console = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False, highlight=False)
complain = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)

Arguments = ParamSpec("Arguments")
Command = Callable[Arguments, None]
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. training.lr=0.05. Repeatable."),
]
Methods = Annotated[
    list[str] | None,
    typer.Option("--methods", help="Only this method, as the paper calls it. Repeatable."),
]
Only = Annotated[str | None, typer.Option(help="Only parts with these words in their title, e.g. EMNIST-L.")]
FromScratch = Annotated[
    bool, typer.Option("--from-scratch", help="Random weights where the paper starts from published ones.")
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Train on this Ray cluster; auto finds one, local starts one here."),
]
Tracking = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="FOLDER", help="Also write curves for TensorBoard there."),
]
Root = Annotated[Path, typer.Option("--runs", help="Where run folders live.")]
RUNS = Path("runs")


def command_of(group: typer.Typer, kept: str) -> Callable[[Command[Arguments]], Command[Arguments]]:
    """Registers commands whose errors are one line: 2 for bad input, 1 for failure, 130 for Ctrl-C.

    `kept` says what a failure leaves behind.
    """

    def register(function: Command[Arguments]) -> Command[Arguments]:
        @functools.wraps(function)
        def guarded(*positional: Arguments.args, **named: Arguments.kwargs) -> None:
            try:
                with _notes():
                    function(*positional, **named)
            except DivergedError as error:
                _stop(1, str(error))
            except FlatfedError as error:
                _stop(2, str(error))
            except BrokenPipeError:
                # The reader has gone (`flatfed list | head`).
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
                raise typer.Exit(0) from None
            except OSError as error:
                name = f" {error.filename}" if error.filename else ""
                _stop(1, f"cannot read or write{name}: {error.strerror}; {kept}")
            except KeyboardInterrupt:
                _stop(130, f"interrupted; {kept}")

        group.command(function.__name__.rstrip("_"))(guarded)
        return guarded

    return register


@contextmanager
def _notes() -> Iterator[None]:
    """Our own warnings once, without the line of code that gave them."""
    usual, seen = warnings.showwarning, set[str]()

    def show(message: Warning | str, category: type[Warning], *place: Any, **options: Any) -> None:
        if not issubclass(category, FlatfedWarning):
            usual(message, category, *place, **options)
        elif str(message) not in seen:
            seen.add(str(message))
            # Not by a console of our own, which would write into a progress bar.
            sys.stderr.write(f"note: {printable(str(message))}\n")

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def tell(line: str) -> None:
    """A line of a result, in which there may be words of the user's own."""
    console.print(printable(line), soft_wrap=True)


def print_json(value: Any) -> None:
    """For other programs: nothing else is printed with it."""
    print(json.dumps(value, indent=1))  # noqa: T201


def check_damage(folders: int) -> None:
    """The end of a command that has left some run folders out, and named them."""
    if folders:
        problem = "run folder is damaged" if folders == 1 else "run folders are damaged"
        raise FlatfedError(f"{folders} {problem} and left out (see above); restore or remove what is named")


def say(kind: str, message: str, style: str = "yellow") -> None:
    """A line about the run beside its results: "note: …", "left out: …"."""
    complain.print(Text.assemble((f"{kind}:", style), f" {printable(message)}"))


def _stop(code: int, message: str) -> None:
    say("error", message, "red")
    raise typer.Exit(code)


# Of the commands that train, and of those that only look.
command = command_of(app, "finished rounds are kept up to the last checkpoint; the same command goes on")
look = command_of(app, "nothing was changed")


def print_facts(facts: Iterable[tuple[str, str]]) -> None:
    """Names in bold beside their values."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    for fact in facts:
        table.add_row(*fact)
    console.print(table)


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


def on_ray(address: str | None) -> list[str]:
    """The assignments that move a training to a Ray cluster."""
    return [] if address is None else ["execution.engine=ray", f"execution.ray_address={address}"]


def trackers(tensorboard: Path | None, folder: Path) -> list[Callback]:
    """Curves of several runs lie beside each other, under the names of their run folders."""
    if tensorboard is None:
        return []
    from flatfed.training.callbacks import TensorBoard

    return [TensorBoard(tensorboard / folder.name)]


def describe_round(record: Mapping[str, Any]) -> str:
    """A round in a few words."""
    accuracy = f"accuracy {record['test_accuracy']:.1%}" if "test_accuracy" in record else ""
    validation = "validation_accuracy"
    validated = f", validation {record[validation]:.1%}" if validation in record else ""
    return f"loss {record['train_loss']:.3f} {accuracy}{validated}"
