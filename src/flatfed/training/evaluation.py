"""How evenly one model serves the clients: the spread of its accuracy between them, beside that of chance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


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
    """The spread of what `evaluate_clients` found, on "train" and, if clients have some, "test" data.

    A metric that is called accuracy but is not a share of the samples has none.
    """
    spreads = {}
    for name, prefix in (("train", ""), ("test", "test_")):
        # Not every client needs to have test data.
        having = [client for client in per_client if f"{prefix}accuracy" in client]
        found = [client[f"{prefix}accuracy"] for client in having]
        if found and all(0 <= accuracy <= 1 for accuracy in found):
            spreads[name] = ClientSpread.of(found, [client[f"{prefix}samples"] for client in having])
    return spreads
