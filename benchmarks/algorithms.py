"""What a round of every algorithm costs beside its gradient evaluations times a round of FedAvg.

    python benchmarks/algorithms.py [NAME …] [--rounds 20] [--tasks mlp lenet5 cnn]

The work is that of benchmarks/peers, but with so few clients that all have taken part before timing begins:
a client's state takes longer to write when it is new, which a long run does not notice. An algorithm and
FedAvg take turns round by round, so that a machine that is slow for a while is slow for both, and the median
of the ratios of such pairs is reported. FedSynSAM and DynaFed distil one image a class in their first rounds,
which are not timed; what DynaFed's server does in every round is said to be the server's, not the clients'.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from work import PARTICIPANTS, RATE, TASKS

import flatfed as ff

CLIENTS = 2 * PARTICIPANTS
WARM_UP = 8
DISTILLED = {"warm_rounds": 2, "samples_per_class": 1, "iterations": 1, "span": 1}
OPTIONS: dict[str, dict[str, Any]] = {"fedsynsam": DISTILLED}
OWN_WORK = ("dynafed", "dynafed_syn_only")
"""Their server trains on made-up images in every round."""


class Turns:
    """Lets two threads go on in turn."""

    def __init__(self) -> None:
        self._semaphores = threading.Semaphore(1), threading.Semaphore(0)

    def wait(self, number: int) -> None:
        self._semaphores[number].acquire()

    def done(self, number: int, turns: int = 1) -> None:
        self._semaphores[1 - number].release(turns)


def measure(task_name: str, name: str, rounds: int) -> tuple[float, float]:
    """The median ratio of a round to FedAvg's before it, and gradient evaluations per local step."""
    work, turns = TASKS[task_name], Turns()
    training = ff.Training(
        rounds=rounds + WARM_UP,
        participants=PARTICIPANTS,
        local_steps=work.steps,
        batch_size=work.batch,
        lr=RATE / 10,
    )

    def train(number: int, algorithm: ff.Algorithm) -> tuple[list[float], float]:
        seconds: list[float] = []
        began = 0.0

        def tick(progress: ff.Progress) -> None:
            nonlocal began
            seconds.append(time.perf_counter() - began)
            turns.done(number)
            if progress.round < rounds + WARM_UP:
                turns.wait(number)
            began = time.perf_counter()

        federation = ff.Federation.from_tensors([work.client(client) for client in range(CLIENTS)])
        turns.wait(number)
        began = time.perf_counter()
        try:
            run = ff.train(ff.Task(work.model(), federation), algorithm, training, callbacks=[tick])
        finally:
            # Nobody waits for one that has ended, however it did.
            turns.done(number, rounds + WARM_UP)
        return seconds[WARM_UP:], run.history[-1]["gradient_evaluations"] / (PARTICIPANTS * work.steps)

    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(train, 0, ff.fedavg())
        own = pool.submit(train, 1, ff.ALGORITHMS[name](**OPTIONS.get(name, {})))
        seconds, evaluations = own.result()
        ratios = [mine / its for mine, its in zip(seconds, plain.result()[0], strict=True)]
    return statistics.median(ratios), evaluations


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tasks", nargs="+", default=["mlp", "lenet5", "cnn"], choices=list(TASKS))
    options = parser.parse_args()
    if unknown := set(options.names) - set(ff.ALGORITHMS):
        parser.error(f"unknown algorithms: {', '.join(sorted(unknown))}")
    names = [name for name in options.names or ff.ALGORITHMS if name not in OWN_WORK]
    measured: dict[tuple[str, str], tuple[float, float]] = {}
    cells = list(itertools.product(options.tasks, names))
    for task, name in track(cells, "algorithms in turn", console=Console(stderr=True)):
        measured[task, name] = measure(task, name, options.rounds)
    table = Table(title="a round / (gradient evaluations × FedAvg's round)", title_justify="left")
    for header in ("algorithm", "evaluations a step", *options.tasks):
        table.add_column(header, justify="left" if header == "algorithm" else "right")
    for name in names:
        ratios = [
            f"{ratio / evaluations:.2f}"
            for ratio, evaluations in (measured[task, name] for task in options.tasks)
        ]
        table.add_row(name, f"{measured[options.tasks[0], name][1]:g}", *ratios)
    Console().print(table)


if __name__ == "__main__":
    main()
