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
from flatfed.engines.evaluator import Snapshot

OWN = ("personal", "fine_tuned")
"""The models that clients may have of their own."""


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

    That of models that clients have of their own is called "personal train" and so on.

    A metric that is called accuracy but is not a share of the samples has none.
    """
    spreads: dict[str, ClientSpread] = {}
    for own in ("", *OWN):
        spreads |= _spreads(per_client, own)
    return spreads


def _spreads(per_client: Sequence[Mapping[str, Any]], own: str) -> dict[str, ClientSpread]:
    spreads = {}
    for samples, prefix in (("train", ""), ("test", "test_")):
        name, accuracy = f"{own} {samples}".strip(), f"{prefix}{own}_accuracy" if own else f"{prefix}accuracy"
        # Not every client needs to have test data.
        clients = [client for client in per_client if accuracy in client]
        accuracies = [client[accuracy] for client in clients]
        if accuracies and all(0 <= accuracy <= 1 for accuracy in accuracies):
            spreads[name] = ClientSpread.of(accuracies, [client[f"{prefix}samples"] for client in clients])
    return spreads


def evaluate_clients(
    evaluate: Callable[[Snapshot, Samples], dict[str, float]],
    federation: Federation,
    snapshot: Snapshot,
    clients: Sequence[int],
    own_models: Callable[[int, Snapshot], Mapping[str, Snapshot]] = lambda client, snapshot: {},
) -> list[dict[str, float]]:
    """Samples, loss and metrics of one model on each client's own data, and on its own test data.

    Those of the models that a client has of its own have their names in front.
    """

    def on(data: ClientData, models: Mapping[str, Snapshot]) -> dict[str, float]:
        samples = data.whole()
        record = {"samples": len(data), **evaluate(snapshot, samples)}
        for own, model in models.items():
            record |= {f"{own}_{name}": value for name, value in evaluate(model, samples).items()}
        return record

    records = []
    for client in clients:
        models, test = own_models(client, snapshot), federation.client_test(client)
        record = on(federation.client(client), models)
        if test is not None:
            record |= {f"test_{name}": value for name, value in on(test, models).items()}
        records.append(record)
    return records
