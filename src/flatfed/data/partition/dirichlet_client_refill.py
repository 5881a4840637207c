"""Label skew by a Dirichlet prior per client, with class pools that are refilled.

Rule: client i draws class proportions q_i ~ Dirichlet(concentration * 1) over the classes that occur and then
the class of each of its samples from q_i. A class hands out its samples in random order; when all are gone,
the whole class is shuffled and handed out again. Clients therefore follow their priors exactly, whatever the
others take. FL-Simulator, FedLESAM, FedSWA and FedNSAM split data this way.

Sizes: equal to within one sample. Duplicates: yes, between clients and, for a class handed out more than
once, within a client. Unused: yes, the samples of classes in low demand; a small concentration with few
clients can leave whole classes out, see `summary`.
"""

from __future__ import annotations

import numpy as np
from numpy.random import Generator

from flatfed.data.partition.base import (
    Assignment,
    Classes,
    Concentration,
    Partition,
    assign_with_refill,
    even_sizes,
    register,
)


@register("dirichlet_client_refill")
class DirichletClientRefill(Partition):
    """Equal clients with Dirichlet class proportions, samples reused when a class runs out."""

    concentration: Concentration

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        priors = generator.dirichlet(np.full(classes.count, self.concentration), size=clients)
        demand = generator.multinomial(even_sizes(classes.samples, clients), priors)
        return assign_with_refill(demand, classes, generator)
