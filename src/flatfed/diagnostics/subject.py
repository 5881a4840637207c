"""What diagnostics look at: a model, its clients' data, and the state from which its training would go on.

Losses here are the plain mean loss on stored data: evaluation mode (running statistics, no dropout), no
augmentation, no weight decay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.algorithms import ALGORITHMS
from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.flat import Layout, Loss
from flatfed.core.part import Carry, ClientContext, Correction, Finish
from flatfed.core.rounds import broadcast
from flatfed.core.settings import Settings, SettingsOptions
from flatfed.core.state import State, initial_state
from flatfed.data.federation import Federation, Samples
from flatfed.engines.client_store import ClientStore
from flatfed.engines.local import LocalEngine
from flatfed.engines.worker import Metric
from flatfed.runs.folder import RunFolder, read_json
from flatfed.runs.identity import fingerprint
from flatfed.training.config import Config
from flatfed.training.loop import Callback, Run, default_metrics, train

GRADIENT_SLICE = 512

Tick = Callable[[float], None]
"""Called with the share of the work that is done, 0 … 1."""


def silent(share: float) -> None:
    """Shows no progress."""


@dataclass(frozen=True)
class Subject:
    """Everything that a diagnostic may look at; diagnostics leave it unchanged."""

    engine: LocalEngine
    """Its model has the first weights, for diagnostics that train again."""
    server: State
    buffers: State
    clients: ClientStore
    round: int
    """Rounds finished."""
    seen_loss: Callable[[Tensor, Tensor, Tensor], Tensor]
    """The loss of a flat model [P] on inputs as the model sees them and targets."""

    @property
    def model(self) -> Tensor:
        """The global model [P]."""
        return self.server["model"]

    @property
    def fingerprint(self) -> str:
        """Tells this training from any other."""
        return fingerprint(self.engine)

    @property
    def initial_model(self) -> Tensor:
        """The model [P] that the training started from."""
        return self.engine.initial_vector

    @property
    def layout(self) -> Layout:
        """Which part of a flat model is which parameter."""
        return self.engine.plan.layout

    @property
    def input_shape(self) -> tuple[int, ...]:
        return self.engine.plan.dimensions.input_shape

    @property
    def metrics(self) -> Mapping[str, Metric]:
        return self.engine.plan.metrics

    @property
    def received(self) -> dict[str, Tensor]:
        """What the participants of the next round would get."""
        return broadcast(self.algorithm, self.server)

    @property
    def algorithm(self) -> Algorithm:
        return self.engine.plan.algorithm

    @property
    def settings(self) -> Settings:
        return self.engine.plan.settings

    @property
    def federation(self) -> Federation:
        return self.engine.federation

    def some_clients(self, count: int | None) -> list[int]:
        """A number of clients, for one seed always the same ones; all of them if None."""
        population = len(self.federation)
        if count is None or count >= population:
            return list(range(population))
        generator = random.numpy_generator(self.settings.seed, "examined clients")
        return sorted(generator.choice(population, count, replace=False).tolist())

    def data(self, client: int) -> Samples:
        own = self.federation.client(client)
        return own.batch(torch.arange(len(own), device=own.inputs.device))

    def training_data(self, limit: int | None, clients: Sequence[int] | None = None) -> Samples:
        """The pooled samples of some clients (all unless given), or `limit` of them drawn at random."""
        members = range(len(self.federation)) if clients is None else clients
        owned = [self.federation.client(client) for client in members]
        ends = torch.tensor([len(own) for own in owned]).cumsum(0)
        chosen = self._drawn(int(ends[-1]), limit)
        # Only the drawn samples are gathered: the whole may be large.
        owner = torch.bucketize(chosen, ends, right=True)
        pieces = []
        for number in owner.unique().tolist():
            start = int(ends[number - 1]) if number else 0
            pieces.append(
                owned[number].batch((chosen[owner == number] - start).to(owned[number].inputs.device))
            )
        return torch.cat([inputs for inputs, _ in pieces]), torch.cat([targets for _, targets in pieces])

    def test_data(self, limit: int | None) -> Samples | None:
        if self.federation.test is None:
            return None
        inputs, targets = self.federation.test
        chosen = self._drawn(len(inputs), limit).to(inputs.device)
        return inputs[chosen], targets[chosen]

    def _drawn(self, count: int, limit: int | None) -> Tensor:
        if limit is None or limit >= count:
            return torch.arange(count)
        generator = random.torch_generator(self.settings.seed, "examined samples")
        return torch.randperm(count, generator=generator)[:limit].sort().values

    def evaluate(self, vector: Tensor, samples: Samples, buffers: State | None = None) -> dict[str, float]:
        """Loss and metrics at any point [P], with the global model's buffers unless others are given."""
        return self.engine.evaluate(vector, self.buffers if buffers is None else buffers, samples)

    def loss(self, vector: Tensor, samples: Samples) -> Tensor:
        """The mean loss on a batch as a differentiable function of the flat model [P]."""
        inputs, targets = samples
        return self.seen_loss(vector, self.federation.transform.evaluate(inputs), targets)

    def gradient(self, vector: Tensor, samples: Samples) -> Tensor:
        """The gradient [P] of the mean loss, in slices."""
        point = vector.detach().requires_grad_()
        total = torch.zeros_like(vector)
        for share, part in _slices(samples):
            with torch.enable_grad():
                (piece,) = torch.autograd.grad(self.loss(point, part), point)
            total += share * piece
        return total

    def hessian_product(self, vector: Tensor, samples: Samples, direction: Tensor) -> Tensor:
        """H(vector) direction [P], by differentiating the gradient along the direction, in slices."""
        point = vector.detach().requires_grad_()
        total = torch.zeros_like(vector)
        for share, part in _slices(samples):
            with torch.enable_grad():
                (slope,) = torch.autograd.grad(self.loss(point, part), point, create_graph=True)
                if not slope.requires_grad:  # a loss that is linear in the model has no curvature
                    continue
                (piece,) = torch.autograd.grad(
                    slope @ direction, point, allow_unused=True, materialize_grads=True
                )
            total += share * piece
        return total

    def train_again(self, federation: Federation, rounds: int, callback: Callback) -> None:
        """Repeats the training from the first weights, on this federation or another."""
        plan, settings = self.engine.plan, self.settings.model_dump()
        train(
            self.engine.model,
            federation,
            self.algorithm,
            loss=plan.loss,
            metrics=plan.metrics,
            callbacks=[callback],
            **{**settings, "rounds": rounds, "evaluate_every": rounds},
        )

    def local_models(
        self, clients: Sequence[int], visit: Callable[[list[int], int, Tensor], None], tick: Tick = silent
    ) -> None:
        """Trains clients for one round from the present state and visits every local model on the way.

        `visit(members, k, points)` gets the models [C, P] of some clients after k steps, k = 0 … K.
        """
        members: list[int] = []
        step = 0

        def see(point: Tensor) -> None:
            nonlocal step
            visit(members, step, point if point.dim() > 1 else point[None])
            step += 1

        plan = self.engine.plan
        watched = replace(self.algorithm, correct=(_Watched(see), *self.algorithm.corrections))
        settings = plan.settings.model_copy(update={"path": plan.path})
        engine = LocalEngine(self.engine.model, self.federation, watched, plan.loss, settings, {})
        received = self.received
        try:
            # A chunk at a time, so that the steps seen are all its own.
            seen = 0
            for chunk in engine.chunks(clients):
                members, step = list(chunk), 0
                engine.train_chunks(received, self.buffers, self.clients, self.round, [members])
                seen += len(members)
                tick(seen / len(clients))
        finally:
            self.clients.discard()
            engine.close()


class _Watched(Correction):
    """Changes nothing, and shows the local model before every step and after the last."""

    def __init__(self, see: Callable[[Tensor], None]) -> None:
        self.see = see

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> tuple[Tensor, Carry]:
        self.see(context.origin + context.moved)
        return direction, carry

    def finish(self, context: ClientContext, carry: Carry, moved: Tensor) -> Finish:
        self.see(context.origin + moved)
        return Finish()


def _slices(samples: Samples) -> Iterator[tuple[float, Samples]]:
    inputs, targets = samples
    for start in range(0, len(inputs), GRADIENT_SLICE):
        part = slice(start, start + GRADIENT_SLICE)
        yield len(inputs[part]) / len(inputs), (inputs[part], targets[part])


@contextmanager
def inspect(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm | None = None,
    *,
    run: Run | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    **options: Unpack[SettingsOptions],
) -> Iterator[Subject]:
    """Any model with any federation: its own weights, or the final ones of a `run`.

    Without a run, `algorithm` (FedAvg unless given) and `options`, the fields of `Settings`, say how clients
    would train from here; with one, they are the run's, and so are `loss` (else cross-entropy) and `metrics`
    unless given.
    """
    if run is not None and (algorithm is not None or options):
        raise FlatfedError("run: it has its own algorithm and settings; give either it or them")
    algorithm = run.algorithm if run else algorithm or ALGORITHMS["fedavg"]()
    settings = run.settings if run else Settings.checked(**{"rounds": 1, **options})
    if metrics is None:
        metrics = run.metrics if run and loss is None else default_metrics(loss or F.cross_entropy)
    loss = loss or (run.loss if run else F.cross_entropy)
    engine = LocalEngine(model, federation, algorithm, loss, settings, metrics)
    try:
        if run is None:
            server = {"model": engine.initial_vector, **_first_state(engine)}
            yield _subject(engine, server, engine.initial_buffers, _store(engine), 0)
        else:
            buffers = dict(run.model.named_buffers())
            yield _subject(engine, run.server, buffers, run.clients, len(run.history))
    finally:
        engine.close()


@contextmanager
def inspect_folder(folder: Path) -> Iterator[tuple[Subject, str]]:
    """A run's last checkpoint and its fingerprint, rebuilt from the run folder alone."""
    existing = RunFolder.existing(folder)
    values = read_json(folder / "config.json")
    if not isinstance(values, dict) or "data" not in values:
        raise FlatfedError(
            f"{folder}: made from Python, whose model and data are not in the folder; there, use "
            "flatfed.diagnostics.inspect(model, federation, run=run) as a subject and "
            f"flatfed.diagnostics.diagnose({str(folder)!r}, subject=subject)"
        )
    checkpoint = existing.last_checkpoint()
    config = Config.checked(values)
    federation = config.make_federation()
    model = config.make_model(federation)
    loss = F.cross_entropy
    algorithm = config.make_algorithm()
    engine = LocalEngine(model, federation, algorithm, loss, config.training, default_metrics(loss))
    try:
        if fingerprint(engine) != checkpoint.fingerprint:
            raise FlatfedError(
                f"{folder}: its checkpoint was made with other data or by another version of flatfed; "
                "use that version or run it again"
            )
        store = _store(engine)
        existing.load_clients(store)
        subject = _subject(engine, checkpoint.server, checkpoint.buffers, store, checkpoint.round)
        yield subject, checkpoint.fingerprint
    finally:
        engine.close()


def _subject(
    engine: LocalEngine, server: State, buffers: State, clients: ClientStore, finished: int
) -> Subject:
    device = engine.plan.device
    return Subject(
        engine=engine,
        server={name: value.to(device) for name, value in server.items()},
        buffers={name: value.to(device) for name, value in buffers.items()},
        clients=clients,
        round=finished,
        seen_loss=engine.server_loss(buffers),
    )


def _first_state(engine: LocalEngine) -> dict[str, Tensor]:
    plan = engine.plan
    return initial_state(plan.algorithm.server_vectors, plan.dimensions, engine.initial_vector)


def _store(engine: LocalEngine) -> ClientStore:
    plan = engine.plan
    memory = int(plan.settings.client_memory * 2**20)
    return ClientStore(plan.algorithm.client_vectors, plan.dimensions, engine.initial_vector.dtype, memory)
