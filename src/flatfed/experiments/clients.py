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
    """The spread of what `evaluate_clients` found, on "train" and, if clients have some, "test" data."""
    prefixes = {"train": "", "test": "test_"}
    return {
        name: ClientSpread.of(
            [client[f"{prefix}accuracy"] for client in per_client],
            [client[f"{prefix}samples"] for client in per_client],
        )
        for name, prefix in prefixes.items()
        if per_client and f"{prefix}accuracy" in per_client[0]
    }
