"""What clients with a single class cost: numbers too small for full precision.

    python benchmarks/one_class.py [--rounds 40]

A client that has learnt its only class is so sure of it that its slopes are tiny, and processors are slow at
numbers below the smallest normal one. Local training counts them as zero. Timed are rounds of clients with
one class and with all, with that and without it, in turn; ratios are to clients with all classes.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from unittest.mock import patch

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor, nn

import flatfed as ff

CLIENTS, SAMPLES, CLASSES, FEATURES = 10, 256, 10, 784
REPEATS = 3
WARM_UP = 5


def federation(one_class: bool) -> ff.Federation:
    """A noisy image for each class, brighter in some samples than in others."""
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(CLASSES, FEATURES, generator=generator)

    def client(number: int) -> tuple[Tensor, Tensor]:
        targets = torch.arange(SAMPLES) % CLASSES
        if one_class:
            targets = torch.full_like(targets, number % CLASSES)
        noise = 0.3 * torch.randn(SAMPLES, FEATURES, generator=generator)
        brightness = 2 * torch.rand(SAMPLES, 1, generator=generator)
        return brightness * (images[targets] + noise).clamp(0, 1), targets

    return ff.Federation.from_tensors([client(number) for number in range(CLIENTS)])


def seconds_a_round(one_class: bool, rounds: int) -> float:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(FEATURES, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, CLASSES)
    )
    training = ff.Training(
        rounds=rounds + WARM_UP, participants=CLIENTS, local_steps=10, batch_size=128, lr=0.5
    )
    run = ff.train(ff.Task(model, federation(one_class)), ff.fedavg(), training)
    return statistics.median(line["seconds"] for line in run.history[WARM_UP:])


def kept(function: Callable[[], float]) -> float:
    """With tiny numbers as they are."""
    with patch("torch.set_flush_denormal", lambda on: False):
        return function()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    ways: dict[str, Callable[[bool], float]] = {
        "as they are": lambda one_class: kept(lambda: seconds_a_round(one_class, rounds)),
        "as zero": lambda one_class: seconds_a_round(one_class, rounds),
    }
    times: dict[tuple[str, bool], list[float]] = {}
    for _ in track(range(REPEATS), "in turn", console=Console(stderr=True)):
        for name, way in ways.items():
            for one_class in (False, True):
                times.setdefault((name, one_class), []).append(way(one_class))
    table = Table("tiny numbers", "all classes, ms", "one class, ms", "ratio")
    for name in ways:
        every, one = (min(times[name, one_class]) for one_class in (False, True))
        table.add_row(name, f"{1e3 * every:.1f}", f"{1e3 * one:.1f}", f"{one / every:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
