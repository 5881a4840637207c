"""What an engine is: it trains cohorts, evaluates models, and says what its clients' state is kept in."""

from collections.abc import Sequence
from typing import Protocol

from flatfed.core.aggregate import Aggregate
from flatfed.core.rounds import Broadcast
from flatfed.data.samples import Samples
from flatfed.engines.client_store import ClientStore
from flatfed.engines.evaluator import Snapshot
from flatfed.engines.planning import Plan


class Engine(Protocol):
    """Three methods. All engines give the same numbers."""

    plan: Plan
    clients: ClientStore
    """What is kept here about clients between rounds; a round's new state is staged until it is committed."""
    workers: int

    def train(self, broadcast: Broadcast, round: int, cohort: Sequence[int]) -> Aggregate:
        """A round of some clients; their new state is staged."""
        ...

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> dict[str, float]:
        """Mean loss and metrics of a model on some samples, in evaluation mode."""
        ...

    def close(self) -> None: ...
