"""What diagnostics look at: a model, its clients' data, and the state from which its training would go on.

Losses here are the plain mean loss on stored data: evaluation mode (running statistics, no dropout), no
augmentation, no weight decay. They are measured in float32 whatever the precision of the training, because
bfloat16 would hide small differences; only what trains again does so as the run did.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.context import Carry, ClientContext, Finish
from flatfed.core.errors import FlatfedError, FlatfedWarning
from flatfed.core.part import Correction, Part
from flatfed.core.rounds import broadcast
from flatfed.core.settings import Training
from flatfed.core.state import State
from flatfed.core.tree import Tree, first_leaf, rows
from flatfed.data.federation import Federation
from flatfed.data.pooling import drawn, pooled_samples
from flatfed.data.samples import Samples
from flatfed.diagnostics.plain import read_plain
from flatfed.engines.chunks import chunks
from flatfed.engines.client_store import ClientStore
from flatfed.engines.engine import Engine
from flatfed.engines.evaluator import Evaluator, Snapshot
from flatfed.engines.execution import Execution
from flatfed.engines.planning import Plan
from flatfed.engines.server_loss import server_loss
from flatfed.engines.threads import WorkerThreads
from flatfed.engines.worker import Worker
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import run_identity
from flatfed.runs.train import Run, train
from flatfed.training.config import Config
from flatfed.training.loop import Callback, Progress, TrainingState
from flatfed.training.start import start_engine
from flatfed.training.task import Task, is_cross_entropy

GRADIENT_SLICE = 512

Item = TypeVar("Item")
Evaluate = Callable[[Snapshot, Samples], dict[str, float]]
Tick = Callable[[float], None]
"""Called with the share of the work that is done, 0 … 1."""


def silent(share: float) -> None:
    """Shows no progress."""


def part_of(tick: Tick, first: float, last: float) -> Tick:
    """For a part of the work, which begins and ends at these shares of the whole."""
    return lambda share: tick(first + share * (last - first))


def ticked(items: Sequence[Item], tick: Tick) -> Iterator[Item]:
    """The items, with a tick after each."""
    for number, item in enumerate(items, start=1):
        yield item
        tick(number / len(items))


@dataclass(frozen=True)
class Subject:
    """Everything that a diagnostic may look at; diagnostics leave it unchanged."""

    task: Task
    """Its model has the first weights, for diagnostics that train again; its data are on the device."""
    execution: Execution
    engine: Engine
    server: State
    buffers: State
    clients: ClientStore
    round: int
    """Rounds finished."""
    model_before: Tensor | None
    """The global model a round earlier; known only in the course of a training."""
    seen_loss: Callable[[Tensor, Tree, Tree], Tensor]
    """The loss of a flat model [P] on inputs as the model sees them and targets."""
    evaluation: Evaluate
    """Loss and metrics of a model on stored samples."""

    def later(self, progress: Progress) -> "Subject":
        """What a callback sees in the course of the training; the clients' own vectors are not part of it."""
        loss = self.seen_loss
        if progress.buffers:
            loss = server_loss(self.plan, self.task.model, progress.buffers)
        return replace(
            self,
            server=progress.server,
            buffers=progress.buffers,
            clients=_UnknownClients.for_plan(self.plan, self.execution),
            round=progress.round,
            model_before=progress.before["model"],
            seen_loss=loss,
        )

    @property
    def model(self) -> Tensor:
        """The global model [P]."""
        return self.server["model"]

    @property
    def plan(self) -> Plan:
        return self.engine.plan

    @property
    def identity(self) -> str:
        """Tells this training from any other."""
        return run_identity(self.task, self.plan).digest

    @property
    def received(self) -> State:
        """The vectors that the participants of the next round would get."""
        return broadcast(self.algorithm, self.server, self.buffers).vectors

    @property
    def algorithm(self) -> Algorithm:
        return self.plan.algorithm

    @property
    def training(self) -> Training:
        return self.plan.training

    @property
    def federation(self) -> Federation:
        return self.task.federation

    def vectors_of(self, kind: type[Part], client: int) -> dict[str, Tensor] | None:
        """What a part of this kind keeps on the server and on a client, by its own names; None without."""
        member = next((member for member in self.algorithm.members if isinstance(member.part, kind)), None)
        if member is None:
            return None
        state = self.clients.read(client, self.received["model"])
        return {**member.seen(self.server), **{name: state[key] for name, key in member.client.items()}}

    def some_clients(self, count: int | None) -> list[int]:
        """A number of clients, for one seed always the same ones; all of them if None."""
        population = len(self.federation)
        if count is None or count >= population:
            return list(range(population))
        generator = random.numpy_generator(self.training.seed, "examined clients")
        return sorted(generator.choice(population, count, replace=False).tolist())

    def data(self, client: int) -> Samples:
        return self.federation.client(client).whole()

    def training_data(self, limit: int | None, clients: Sequence[int] | None = None) -> Samples:
        """The pooled samples of some clients (all unless given), or `limit` of them drawn at random."""
        return pooled_samples(self.federation, limit, self.training.seed, clients)

    def test_data(self, limit: int | None) -> Samples | None:
        if self.federation.test is None:
            return None
        first = first_leaf(self.federation.test)
        chosen = drawn(len(first), limit, self.training.seed).to(first.device)
        return rows(self.federation.test, chosen)

    def evaluate(self, vector: Tensor, samples: Samples, buffers: State | None = None) -> dict[str, float]:
        """Loss and metrics at any point [P], with the global model's buffers unless others are given."""
        return self.evaluation(Snapshot(vector, self.buffers if buffers is None else buffers), samples)

    def _losses(self, point: Tensor, samples: Samples) -> Iterator[tuple[float, Tensor]]:
        """The mean losses of slices of the samples, as functions of the point [P], and the slices' shares."""
        count = len(first_leaf(samples))
        for start in range(0, count, GRADIENT_SLICE):
            inputs, targets = rows(samples, slice(start, start + GRADIENT_SLICE))
            with torch.enable_grad():
                loss = self.seen_loss(point, self.federation.transform.evaluate(inputs), targets)
            yield len(first_leaf(targets)) / count, loss

    def gradient(self, vector: Tensor, samples: Samples) -> Tensor:
        """The gradient [P] of the mean loss."""
        point = vector.detach().requires_grad_()
        total = torch.zeros_like(vector)
        for share, loss in self._losses(point, samples):
            total += share * torch.autograd.grad(loss, point)[0]
        return total

    def hessian_product(self, vector: Tensor, samples: Samples, direction: Tensor) -> Tensor:
        """H(vector) direction [P], by differentiating the gradient along the direction."""
        point = vector.detach().requires_grad_()
        total = torch.zeros_like(vector)
        for share, loss in self._losses(point, samples):
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(loss, point, create_graph=True)
                if not slope.requires_grad:  # a loss that is linear in the model has no curvature
                    continue
                (piece,) = torch.autograd.grad(
                    slope @ direction, point, allow_unused=True, materialize_grads=True
                )
            total += share * piece
        return total

    def train_again(self, federation: Federation, rounds: int, callback: Callback) -> None:
        """Repeats the training from the first weights, on this federation or another."""
        training = self.training.replaced(rounds=rounds, evaluate_every=rounds, patience=None, best_by=None)
        task = replace(self.task, federation=federation)
        train(task, self.algorithm, training, self.execution, callbacks=[callback], progress=False)

    def local_models(
        self, clients: Sequence[int], visit: Callable[[int, int, Tensor], None], tick: Tick = silent
    ) -> None:
        """Trains clients for one round from the present state and visits every local model on the way.

        `visit(client, k, model)` gets a client's model [P] after k steps, k = 0 … K.
        """
        members: list[int] = []
        step = 0

        def see(point: Tensor) -> None:
            nonlocal step
            for client, model in zip(members, point if point.dim() > 1 else point[None], strict=True):
                visit(client, step, model)
            step += 1

        corrections = [part for part in self.algorithm.corrections if part.slot == "correct"]
        watched = replace(self.algorithm, correct=(_Watched(see), *corrections))
        worker = Worker(replace(self.plan, algorithm=watched), self.task.model, self.federation)
        buffers = self.plan.division.travelling(self.buffers)
        sent, seen = broadcast(self.algorithm, self.server, buffers), 0
        # A chunk at a time, so that the steps seen are all its own.
        for chunk in chunks(self.plan, clients):
            members, step = list(chunk), 0
            states = [self.clients.read(client, sent.vectors["model"]) for client in members]
            worker.train(members, sent, states, self.round)
            seen += len(members)
            tick(seen / len(clients))


class _UnknownClients(ClientStore):
    """Clients whose vectors nobody else gets to see."""

    def read(self, client: int, received: Tensor) -> dict[str, Tensor]:
        if not self.lengths:
            return {}
        names = ", ".join(self.lengths)
        raise FlatfedError(
            f"{names}: kept by the clients, so this diagnostic cannot be taken in the course of a training; "
            "measure the finished run"
        )


class _Watched(Correction):
    """Changes nothing, and shows the local model before every step and after the last."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        self.see = see

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> tuple[Tensor, Carry]:
        self.see(context.origin + context.displacement)
        return direction, carry

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        self.see(context.origin + displacement)
        return Finish()


@contextmanager
def inspect(
    task: Task,
    algorithm: Algorithm | None = None,
    training: Training | None = None,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    *,
    run: Run | None = None,
) -> Iterator[Subject]:
    """A task's model as it is, or as a `run` of it left it.

    Without a run, `algorithm` (plain averaging unless given) and `training` say how clients would train from
    here; with one, they are the run's. Losses and metrics are the task's.
    """
    if run is not None and (algorithm is not None or training is not None):
        raise FlatfedError("run: it has its own algorithm and settings; give either it or them")
    if run is not None:
        algorithm, training = run.algorithm, run.training
        if is_cross_entropy(task.loss) and not is_cross_entropy(run.loss):
            warnings.warn(
                "the task's loss is cross-entropy, and the run was trained with another; give the task that "
                "was trained to measure with that",
                FlatfedWarning,
                stacklevel=3,
            )
    algorithm, training = algorithm or Algorithm(), training or Training(rounds=1)
    with closing(start_engine(task, algorithm, training, execution)) as engine:
        state, clients = TrainingState.initial(engine.plan, task.model), engine.clients
        if run is not None:
            state = TrainingState(run.server, dict(run.model.named_buffers()), len(run.history))
            clients = run.clients
        with _subject(task, execution, engine, state, clients) as subject:
            yield subject


@contextmanager
def inspect_folder(folder: Path) -> Iterator[Subject]:
    """A run's last checkpoint, rebuilt from the run folder alone."""
    existing = RunFolder.existing(folder)
    problems: list[str] = []
    values = read_plain(folder / "config.json", problems)
    if problems:
        raise FlatfedError(problems[0])
    if not isinstance(values, dict) or not {"data", "task"} & values.keys():
        raise FlatfedError(
            f"{folder}: made from Python, whose model and data are not in the folder; there, use "
            "flatfed.diagnostics.inspect(task, run=run) as a subject and "
            f"flatfed.diagnostics.diagnose({str(folder)!r}, subject=subject)"
        )
    checkpoint = existing.last_checkpoint()
    config = Config.checked(values)
    task, execution = config.make_task(), config.execution.replaced(engine="local", ray_address=None)
    with closing(start_engine(task, config.make_algorithm(), config.training, execution)) as engine:
        if run_identity(task, engine.plan).digest != checkpoint.identity:
            raise FlatfedError(
                f"{folder}: its checkpoint was made with other data or by another version of flatfed; "
                "use that version or run it again"
            )
        state = TrainingState(checkpoint.server, checkpoint.buffers, checkpoint.round)
        first = TrainingState.initial(engine.plan, task.model)
        if _forms(state.server) != _forms(first.server) or _forms(state.buffers) != _forms(first.buffers):
            raise FlatfedError(f"{existing.checkpoints.server_path}: of another model or algorithm")
        existing.checkpoints.load_clients(engine.clients)
        with _subject(task, execution, engine, state, engine.clients) as subject:
            yield subject


def _forms(tensors: State) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (value.shape, value.dtype) for name, value in tensors.items()}


@contextmanager
def _float32_evaluation(task: Task, engine: Engine) -> Iterator[Evaluate]:
    """The engine's own evaluation, unless that is less precise."""
    plan = engine.plan
    if plan.training.precision == "float32":
        yield engine.evaluate
        return
    warnings.warn(
        f"precision = {plan.training.precision!r}: losses, gradients and curvature are measured in float32; "
        "what trains clients again does so as the run did",
        FlatfedWarning,
        stacklevel=6,
    )
    exact = replace(plan, training=plan.training.replaced(precision="float32"))
    evaluators = [Evaluator(exact, task.model, task.federation.transform) for _ in range(engine.workers)]
    with closing(WorkerThreads(evaluators)) as threads:
        yield threads.evaluate


@contextmanager
def _subject(
    task: Task, execution: Execution, engine: Engine, state: TrainingState, clients: ClientStore
) -> Iterator[Subject]:
    plan = engine.plan
    with _float32_evaluation(task, engine) as evaluation:
        yield Subject(
            task=replace(task, federation=task.federation.to(plan.device)),
            execution=execution,
            engine=engine,
            server={key: value.to(plan.device) for key, value in state.server.items()},
            buffers={name: value.to(plan.device) for name, value in state.buffers.items()},
            clients=clients,
            round=state.round,
            model_before=None,
            seen_loss=server_loss(plan, task.model, state.buffers),
            evaluation=evaluation,
        )
