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
import logging
import os
import pickle
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.flat import Loss
from flatfed.core.settings import Settings
from flatfed.core.state import State
from flatfed.data.federation import ClientData, Federation, PooledFederation
from flatfed.engines.client_store import ClientStore
from flatfed.engines.local import LocalEngine
from flatfed.engines.sums import OrderedSum, Piece
from flatfed.engines.worker import Metric, Worker, no_unexpected_draws

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
        self._per_shard = -(-self._clients // SHARDS)
        self._shards = [
            ray.put([_own(federation.client(client)) for client in run.tolist()])
            for run in torch.arange(self._clients).split(self._per_shard)
        ]

    def __len__(self) -> int:
        return self._clients

    def client(self, number: int) -> ClientData:
        shard, place = divmod(number, self._per_shard)
        return _fetched(self._shards[shard])[place]

    @property
    def total_samples(self) -> None:
        return None

    @property
    def common_size(self) -> None:
        return None

    def to(self, device: torch.device) -> ShardedFederation:
        return self


def _own(data: ClientData) -> ClientData:
    """A client's samples by themselves, without those that they are pooled with."""
    return ClientData(*data.batch(torch.arange(len(data), device=data.inputs.device)))


@functools.lru_cache(maxsize=SHARDS)
def _fetched(shard: Any) -> list[ClientData]:
    found: list[ClientData] = ray.get(shard)
    return found


class RemoteWorker:
    """A worker of the cluster: one model, and the data that it has needed so far."""

    def __init__(self, shared: Sequence[Any]) -> None:
        """`shared` are references to the plan, the model and the data."""
        torch.set_num_threads(1)
        plan, model, federation = ray.get(list(shared))
        self.plan, self.worker = plan, Worker(plan, model, federation)

    def train(
        self,
        start: int,
        chunks: Sequence[Sequence[int]],
        sent: tuple[State, State],
        states: Sequence[Sequence[State]],
        round_number: int,
    ) -> tuple[list[Piece], list[list[dict[str, Tensor]]]]:
        """The sums over a stretch of the cohort's chunks, the first of them at place `start`."""
        received, buffers = sent
        total, found = OrderedSum(), []
        with no_unexpected_draws(self.plan):
            for place, (members, own) in enumerate(zip(chunks, states, strict=True), start):
                totals, new_states = self.worker.train(members, received, buffers, own, round_number)
                total.add(Piece(place, 1, totals))
                found.append(new_states)
        return total.pieces, found

    def process(self) -> int:
        return os.getpid()


class RayEngine(LocalEngine):
    """Trains cohorts on a Ray cluster; everything else happens here."""

    def __init__(
        self,
        model: nn.Module,
        federation: Federation,
        algorithm: Algorithm,
        loss: Loss,
        settings: Settings,
        metrics: Mapping[str, Metric],
    ) -> None:
        _check_address(settings.ray_address)
        super().__init__(model, federation, algorithm, loss, settings, metrics)
        self._started = not ray.is_initialized()
        if self._started:
            try:
                ray.init(
                    # Not whatever cluster may once have been on this machine.
                    address=settings.ray_address or "local",
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                )
            except (ConnectionError, RuntimeError, ValueError) as error:
                super().close()
                raise FlatfedError(
                    f"ray_address = {settings.ray_address!r}: no cluster answers there ({_first_line(error)})"
                ) from None
        self.workers = settings.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))
        self._idle_remote: list[Any] = []
        self._starting: dict[Any, Any] = {}
        """Workers that have not answered yet, by what they will answer."""
        self._lost_starts = 0
        """How many in a row were lost before they answered."""
        # A lost worker is replaced here, not by Ray, which would wait for room for it.
        self._kind: Any = ray.remote(num_cpus=1, num_gpus=1 if self.plan.device.type == "cuda" else 0)(
            RemoteWorker
        )
        try:
            data: Federation
            if isinstance(self.federation, PooledFederation):
                data = ShardedFederation(self.federation)
            else:
                data = copy.copy(self.federation)
                data.test = None
            # Kept here: a worker that is started later asks for them too.
            self._shared = [ray.put(each) for each in (self.plan, model, data)]
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            self.close()
            raise FlatfedError(
                f"engine = 'ray': the model, the loss or the data cannot be sent to workers "
                f"({_first_line(error)})"
            ) from None
        for _ in range(self.workers):
            self._start_worker()

    def _start_worker(self) -> None:
        worker = self._kind.remote(self._shared)
        self._starting[worker.process.remote()] = worker

    def close(self) -> None:
        for worker in [*self._idle_remote, *self._starting.values()]:
            ray.kill(worker)
        self._idle_remote, self._starting = [], {}
        if self._started:
            ray.shutdown()
        super().close()

    def _pieces(
        self,
        received: State,
        buffers: State,
        store: ClientStore,
        round_number: int,
        chunks: Sequence[Sequence[int]],
    ) -> Iterator[Piece]:
        sent = ray.put((received, buffers))
        size = -(-len(chunks) // self.workers)
        stretches = [chunks[start : start + size] for start in range(0, len(chunks), size)]

        waiting, losses = deque(range(len(stretches))), [0] * len(stretches)
        running: dict[Any, tuple[int, Any]] = {}
        found: dict[int, tuple[list[Piece], list[list[dict[str, Tensor]]]]] = {}
        upcoming = 0
        while upcoming < len(stretches):
            while waiting and self._idle_remote:
                number, worker = waiting.popleft(), self._idle_remote.pop()
                states = [
                    [store.read(client, received["model"]) for client in members]
                    for members in stretches[number]
                ]
                answer = worker.train.remote(size * number, stretches[number], sent, states, round_number)
                running[answer] = number, worker
            for answer in self._answered(running):
                number, worker = running.pop(answer)
                try:
                    found[number] = ray.get(answer)
                except RayTaskError as error:
                    # What a worker raised, without Ray's own account of where.
                    raise error.cause if isinstance(error.cause, FlatfedError) else error from None
                except RayError as error:
                    losses[number] += 1
                    if losses[number] == ATTEMPTS:
                        clients = [client for members in stretches[number] for client in members]
                        raise FlatfedError(
                            f"round {round_number + 1}: {ATTEMPTS} workers were lost with clients {clients} "
                            f"({_first_line(error)}); perhaps they take more memory than there is"
                        ) from None
                    waiting.appendleft(number)
                    self._start_worker()
                else:
                    self._idle_remote.append(worker)
            # In the order of the cohort, whoever was first.
            while upcoming in found:
                pieces, new_states = found.pop(upcoming)
                for members, own in zip(stretches[upcoming], new_states, strict=True):
                    for client, state in zip(members, own, strict=True):
                        store.stage(client, state)
                yield from pieces
                upcoming += 1

    def _answered(self, running: Mapping[Any, Any]) -> list[Any]:
        """Waits for an answer; workers that have started meanwhile become idle."""
        answers, _ = ray.wait([*running, *self._starting], timeout=PATIENCE)
        if not answers and not running:
            raise FlatfedError(
                f"engine = 'ray': no worker has started in {PATIENCE:g} seconds; the cluster has no free CPU"
                + (" with a GPU" if self.plan.device.type == "cuda" else "")
            )
        for started in [answer for answer in answers if answer in self._starting]:
            worker = self._starting.pop(started)
            try:
                ray.get(started)
            except RayError as error:
                # Whoever was lost with its node before it could answer is replaced.
                self._lost_starts += 1
                if not getattr(error, "actor_init_failed", True) and self._lost_starts < ATTEMPTS:
                    self._start_worker()
                    continue
                raise FlatfedError(
                    f"engine = 'ray': a worker cannot start ({_first_line(error)}); nodes need flatfed and "
                    "what the model and the data are made of"
                ) from None
            self._lost_starts = 0
            self._idle_remote.append(worker)
        return [answer for answer in answers if answer in running]


def _check_address(address: str | None) -> None:
    """Ray itself waits for minutes for somebody to answer."""
    if address in {None, "auto", "local"} or ray.is_initialized():
        return
    host, _, port = str(address).removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        raise FlatfedError(f"ray_address = {address!r}: write HOST:PORT, ray://HOST:PORT, auto or local")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as error:
        raise FlatfedError(f"ray_address = {address!r}: nobody answers there ({error})") from None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
