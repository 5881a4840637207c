"""The local engine: workers on one machine.

Each worker owns one model; torch's own threading inside operations is switched off, because two workers with
one thread each beat one worker with two. Several workers train in processes of their own where that can be
had, else in threads; evaluation is always in threads. Small models train a chunk of clients as a matrix
[C, P]; others, and those that draw random numbers or change buffers, train client by client. Chunks do not
depend on the number of workers and are summed in a fixed order, a few under way at a time: the numbers do not
depend on the workers, and memory does not grow with the participants.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor, nn

from flatfed.core.aggregate import Aggregate
from flatfed.core.rounds import Broadcast
from flatfed.core.tree import cloned, moved
from flatfed.data.federation import Federation
from flatfed.data.samples import Samples
from flatfed.engines.chunks import chunks, fitting_clients
from flatfed.engines.client_store import ClientStore, Slots
from flatfed.engines.evaluator import Snapshot
from flatfed.engines.execution import Execution
from flatfed.engines.planning import Plan
from flatfed.engines.processes import Portable, WorkerPool, start_method
from flatfed.engines.remote import HOST, RemoteJob, RemoteTrainer
from flatfed.engines.sums import CohortCollector, CohortSums, Piece
from flatfed.engines.threads import WorkerThreads, available_cores
from flatfed.engines.worker import Worker


class ChunkJob(NamedTuple):
    """A chunk of clients to train."""

    members: Sequence[int]
    broadcast: Broadcast
    slots: Sequence[Slots]
    round: int


@dataclass(frozen=True)
class ChunkTrainer:
    """Trains chunks of clients, in whatever thread or process; knows nothing of who hands them out."""

    plan: Plan
    clients: ClientStore
    threads: WorkerThreads[Worker]

    def __call__(self, job: ChunkJob) -> CohortSums:
        model = job.broadcast.vectors["model"]
        states = [self.clients.load(slots.old, model) for slots in job.slots]
        with self.threads.worker() as worker:
            sums, new_states = worker.train(job.members, job.broadcast, states, job.round)
        for slots, state in zip(job.slots, new_states, strict=True):
            self.clients.write(slots.new, state)
        return sums


class LocalEngine:
    """Trains cohorts and evaluates models on this machine."""

    def __init__(
        self,
        plan: Plan,
        model: nn.Module,
        federation: Federation,
        execution: Execution,
        folder: Path | None = None,
    ) -> None:
        on_cpu = plan.device.type == "cpu"
        self.workers = execution.workers or (available_cores() if on_cpu else 1)
        self.plan = replace(plan, most_clients=fitting_clients(plan, self.workers))
        self.clients = ClientStore.for_plan(plan, execution, folder)
        self._memory_bytes, self._folder = execution.client_memory_bytes, folder
        self._start_method = start_method(plan.device) if self.workers > 1 else None
        # Processes that begin anew hold the device's memory by themselves.
        threads = 1 if self._start_method == "spawn" else self.workers
        data = federation.to(plan.device)
        self._threads = WorkerThreads([Worker(self.plan, model, data) for _ in range(threads)])
        self._train_chunk = ChunkTrainer(self.plan, self.clients, self._threads)
        if self._start_method == "spawn":
            remote = Portable(RemoteTrainer(self.plan, model, federation))
            self._pool = WorkerPool(remote, self._received, self.workers)
        else:
            self._pool = WorkerPool(self._train_chunk, CohortSums.copied, self.workers)
        self._forked_with: tuple[object, ...] = ()
        """The files of the client store that were there when the processes were forked."""

    def train(self, broadcast: Broadcast, round: int, cohort: Sequence[int]) -> Aggregate:
        collector = CohortCollector(self.plan.algorithm, len(cohort), self._memory_bytes, self._folder)
        for number, sums in enumerate(self._chunk_sums(broadcast, round, chunks(self.plan, cohort))):
            collector.add(Piece(number, 1, sums))
        return collector.aggregate(broadcast.buffers)

    def _chunk_sums(
        self, broadcast: Broadcast, round_number: int, divided: Sequence[Sequence[int]]
    ) -> Iterator[CohortSums]:
        """The sums of the chunks, in their order; a single chunk stays in this process."""
        if self._start_method == "spawn" and len(divided) > 1:
            return self._remote_sums(broadcast, round_number, divided)
        jobs = [
            ChunkJob(members, broadcast, [self.clients.reserve(client) for client in members], round_number)
            for members in divided
        ]
        if self._start_method is None or len(jobs) == 1:
            return self._threads.in_order(self._train_chunk, jobs)
        files = tuple(self.clients.files.values())
        if self._forked_with != files:
            self._pool.close()
            self._forked_with = files
        return self._pool.in_order(jobs)

    def _remote_sums(
        self, broadcast: Broadcast, round_number: int, divided: Sequence[Sequence[int]]
    ) -> Iterator[CohortSums]:
        """Those of processes that share no memory: what clients remember goes there and back."""
        sent, model = moved(broadcast, HOST), broadcast.vectors["model"].to(HOST)
        jobs = (
            RemoteJob(members, sent, [self.clients.read(client, model) for client in members], round_number)
            for members in divided
        )
        for members, (sums, states) in zip(divided, self._pool.in_order(jobs), strict=True):
            for client, state in zip(members, states, strict=True):
                self.clients.stage(client, state)
            yield sums

    def _received(
        self, trained: tuple[CohortSums, list[dict[str, Tensor]]]
    ) -> tuple[CohortSums, list[dict[str, Tensor]]]:
        """What a remote process answered, of which it keeps nothing."""
        sums, states = trained
        return moved(sums.copied(), self.plan.device), cloned(states)

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> dict[str, float]:
        return self._threads.evaluate(snapshot, samples)

    def close(self) -> None:
        try:
            self._pool.close()
        finally:
            self._threads.close()
