"""What all commands share: the terminal, and errors in one line.

Commands import the rooms that they need when they run: torch takes a second, and help is printed without it.
"""

from __future__ import annotations

import functools
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ParamSpec, TextIO

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, first_line, printable

if TYPE_CHECKING:
    from flatfed.diagnostics import figures
    from flatfed.training.loop import Callback


def _open_streams() -> None:
    """Standard streams that are closed lead nowhere, and those that lack a sign show its number.

    The next file that is opened would take the place of a closed one, and get what is printed.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115 (for as long as the process)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


_open_streams()
app = typer.Typer(
    help="Federated learning that finds flat, stable minima.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
# Without a terminal there is no width to fit; tables then take the room that they need.
console = Console(width=None if sys.stdout.isatty() else 140, markup=False, emoji=False, highlight=False)
complain = Console(stderr=True, soft_wrap=True, markup=False, emoji=False, highlight=False)

_results: ContextVar[TextIO | None] = ContextVar("results", default=None)
"""Where results for other programs go, if not to stdout."""

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
AsJson = Annotated[
    bool, typer.Option("--json", help="Print the results as JSON, and everything else to stderr.")
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
            console.stderr = bool(named.get("as_json"))
            try:
                with _notes(), _results_alone() if console.stderr else nullcontext():
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
            except MemoryError as error:
                _stop(1, f"memory ran out ({first_line(error)}); {kept}")
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


def print_tables(tables: Iterable[figures.Table]) -> None:
    """Tables of text and numbers, with their notes."""
    for shown in tables:
        table = Table(*shown.columns, title=shown.title, title_justify="left")
        for row in shown.rows:
            table.add_row(*(printable(entry.text) for entry in row))
        console.print(table)
        if shown.note:
            console.print(shown.note)


def tell(line: str) -> None:
    """A line of a result, in which there may be words of the user's own."""
    console.print(printable(line), soft_wrap=True)


@contextmanager
def _results_alone() -> Iterator[None]:
    """Sends to stderr whatever is printed, be it by a user's own code, a library or another process.

    Only `print_json` still writes to stdout, for programs that read it.
    """
    with ExitStack() as stack:
        stream: TextIO = sys.stdout
        stack.callback(_results.reset, _results.set(stream))
        if _is_standard_output(stream):
            stream.flush()
            kept = os.dup(1)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, 1)
            os.dup2(2, 1)
            stream = stack.enter_context(
                open(kept, "w", encoding="utf-8", errors="backslashreplace", closefd=False)
            )
            _results.set(stream)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


def _is_standard_output(stream: TextIO) -> bool:
    try:
        return stream.fileno() == 1
    except (OSError, ValueError):  # one in memory, or closed
        return False


def print_json(value: Any) -> None:
    """For other programs: nothing else is printed with it. What is not finite is null, as JSON has it."""
    print(json.dumps(_finite(value), indent=1, default=str), file=_results.get(), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def table_facts(table: figures.Table) -> dict[str, Any]:
    """A table as plain data: numbers where its cells have them, texts elsewhere."""
    rows = [
        {
            column.replace("\n", " "): entry.text if entry.value is None else entry.value
            for column, entry in zip(table.columns, row, strict=True)
        }
        for row in table.rows
    ]
    return {"title": table.title, "rows": rows, "note": table.note}


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


@contextmanager
def measurement_bars() -> Iterator[Callable[[str], Callable[[float], None]]]:
    """Adds a bar for each measurement by its name; nothing is shown before the first."""
    with ExitStack() as stack:
        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        progress = Progress(*columns, console=Console(stderr=True))

        def watch(name: str) -> Callable[[float], None]:
            if not progress.tasks:  # only what takes time gets a bar, not a complaint about the folder
                stack.enter_context(progress)
            task = progress.add_task(printable(name), total=1.0)
            return lambda share: progress.update(task, completed=share)

        yield watch


def on_ray(address: str | None) -> list[str]:
    """The assignments that move a training to a Ray cluster."""
    return [] if address is None else ["execution.engine=ray", f"execution.ray_address={address}"]


def trackers(tensorboard: Path | None, folder: Path) -> list[Callback]:
    """Curves of several runs lie beside each other, under the names of their run folders."""
    if tensorboard is None:
        return []
    from flatfed.training.callbacks import TensorBoard

    return [TensorBoard(tensorboard / folder.name)]
