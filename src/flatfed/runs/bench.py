"""How fast the engine is on this machine, beside a loop written by hand, on made-up clients or a task.

The loop takes the same batches, so that it does the same work and must end with the same loss.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.flat import Loss
from flatfed.core.outputs import judged
from flatfed.core.sampling import batches, cohort
from flatfed.core.settings import Precision, Training
from flatfed.core.tree import call
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
    """One of the models above on made-up clients."""
    training = Training(
        rounds=rounds,
        participants=PARTICIPANTS,
        local_steps=workload.steps,
        batch_size=workload.batch,
        lr=RATE,
        precision=precision,
    )
    task = Task(workload.make_model(), Federation.from_tensors(workload.clients()))
    return measure_task(task, training, Execution(device=device), rounds, tick)


def measure_task(
    task: Task, training: Training, execution: Execution, rounds: int, tick: Callable[[], None]
) -> Measured:
    """FedAvg's rounds on a task, with a training's local work, by the engine and by the loop.

    They take turns, so that both see the same machine.
    """
    training = plain_training(training, rounds)
    where = usable_device(execution.device)
    loop_model, federation = copy.deepcopy(task.model).to(where), task.federation.to(where)
    loop = loop_rounds(loop_model, task.loss, federation, training)
    threads = torch.get_num_threads()
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

    run = train(task, Algorithm(), training, execution, callbacks=[turn], progress=False)
    return Measured(
        path=run.path,
        reason=run.path_reason,
        parameters=sum(parameter.numel() for parameter in _trained(loop_model)),
        seconds=min(seconds[WARM_UP:]),
        loop_seconds=min(loop_seconds[WARM_UP:]),
        loss=mean_loss(run.model.to(where), task.loss, federation),
        loop_loss=mean_loss(loop_model, task.loss, federation),
    )


def plain_training(training: Training, rounds: int) -> Training:
    """A training's participants and local work, and nothing that the loop does not do."""
    kept = (
        "participation", "participants", "sampling", "local_epochs", "local_steps", "batch_size", "lr",
        "precision", "path", "seed",
    )  # fmt: skip
    settings = {name: getattr(training, name) for name in kept}
    return Training(rounds=rounds + WARM_UP, evaluate_every=rounds + WARM_UP, **settings)


def tolerance(precision: Precision) -> float:
    """How far the losses may be apart: bfloat16 has three digits, and a matrix rounds them otherwise."""
    return 1e-3 if precision == "float32" else 2e-2


def loop_rounds(
    model: nn.Module, loss_of: Loss, federation: Federation, training: Training
) -> Iterator[float]:
    """FedAvg as one would write it down, round by round; yields their seconds."""
    parameters, device = _trained(model), federation.client(0).device
    averaged = [*parameters, *(buffer for buffer in model.buffers() if buffer.is_floating_point())]
    model.train()
    for number in range(training.rounds):
        members = cohort(training, len(federation), number)
        seconds = 0.0
        received = [tensor.detach().clone() for tensor in averaged]
        total = [torch.zeros_like(tensor) for tensor in averaged]
        for client in members:
            steps = list(_steps(federation, training, client, number))  # one client's at a time in memory
            began = time.perf_counter()
            _set(averaged, received)
            optimizer = torch.optim.SGD(parameters, lr=training.lr)
            for inputs, targets in steps:
                optimizer.zero_grad()
                with torch.enable_grad():
                    with computing_in(training.precision, device):
                        loss = judged(loss_of, call(model, inputs), targets)
                    loss.backward()
                optimizer.step()
            for whole, tensor in zip(total, averaged, strict=True):
                whole.add_(tensor.detach())
            wait_for(device)
            seconds += time.perf_counter() - began
        _set(averaged, [whole / len(members) for whole in total])
        yield seconds


def _steps(federation: Federation, training: Training, client: int, number: int) -> Iterator[Samples]:
    """A client's batches of a round, as the model sees them."""
    data = federation.client(client)
    seen: dict[bool, Samples] = {}
    for positions in batches(training, len(data), number, client):
        every = len(positions) == len(data)
        if not every or not seen:
            inputs, targets = data.whole() if every else data.batch(positions.to(data.device))
            seen[every] = federation.transform.evaluate(inputs), targets
        yield seen[every]


def _trained(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@torch.no_grad()
def _set(tensors: list[Tensor], values: list[Tensor]) -> None:
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)


@torch.no_grad()
def mean_loss(model: nn.Module, loss_of: Loss, federation: Federation) -> float:
    """Over some clients' samples, in evaluation mode."""
    model.eval()
    losses = []
    for client in range(min(PARTICIPANTS, len(federation))):
        inputs, targets = federation.client(client).whole()
        losses.append(judged(loss_of, call(model, federation.transform.evaluate(inputs)), targets))
    return float(torch.stack(losses).mean())
