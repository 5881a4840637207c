"""Identically distributed clients: samples are dealt at random.

Rule: a random permutation cut into equal pieces. With `stratified`, every client also gets the same
number of samples of every class, as FedDyn does for CIFAR-100.
Used by nearly every federated learning paper as the homogeneous reference.

Sizes: equal to within one sample (stratified: also within every class). Duplicates: none. Unused: none.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from flatfed.data.partition.base import STRICT, Indices, Partition, collect, read_classes


@dataclass(frozen=True, config=STRICT)
class Iid(Partition):
    """Equal random shares, exactly balanced over classes if `stratified`."""

    stratified: bool = False

    def split(self, labels: NDArray[Any], clients: int, generator: np.random.Generator) -> list[Indices]:
        classes = read_classes(labels, clients)
        samples = classes.shuffled(generator) if self.stratified else generator.permutation(classes.samples)
        # Dealing class after class in turns levels both the totals and the classes. The clients are
        # permuted because otherwise the low numbers would always receive the odd samples.
        turns = generator.permutation(clients)
        return collect(samples, turns[np.arange(classes.samples) % clients], clients)
