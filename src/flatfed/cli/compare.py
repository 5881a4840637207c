"""Several algorithms on the same data: compare and demo."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.panel import Panel
from rich.table import Table

from flatfed.cli.report import end_with_report
from flatfed.cli.run import run_labelled
from flatfed.cli.terminal import (
    RUNS,
    AsJson,
    Assignments,
    RayAddress,
    Root,
    Tracking,
    check_damage,
    command,
    console,
    on_ray,
    print_json,
    tell,
)
from flatfed.core.errors import DivergedError, FlatfedError, printable

if TYPE_CHECKING:
    from flatfed.runs.compare import Contestant, Row
    from flatfed.runs.statistics import ClientRow


@command
def compare_(
    algorithms: Annotated[
        list[str], typer.Argument(metavar="ALGORITHM…", help="e.g. fedavg fedsam:radius=0.05,lr=0.2")
    ],
    config: Annotated[
        Path | None, typer.Option(help="A TOML file or my_task.py:make; the demo's setting if not given.")
    ] = None,
    assignments: Assignments = None,
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = 3,
    target: Annotated[
        float | None, typer.Option(min=0, max=1, help="Accuracy to count rounds to; the demo's if not given.")
    ] = None,
    runs: Root = RUNS,
    ray_address: RayAddress = None,
    tensorboard: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Run several algorithms on the same data, clients and batches."""
    from flatfed.core.algorithm import COMMON
    from flatfed.runs.compare import DEMO, Contestant
    from flatfed.training.config import Config, with_assignments

    for assignment in assignments or []:
        table, _, key = assignment.partition("=")[0].strip().partition(".")
        common = table == "algorithm" and key.partition(".")[0] in COMMON
        if (table == "algorithm" and not common) or (table, key) == ("training", "seed"):
            raise FlatfedError(
                f"--set {assignment}: name the algorithms and their options as arguments, and use --seeds"
            )
    contestants = [Contestant.parse(text) for text in algorithms]
    changes = [*(assignments or []), *on_ray(ray_address)]
    if config is None:
        setting = with_assignments(DEMO.setting, changes)
    else:
        setting = Config.read(config, changes).model_dump(exclude_unset=True)
    target = DEMO.target if target is None else target
    run_comparison(setting, contestants, range(seeds), target, runs, tensorboard, as_json)


@command
def demo(
    runs: Root = RUNS / "demo",
    rounds: Annotated[int | None, typer.Option(help="Rounds of each run, instead of 100.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds, instead of 3.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare FedAvg with the papers' methods on handwritten digits (about a minute)."""
    from flatfed.runs.compare import DEMO
    from flatfed.training.config import with_assignments

    seeds = DEMO.seeds if seeds is None else seeds
    rounds = DEMO.setting["training"]["rounds"] if rounds is None else rounds
    base = with_assignments(DEMO.setting, [f"training.rounds={rounds}"])
    console.print(
        Panel(
            "1,442 handwritten digits, split over 100 clients so unevenly that most see two to four classes "
            f"(Dirichlet 0.1).\nIn each of {rounds} rounds 10 clients train for 10 steps. Every method runs "
            f"under {seeds} seed{'s' if seeds > 1 else ''} with the same clients and batches, at a step size "
            "tuned on other seeds, by their test accuracy.",
            title="flatfed demo",
            width=min(console.width, 110),
        )
    )
    run_comparison(base, DEMO.contestants, range(seeds), DEMO.target, runs, as_json=as_json)


def run_comparison(
    base: Mapping[str, Any],
    contestants: Sequence[Contestant],
    seeds: Sequence[int],
    target: float,
    runs: Path,
    tensorboard: Path | None = None,
    as_json: bool = False,
) -> None:
    """Runs what is missing, prints the table and writes the report."""
    from flatfed.core.tree import first_leaf
    from flatfed.runs.compare import check_comparable, summarise
    from flatfed.runs.files import check_replaceable

    # Everything is checked before anything runs.
    labelled = [
        (contestant.label, [contestant.config(base, seed) for seed in seeds]) for contestant in contestants
    ]
    task = labelled[0][1][0].make_task()
    check_comparable(task)
    rounds = base.get("training", {}).get("rounds", 0) * len(contestants) * len(seeds)
    check_replaceable(runs / "report.html")
    finished, damaged = run_labelled(labelled, runs, rounds, tensorboard)
    rows = [
        summarise(label, configs[0].training.lr, folders, target)
        for (label, configs), folders in zip(labelled, finished, strict=True)
        if folders
    ]
    if not rows:
        check_damage(len(damaged))
        raise DivergedError("no run was left to compare; lower lr or set clip")
    assert task.federation.test is not None
    if as_json:
        print_json({"target": target, "algorithms": [asdict(row) for row in rows], "folder": str(runs)})
    else:
        _print_rows(rows, target, len(first_leaf(task.federation.test[0])))
    tell(f"Run folders: {runs}")
    end_with_report(labelled, runs, damaged, targets=[target])
    check_damage(len(damaged))


def _print_rows(rows: Sequence[Row], target: float, test_samples: int) -> None:
    most_seeds = max(row.seeds for row in rows)

    def label(row: Row) -> str:
        name = printable(row.label)
        return name if row.seeds == most_seeds else f"{name} ({row.seeds} of {most_seeds} seeds)"

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
    wide = 120
    if any(row.client_tests for row in rows):
        wide = 165
        results |= {
            "clients'\ntests %": lambda row: row.client_tests.mean.text(1, 100) if row.client_tests else "–",
            "their deviation\n% (chance)": lambda row: _deviation(row.client_tests),
        }
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
        "gives for clients this small. clients' tests: the mean over clients on test samples like their own."
    )


def _deviation(row: ClientRow | None) -> str:
    return row.deviation_text if row else "–"
