"""How fast the engine is here: bench."""

from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

import typer
from rich.table import Table

from flatfed.cli.terminal import AsJson, app, command_of, console, print_json
from flatfed.core.errors import FlatfedError
from flatfed.training.progress import round_progress

NEVER_RUN = "Its authors have had no accelerator, so flatfed was written for yours without having run on one."


@command_of(app, "nothing is kept")
def bench(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]…", help="Only these, e.g. MLP or LeNet-5.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of each.")] = 5,
    precision: Annotated[str, typer.Option(help="Of both: float32, tf32 or bfloat16.")] = "float32",
    device: Annotated[str, typer.Option(help="Where both compute: cpu, cuda, cuda:1, xpu.")] = "cpu",
    as_json: AsJson = False,
) -> None:
    """Measure rounds of five models on this machine, beside a loop written by hand; says what was chosen."""
    import torch

    from flatfed.core.settings import Training
    from flatfed.engines.devices import described, usable_device
    from flatfed.engines.precision import check_precision
    from flatfed.engines.processes import can_fork
    from flatfed.engines.threads import available_cores
    from flatfed.runs.bench import CLIENTS, PARTICIPANTS, WARM_UP, WORKLOADS, Measured, measure, tolerance

    known = {name.lower(): name for name in WORKLOADS}
    for name in names or []:
        if name.lower() not in known:
            raise FlatfedError(f"unknown model {name!r}; choose from {', '.join(WORKLOADS)}")
    computed, where = Training(rounds=1, precision=precision).precision, usable_device(device)
    check_precision(computed, torch.float32, where)
    chosen = [known[name.lower()] for name in names or known]
    threads = torch.get_num_threads()
    measured: dict[str, Measured] = {}
    with round_progress() as progress:
        task = progress.add_task("bench", total=len(chosen) * (rounds + WARM_UP), unit="rounds", note="")
        for name in chosen:
            progress.update(task, note=name)
            measured[name] = measure(
                WORKLOADS[name], rounds, lambda: progress.advance(task), computed, device
            )
    table = Table(
        title=f"FedAvg, {PARTICIPANTS} of {CLIENTS} clients, {computed}, {where}, ms of the best round",
        title_justify="left",
    )
    for header in ("model", "parameters", "flatfed", "loop", "faster", "path, and why"):
        table.add_column(header, justify="left" if header in {"model", "path, and why"} else "right")
    for name, result in measured.items():
        table.add_row(
            name,
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
        loop = f"one client after the other with torch.optim.SGD, {threads} threads in torch's operations"
        console.print(f"flatfed: {workers}. loop: {loop}. torch {torch.__version__}.")
    else:
        console.print(f"{described(where)}; torch {torch.__version__}, flatfed {version('flatfed')}.")
        console.print(f"{NEVER_RUN} This table is what a report of it needs.", soft_wrap=True)
    for name, result in measured.items():
        if abs(result.loss - result.loop_loss) > tolerance(computed):
            raise FlatfedError(
                f"{name}: flatfed ended with a loss of {result.loss:.5f} and the loop with "
                f"{result.loop_loss:.5f}; they should agree, please report this"
            )
