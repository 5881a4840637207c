"""The local engine: a pool of worker threads on one machine.

Each worker owns one model; torch's own threading inside operations is switched off, because two workers
with one thread each beat one worker with two. Small models train a chunk of clients as a matrix [C, P];
convolutional, recurrent and large ones, and those that draw random numbers or change buffers, train client
by client. Chunks do not depend on the number of workers and are summed in a fixed order, a few in flight at
a time: the numbers do not depend on the workers, and memory does not grow with the participants.
"""

from __future__ import annotations

import itertools
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.algorithm import Algorithm, ClientContext
from flatfed.core.errors import FlatfedError
from flatfed.core.flat import BoundModel, Layout, Loss, buffer_change, buffers_of, load_buffers
from flatfed.core.rounds import client_round
from flatfed.core.sampling import batches, equal_batches
from flatfed.core.settings import Settings
from flatfed.core.state import ClientStore, Dimensions, State
from flatfed.data.federation import ClientData, Federation, Samples, stacked_batch
from flatfed.engines.oracles import MatrixGradients, MatrixOracle, ModuleOracle

MATRIX_PARAMETERS = 32_768
"""Larger models keep a core busy by themselves, and a matrix of them falls out of the cache."""
MATRIX_CLIENTS = 64
"""Clients in one chunk of the matrix path."""
EVALUATION_BATCH = 512

Metric = Callable[[Tensor, Tensor], Tensor]
Result = TypeVar("Result")


@dataclass
class Totals:
    """Weighted sums over clients: of uploads, buffer changes, losses and step sizes."""

    weight: float = 0.0
    upload: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    rate: float = 0.0
    loss: float = 0.0
    evaluations: int = 0
    """Minibatch gradients taken."""

    def add(self, other: Totals) -> None:
        """In place; must be called in the order of the chunks."""
        for own, new in ((self.upload, other.upload), (self.buffers, other.buffers)):
            for name, value in new.items():
                if name in own:
                    own[name] += value
                else:
                    own[name] = value
        self.weight += other.weight
        self.rate += other.rate
        self.loss += other.loss
        self.evaluations += other.evaluations

    def mean(self) -> Totals:
        return Totals(
            weight=self.weight,
            upload={name: value / self.weight for name, value in self.upload.items()},
            buffers={name: value / self.weight for name, value in self.buffers.items()},
            rate=self.rate / self.weight,
            loss=self.loss / self.weight,
            evaluations=self.evaluations,
        )


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FlatfedError(f"device = {name!r}: cannot be used here ({reason})") from None


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread inside each operation: faster with several workers, and the same bits for any number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LocalEngine:
    """Trains cohorts and evaluates models on this machine."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        algorithm: Algorithm,
        loss: Loss,
        settings: Settings,
        metrics: Mapping[str, Metric],
    ) -> None:
        self.device = _device(settings.device)
        self.federation = federation.to(self.device)
        self.algorithm, self.loss, self.settings, self.metrics = algorithm, loss, settings, metrics
        self.layout = Layout(model)
        self.workers = settings.workers or (available_cores() if self.device.type == "cpu" else 1)
        self._models: queue.SimpleQueue[BoundModel] = queue.SimpleQueue()
        first = BoundModel(model, self.layout, self.device)
        self.initial_vector = self.layout.vector(first.module)
        self.initial_buffers = buffers_of(first.module)
        probe = _probe(first, self.federation, loss, settings, algorithm)
        self.draws_random_numbers = probe.random
        self.dimensions = Dimensions(self.layout.size, probe.input_shape)
        self.path, self.path_reason = _choose_path(
            first, probe, loss, settings, self.layout, self.federation.common_size
        )
        self._matrix = MatrixGradients(first.module, self.layout, loss) if self.path == "matrix" else None
        self._models.put(first)
        for _ in range(self.workers - 1):
            self._models.put(BoundModel(model, self.layout, self.device))
        self._pool = ThreadPoolExecutor(
            self.workers, thread_name_prefix="flatfed", initializer=torch.set_num_threads, initargs=(1,)
        )

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    # -- training -----------------------------------------------------------------------------------------

    def train(
        self,
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
        clients: Sequence[int],
    ) -> Totals:
        """The participants' weighted mean uploads; their new vectors are staged in the store."""
        chunk = MATRIX_CLIENTS if self.path == "matrix" else 1
        train = self._train_matrix if self.path == "matrix" else self._train_client
        before = torch.get_rng_state()
        totals = Totals()
        with single_threaded():
            chunks = (clients[start : start + chunk] for start in range(0, len(clients), chunk))
            for part in self._in_order(
                lambda members: train(members, received, buffers, store, round_number), chunks
            ):
                totals.add(part)
        if not self.draws_random_numbers and not torch.equal(before, torch.get_rng_state()):
            raise FlatfedError(
                "model: it drew random numbers in training that it did not draw when it was first tried, so "
                "its results would depend on the order of work; draw them in every forward pass or in none"
            )
        return totals.mean()

    def _in_order(self, work: Callable[[Any], Result], items: Iterable[Any]) -> Iterator[Result]:
        """Results in the order of the items, with a bounded number under way."""
        waiting: deque[Future[Result]] = deque()
        items = iter(items)
        try:
            for item in itertools.islice(items, 2 * self.workers):
                waiting.append(self._pool.submit(work, item))
            while waiting:
                result = waiting.popleft().result()
                for item in itertools.islice(items, 1):
                    waiting.append(self._pool.submit(work, item))
                yield result
        finally:
            for future in waiting:
                future.cancel()
            for future in waiting:
                if not future.cancelled():
                    future.exception()

    @contextmanager
    def _model(self) -> Iterator[BoundModel]:
        bound = self._models.get()
        try:
            yield bound
        finally:
            self._models.put(bound)

    def _context(
        self,
        received: State,
        client: State,
        steps: int,
        round_number: int,
        full_gradient: Callable[[], Tensor],
    ) -> ClientContext:
        kept: list[Tensor] = []

        def once() -> Tensor:
            # Parts that want the full gradient share one pass.
            if not kept:
                kept.append(full_gradient())
            return kept[0]

        return ClientContext(
            round=round_number,
            received=received,
            client=client,
            rates=self.algorithm.schedule.rates(self.settings.rate(round_number), steps),
            layout=self.layout,
            input_shape=self.dimensions.input_shape,
            full_gradient=once,
        )

    def _train_client(
        self,
        members: Sequence[int],
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
    ) -> Totals:
        (client,) = members
        model, data = received["model"], self.federation.client(client)
        positions = batches(self.settings, len(data), round_number, client)
        oracles: list[ModuleOracle] = []
        with self._model() as bound:
            load_buffers(bound.module, buffers)
            bound.module.train()

            def oracle(chosen: Tensor, purpose: str, step: int) -> ModuleOracle:
                inputs, targets = data.batch(chosen.to(self.device))
                inputs = self._model_inputs(inputs, purpose, round_number, client, step)
                key = random.key(self.settings.seed, purpose, round_number, client, step)
                return ModuleOracle(
                    bound,
                    self.loss,
                    (inputs, targets),
                    key if self.draws_random_numbers else None,
                    moves_buffers=purpose == "step",
                )

            def each_step() -> Iterator[ModuleOracle]:
                for step, chosen in enumerate(positions):
                    oracles.append(oracle(chosen, "step", step))
                    yield oracles[-1]

            def full_gradient() -> Tensor:
                return _full_gradient(model, len(data), lambda *slice_: oracle(slice_[1], "full", slice_[0]))

            context = self._context(
                received, store.read(client, model), len(positions), round_number, full_gradient
            )
            result = client_round(
                self.algorithm, context, each_step(), self.settings.step_rule, model.clone()
            )
            change = buffer_change(buffers, bound.buffers)
        store.stage(client, result.client)
        weight = float(len(data)) if self.settings.weighting == "samples" else 1.0
        return Totals(
            weight=weight,
            upload=_scaled(result.upload, weight),
            buffers=_scaled(change, weight),
            rate=weight * context.total_rate,
            loss=weight * float(torch.stack([each.loss for each in oracles]).mean()),  # type: ignore[misc]
            evaluations=self._evaluations(len(positions), len(data)),
        )

    def _train_matrix(
        self,
        members: Sequence[int],
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
    ) -> Totals:
        assert self._matrix is not None
        matrix, model = self._matrix, received["model"]
        data = [self.federation.client(client) for client in members]
        positions = [
            batches(self.settings, len(own), round_number, client)
            for own, client in zip(data, members, strict=True)
        ]
        steps = len(positions[0])
        oracles: list[MatrixOracle] = []

        transform = self.federation.transform

        def oracle(owners: Sequence[ClientData], chosen: Sequence[Tensor], step: int | None) -> MatrixOracle:
            inputs, targets = stacked_batch(owners, [each.to(self.device) for each in chosen])
            if step is not None and transform.draws:
                augmented = [
                    self._model_inputs(own, "step", round_number, client, step)
                    for own, client in zip(inputs, members, strict=True)
                ]
                return MatrixOracle(matrix, torch.stack(augmented), targets)
            seen = transform.evaluate(inputs.flatten(0, 1))
            return MatrixOracle(matrix, seen.unflatten(0, inputs.shape[:2]), targets)

        def each_step() -> Iterator[MatrixOracle]:
            for step in range(steps):
                oracles.append(oracle(data, [own[step] for own in positions], step))
                yield oracles[-1]

        def full_gradient() -> Tensor:
            # Client by client, because their sizes may differ.
            return torch.cat(
                [
                    _full_gradient(model[None], len(own), lambda _, chosen: oracle([own], [chosen], None))  # noqa: B023
                    for own in data
                ]
            )

        own_vectors = [store.read(client, model) for client in members]
        vectors = {name: torch.stack([each[name] for each in own_vectors]) for name in own_vectors[0]}
        context = self._context(received, vectors, steps, round_number, full_gradient)
        point = model.expand(len(members), -1).clone()  # [C, P]
        result = client_round(self.algorithm, context, each_step(), self.settings.step_rule, point)
        for index, client in enumerate(members):
            # A vector without a client axis is the same for everybody.
            store.stage(client, {k: v[index] if v.dim() > 1 else v for k, v in result.client.items()})
        by_samples = self.settings.weighting == "samples"
        weights = model.new_tensor([len(own) if by_samples else 1 for own in data])  # [C]
        losses = torch.stack([each.loss for each in oracles])  # type: ignore[misc]  # [K, C]
        total = float(weights.sum())
        return Totals(
            weight=total,
            upload={
                name: (weights[:, None] * value if by_samples else value).sum(0)
                for name, value in result.upload.items()
            },
            rate=total * context.total_rate,
            loss=float((weights * losses.mean(0)).sum()),
            evaluations=sum(self._evaluations(steps, len(own)) for own in data),
        )

    def _model_inputs(
        self, inputs: Tensor, purpose: str, round_number: int, client: int, step: int
    ) -> Tensor:
        """A training batch as the model sees it, augmented from the client's stream; full passes are not."""
        transform = self.federation.transform
        if purpose != "step" or not transform.draws:
            return transform.evaluate(inputs)
        generator = random.torch_generator(self.settings.seed, "augment", round_number, client, step)
        return transform.train(inputs, generator)

    def _evaluations(self, steps: int, samples: int) -> int:
        """Minibatch gradients of one client's round; a pass over its data counts as its batches."""
        passes = -(-samples // (self.settings.batch_size or samples))
        return steps * self.algorithm.gradient_evaluations + passes * self.algorithm.full_gradients

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(self, model: Tensor, buffers: State, data: Samples) -> dict[str, float]:
        """Mean loss and metrics of a model on some samples, in evaluation mode."""
        sums = torch.zeros(1 + len(self.metrics), dtype=torch.float64)
        for part in self._evaluated(model, buffers, data):
            sums += part
        return dict(zip(["loss", *self.metrics], (sums / len(data[0])).tolist(), strict=True))

    def _evaluated(self, model: Tensor, buffers: State, data: Samples) -> Iterator[Tensor]:
        """For each batch the loss and the metrics, times the batch's size."""
        inputs, targets = data

        def work(start: int) -> Tensor:
            stored = inputs[start : start + EVALUATION_BATCH].to(self.device)
            batch = self.federation.transform.evaluate(stored)
            truth = targets[start : start + EVALUATION_BATCH].to(self.device)
            with self._model() as bound, torch.no_grad():
                bound.bind(model)
                load_buffers(bound.module, buffers)
                bound.module.eval()
                outputs = bound.module(batch)
                values = [function(outputs, truth) for function in (self.loss, *self.metrics.values())]
            return torch.stack([value.double().cpu() for value in values]) * len(batch)

        with single_threaded():
            yield from self._in_order(work, range(0, len(inputs), EVALUATION_BATCH))

    def evaluate_clients(
        self, model: Tensor, buffers: State, clients: Sequence[int]
    ) -> list[dict[str, float]]:
        """Loss and metrics of one model on each client's own data."""
        owned = (self.federation.client(client) for client in clients)
        return [
            self.evaluate(model, buffers, data.batch(torch.arange(len(data), device=self.device)))
            for data in owned
        ]


def _scaled(vectors: Mapping[str, Tensor], weight: float) -> dict[str, Tensor]:
    return dict(vectors) if weight == 1 else {name: weight * value for name, value in vectors.items()}


def _full_gradient(
    point: Tensor, samples: int, oracle: Callable[[int, Tensor], Callable[[Tensor], Tensor]]
) -> Tensor:
    """The gradient of the mean loss over all of a client's samples, in slices."""
    total = torch.zeros_like(point)
    for number, chosen in enumerate(torch.arange(samples).split(EVALUATION_BATCH)):
        total += oracle(number, chosen)(point) * (len(chosen) / samples)
    return total


@dataclass(frozen=True)
class _Probe:
    """What one forward and backward pass on a batch of client 0 showed."""

    random: bool
    changes_buffers: bool
    input_shape: tuple[int, ...]
    inputs: Tensor
    targets: Tensor


def _probe(
    bound: BoundModel, federation: Federation, loss: Loss, settings: Settings, algorithm: Algorithm
) -> _Probe:
    data = federation.client(0)
    (positions, *_) = batches(settings, len(data), 0, 0)
    inputs, targets = data.batch(positions.to(data.inputs.device))
    inputs = federation.transform.evaluate(inputs)
    before = buffers_of(bound.module)
    shown = f"inputs {list(inputs.shape)} {str(inputs.dtype).removeprefix('torch.')}"
    if algorithm.gradient.needs_float_inputs and not inputs.is_floating_point():
        raise FlatfedError(
            f"algorithm: {algorithm.name} shifts the inputs, which must be floats, not {shown}"
        )
    bound.module.train()
    values: list[Tensor] = []

    def call() -> None:
        outputs = bound.module(inputs)
        values.append(loss(outputs, targets))
        torch.autograd.grad(values[0], bound.parameters, allow_unused=True)

    try:
        drawn = random.draws_random_numbers(call)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FlatfedError(
            f"model: it cannot be trained on a batch of client 0 ({shown}, targets {list(targets.shape)} "
            f"{str(targets.dtype).removeprefix('torch.')}): {reason}"
        ) from error
    if values[0].dim() != 0:
        raise FlatfedError(
            f"loss: it must return one number, not a tensor shaped {list(values[0].shape)}; "
            "take the mean over the batch"
        )
    changed = any(bool((change != 0).any()) for change in buffer_change(before, bound.buffers).values())
    load_buffers(bound.module, before)
    return _Probe(drawn, changed, tuple(inputs.shape[1:]), inputs, targets)


_CLIENT_BY_CLIENT = (nn.modules.conv._ConvNd, nn.RNNBase)


def _choose_path(
    bound: BoundModel, probe: _Probe, loss: Loss, settings: Settings, layout: Layout, common_size: int | None
) -> tuple[str, str]:
    """How to train, and why: a fixed rule, so that the same configuration always takes the same path."""
    impossible = None
    if probe.random:
        impossible = "the model draws random numbers"
    elif probe.changes_buffers:
        impossible = "the model changes its buffers"
    elif not equal_batches(settings, common_size):
        impossible = "clients take different numbers of steps or batches of different sizes"
    else:
        vector = layout.vector(bound.module)
        try:
            MatrixGradients(bound.module, layout, loss).plain(
                vector[None], probe.inputs[None], probe.targets[None]
            )
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            impossible = f"the model cannot be vectorised ({type(error).__name__})"
    if settings.path == "matrix" and impossible:
        raise FlatfedError(f"path = 'matrix': {impossible}; use path = 'client' or 'auto'")
    if settings.path != "auto":
        return settings.path, "asked for"
    if impossible:
        return "client", impossible
    if any(isinstance(module, _CLIENT_BY_CLIENT) for module in bound.module.modules()):
        return "client", "the model has convolutional or recurrent layers"
    if layout.size > MATRIX_PARAMETERS:
        return "client", f"the model has more than {MATRIX_PARAMETERS} parameters"
    return "matrix", f"the model has at most {MATRIX_PARAMETERS} parameters and all batches have one shape"
