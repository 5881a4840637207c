"""How one model does on every client's own data, and how evenly: the spread between clients."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flatfed.data.federation import Federation
from flatfed.data.pool import ClientData
from flatfed.data.samples import Samples
from flatfed.engines.worker import Snapshot


@dataclass(frozen=True)
class ClientSpread:
    """The accuracy over clients, each client counting the same."""

    mean: float
    deviation: float
    """The standard deviation between clients."""
    chance: float
    """The deviation that clients of one true accuracy p would show: the root of the mean of p(1−p)/n."""

    @classmethod
    def of(cls, accuracies: Sequence[float], samples: Sequence[int]) -> ClientSpread:
        mean = statistics.fmean(accuracies)
        chance = math.sqrt(statistics.fmean(mean * (1 - mean) / count for count in samples))
        return cls(mean, statistics.pstdev(accuracies), chance)


def client_spreads(per_client: Sequence[Mapping[str, Any]]) -> dict[str, ClientSpread]:
    """The spread of what `evaluate_clients` measured, on "train" and, if clients have some, "test" data.

    A metric that is called accuracy but is not a share of the samples has none.
    """
    spreads = {}
    for name, prefix in (("train", ""), ("test", "test_")):
        # Not every client needs to have test data.
        clients = [client for client in per_client if f"{prefix}accuracy" in client]
        accuracies = [client[f"{prefix}accuracy"] for client in clients]
        if accuracies and all(0 <= accuracy <= 1 for accuracy in accuracies):
            spreads[name] = ClientSpread.of(accuracies, [client[f"{prefix}samples"] for client in clients])
    return spreads


def evaluate_clients(
    evaluate: Callable[[Snapshot, Samples], dict[str, float]],
    federation: Federation,
    snapshot: Snapshot,
    clients: Sequence[int],
) -> list[dict[str, float]]:
    """Samples, loss and metrics of one model on each client's own data, and on its own test data."""

    def on(data: ClientData) -> dict[str, float]:
        return {"samples": len(data), **evaluate(snapshot, data.whole())}

    records = []
    for client in clients:
        record, test = on(federation.client(client)), federation.client_test(client)
        if test is not None:
            record |= {f"test_{name}": value for name, value in on(test).items()}
        records.append(record)
    return records
