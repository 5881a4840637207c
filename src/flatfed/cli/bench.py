"""How fast the engine is here: bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from flatfed.cli.terminal import AsJson, Assignments, app, command_of, console, print_json, say
from flatfed.core.errors import FlatfedError, printable
from flatfed.training.progress import round_progress

if TYPE_CHECKING:
    from flatfed.core.settings import Precision
    from flatfed.runs.bench import Measured

NEVER_RUN = "Its authors have had no accelerator, so flatfed was written for yours without having run on one."


@command_of(app, "nothing is kept")
def bench(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODEL]…",
            help="Only these, e.g. MLP or LeNet-5; or a task of yours: a TOML file, or my_task.py:make.",
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 5,
    precision: Annotated[str | None, typer.Option(help="Of both: float32, tf32 or bfloat16.")] = None,
    device: Annotated[str | None, typer.Option(help="Where both compute: cpu, cuda, cuda:1, xpu.")] = None,
    assignments: Assignments = None,
    as_json: AsJson = False,
) -> None:
    """Measure rounds on this machine, of five models or a task, beside a loop written by hand."""
    from flatfed.core.settings import Training
    from flatfed.runs.bench import CLIENTS, PARTICIPANTS
    from flatfed.runs.overview import is_reference

    if any(is_reference(Path(name)) for name in names or []):
        changes = [f"training.precision={precision}"] * (precision is not None)
        changes += [f"execution.device={device}"] * (device is not None)
        _bench_task(names or [], [*(assignments or []), *changes], rounds, as_json)
        return
    if assignments:
        raise FlatfedError(f"--set {assignments[0]}: give it with a task, for instance my_task.py:make")
    device, computed = device or "cpu", Training(rounds=1, precision=precision or "float32").precision
    measured = _measured_models(names or [], rounds, computed, device)
    _print(measured, f"{PARTICIPANTS} of {CLIENTS} clients", computed, device, as_json)
    _check_losses(measured, computed)


def _measured_models(
    names: Sequence[str], rounds: int, precision: Precision, device: str
) -> dict[str, Measured]:
    import torch

    from flatfed.engines.devices import usable_device
    from flatfed.engines.precision import check_precision
    from flatfed.runs.bench import WARM_UP, WORKLOADS, measure

    known = {name.lower(): name for name in WORKLOADS}
    for name in names:
        if name.lower() not in known:
            raise FlatfedError(f"unknown model {name!r}; choose from {', '.join(WORKLOADS)}")
    check_precision(precision, torch.float32, usable_device(device))
    chosen = [known[name.lower()] for name in names or known]
    measured: dict[str, Measured] = {}
    with round_progress() as progress:
        task = progress.add_task("bench", total=len(chosen) * (rounds + WARM_UP), unit="rounds", note="")
        for name in chosen:
            progress.update(task, note=name)
            measured[name] = measure(
                WORKLOADS[name], rounds, lambda: progress.advance(task), precision, device
            )
    return measured


def _bench_task(names: Sequence[str], assignments: Sequence[str], rounds: int, as_json: bool) -> None:
    from flatfed.runs.bench import WARM_UP, measure_task, tolerance
    from flatfed.training.config import Config

    if len(names) > 1:
        raise FlatfedError(f"bench {' '.join(names)}: give one task, or models by their names")
    config = Config.read(Path(names[0]), assignments)
    task, training, execution = config.make_task(), config.training, config.execution
    if execution.engine != "local":
        raise FlatfedError(
            f"execution.engine = {execution.engine!r}: bench measures this machine; leave it out"
        )
    with round_progress() as progress:
        bar = progress.add_task("bench", total=rounds + WARM_UP, unit="rounds", note="")
        result = measure_task(task, training, execution, rounds, lambda: progress.advance(bar))
    clients = len(task.federation)
    what = f"{training.cohort_size(clients)} of {clients} clients"
    _print({Path(names[0]).name: result}, what, training.precision, execution.device, as_json)
    if abs(result.loss - result.loop_loss) > tolerance(training.precision):
        say(
            "note",
            f"flatfed ended with a loss of {result.loss:.5f} and the loop with {result.loop_loss:.5f}, as "
            "where a model or augmentation draws random numbers; without such draws, please report this",
        )


def _print(
    measured: Mapping[str, Measured], clients: str, precision: str, device: str, as_json: bool
) -> None:
    import torch

    from flatfed.engines.devices import described, usable_device
    from flatfed.engines.processes import can_fork
    from flatfed.engines.threads import available_cores

    where = usable_device(device)
    table = Table(
        title=f"FedAvg, {clients}, {precision}, {where}, ms of the best round", title_justify="left"
    )
    for header in ("model", "parameters", "flatfed", "loop", "faster", "path, and why"):
        table.add_column(header, justify="left" if header in {"model", "path, and why"} else "right")
    for name, result in measured.items():
        table.add_row(
            printable(name),
            f"{result.parameters:,}",
            f"{1000 * result.seconds:.1f}",
            f"{1000 * result.loop_seconds:.1f}",
            f"{result.loop_seconds / result.seconds:.2f} x",
            f"{result.path}: {result.reason}",
        )
    if as_json:
        print_json({name: asdict(result) for name, result in measured.items()})
    console.print(table)
    if where.type == "cpu":
        workers = (
            f"{available_cores()} worker {'processes' if can_fork() else 'threads'} with one thread each"
        )
        threads = torch.get_num_threads()
        loop = f"one client after the other with torch.optim.SGD, {threads} threads in torch's operations"
        console.print(f"flatfed: {workers}. loop: {loop}. torch {torch.__version__}.")
    else:
        console.print(f"{described(where)}; torch {torch.__version__}, flatfed {version('flatfed')}.")
        console.print(f"{NEVER_RUN} This table is what a report of it needs.", soft_wrap=True)


def _check_losses(measured: Mapping[str, Measured], precision: Precision) -> None:
    from flatfed.runs.bench import tolerance

    for name, result in measured.items():
        if abs(result.loss - result.loop_loss) > tolerance(precision):
            raise FlatfedError(
                f"{name}: flatfed ended with a loss of {result.loss:.5f} and the loop with "
                f"{result.loop_loss:.5f}; they should agree, please report this"
            )
