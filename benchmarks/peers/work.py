"""The same work for every framework: five models, made-up clients, and who takes part when.

Each client has exactly one batch of samples and takes all its steps on it, so that no framework's order of
samples matters; the cohorts are given. Needs torch alone, as the peers live in environments of their own.
"""

from __future__ import annotations

import functools
import itertools
import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLIENTS, PARTICIPANTS, WARM_UP = 100, 10, 3
RATE = 0.05


class CharacterLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 100, 2, batch_first=True)
        self.classifier = nn.Linear(100, 80)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(self.lstm(self.embedding(inputs))[0][:, -1])


def convolutional(first: int, second: int, *widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, filters in ((3, first), (first, second)):
        layers += [nn.Conv2d(channels, filters, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    sizes = [second * 25, *widths]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


@dataclass(frozen=True)
class Task:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int
    classes: int = 10
    characters: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    @functools.cache  # noqa: B019 (one object lives as long as the process)
    def client(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + number)
        targets = torch.randint(self.classes, (self.batch,), generator=generator)
        if self.characters:
            return torch.randint(80, (self.batch, *self.shape), generator=generator), targets
        return torch.randn(self.batch, *self.shape, generator=generator), targets


TASKS = {
    "logistic": Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), (784,), 48, 10),
    "mlp": Task(lambda: nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)), (784,), 128, 10),
    "lenet5": Task(lambda: convolutional(6, 16, 120, 84), (3, 32, 32), 50, 5),
    "cnn": Task(lambda: convolutional(64, 64, 384, 192), (3, 32, 32), 50, 2),
    "lstm": Task(CharacterLSTM, (80,), 100, 2, classes=80, characters=True),
}


def final_loss(task: Task, model: nn.Module) -> float:
    """The mean loss over all clients, by which everybody is seen to have done the same."""
    with torch.no_grad():
        clients = map(task.client, range(CLIENTS))
        losses = [F.cross_entropy(model(inputs), targets) for inputs, targets in clients]
    return float(torch.stack(losses).mean())


class Stopwatch:
    """Seconds between rounds, without the first few."""

    def __init__(self) -> None:
        self.ends = [time.perf_counter()]

    def tick(self) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        lengths = [after - before for before, after in itertools.pairwise(self.ends)]
        return lengths[WARM_UP:]


def report(task: Task, model: nn.Module, watch: Stopwatch, **more: Any) -> None:
    result = {"seconds": watch.seconds, "loss": final_loss(task, model), **more}
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")


def asked() -> tuple[Task, list[list[int]], list[str]]:
    """The task, the cohort of every round and further arguments, from the command line."""
    name, cohorts, *more = sys.argv[1:]
    return TASKS[name], json.loads(Path(cohorts).read_text()), more
