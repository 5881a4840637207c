"""Identically distributed clients: samples are dealt at random.

Rule: a random permutation cut into equal pieces. With `stratified`, every client also gets the same number of
samples of every class, as FedDyn does for CIFAR-100. Nearly every federated learning paper uses it as the
homogeneous reference.

Sizes: equal to within one sample (stratified: also within every class). Duplicates: none. Unused: none.
"""

import numpy as np
from numpy.random import Generator

from flatfed.data.partition.base import Assignment, Classes, Partition, register


@register("iid")
class Iid(Partition):
    """Equal random shares, exactly balanced over classes if `stratified`."""

    stratified: bool = False

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        samples = classes.shuffled(generator) if self.stratified else generator.permutation(classes.samples)
        # Dealing class after class in turns levels both the totals and the classes. The clients are
        # permuted because otherwise the low numbers would always receive the odd samples.
        turns = generator.permutation(clients)
        return samples, turns[np.arange(classes.samples) % clients]
