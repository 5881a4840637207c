"""The command line: `flatfed demo | run | compare | sweep | reproduce | resume | list | show | split | …`."""

from __future__ import annotations

import functools
import inspect
import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ParamSpec

import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import flatfed
from flatfed.algorithms import ALGORITHMS, equations
from flatfed.core.algorithm import SLOTS, Algorithm, describe_part
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.data.commands import data_app
from flatfed.data.partition import PARTITIONS, class_counts, summary
from flatfed.data.split import check_output, describe, terminal_picture, write_picture
from flatfed.experiments.compare import Contestant, Row, compare, is_complete, run_folder
from flatfed.experiments.config import Config, with_assignments
from flatfed.experiments.demo import DEMO_BASE, DEMO_CONTESTANTS, DEMO_SEEDS, DEMO_TARGET
from flatfed.experiments.papers import tables
from flatfed.experiments.papers.presets import Cell
from flatfed.experiments.papers.reproduce import Result, chosen_cells, remaining_work
from flatfed.experiments.papers.reproduce import reproduce as run_cells
from flatfed.experiments.record import RunFolder, read_json
from flatfed.experiments.run import Callback, Run
from flatfed.experiments.run import Progress as RoundProgress
from flatfed.experiments.sweep import Plan, Trial, parse_grid
from flatfed.experiments.sweep import sweep as run_trials

app = typer.Typer(
    help="Federated learning that finds flat, stable minima.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
# Without a terminal there is no width to fit; tables then take the room that they need.
console = Console(width=None if sys.stdout.isatty() else 140)
complain = Console(stderr=True, soft_wrap=True)

Arguments = ParamSpec("Arguments")
Assignments = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. training.lr=0.05. Repeatable."),
]
Root = Annotated[Path, typer.Option("--runs", help="Where run folders live.")]
RUNS = Path("runs")


def command(function: Callable[Arguments, None]) -> Callable[Arguments, None]:
    """Registers a command whose errors are one line: 2 for bad input, 1 for failure, 130 for Ctrl-C."""

    @functools.wraps(function)
    def guarded(*positional: Arguments.args, **named: Arguments.kwargs) -> None:
        try:
            function(*positional, **named)
        except DivergedError as error:
            _stop(1, str(error))
        except FlatfedError as error:
            _stop(2, str(error))
        except BrokenPipeError:
            # The reader has gone (`flatfed list | head`); there is nobody left to tell.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:
            name = f" {error.filename}" if error.filename else ""
            _stop(1, f"cannot read or write{name}: {error.strerror}; the last checkpoint, if any, is intact")
        except KeyboardInterrupt:
            _stop(130, "interrupted; finished rounds are kept, run the same command again to go on")

    app.command(function.__name__.rstrip("_"))(guarded)
    return guarded


def _stop(code: int, message: str) -> None:
    complain.print(f"[red]error:[/] {escape(message)}")
    raise typer.Exit(code)


@command
def demo(
    runs: Root = RUNS / "demo",
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = DEMO_BASE["training"]["rounds"],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = len(DEMO_SEEDS),
) -> None:
    """Compare FedAvg with the papers' methods on handwritten digits (about a minute)."""
    base = with_assignments(DEMO_BASE, [f"training.rounds={rounds}"])
    console.print(
        Panel(
            "1,442 handwritten digits, split over 100 clients so unevenly that most see two to four classes "
            f"(Dirichlet 0.1).\nIn each of {rounds} rounds 10 clients train for 10 steps. Every method runs "
            f"under {seeds} seed{'s' if seeds > 1 else ''} with the same clients and batches, at a step size "
            "tuned on other seeds.",
            title="flatfed demo",
            width=min(console.width, 110),
        )
    )
    _compare(base, DEMO_CONTESTANTS, range(seeds), DEMO_TARGET, runs)


@command
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    assignments: Assignments = None,
    runs: Root = RUNS,
    folder: Annotated[Path | None, typer.Option(help="This run's folder, instead of one in --runs.")] = None,
) -> None:
    """Train what a config file describes."""
    checked = Config.read(config, assignments or [])
    _run(checked, folder or run_folder(checked, runs))


@command
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Go on to this many rounds.")] = None,
) -> None:
    """Go on with an interrupted run, to the same bits as if it had not been interrupted."""
    existing = RunFolder.existing(folder)
    values = read_json(existing.path / "config.json")
    if not isinstance(values, dict) or "data" not in values:
        raise FlatfedError(
            f"{folder}: made from Python, whose model and data are not in the folder; call flatfed.train "
            f"again with folder={str(folder)!r}"
        )
    _run(
        Config.checked(with_assignments(values, [f"training.rounds={rounds}"] if rounds is not None else [])),
        folder,
    )


@command
def compare_(
    algorithms: Annotated[
        list[str], typer.Argument(metavar="ALGORITHM…", help="e.g. fedavg fedsam:radius=0.05,lr=0.2")
    ],
    config: Annotated[Path | None, typer.Option(help="A TOML file; the demo's setting if not given.")] = None,
    assignments: Assignments = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    target: Annotated[float, typer.Option(min=0, max=1, help="Accuracy to count rounds to.")] = DEMO_TARGET,
    runs: Root = RUNS,
) -> None:
    """Run several algorithms on the same data, clients and batches."""
    base = dict(Config.read(config).model_dump(exclude_unset=True)) if config else DEMO_BASE
    for assignment in assignments or []:
        if assignment.startswith(("algorithm", "training.seed")):
            raise FlatfedError(
                f"--set {assignment}: name the algorithms and their options as arguments, and use --seeds"
            )
    contestants = [_contestant(text) for text in algorithms]
    _compare(with_assignments(base, assignments or []), contestants, range(seeds), target, runs)


@command
def reproduce(
    table: Annotated[str | None, typer.Argument(help="e.g. fedsagd/table2; none lists them.")] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", help="Only this method, as the paper calls it. Repeatable."),
    ] = None,
    only: Annotated[
        str | None, typer.Option(help="Only parts whose title contains this, e.g. EMNIST-L.")
    ] = None,
    rounds: Annotated[int | None, typer.Option(min=1, help="Rounds, instead of the paper's.")] = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    scale: Annotated[
        str, typer.Option(help="full, or small: a few clients and steps, to try it out.")
    ] = "full",
    runs: Root = RUNS,
) -> None:
    """Run a table of the papers and print our numbers beside theirs."""
    if table is None:
        listing = Table("table", "what it shows")
        for name, content in tables().items():
            later = " (needs compressed uploads: not yet)" if name.startswith("fedsynsam") else ""
            listing.add_row(name, content["title"] + later)
        console.print(listing)
        return
    if scale not in {"full", "small"}:
        raise FlatfedError(f"scale = {scale!r}: must be full or small")
    chosen = chosen_cells(table, methods or [], only, rounds, scale)
    work = remaining_work(chosen, range(seeds), runs)
    console.print(
        f"{table}: {len(chosen)} cells × {seeds} seeds; {work.runs} runs to do, {work.rounds:,} rounds, "
        f"{work.gradients:,} gradients, about {_duration(work.seconds)}."
    )
    failures: list[str] = []
    with _progress() as progress:
        task = progress.add_task("all runs", total=work.rounds, note="")

        def watch(cell: Cell, seed: int) -> Callback:
            def update(now: RoundProgress) -> None:
                progress.update(task, advance=1, note=f"{cell.label}, seed {seed}: {_note(now.record)}")

            return update

        def failed(cell: Cell, seed: int, error: DivergedError) -> None:
            failures.append(f"{cell.label}, seed {seed}: {error}")

        results = run_cells(chosen, range(seeds), runs, watch, failed)
    for failure in failures:
        complain.print(f"[yellow]left out:[/] {escape(failure)}")
    _print_results(results)
    for note in tables()[table]["notes"]:
        console.print(f"note: {note}", highlight=False)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} seconds"
    return f"{seconds / 60:.0f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _print_results(results: Sequence[Result]) -> None:
    for block in dict.fromkeys(result.cell.block for result in results):
        rows = [result for result in results if result.cell.block == block]
        targets = rows[0].cell.targets
        table = Table(title=rows[0].cell.title, title_justify="left")
        table.add_column("method")
        for header in ("paper %", "ours %", "difference"):
            table.add_column(header, justify="right", no_wrap=True)
        for target in targets:
            table.add_column(f"rounds to {target:.0%}\npaper | ours", justify="right", no_wrap=True)
        for row in rows:
            printed = "–" if row.printed is None else f"{row.printed:.2f}"
            if row.printed_deviation is not None:
                printed += f" ± {row.printed_deviation:.2f}"
            difference = "–" if row.difference is None else f"{row.difference:+.2f}"
            mark = " [yellow](!)[/]" if "impossible" in row.cell.printed else ""
            ours = "diverged" if row.ours is None else row.ours.text(2, 100)
            table.add_row(row.cell.label + mark, printed, ours, difference, *_rounds_columns(row))
        console.print(table)
        for row in rows:
            if "impossible" in row.cell.printed:
                console.print(f"(!) {row.cell.label}: the paper's cell {row.cell.printed['impossible']}")


def _rounds_columns(row: Result) -> list[str]:
    columns = []
    for printed, ours, reached in zip(row.printed_rounds, row.our_rounds, row.reached, strict=True):
        own = "–" if ours is None else ours.text(0)
        if 0 < reached < row.seeds:
            own += f" ({reached} of {row.seeds})"
        columns.append(f"{'–' if printed is None else printed} | {own}")
    return columns


@command
def sweep(
    config: Annotated[Path, typer.Argument(help="A TOML file.")],
    grid: Annotated[
        list[str], typer.Option("--grid", metavar="KEY=V,V,…", help="e.g. training.lr=0.01,0.1. Repeatable.")
    ],
    trials: Annotated[
        int | None, typer.Option(min=1, help="Try only this many combinations, chosen by TPE.")
    ] = None,
    metric: Annotated[
        str, typer.Option(help="final or best: accuracy of the last or the best round.")
    ] = "final",
    seed: Annotated[int | None, typer.Option(min=0, help="Seed, instead of the config's.")] = None,
    study: Annotated[
        str | None, typer.Option(help="The sweep's name; from config and grid if not given.")
    ] = None,
    assignments: Assignments = None,
    runs: Root = RUNS,
) -> None:
    """Try a grid of settings, stopping runs that fall behind, and print the best (needs optuna)."""
    base = Config.read(config, assignments or []).model_dump(exclude_unset=True)
    plan = Plan.checked(base, parse_grid(grid), metric, seed)
    name = study or f"{config.stem}-{plan.digest}"
    with _progress() as progress:
        count = min(trials or len(plan.combinations), len(plan.combinations))
        task = progress.add_task(name, total=count * plan.rounds, note="")

        def watch(assigned: Sequence[str], done: int) -> Callback:
            def update(now: RoundProgress) -> None:
                note = f"{' '.join(assigned)}: {_note(now.record)}"
                progress.update(task, completed=done * plan.rounds + now.round, note=note)

            return update

        found = run_trials(plan, name, runs, trials, watch)
        progress.update(task, completed=count * plan.rounds, note="")
    for trial in found:
        if trial.state == "diverged":
            complain.print(
                f"[yellow]diverged:[/] {escape(' '.join(trial.assignments))}: {escape(trial.note)}"
            )
    _print_trials(found, plan, config, seed, assignments or [])
    console.print(f"Sweep {name} in {runs}; the same command goes on with what is missing.", highlight=False)


@command
def split(
    dataset: Annotated[str, typer.Option(help="A data set; see flatfed data list.")] = "digits",
    clients: Annotated[int, typer.Option(help="Among how many clients.")] = 100,
    partition: Annotated[str, typer.Option(help="How they are divided.")] = "dirichlet_client",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the partition, e.g. concentration=0.1, or of the data set, e.g. "
            "data.options.split=byclass. Repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed in a run gives the same split.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the picture, as .svg or .html.")] = None,
) -> None:
    """Show which client holds how many samples of which class."""
    if output is not None:
        check_output(output)
    values: dict[str, Any] = {
        "data": {"dataset": dataset, "clients": clients},
        "partition": {"name": partition},
        "training": {"rounds": 1, "seed": seed},
    }
    if "concentration" in inspect.signature(PARTITIONS.get(partition, object)).parameters:
        values["partition"]["concentration"] = 0.1
    # A plain name is an option of the partition, one with dots a setting of the config.
    named = [each if "." in each.partition("=")[0] else f"partition.{each}" for each in assignments or []]
    config = Config.checked(with_assignments(values, named))
    federation = config.make_federation()
    rows = [federation.rows(client).numpy() for client in range(len(federation))]
    labels = federation.targets.numpy()
    counts, found = class_counts(rows, labels, federation.classes or 1), summary(rows, labels)
    options = ", ".join(f"{key} = {value}" for key, value in config.partition.items() if key != "name")
    title = ", ".join(filter(None, [f"{dataset} over {clients} clients", config.partition["name"], options]))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for what, number in describe(found):
        table.add_row(f"[bold]{what}", number)
    console.print(f"[bold]{escape(title)}", highlight=False)
    console.print(table)
    coloured = console.color_system is not None and not console.no_color
    console.print(terminal_picture(counts, min(console.width, 140), coloured))
    if output is not None:
        write_picture(output, counts, f"{title}, seed {seed}", found)
        console.print(f"picture: {output}", highlight=False)


@command
def list_() -> None:
    """List the algorithms."""
    table = Table("name", "what it is", "gradients\nper step", "down", "up", "server keeps", "client keeps")
    for name in sorted(ALGORITHMS):
        algorithm = ALGORITHMS[name]()
        title = equations(name).splitlines()[0].partition(": ")[2].rstrip(".")
        extra = " + pass" if algorithm.full_gradients else ""
        table.add_row(
            name,
            title[0].upper() + title[1:],
            f"{algorithm.gradient_evaluations}{extra}",
            str(len(algorithm.broadcast)),
            str(len(algorithm.uploads)),
            _names(algorithm.server_vectors),
            _names(algorithm.client_vectors),
        )
    console.print(table)
    console.print("down, up: vectors of the model's size per participant and round. See flatfed show NAME.")


@command
def show(algorithm: Annotated[str, typer.Argument(help="An algorithm's name.")]) -> None:
    """Show an algorithm's equations, defaults, traffic and parts."""
    made = flatfed.build(algorithm)
    console.print(equations(made.name), highlight=False, markup=False)
    console.print()
    console.print(_facts(made))


def _facts(made: Algorithm) -> Table:
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("[bold]defaults", ", ".join(f"{k} = {v}" for k, v in made.options.items()) or "none")
    extra = ", one pass over the client's data per round" if made.full_gradients else ""
    facts.add_row("[bold]gradients per step", f"{made.gradient_evaluations}{extra}")
    facts.add_row("[bold]down", ", ".join(made.broadcast))
    facts.add_row("[bold]up", ", ".join(made.uploads))
    facts.add_row("[bold]server keeps", ", ".join(["model", *(v.name for v in made.server_vectors)]))
    facts.add_row("[bold]client keeps", _names(made.client_vectors))
    described = [describe_part(part) for part in made.parts if type(part) is not SLOTS[part.slot]]
    facts.add_row(
        "[bold]parts",
        "\n".join(
            f"{each['part']}({', '.join(f'{k}={v}' for k, v in each.items() if k != 'part')})"
            for each in described
        )
        or "none beyond averaging",
    )
    return facts


def _names(vectors: Sequence[Any]) -> str:
    return ", ".join(vector.name for vector in vectors) or "–"


@contextmanager
def _progress() -> Any:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        yield progress


def _note(record: Mapping[str, Any]) -> str:
    found = f"accuracy {record['test_accuracy']:.1%}" if "test_accuracy" in record else ""
    return f"loss {record['train_loss']:.3f} {found}"


def _run(config: Config, folder: Path) -> None:
    if is_complete(config, folder):
        console.print(f"{folder} is complete: {config.training.rounds} rounds.")
        return
    federation = config.make_federation()
    with _progress() as progress:
        name = config.make_algorithm().name
        task = progress.add_task(name, total=config.training.rounds, note="")

        def watch(now: RoundProgress) -> None:
            progress.update(task, completed=now.round, note=_note(now.record))

        finished = config.run(federation, folder, [watch])
    _report_run(finished, folder)


def _report_run(finished: Run, folder: Path) -> None:
    last = finished.history[-1]
    console.print(f"{finished.algorithm.name}: {last['round']} rounds, {_note(last)}")
    console.print(f"clients were trained by the {finished.path} path: {finished.path_reason}")
    console.print(f"run folder: {folder}")


def _contestant(text: str) -> Contestant:
    """`fedsam:radius=0.05,lr=0.2`: an algorithm, its options and its own training settings."""
    name, _, options = text.partition(":")
    values = with_assignments({}, [item for item in options.split(",") if item])
    if "seed" in values:
        raise FlatfedError(f"{text}: every algorithm runs under the same seeds; use --seeds")
    training = {key: values.pop(key) for key in list(values) if key in flatfed.Settings.model_fields}
    return Contestant(text, {"algorithm": {"name": name, **values}, "training": training})


def _compare(
    base: Mapping[str, Any],
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    target: float,
    runs: Path,
) -> None:
    failures: list[str] = []
    with _progress() as progress:
        total = base["training"]["rounds"] if "training" in base and "rounds" in base["training"] else 0
        overall = progress.add_task("all runs", total=total * len(contestants) * len(seeds), note="")

        def watch(contestant: Contestant, seed: int) -> Callback:
            note = f"{contestant.label}, seed {seed}"

            def update(now: RoundProgress) -> None:
                progress.update(overall, advance=1, note=f"{note}: {_note(now.record)}")

            return update

        def failed(contestant: Contestant, seed: int, error: DivergedError) -> None:
            failures.append(f"{contestant.label}, seed {seed}: {error}")

        rows = compare(base, contestants, seeds, target, runs, watch, failed)
        progress.update(overall, completed=total * len(contestants) * len(seeds), note="")
    for failure in failures:
        complain.print(f"[yellow]left out:[/] {escape(failure)}")
    if not rows:
        raise DivergedError("no run was left to compare; lower lr or set clip")
    config = contestants[0].config(base, seeds[0])
    test = config.make_federation().test
    _print_rows(rows, target, len(test[0]) if test else 0)
    console.print(f"Run folders: {runs}")


def _print_rows(rows: Sequence[Row], target: float, test_samples: int) -> None:
    most_seeds = max(row.seeds for row in rows)

    def label(row: Row) -> str:
        return row.label if row.seeds == most_seeds else f"{row.label} ({row.seeds} of {most_seeds} seeds)"

    def rounds(row: Row) -> str:
        if row.rounds_to_target is None:
            return "not reached"
        some = f" ({row.reached} of {row.seeds})" if row.reached < row.seeds else ""
        return row.rounds_to_target.text(0) + some

    def deviation(row: Row) -> str:
        return f"{row.client_deviation.text(1, 100)} ({100 * row.chance_deviation:.1f})"

    results: dict[str, Callable[[Row], str]] = {
        "lr": lambda row: f"{row.lr:g}",
        "accuracy %": lambda row: row.accuracy.text(1, 100),
        f"rounds\nto {target:.0%}": rounds,
        "deviation between\nclients % (chance)": deviation,
    }
    costs: dict[str, Callable[[Row], str]] = {
        "MB down": lambda row: row.megabytes_down.text(1),
        "MB up": lambda row: row.megabytes_up.text(1),
        "gradients": lambda row: row.gradient_evaluations.text(0),
        "seconds": lambda row: row.seconds.text(1),
    }
    # A narrow terminal gets two tables rather than one that is cut off.
    for columns in [results | costs] if console.width >= 120 else [results, costs]:
        table = Table()
        table.add_column("algorithm", no_wrap=True)
        for header in columns:
            table.add_column(header, justify="right", no_wrap=True)
        for row in rows:
            table.add_row(label(row), *(column(row) for column in columns.values()))
        console.print(table)
    worst = max(row.accuracy.mean * (1 - row.accuracy.mean) for row in rows)
    error = 100 * (worst / test_samples) ** 0.5 if test_samples else float("nan")
    spread = f"mean ± standard deviation over {most_seeds} seeds" if most_seeds > 1 else "one seed"
    console.print(
        f"{spread}. With {test_samples:,} test samples an accuracy is uncertain by up to ±{error:.1f} points "
        "(one standard error) whatever the seeds say; differences of that size may be luck.\n"
        "MB: traffic of the whole run, all participants. gradients: minibatch gradients of the whole run. "
        "deviation: of the global model's accuracy on each client's own data; in brackets what chance alone "
        "gives for clients this small.",
        highlight=False,
    )


def _print_trials(
    found: Sequence[Trial], plan: Plan, config: Path, seed: int | None, assignments: Sequence[str]
) -> None:
    table = Table(title_justify="left")
    for header in (*plan.grid, f"accuracy %\n({plan.metric})", "rounds", "state", "run folder"):
        table.add_column(header, justify="left" if header in {"state", "run folder"} else "right")
    for trial in found:
        value = "–" if trial.value is None else f"{100 * trial.value:.2f}"
        values = [assigned.partition("=")[2] for assigned in trial.assignments]
        table.add_row(*values, value, str(trial.rounds), trial.state, trial.folder.name)
    console.print(table)
    if not found or found[0].state != "complete":
        raise DivergedError(
            "no trial ran to its end; add smaller values of training.lr to the grid or set clip"
        )
    seeded = [] if seed is None else [f"training.seed={seed}"]
    best = [*assignments, *seeded, *found[0].assignments]
    line = " ".join(f"--set {shlex.quote(each)}" for each in best)
    console.print("best:", highlight=False)
    console.print(
        f"flatfed run {shlex.quote(str(config))} {line}", highlight=False, markup=False, soft_wrap=True
    )


def main() -> None:
    app()
