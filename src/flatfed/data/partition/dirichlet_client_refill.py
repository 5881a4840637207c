"""Label skew by a Dirichlet prior per client, with class pools that are refilled.

Rule: client i draws class proportions q_i ~ Dirichlet(concentration * 1) over the classes that occur
and then the class of each of its samples from q_i. A class hands out its samples in random order; when
all are gone, the whole class is shuffled and handed out again. Clients therefore follow their priors
exactly, whatever the others take. FL-Simulator, FedLESAM, FedSWA and FedNSAM split data this way.

Sizes: equal to within one sample. Duplicates: yes, between clients and, for a class handed out more
than once, within a client. Unused: yes, the samples of classes in low demand; a small concentration
with few clients can leave whole classes out, see `summary`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic.dataclasses import dataclass

from flatfed.data.partition.base import (
    STRICT,
    Classes,
    Concentration,
    Indices,
    Partition,
    collect,
    even_sizes,
    read_classes,
)


@dataclass(frozen=True, config=STRICT)
class DirichletClientRefill(Partition):
    """Equal clients with Dirichlet class proportions, samples reused when a class runs out."""

    concentration: Concentration

    def split(self, labels: NDArray[Any], clients: int, generator: np.random.Generator) -> list[Indices]:
        classes = read_classes(labels, clients)
        priors = generator.dirichlet(np.full(classes.count, self.concentration), size=clients)
        demand = generator.multinomial(even_sizes(classes.samples, clients), priors)
        return serve(demand, classes, generator)


def serve(demand: Indices, classes: Classes, generator: np.random.Generator) -> list[Indices]:
    """Give each client the demanded number of samples per class, `demand` being [clients, classes].

    A class serves its clients in random order, from as many shuffled copies of itself as it takes.
    """
    clients = len(demand)
    pools = np.split(classes.shuffled(generator), np.cumsum(classes.counts)[:-1])
    samples, owners = [], []
    for pool, wanted in zip(pools, demand.T, strict=True):
        total = int(wanted.sum())
        copies = np.tile(pool, (-(-total // len(pool)), 1))
        samples.append(generator.permuted(copies, axis=1).ravel()[:total])
        owners.append(generator.permutation(np.repeat(np.arange(clients), wanted)))
    return collect(np.concatenate(samples), np.concatenate(owners), clients)
