"""Training chunks of clients apart from the engine: what is sent there and back has no device of its own."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatfed.core.rounds import Broadcast
from flatfed.core.state import State
from flatfed.core.tree import moved
from flatfed.data.federation import Federation
from flatfed.engines.planning import Plan
from flatfed.engines.sums import CohortSums
from flatfed.engines.worker import Worker

HOST = torch.device("cpu")


class RemoteJob(NamedTuple):
    """A chunk of clients to train, with everything that is needed for it."""

    members: Sequence[int]
    broadcast: Broadcast
    states: Sequence[State]
    """What the clients remember."""
    round: int


class RemoteTrainer:
    """Trains chunks on its plan's device, with a worker that is made for the first of them."""

    def __init__(self, plan: Plan, model: nn.Module, federation: Federation) -> None:
        self.plan, self.model, self.federation = plan, model, federation
        self._worker: Worker | None = None

    def __call__(self, job: RemoteJob) -> tuple[CohortSums, list[dict[str, Tensor]]]:
        """The chunk's sums and its clients' new vectors, on the CPU."""
        device = self.plan.device
        if self._worker is None:
            self._worker = Worker(self.plan, self.model, self.federation.to(device))
        broadcast, states = moved((job.broadcast, job.states), device)
        trained = self._worker.train(job.members, broadcast, states, job.round)
        on_host: tuple[CohortSums, list[dict[str, Tensor]]] = moved(trained, HOST)
        return on_host
