"""The Ray engine: the same chunks of clients on the workers of a cluster, and the same bits.

The driver keeps the server's and the clients' vectors, so a lost worker takes nothing with it: its stretch of
the cohort, whose sums the driver has not seen yet, goes to another, and a new worker is asked for. What is
broadcast travels once to each node and round. Clients' samples lie in Ray's object store in shards, of which
a node fetches those that it needs, once; data that come from a function are loaded where they are used.
Every worker returns partial sums, which the driver adds up in the order of the cohort.

Evaluation, and whatever the server does by itself, stays with the driver.
"""

from __future__ import annotations

import copy
import functools
import itertools
import logging
import os
import pickle
import socket
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatfed.core import task_files
from flatfed.core.aggregate import Aggregate
from flatfed.core.errors import FlatfedError, first_line
from flatfed.core.rounds import Broadcast
from flatfed.core.tree import moved
from flatfed.data.federation import Federation, PooledFederation
from flatfed.data.pool import ClientData
from flatfed.data.samples import Samples
from flatfed.engines.chunks import chunks
from flatfed.engines.client_store import ClientStore
from flatfed.engines.evaluator import Evaluator, Snapshot
from flatfed.engines.execution import Execution
from flatfed.engines.memory import keep_freed_memory
from flatfed.engines.messages import Packed
from flatfed.engines.planning import Plan
from flatfed.engines.remote import HOST, RemoteJob, RemoteTrainer
from flatfed.engines.scheduler import in_order
from flatfed.engines.sums import CohortCollector, PairwiseSum, Piece
from flatfed.engines.threads import WorkerThreads, available_cores

# No reports to its makers, and no advice about accelerators on every start.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
try:
    import ray
    from ray.exceptions import RayError, RayTaskError
except ImportError:
    raise FlatfedError("engine = 'ray': Ray is not installed; pip install 'flatfed[ray]'") from None

ATTEMPTS = 3
"""So often a stretch of the cohort is handed out before its clients are taken for the reason of the loss."""
PATIENCE = 300.0
"""Seconds that a cluster may take to find room for a first worker."""
SHARDS = 256
"""At most so many pieces of the clients' data; a node keeps those that it has needed."""


class ShardedFederation(Federation):
    """Clients whose samples lie in Ray's object store, a run of clients in each shard."""

    test = None

    def __init__(self, federation: PooledFederation) -> None:
        self.transform, self.classes = federation.transform, federation.classes
        self._clients = len(federation)
        self._per_shard, self._device = -(-self._clients // SHARDS), HOST
        self._shards = [
            ray.put([_alone(federation.client(client)) for client in run.tolist()])
            for run in torch.arange(self._clients).split(self._per_shard)
        ]

    def __len__(self) -> int:
        return self._clients

    def client(self, number: int) -> ClientData:
        shard, place = divmod(number, self._per_shard)
        return ClientData(*moved(tuple(_fetched(self._shards[shard])[place]), self._device))

    def to(self, device: torch.device) -> ShardedFederation:
        other = copy.copy(self)
        other._device = device
        return other


def _alone(data: ClientData) -> ClientData:
    """A client's samples by themselves, without those that they are pooled with."""
    return ClientData(*data.whole())


@functools.lru_cache(maxsize=SHARDS)
def _fetched(shard: Any) -> list[ClientData]:
    clients: list[ClientData] = ray.get(shard)
    return clients


class RemoteWorker:
    """A worker of the cluster: one model, and the data that it has needed so far."""

    def __init__(self, shared: Sequence[Any], files: Sequence[str]) -> None:
        """`shared` are references to the plan, the model and the data, which may be of users' `files`."""
        task_files.load_again(files)
        torch.set_num_threads(1)
        keep_freed_memory()
        self.trainer = RemoteTrainer(*ray.get(list(shared)))

    def train(
        self,
        start: int,
        chunks: Sequence[Sequence[int]],
        broadcast: Packed,
        states: Packed,
        round_number: int,
    ) -> Packed:
        """The sums over a stretch of the cohort's chunks, of which the first is number `start`."""
        total, new_states, received = PairwiseSum(), [], broadcast.message()
        for number, (members, own) in enumerate(zip(chunks, states.message(), strict=True), start):
            sums, changed = self.trainer(RemoteJob(members, received, own, round_number))
            total.add(Piece(number, 1, sums))
            new_states.append(changed)
        return Packed.of((total.pieces, new_states))

    def process(self) -> int:
        return os.getpid()


class Stretch(NamedTuple):
    """Consecutive chunks of a cohort, which one worker trains and sums up."""

    start: int
    chunks: Sequence[Sequence[int]]
    broadcast: Any
    """The reference to it in Ray's object store."""
    states: Packed
    round: int


Trained = tuple[Stretch, list[Piece], list[list[dict[str, Tensor]]]]


class RemoteWorkers:
    """The cluster's workers. A lost one is replaced, and its stretch goes to another."""

    def __init__(self, start_actor: Callable[[], Any], needs: str) -> None:
        """`start_actor` asks the cluster for a worker; `needs` says what a node must have free for one."""
        self._start_actor, self._needs = start_actor, needs
        self._idle: list[Any] = []
        self._starting: dict[Any, Any] = {}
        """Workers that have not answered yet, by what they will answer."""
        self._lost_starts = 0
        """How many in a row were lost before they answered."""
        self._queued: deque[tuple[int, Stretch]] = deque()
        """What lost workers left behind."""
        self._running: dict[Any, tuple[int, Stretch, Any]] = {}
        self._losses: Counter[int] = Counter()

    def start_worker(self) -> None:
        worker = self._start_actor()
        self._starting[worker.process.remote()] = worker

    @property
    def idle(self) -> int:
        return max(0, len(self._idle) - len(self._queued))

    def start(self, number: int, stretch: Stretch) -> None:
        worker = self._idle.pop()
        answer = worker.train.remote(*stretch)
        self._running[answer] = number, stretch, worker

    def finished(self) -> Iterator[tuple[int, Trained | Exception]]:
        while self._queued and self._idle:
            self.start(*self._queued.popleft())
        for answer in self._answers():
            number, stretch, worker = self._running.pop(answer)
            try:
                trained = ray.get(answer).message()
            except RayTaskError as error:
                # What a worker raised, without Ray's own account of where.
                yield number, error.cause if isinstance(error.cause, FlatfedError) else error
            except RayError as error:
                self._losses[number] += 1
                if self._losses[number] < ATTEMPTS:
                    self._queued.append((number, stretch))
                    self.start_worker()
                    continue
                clients = list(itertools.chain(*stretch.chunks))
                yield (
                    number,
                    FlatfedError(
                        f"round {stretch.round + 1}: {ATTEMPTS} workers were lost with clients {clients} "
                        f"({first_line(error)}); perhaps they need more memory"
                    ),
                )
            else:
                self._idle.append(worker)
                yield number, (stretch, *trained)

    def _answers(self) -> list[Any]:
        """Waits for an answer; workers that have started meanwhile become idle."""
        answers, _ = ray.wait([*self._running, *self._starting], timeout=PATIENCE)
        if not answers and not self._running:
            raise FlatfedError(
                f"engine = 'ray': no worker has started in {PATIENCE:g} seconds; the cluster has no free "
                f"{self._needs}"
            )
        for started in [answer for answer in answers if answer in self._starting]:
            worker = self._starting.pop(started)
            try:
                ray.get(started)
            except RayError as error:
                # A worker that was lost with its node before it could answer is replaced.
                self._lost_starts += 1
                if not getattr(error, "actor_init_failed", True) and self._lost_starts < ATTEMPTS:
                    self.start_worker()
                    continue
                raise FlatfedError(
                    f"engine = 'ray': a worker cannot start ({first_line(error)}); nodes need flatfed and "
                    "what the model and the data are made of"
                ) from None
            self._lost_starts = 0
            self._idle.append(worker)
        return [answer for answer in answers if answer in self._running]

    def in_order(self, stretches: Iterable[Stretch]) -> Iterator[Trained]:
        """Stretches in their order, trained; after an error all workers are ended, so that none works on."""
        self._losses.clear()
        try:
            yield from in_order(self, stretches, ahead=sys.maxsize)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        running = [worker for _, _, worker in self._running.values()]
        for worker in [*self._idle, *self._starting.values(), *running]:
            ray.kill(worker)
        self._idle, self._starting, self._running = [], {}, {}


class RayEngine:
    """Trains cohorts on a Ray cluster; everything else happens here."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        federation: Federation,
        execution: Execution,
        folder: Path | None = None,
    ) -> None:
        _check_address(execution.ray_address)
        self.plan = plan
        self.clients = ClientStore.for_plan(plan, execution, folder)
        self._memory_bytes, self._folder = execution.client_memory_bytes, folder
        self._connected = _connect(execution.ray_address)
        self.workers = execution.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        evaluators = execution.workers or available_cores()
        self._threads = WorkerThreads(
            [Evaluator(plan, model, federation.transform) for _ in range(evaluators)]
        )
        # A lost worker is replaced here, not by Ray, which would wait for room for it.
        gpus, needs = gpu_need(plan.device, execution.gpu_share)
        files = task_files.loaded()
        actor: Any = ray.remote(num_cpus=1, num_gpus=gpus)(RemoteWorker)
        self._remote = RemoteWorkers(lambda: actor.remote(self._shared, files), needs)
        try:
            data: Federation
            if isinstance(federation, PooledFederation):
                data = ShardedFederation(federation)
            else:
                data = copy.copy(federation)
                data.test = None
            # Kept here: a worker that is started later asks for them too.
            # Ray shows a worker its own GPUs alone, of which the first is as good as any.
            remote = replace(plan, device=torch.device(plan.device.type))
            self._shared = [ray.put(shared) for shared in (remote, model, data)]
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            self.close()
            raise FlatfedError(
                f"engine = 'ray': the model, the loss or the data cannot be sent to workers "
                f"({first_line(error)})"
            ) from None
        for _ in range(self.workers):
            self._remote.start_worker()

    def train(self, broadcast: Broadcast, round: int, cohort: Sequence[int]) -> Aggregate:
        collector = CohortCollector(self.plan.algorithm, len(cohort), self._memory_bytes, self._folder)
        stretches = self._stretches(broadcast, round, cohort)
        for stretch, pieces, new_states in self._remote.in_order(stretches):
            for members, states in zip(stretch.chunks, new_states, strict=True):
                for client, state in zip(members, states, strict=True):
                    self.clients.stage(client, state)
            for piece in pieces:
                collector.add(moved(piece, self.plan.device))
        return collector.aggregate(broadcast.buffers)

    def _stretches(self, broadcast: Broadcast, round_number: int, cohort: Sequence[int]) -> Iterator[Stretch]:
        divided = chunks(self.plan, cohort)
        reference = ray.put(Packed.of(moved(broadcast, HOST)))
        model = broadcast.vectors["model"].to(HOST)
        # A rule that needs all uploads gets them a chunk at a time; sums are made of as many as there are.
        size = -(-len(divided) // self.workers) if self.plan.algorithm.aggregate.streams else 1
        for start in range(0, len(divided), size):
            members = divided[start : start + size]
            states = [[self.clients.read(client, model) for client in chunk] for chunk in members]
            yield Stretch(start, members, reference, Packed.of(states), round_number)

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> dict[str, float]:
        return self._threads.evaluate(snapshot, samples)

    def close(self) -> None:
        try:
            self._remote.close()
            if self._connected:
                ray.shutdown()
        finally:
            self._threads.close()


def gpu_need(device: torch.device, share: float) -> tuple[float, str]:
    """The GPUs that a worker asks the cluster for, and what a node must have free for one, in words."""
    if device.type != "cuda":
        return 0, "CPU"
    return share, "CPU with a GPU" if share == 1 else f"CPU with {share:g} of a GPU"


def _connect(address: str | None) -> bool:
    """Whether a connection to the cluster was made here, rather than by the caller before."""
    if ray.is_initialized():
        return False
    try:
        ray.init(
            # Not whatever cluster may once have been on this machine.
            address=address or "local",
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise FlatfedError(
            f"ray_address = {address!r}: no cluster answers there ({first_line(error)})"
        ) from None
    return True


def _check_address(address: str | None) -> None:
    """Ray itself waits for minutes for an answer."""
    if address in {None, "auto", "local"} or ray.is_initialized():
        return
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise FlatfedError(f"ray_address = {address!r}: write HOST:PORT, ray://HOST:PORT, auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise FlatfedError(f"ray_address = {address!r}: nothing answers there ({error})") from None
