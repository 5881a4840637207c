"""The local engine: a pool of workers on one machine.

Each worker owns one model; torch's own threading inside operations is switched off, because two workers
with one thread each beat one worker with two. Several workers train in processes of their own where that can
be had, else in threads; evaluation is always in threads. Small models train a chunk of clients as a matrix
[C, P]; convolutional, recurrent and large ones, and those that draw random numbers or change buffers, train
client by client. Chunks do not depend on the number of workers and are summed in a fixed order, a few in
flight at a time: the numbers do not depend on the workers, and memory does not grow with the participants.
"""

from __future__ import annotations

import copy
import itertools
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.flat import Loss, buffers_of, load_buffers
from flatfed.core.settings import Settings
from flatfed.core.state import State, Vector
from flatfed.data.federation import ClientData, Federation, Samples
from flatfed.engines.client_store import ClientStore, Place
from flatfed.engines.oracles import MatrixGradients
from flatfed.engines.planning import make_plan
from flatfed.engines.processes import Crew, can_fork
from flatfed.engines.sums import OrderedSum, Piece, Totals
from flatfed.engines.worker import Metric, Worker, no_unexpected_draws

MATRIX_CLIENTS = 64
"""At most so many clients in one chunk of the matrix path,"""
MATRIX_ENTRIES = 2**18
"""and about so many numbers in its matrix: more would fall out of a core's cache,"""
FEWEST_CLIENTS = 6
"""but not fewer clients than that, or calls would cost more than what they compute;"""
CHUNKS = 16
"""smaller where there would be fewer chunks than that, so that several workers have something to do."""
EVALUATION_BATCH = 512

Job = tuple[Sequence[int], State, State, Sequence[Place], int]
"""Clients, what they receive, buffers, where their vectors are, and the number of the round."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def single_threaded() -> Iterator[None]:
    """One thread inside each of torch's operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class LocalEngine:
    """Trains cohorts and evaluates models on this machine.

    Until it is closed, torch uses one thread inside each operation: that is faster with several workers, and
    gives the same bits for any number of them.
    """

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        algorithm: Algorithm,
        loss: Loss,
        settings: Settings,
        metrics: Mapping[str, Metric],
    ) -> None:
        with single_threaded():
            self.plan = make_plan(model, federation, algorithm, loss, settings, metrics)
        self.federation = federation.to(self.plan.device)
        self.model = model
        self.initial_vector = self.plan.layout.vector(model).to(self.plan.device)
        self.initial_buffers = {name: value.to(self.plan.device) for name, value in buffers_of(model).items()}
        on_cpu = self.plan.device.type == "cpu"
        self.workers = settings.workers or (available_cores() if on_cpu else 1)
        self._forks = self.workers > 1 and on_cpu and can_fork()
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for _ in range(self.workers):
            self._idle.put(Worker(self.plan, model, self.federation))
        self._pool = ThreadPoolExecutor(
            self.workers, thread_name_prefix="flatfed", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._crew = Crew(self._work, self.workers)
        self._store: ClientStore | None = None
        self._seen: tuple[object, ...] = ()
        """What the crew has of a store: it and its files."""
        self._open = ExitStack()
        self._open.enter_context(single_threaded())

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        """What is kept here about every client between rounds."""
        return self.plan.algorithm.client_vectors

    @property
    def client_dtype(self) -> torch.dtype:
        return self.plan.layout.dtype

    def close(self) -> None:
        self._crew.close()
        self._store, self._seen = None, ()
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open.close()

    def train(
        self,
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
        clients: Sequence[int],
    ) -> Totals:
        """The participants' weighted mean uploads; their new vectors are staged in the store."""
        return self.train_chunks(received, buffers, store, round_number, self.chunks(clients))

    def train_chunks(
        self,
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
        chunks: Sequence[Sequence[int]],
    ) -> Totals:
        """The same for participants who have been divided already; a single chunk stays in this process."""
        total = OrderedSum()
        for piece in self._pieces(received, buffers, store, round_number, chunks):
            total.add(piece)
        return total.total().mean()

    def chunks(self, clients: Sequence[int]) -> list[Sequence[int]]:
        """Clients that are trained together, in chunks as equal as they can be."""
        size = 1
        if self.plan.path == "matrix":
            wanted = min(MATRIX_ENTRIES // self.plan.layout.size, -(-len(clients) // CHUNKS))
            size = min(MATRIX_CLIENTS, max(FEWEST_CLIENTS, wanted))
        count = -(-len(clients) // size)
        bounds = [len(clients) * number // count for number in range(count + 1)]
        return [clients[start:end] for start, end in itertools.pairwise(bounds)]

    def _pieces(
        self,
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
        chunks: Sequence[Sequence[int]],
    ) -> Iterator[Piece]:
        """The sums of the chunks, in their order."""
        self._store = store
        jobs: list[Job] = [
            (members, received, buffers, [store.place(client) for client in members], round_number)
            for members in chunks
        ]
        if self._forks and len(chunks) > 1:
            if self._seen != (store, *store.files.values()):
                # A process sees the files that were there when it was forked.
                self._crew.close()
                self._seen = (store, *store.files.values())
            found: Iterator[Totals] = self._crew.in_order(jobs, lambda _, totals: totals.copied())
        else:
            found = self._in_order(self._work, jobs)
        for number, totals in enumerate(found):
            yield Piece(number, 1, totals)

    def _work(self, job: Job) -> Totals:
        """Trains a chunk, in whatever thread or process."""
        members, received, buffers, places, round_number = job
        store = self._store
        assert store is not None
        states = [store.load(place.old, received["model"]) for place in places]
        with no_unexpected_draws(self.plan), self.worker() as worker:
            totals, new_states = worker.train(members, received, buffers, states, round_number)
        for place, state in zip(places, new_states, strict=True):
            store.keep(place.new, state)
        return totals

    def evaluate(self, model: Tensor, buffers: State, data: Samples) -> dict[str, float]:
        """Mean loss and metrics of a model on some samples, in evaluation mode."""
        inputs, targets = data

        def work(start: int) -> Tensor:
            batch = slice(start, start + EVALUATION_BATCH)
            with self.worker() as worker:
                means = worker.evaluate(model, buffers, (inputs[batch], targets[batch]))
            return means * len(inputs[batch])

        sums = torch.zeros(1 + len(self.plan.metrics), dtype=torch.float64)
        for part in self._in_order(work, range(0, len(inputs), EVALUATION_BATCH)):
            sums += part
        return dict(zip(["loss", *self.plan.metrics], (sums / len(inputs)).tolist(), strict=True))

    def evaluate_clients(
        self, model: Tensor, buffers: State, clients: Sequence[int]
    ) -> list[dict[str, float]]:
        """Samples, loss and metrics of one model on each client's own data, and on its own test data."""

        def on(data: ClientData) -> dict[str, float]:
            samples = data.batch(torch.arange(len(data), device=self.plan.device))
            return {"samples": len(data), **self.evaluate(model, buffers, samples)}

        found = []
        for client in clients:
            record, test = on(self.federation.client(client)), self.federation.client_test(client)
            if test is not None:
                record |= {f"test_{name}": value for name, value in on(test).items()}
            found.append(record)
        return found

    def server_loss(self, buffers: State) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        """The loss of a flat model on inputs and targets, in evaluation mode, differentiable repeatedly."""
        module = copy.deepcopy(self.model).to(self.plan.device).eval()
        load_buffers(module, buffers)
        loss_of = MatrixGradients(module, self.plan.layout, self.plan.loss).loss_of

        def loss(point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
            # Of torch's attention kernels only the plain one can be differentiated twice.
            with random.routed(self.plan.evaluation_generator()), sdpa_kernel(SDPBackend.MATH):
                return loss_of(point, inputs, targets)

        return loss

    def _in_order(self, work: Callable[[Item], Result], items: Iterable[Item]) -> Iterator[Result]:
        """Results in the order of the items, with a bounded number under way."""
        waiting: deque[Future[Result]] = deque()
        remaining = iter(items)
        try:
            for item in itertools.islice(remaining, 2 * self.workers):
                waiting.append(self._pool.submit(work, item))
            while waiting:
                result = waiting.popleft().result()
                for item in itertools.islice(remaining, 1):
                    waiting.append(self._pool.submit(work, item))
                yield result
        finally:
            # Whatever went wrong, nobody works on when this returns.
            for future in waiting:
                future.cancel()
            for future in waiting:
                if not future.cancelled():
                    future.exception()

    @contextmanager
    def worker(self) -> Iterator[Worker]:
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)
