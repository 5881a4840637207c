"""The models that single clients end up with, beside the global one."""

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from flatfed.core.rounds import Broadcast
from flatfed.core.sharing import PRIVATE_BUFFERS, PRIVATE_MODEL
from flatfed.core.state import State, initial_state
from flatfed.data.federation import Federation
from flatfed.engines.evaluator import Snapshot
from flatfed.engines.planning import Plan
from flatfed.engines.trial import plain_torch
from flatfed.engines.worker import Worker
from flatfed.training.evaluation import OWN


def own_model_names(plan: Plan) -> list[str]:
    """Which models every client has of its own."""
    wanted = {"personal": plan.division.personal, "fine_tuned": plan.training.fine_tuning_steps is not None}
    return [name for name in OWN if wanted[name]]


class OwnModels:
    """A client's "personal" model, where it keeps something to itself, and its "fine_tuned" one, if wanted.

    Fine-tuning begins where a client would begin another round, and takes plain local steps with the step
    size of the last round.
    """

    def __init__(
        self, plan: Plan, model: nn.Module, federation: Federation, state_of: Callable[[int], State]
    ) -> None:
        self.plan, self._state_of = plan, state_of
        self._worker: Worker | None = None
        training, algorithm = plan.training, plan.algorithm.alone
        if training.fine_tuning_steps is not None:
            steps = training.replaced(
                local_steps=training.fine_tuning_steps,
                local_epochs=None,
                sharing=training.sharing.replaced(private_steps=None),
            )
            plain = replace(plan, algorithm=algorithm, training=steps)
            self._worker = Worker(plain, model, federation.to(plan.device))

    def __call__(self, client: int, snapshot: Snapshot) -> dict[str, Snapshot]:
        keys = (PRIVATE_MODEL, PRIVATE_BUFFERS) if self.plan.division.personal else ()
        own = {key: value for key, value in (self._state_of(client) if keys else {}).items() if key in keys}
        models = {"personal": snapshot._replace(private=own)} if own else {}
        if self._worker is not None:
            models["fine_tuned"] = self._fine_tuned(self._worker, client, snapshot, own)
        return models

    @plain_torch()
    def _fine_tuned(self, worker: Worker, client: int, snapshot: Snapshot, own: State) -> Snapshot:
        plan, (model, buffers, _) = worker.plan, snapshot
        fresh = initial_state(plan.algorithm.client_vectors, plan.dimensions, model)
        state = {**fresh, **plan.private_state, **own}
        sent = Broadcast({"model": model}, buffers)
        result, *_ = worker.train_client(client, sent, state, plan.training.rounds - 1)
        after = {name: value.clone() for name, value in worker.bound.buffers.items()}
        return Snapshot(model + result.displacement, after, result.client)
