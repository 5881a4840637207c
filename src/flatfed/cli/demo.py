"""A first comparison: demo."""

from typing import Annotated

import typer
from rich.panel import Panel

from flatfed.cli.compare import run_comparison
from flatfed.cli.terminal import RUNS, Root, command, console
from flatfed.runs.compare import DEMO
from flatfed.training.config import with_assignments


@command
def demo(
    runs: Root = RUNS / "demo",
    rounds: Annotated[int, typer.Option(help="Rounds of each run.")] = DEMO.setting["training"]["rounds"],
    seeds: Annotated[int, typer.Option(min=1, help="How many seeds.")] = DEMO.seeds,
) -> None:
    """Compare FedAvg with the papers' methods on handwritten digits (about a minute)."""
    base = with_assignments(DEMO.setting, [f"training.rounds={rounds}"])
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
    run_comparison(base, DEMO.contestants, range(seeds), DEMO.target, runs)
