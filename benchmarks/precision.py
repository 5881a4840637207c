"""What bfloat16 gains on this machine, and what it costs in accuracy.

    python benchmarks/precision.py speed [--tasks mlp cnn] [--busy]
    python benchmarks/precision.py accuracy [--seeds 3]      # Fashion-MNIST and CIFAR-10 in $FLATFED_DATA

Speed: rounds of FedAvg in both precisions take turns in one process, so that both see the same
machine; the ratio is that of the best rounds, beside the median of the ratios of neighbouring rounds.
Accuracy: the same seeds, splits and first weights in both precisions.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from machine import StealTime, processor_name, refuse_unless_idle
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from work import CLIENTS, PARTICIPANTS, TASKS, Task

import flatfed as ff
from flatfed.runs.train import run_config
from flatfed.training.config import Config

PRECISIONS = ("float32", "bfloat16")
ROUNDS = {"logistic": 60, "mlp": 40, "lenet5": 25, "cnn": 12, "lstm": 8, "resnet18": 3, "vit": 3}
WARM_UP = 2
DATA_CONFIGS: dict[str, dict[str, Any]] = {
    "Fashion-MNIST, MLP": {
        "data": {"dataset": "fashion_mnist", "clients": 100},
        "model": {"name": "mlp", "hidden": [200]},
        "training": {"rounds": 40, "participation": 0.1, "local_steps": 20, "batch_size": 50, "lr": 0.1},
    },
    "CIFAR-10, LeNet-5": {
        "data": {"dataset": "cifar10", "clients": 100},
        "model": {"name": "lenet5"},
        "training": {"rounds": 40, "participation": 0.1, "local_steps": 20, "batch_size": 50, "lr": 0.05},
    },
}
console = Console(width=120)


class Turns:
    """Lets two trainings, each in a thread of its own, do one round after the other in turn."""

    def __init__(self) -> None:
        self._turn, self._lock = 0, threading.Condition()
        self._left: set[int] = set()

    def wait(self, own: int) -> None:
        with self._lock:
            self._lock.wait_for(lambda: self._turn == own or 1 - own in self._left)

    def pass_on(self, own: int) -> None:
        with self._lock:
            self._turn = 1 - own
            self._lock.notify_all()

    @contextmanager
    def taking_part(self, own: int) -> Iterator[None]:
        try:
            yield
        finally:
            with self._lock:
                self._left.add(own)
                self._lock.notify_all()


def seconds_of_rounds(task: Task, rounds: int) -> dict[str, list[float]]:
    """By precision, those of FedAvg's rounds after the first few."""
    turns, seconds = Turns(), {precision: list[float]() for precision in PRECISIONS}
    errors: list[BaseException] = []

    def train(own: int, precision: str) -> None:
        began = 0.0

        def after_round(progress: ff.Progress) -> None:
            nonlocal began
            seconds[precision].append(time.perf_counter() - began)
            turns.pass_on(own)
            turns.wait(own)
            began = time.perf_counter()

        federation = ff.Federation.from_tensors([task.client(number) for number in range(CLIENTS)])
        training = ff.Training(
            rounds=rounds + WARM_UP,
            participants=PARTICIPANTS,
            local_steps=task.steps,
            batch_size=task.batch,
            lr=task.rate,
            precision=precision,
        )
        with turns.taking_part(own):
            try:
                turns.wait(own)
                ff.train(ff.Task(models[own], federation), ff.fedavg(), training, callbacks=[after_round])
            except BaseException as error:  # raised again by the caller
                errors.append(error)

    models = [task.model() for _ in PRECISIONS]
    threads = [threading.Thread(target=train, args=pair) for pair in enumerate(PRECISIONS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return {precision: times[WARM_UP:] for precision, times in seconds.items()}


def speed(names: list[str], busy: bool) -> None:
    if not busy:
        refuse_unless_idle()
    steal = StealTime()
    console.print("| model | float32, ms | bfloat16, ms | best / best | median of neighbours |")
    console.print("|---|---|---|---|---|")
    for name in names:
        exact, reduced = seconds_of_rounds(TASKS[name], ROUNDS[name]).values()
        ratios = [one / other for one, other in zip(exact, reduced, strict=True)]
        console.print(
            f"| {name} | {1000 * min(exact):.1f} | {1000 * min(reduced):.1f} "
            f"| {min(exact) / min(reduced):.2f} | {statistics.median(ratios):.2f} |"
        )
    console.print(f"{processor_name()}, {ff.Execution().workers or 'all'} cores; steal {steal.share():.1%}")


def accuracy(seeds: int) -> None:
    console.print("| task | seed | float32 | bfloat16 | seconds of training |")
    console.print("|---|---|---|---|---|")
    for name, values in DATA_CONFIGS.items():
        differences = []
        for seed in range(seeds):
            ends, spent = [], []
            for precision in PRECISIONS:
                training = {**values["training"], "seed": seed, "precision": precision, "evaluate_every": 5}
                partition = {"name": "dirichlet_client", "concentration": 0.3}
                config = Config.checked(
                    {**values, "algorithm": {"name": "fedavg"}, "partition": partition, "training": training}
                )
                run = run_config(config)
                ends.append(
                    statistics.fmean(run.history[-1 - 5 * back]["test_accuracy"] for back in range(3))
                )
                spent.append(sum(line["seconds"] for line in run.history))
            differences.append(ends[1] - ends[0])
            console.print(
                f"| {name} | {seed} | {ends[0]:.2%} | {ends[1]:.2%} | {spent[0]:.0f}, {spent[1]:.0f} |"
            )
        spread = statistics.stdev(differences) if seeds > 1 else float("nan")
        console.print(
            f"{name}: bfloat16 − float32 {statistics.fmean(differences):+.2%}, deviation {spread:.2%}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["speed", "accuracy"])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--busy", action="store_true", help="measure although others use the machine")
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    if asked.what == "speed":
        speed(asked.tasks, asked.busy)
    else:
        warnings.simplefilter("ignore", ff.FlatfedWarning)
        accuracy(asked.seeds)


if __name__ == "__main__":
    main()
