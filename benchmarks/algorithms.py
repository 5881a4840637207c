"""What a round of every algorithm costs beside its gradient evaluations times a round of FedAvg.

    python benchmarks/algorithms.py [NAME …] [--rounds 6] [--repeats 3] [--tasks mlp lenet5 cnn]

The work is that of benchmarks/peers. Algorithms take turns, FedAvg before each, and the best rounds are
compared. FedSynSAM and DynaFed distil one image a class in their first rounds, which are not timed; what
DynaFed's server does in every round is said to be the server's, not the clients'.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from work import CLIENTS, PARTICIPANTS, RATE, TASKS, WARM_UP, Stopwatch

import flatfed as ff

DISTILLED = {"warm_rounds": 2, "samples_per_class": 1, "iterations": 1, "span": 1}
OPTIONS: dict[str, dict[str, Any]] = {"fedsynsam": DISTILLED}
OWN_WORK = ("dynafed", "dynafed_syn_only")
"""Their server trains on made-up images in every round."""


def measure(task_name: str, name: str, rounds: int) -> tuple[float, float]:
    """The best round's seconds, and gradient evaluations per local step."""
    task, watch = TASKS[task_name], Stopwatch()
    run = ff.train(
        task.model(),
        ff.Federation.from_tensors([task.client(number) for number in range(CLIENTS)]),
        ff.ALGORITHMS[name](**OPTIONS.get(name, {})),
        rounds=rounds + WARM_UP,
        participants=PARTICIPANTS,
        local_steps=task.steps,
        batch_size=task.batch,
        lr=RATE / 10,
        callbacks=[lambda progress: watch.tick()],
    )
    evaluations = run.history[-1]["gradient_evaluations"] / (PARTICIPANTS * task.steps)
    return min(watch.seconds), evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=["mlp", "lenet5", "cnn"], choices=list(TASKS))
    options = parser.parse_args()
    if unknown := set(options.names) - set(ff.ALGORITHMS):
        parser.error(f"unknown algorithms: {', '.join(sorted(unknown))}")
    names = [name for name in options.names or ff.ALGORITHMS if name not in OWN_WORK]
    turns = list(itertools.product(options.tasks, names, range(options.repeats)))
    seconds: dict[tuple[str, str], list[float]] = {}
    beside: dict[tuple[str, str], list[float]] = {}
    evaluations: dict[tuple[str, str], float] = {}
    for task, name, _ in track(turns, "algorithms in turn", console=Console(stderr=True)):
        plain, _ = measure(task, "fedavg", options.rounds)
        own, evaluations[task, name] = measure(task, name, options.rounds)
        seconds.setdefault((task, name), []).append(own)
        beside.setdefault((task, name), []).append(plain)
    table = Table(title="best round / (gradient evaluations × FedAvg's best round)", title_justify="left")
    for header in ("algorithm", "evaluations a step", *options.tasks):
        table.add_column(header, justify="left" if header == "algorithm" else "right")
    for name in names:
        ratios = [
            f"{min(seconds[task, name]) / (evaluations[task, name] * min(beside[task, name])):.2f}"
            for task in options.tasks
        ]
        table.add_row(name, f"{evaluations[options.tasks[0], name]:g}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
