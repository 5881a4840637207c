"""Threads of this process, each with a model of its own: for evaluation, and for training without a fork."""

import concurrent.futures
import os
import queue
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Generic, TypeVar

import torch

from flatfed.core.flat import Layout
from flatfed.core.tree import first_leaf, rows
from flatfed.data.samples import Samples
from flatfed.engines.evaluator import Evaluator, Snapshot
from flatfed.engines.metrics import Measured, Measurement
from flatfed.engines.planning import MATRIX_PARAMETERS

EVALUATION_BATCH = 512
LARGE_EVALUATION_BATCH = 64
"""Of large convolutional models: what lies between their layers falls out of the cache otherwise."""
Job = TypeVar("Job")
Result = TypeVar("Result")
WorkerKind = TypeVar("WorkerKind", bound=Evaluator)


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


def _batch_size(layout: Layout) -> int:
    """Samples that are evaluated together: a fixed rule, since losses depend on it in their last digits."""
    large = layout.channels_last and layout.size > MATRIX_PARAMETERS
    return LARGE_EVALUATION_BATCH if large else EVALUATION_BATCH


class WorkerThreads(Generic[WorkerKind]):
    """A thread for each of some workers.

    Until it is closed, torch uses one thread inside each operation: that is faster with several workers, and
    gives the same bits for any number of them.
    """

    def __init__(self, workers: Sequence[WorkerKind]) -> None:
        self.count = len(workers)
        self._plan = workers[0].plan
        self._idle: queue.SimpleQueue[WorkerKind] = queue.SimpleQueue()
        for worker in workers:
            self._idle.put(worker)
        self._pool = ThreadPoolExecutor(
            self.count, thread_name_prefix="flatfed", initializer=torch.set_num_threads, initargs=(1,)
        )
        self._open = ExitStack()
        self._open.enter_context(single_threaded())

    @contextmanager
    def worker(self) -> Iterator[WorkerKind]:
        """One that no other thread uses meanwhile."""
        worker = self._idle.get()
        try:
            yield worker
        finally:
            self._idle.put(worker)

    def in_order(self, work: Callable[[Job], Result], jobs: Iterable[Job]) -> Iterator[Result]:
        """The results of jobs in their order; when it is left, no thread works any more."""
        under_way: deque[Future[Result]] = deque()
        try:
            for job in jobs:
                if len(under_way) == 2 * self.count:
                    yield under_way.popleft().result()
                under_way.append(self._pool.submit(work, job))
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()
            concurrent.futures.wait(under_way)

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> dict[str, float]:
        """Mean loss and metrics of a model on some samples, in evaluation mode."""

        def work(start: int) -> Measured:
            with self.worker() as worker:
                return worker.evaluate(snapshot, rows(samples, slice(start, start + size)))

        size = _batch_size(self._plan.layout)
        measurement = Measurement(self._plan.metrics)
        for batch in self.in_order(work, range(0, len(first_leaf(samples)), size)):
            measurement.add(batch)
        return measurement.numbers()

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
        self._open.close()
