"""The same work for every framework: seven models, made-up clients, and who takes part when.

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

CLIENTS, PARTICIPANTS = 100, 10
PRECISIONS = ("float32", "bfloat16")
RATE = 0.05


class CharacterLSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(80, 8)
        self.lstm = nn.LSTM(8, 100, 2, batch_first=True)
        self.classifier = nn.Linear(100, 80)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.classifier(self.lstm(self.embedding(inputs))[0][:, -1])


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10))


def convolutional(first: int, second: int, *widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for channels, filters in ((3, first), (first, second)):
        layers += [nn.Conv2d(channels, filters, 5), nn.ReLU(), nn.MaxPool2d(2)]
    layers.append(nn.Flatten())
    sizes = [second * 25, *widths]
    for before, after in itertools.pairwise(sizes):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 10))


class ResidualBlock(nn.Module):
    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.residual = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride, padding=1, bias=False), nn.GroupNorm(2, after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.GroupNorm(2, after)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if before != after:
            projection = nn.Conv2d(before, after, 1, stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.GroupNorm(2, after))

    def forward(self, inputs: Tensor) -> Tensor:
        return F.relu(self.residual(inputs) + self.shortcut(inputs))


def resnet18() -> nn.Module:
    """With GroupNorm and the stem for small images; 11,173,962 parameters."""
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1, bias=False), nn.GroupNorm(2, 64), nn.ReLU()]
    for before, after in itertools.pairwise([64, 64, 128, 256, 512]):
        stride = 1 if before == after else 2
        layers += [ResidualBlock(before, after, stride), ResidualBlock(after, after, 1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


class VisionTransformer(nn.Module):
    """Six layers of width 192 on 4x4 patches of 32x32 images, the mean of the patches classified."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 192, 4, 4)
        self.positions = nn.Parameter(0.02 * torch.randn(64, 192))
        layer = nn.TransformerEncoderLayer(192, 3, 768, 0.0, "gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 6, nn.LayerNorm(192), enable_nested_tensor=False)
        self.classifier = nn.Linear(192, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.positions
        return self.classifier(self.encoder(tokens).mean(1))


@dataclass(frozen=True)
class Task:
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int
    rounds: int
    """How many are measured, after those that are not."""
    warm_up: int = 3
    rate: float = RATE
    classes: int = 10
    characters: bool = False

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    @functools.cache  # noqa: B019 (one object lives as long as the process)
    def kept_model(self) -> nn.Module:
        return self.model()

    @functools.cache  # noqa: B019
    def client(self, number: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(1000 + number)
        targets = torch.randint(self.classes, (self.batch,), generator=generator)
        if self.characters:
            return torch.randint(80, (self.batch, *self.shape), generator=generator), targets
        return torch.randn(self.batch, *self.shape, generator=generator), targets


TASKS = {
    "logistic": Task(lambda: nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), (784,), 48, 10, 30),
    "mlp": Task(
        lambda: nn.Sequential(nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 10)), (784,), 128, 10, 15
    ),
    "lenet5": Task(lambda: convolutional(6, 16, 120, 84), (3, 32, 32), 50, 5, 10),
    "cnn": Task(lambda: convolutional(64, 64, 384, 192), (3, 32, 32), 50, 2, 5),
    "lstm": Task(CharacterLSTM, (80,), 100, 2, 3, classes=80, characters=True),
    "resnet18": Task(resnet18, (3, 32, 32), 10, 2, 2, warm_up=1, rate=0.005),
    "vit": Task(VisionTransformer, (3, 32, 32), 32, 2, 2, warm_up=1),
}
LARGE = {"resnet18", "vit"}


def final_loss(task: Task, model: nn.Module) -> float:
    """The mean loss of some clients, by which everybody is seen to have done the same."""
    with torch.no_grad():
        clients = map(task.client, range(PARTICIPANTS))
        losses = [F.cross_entropy(model(inputs), targets) for inputs, targets in clients]
    return float(torch.stack(losses).mean())


class Stopwatch:
    """Seconds between rounds, without the first few."""

    def __init__(self, warm_up: int) -> None:
        self.warm_up = warm_up
        self.ends = [time.perf_counter()]

    def tick(self) -> None:
        self.ends.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        lengths = [after - before for before, after in itertools.pairwise(self.ends)]
        return lengths[self.warm_up :]


def report(task: Task, model: nn.Module, watch: Stopwatch, **more: Any) -> None:
    versions = {"torch": torch.__version__, "threads": torch.get_num_threads()}
    result = {"seconds": watch.seconds, "loss": final_loss(task, model), **versions, **more}
    sys.stdout.write(f"RESULT {json.dumps(result)}\n")


def arguments() -> tuple[Task, list[list[int]], str, list[str]]:
    """The task, the cohort of every round, the precision and further arguments, from the command line."""
    name, cohorts, *more = sys.argv[1:]
    given = [word for word in more if word in PRECISIONS]
    others = [word for word in more if word not in PRECISIONS]
    return TASKS[name], json.loads(Path(cohorts).read_text()), (given or ["float32"])[0], others


def training_loss(
    model: Callable[[Tensor], Tensor], inputs: Tensor, targets: Tensor, precision: str
) -> Tensor:
    """The loss of a batch, computed as torch's autocast does it where that is asked for."""
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bfloat16"):
        return F.cross_entropy(model(inputs), targets)
