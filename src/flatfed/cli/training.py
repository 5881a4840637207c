"""Training: demo, run, resume, compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.panel import Panel
from rich.table import Table

from flatfed.algorithms import WIRE
from flatfed.cli.report import end_with_report
from flatfed.cli.terminal import (
    RUNS,
    Assignments,
    Root,
    Watcher,
    command,
    complain,
    console,
    describe_round,
    round_progress,
)
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.settings import Settings
from flatfed.runs.compare import Contestant, Row, compare, is_complete, run_folder
from flatfed.runs.demo import DEMO_BASE, DEMO_CONTESTANTS, DEMO_SEEDS, DEMO_TARGET
from flatfed.runs.folder import RunFolder, read_json
from flatfed.runs.statistics import ClientRow
from flatfed.training.callbacks import TensorBoard
from flatfed.training.config import Config, with_assignments
from flatfed.training.loop import Callback, Run

RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Train on this Ray cluster; auto finds one, local starts one here."),
]
Tracking = Annotated[
    Path | None,
    typer.Option("--tensorboard", metavar="FOLDER", help="Also write curves for TensorBoard there."),
]


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
    ray_address: RayAddress = None,
    tensorboard: Tracking = None,
) -> None:
    """Train what a config file describes."""
    checked = Config.read(config, [*(assignments or []), *_on_ray(ray_address)])
    _run(checked, folder or run_folder(checked, runs), tensorboard)


@command
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Go on to this many rounds.")] = None,
    ray_address: RayAddress = None,
    tensorboard: Tracking = None,
) -> None:
    """Go on with an interrupted run, to the same bits as if it had not been interrupted."""
    existing = RunFolder.existing(folder)
    values = read_json(existing.path / "config.json")
    if isinstance(values, dict) and "federation" in values:
        raise FlatfedError(f"{folder}: a federation's run; start its Flower app again with the same folder")
    if not isinstance(values, dict) or "data" not in values:
        raise FlatfedError(
            f"{folder}: made from Python, whose model and data are not in the folder; call flatfed.train "
            f"again with folder={str(folder)!r}"
        )
    changes = [f"training.rounds={rounds}"] if rounds is not None else []
    _run(Config.checked(with_assignments(values, [*changes, *_on_ray(ray_address)])), folder, tensorboard)


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
    ray_address: RayAddress = None,
    tensorboard: Tracking = None,
) -> None:
    """Run several algorithms on the same data, clients and batches."""
    base = dict(Config.read(config).model_dump(exclude_unset=True)) if config else DEMO_BASE
    for assignment in assignments or []:
        table, _, key = assignment.partition("=")[0].strip().partition(".")
        compressed = table == "algorithm" and key.partition(".")[0] in WIRE
        if (table == "algorithm" and not compressed) or (table, key) == ("training", "seed"):
            raise FlatfedError(
                f"--set {assignment}: name the algorithms and their options as arguments, and use --seeds"
            )
    contestants = [_contestant(text) for text in algorithms]
    setting = with_assignments(base, [*(assignments or []), *_on_ray(ray_address)])
    _compare(setting, contestants, range(seeds), target, runs, tensorboard)


def _on_ray(address: str | None) -> list[str]:
    """The assignments that move a training to a Ray cluster."""
    return [] if address is None else ["training.engine=ray", f"training.ray_address={address}"]


def _run(config: Config, folder: Path, tensorboard: Path | None) -> None:
    if is_complete(config, folder):
        console.print(f"{folder} is complete: {config.training.rounds} rounds.")
        return
    tracking = _tracking(tensorboard, folder)
    federation = config.make_federation()
    with round_progress() as progress:
        name = config.make_algorithm().name
        task = progress.add_task(name, total=config.training.rounds, note="", unit="rounds")
        finished = config.run(federation, folder, [Watcher(progress, task, before=0), *tracking])
    _report_run(finished, folder)


def _tracking(tensorboard: Path | None, folder: Path) -> list[Callback]:
    """Curves of several runs lie beside each other, under the names of their run folders."""
    return [TensorBoard(tensorboard / folder.name)] if tensorboard is not None else []


def _report_run(finished: Run, folder: Path) -> None:
    last = finished.history[-1]
    console.print(f"{finished.algorithm.name}: {last['round']} rounds, {describe_round(last)}")
    for name, spread in finished.client_spreads.items():
        console.print(
            f"clients' own {name} data: mean accuracy {spread.mean:.1%}, deviation between clients "
            f"{100 * spread.deviation:.1f} points; chance alone gives {100 * spread.chance:.1f}",
            highlight=False,
        )
    console.print(f"clients were trained by the {finished.path} path: {finished.path_reason}")
    console.print(f"run folder: {folder}")


def _contestant(text: str) -> Contestant:
    """`fedsam:radius=0.05,lr=0.2`: an algorithm, its options and its own training settings."""
    name, _, options = text.partition(":")
    values = with_assignments({}, [item for item in options.split(",") if item])
    if "seed" in values:
        raise FlatfedError(f"{text}: every algorithm runs under the same seeds; use --seeds")
    training = {key: values.pop(key) for key in list(values) if key in Settings.model_fields}
    return Contestant(text, {"algorithm": {"name": name, **values}, "training": training})


def _compare(
    base: Mapping[str, Any],
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    target: float,
    runs: Path,
    tensorboard: Path | None = None,
) -> None:
    failures: list[str] = []
    with round_progress() as progress:
        total = base["training"]["rounds"] if "training" in base and "rounds" in base["training"] else 0
        overall = progress.add_task(
            "all runs", total=total * len(contestants) * len(seeds), note="", unit="rounds"
        )

        def watch(contestant: Contestant, seed: int) -> Callback:
            tracking = _tracking(tensorboard, run_folder(contestant.config(base, seed), runs))
            return Watcher(progress, overall, f"{contestant.label}, seed {seed}: ", also=tracking)

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
    labels = {run_folder(each.config(base, seed), runs): each.label for each in contestants for seed in seeds}
    end_with_report(labels, runs / "report.html", targets=[target])


def _print_rows(rows: Sequence[Row], target: float, test_samples: int) -> None:
    most_seeds = max(row.seeds for row in rows)

    def label(row: Row) -> str:
        return row.label if row.seeds == most_seeds else f"{row.label} ({row.seeds} of {most_seeds} seeds)"

    def rounds(row: Row) -> str:
        if row.rounds_to_target is None:
            return "not reached"
        some = f" ({row.reached} of {row.seeds})" if row.reached < row.seeds else ""
        return row.rounds_to_target.text(0) + some

    results: dict[str, Callable[[Row], str]] = {
        "lr": lambda row: f"{row.lr:g}",
        "accuracy %": lambda row: row.accuracy.text(1, 100),
        f"rounds\nto {target:.0%}": rounds,
        "deviation between\nclients % (chance)": lambda row: _deviation(row.clients),
    }
    if any(row.client_tests for row in rows):
        results |= {
            "clients'\ntests %": lambda row: row.client_tests.mean.text(1, 100) if row.client_tests else "–",
            "their deviation\n% (chance)": lambda row: _deviation(row.client_tests),
        }
    wide = 165 if any(row.client_tests for row in rows) else 120
    costs: dict[str, Callable[[Row], str]] = {
        "MB down": lambda row: row.megabytes_down.text(1),
        "MB up": lambda row: row.megabytes_up.text(1),
        "gradients": lambda row: row.gradient_evaluations.text(0),
        "seconds": lambda row: row.seconds.text(1),
    }
    # A narrow terminal gets two tables rather than one that is cut off.
    for columns in [results | costs] if console.width >= wide else [results, costs]:
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
        "gives for clients this small. clients' tests: the mean over clients on test samples like their own.",
        highlight=False,
    )


def _deviation(row: ClientRow | None) -> str:
    return row.deviation_text if row else "–"
