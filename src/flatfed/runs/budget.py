"""How many minibatch gradients a training takes, counted before it is run, as its history will count them."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.sampling import cohort, local_steps
from flatfed.core.settings import Training
from flatfed.data.federation import Federation
from flatfed.engines.execution import Execution
from flatfed.runs.train import train
from flatfed.training.task import Task


def gradients_by_round(federation: Federation, algorithm: Algorithm, training: Training) -> Iterator[int]:
    """Those of all participants, round after round without end."""
    full, size = algorithm.full_gradients, training.batch_size
    same_steps = full == 0 and training.local_steps is not None

    def of_client(samples: int) -> int:
        passes = -(-samples // (size or samples)) if full else 0
        return local_steps(training, samples) * algorithm.gradient_evaluations + passes * full

    for number in itertools.count():
        members = cohort(training, len(federation), number)
        if same_steps:
            yield len(members) * of_client(1)
        else:
            yield sum(of_client(len(federation.client(client))) for client in members)


def gradients_of(federation: Federation, algorithm: Algorithm, training: Training) -> int:
    """Those of a whole training."""
    return sum(itertools.islice(gradients_by_round(federation, algorithm, training), training.rounds))


def rounds_within(federation: Federation, algorithm: Algorithm, training: Training, gradients: int) -> int:
    """As many of a training's rounds as take no more than so many gradients."""
    spent = 0
    counts = itertools.islice(gradients_by_round(federation, algorithm, training), training.rounds)
    for finished, count in enumerate(counts):
        spent += count
        if spent > gradients:
            if finished == 0:
                raise FlatfedError(
                    f"gradients: a rung of {gradients} is less than the first round of {algorithm.name}, "
                    f"which takes {count}; allow more of them (or rounds), or try fewer configurations"
                )
            return finished
    return training.rounds


@dataclass(frozen=True)
class Pace:
    """How fast this machine trains a task, from a few timed rounds."""

    start_seconds: float
    """Before the first round and after the last."""
    seconds_per_gradient: float

    @classmethod
    def measured(cls, task: Task, algorithm: Algorithm, training: Training, execution: Execution) -> Pace:
        """Trains two rounds, which are not kept; the second one is timed."""
        began = time.perf_counter()
        run = train(
            task, algorithm, training.replaced(rounds=min(2, training.rounds)), execution, progress=False
        )
        rounds = sum(line["seconds"] for line in run.history)
        last = run.history[-1]
        overhead = max(0.0, time.perf_counter() - began - rounds)
        return cls(overhead, last["seconds"] / max(1, last["gradient_evaluations"]))

    def seconds(self, runs: int, gradients: float) -> float:
        return runs * self.start_seconds + gradients * self.seconds_per_gradient
