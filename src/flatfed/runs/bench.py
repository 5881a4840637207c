"""How fast the engine is on this machine, beside a loop written by hand, on made-up clients.

Every client has one batch, on which it takes all its steps, so that the loop does the same work and must end
with the same loss.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.sampling import cohort
from flatfed.core.settings import Precision, Training
from flatfed.core.tree import moved
from flatfed.data.federation import Federation
from flatfed.data.samples import Samples
from flatfed.engines.devices import usable_device, wait_for
from flatfed.engines.execution import Execution
from flatfed.engines.precision import computing_in
from flatfed.models import MODELS
from flatfed.runs.train import train
from flatfed.training.loop import Progress
from flatfed.training.task import Task

CLIENTS, PARTICIPANTS, WARM_UP, RATE = 100, 10, 2, 0.05


@dataclass(frozen=True)
class Workload:
    """A model, and how a client trains it."""

    model: str
    options: dict[str, Any]
    shape: tuple[int, ...]
    batch: int
    steps: int
    classes: int = 10

    def make_model(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return MODELS[self.model](self.shape, self.classes, **self.options)

    def clients(self) -> list[Samples]:
        return [self._client(torch.Generator().manual_seed(number)) for number in range(CLIENTS)]

    def _client(self, generator: torch.Generator) -> Samples:
        targets = torch.randint(self.classes, (self.batch,), generator=generator)
        if self.model == "char_lstm":
            return torch.randint(self.classes, (self.batch, *self.shape), generator=generator), targets
        return torch.randn(self.batch, *self.shape, generator=generator), targets


WORKLOADS = {
    "logistic regression": Workload("logistic_regression", {}, (784,), 48, 10),
    "MLP": Workload("mlp", {"hidden": [200]}, (784,), 128, 10),
    "LeNet-5": Workload("lenet5", {}, (3, 32, 32), 50, 5),
    "FedDyn CNN": Workload("feddyn_cnn", {}, (3, 32, 32), 50, 2),
    "character LSTM": Workload("char_lstm", {}, (80,), 100, 2, classes=80),
}


@dataclass(frozen=True)
class Measured:
    """Seconds of the best round, of the engine and of the loop, and how each ended."""

    path: str
    reason: str
    parameters: int
    seconds: float
    loop_seconds: float
    loss: float
    loop_loss: float


def measure(
    workload: Workload,
    rounds: int,
    tick: Callable[[], None],
    precision: Precision = "float32",
    device: str = "cpu",
) -> Measured:
    """The engine's rounds and the loop's take turns, so that both see the same machine."""
    training = Training(
        rounds=rounds + WARM_UP,
        participants=PARTICIPANTS,
        local_steps=workload.steps,
        batch_size=workload.batch,
        lr=RATE,
        evaluate_every=rounds + WARM_UP,
        precision=precision,
    )
    clients = workload.clients()
    where = usable_device(device)
    loop_model = workload.make_model().to(where)
    loop, threads = loop_rounds(loop_model, moved(clients, where), training), torch.get_num_threads()
    seconds: list[float] = []
    loop_seconds: list[float] = []
    before = time.perf_counter()

    def turn(progress: Progress) -> None:
        nonlocal before
        seconds.append(time.perf_counter() - before)
        # The loop has torch's own threads, which the engine switches off for its workers.
        torch.set_num_threads(threads)
        loop_seconds.append(next(loop))
        torch.set_num_threads(1)
        tick()
        before = time.perf_counter()

    task = Task(workload.make_model(), Federation.from_tensors(clients))
    execution = Execution(device=device)
    run = train(task, Algorithm(), training, execution, callbacks=[turn], progress=False)
    return Measured(
        path=run.path,
        reason=run.path_reason,
        parameters=sum(parameter.numel() for parameter in loop_model.parameters()),
        seconds=min(seconds[WARM_UP:]),
        loop_seconds=min(loop_seconds[WARM_UP:]),
        loss=mean_loss(run.model, clients),
        loop_loss=mean_loss(loop_model.cpu(), clients),
    )


def tolerance(precision: Precision) -> float:
    """How far the losses may be apart: bfloat16 has three digits, and a matrix rounds them otherwise."""
    return 1e-3 if precision == "float32" else 2e-2


def loop_rounds(model: nn.Module, clients: list[Samples], training: Training) -> Iterator[float]:
    """FedAvg as one would write it down, round by round; yields their seconds."""
    parameters = list(model.parameters())
    for number in range(training.rounds):
        began = time.perf_counter()
        members = cohort(training, len(clients), number)
        received = [parameter.detach().clone() for parameter in parameters]
        total = [torch.zeros_like(parameter) for parameter in parameters]
        for client in members:
            _set(parameters, received)
            optimizer = torch.optim.SGD(parameters, lr=training.lr)
            inputs, targets = clients[client]
            for _ in range(training.local_steps or 0):
                optimizer.zero_grad()
                with torch.enable_grad():
                    with computing_in(training.precision, inputs.device):
                        loss = F.cross_entropy(model(inputs), targets)
                    loss.backward()
                optimizer.step()
            for whole, parameter in zip(total, parameters, strict=True):
                whole.add_(parameter.detach())
        _set(parameters, [whole / len(members) for whole in total])
        wait_for(parameters[0].device)
        yield time.perf_counter() - began


@torch.no_grad()
def _set(parameters: list[nn.Parameter], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


@torch.no_grad()
def mean_loss(model: nn.Module, clients: list[Samples]) -> float:
    return float(torch.stack([F.cross_entropy(model(inputs), targets) for inputs, targets in clients]).mean())
