"""Label skew where each client holds only a few classes.

`pathological_balanced`: every class is cut into equally many shards (to within one), each client gets
shards of `classes_per_client` different classes. In the spirit of McMahan et al., who deal two shards
of label-sorted data to each client, but shards never straddle classes, so the number of classes per
client is exact. With one class per client, client i holds class i mod C.
    Sizes: equal to within one sample per class held if the classes are equally large and C divides
    clients * classes_per_client; otherwise they follow the class sizes. Duplicates: none. Unused: only
    the classes that nobody holds, when clients * classes_per_client < C.

`pathological_independent`: each client draws `classes_per_client` classes on its own and holds equally
many samples of each; a class that runs out is handed out again. As in FL-Simulator and FedLESAM, which
draw the class of every sample at random where this scheme deals them evenly, again so that the number
of classes is exact.
    Sizes: equal to within one sample. Duplicates: yes. Unused: yes, possibly whole classes.
"""

import numpy as np
from numpy.random import Generator

from flatfed.core.types import Count
from flatfed.data.partition.base import (
    Assignment,
    Classes,
    Indices,
    Partition,
    assign_with_refill,
    even_sizes,
    register,
)


@register("pathological_balanced")
class PathologicalBalanced(Partition):
    """Exactly `classes_per_client` classes each, every class shared by equally many clients."""

    classes_per_client: Count

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_classes_per_client(self.classes_per_client)
        classes.check_table(clients)
        if clients * self.classes_per_client > classes.samples:
            raise ValueError(
                f"classes_per_client={self.classes_per_client} with {clients} clients makes "
                f"{clients * self.classes_per_client} shards of {classes.samples} samples: use fewer classes "
                "per client or fewer clients"
            )
        if self.classes_per_client == 1:
            held = np.arange(clients)[:, None] % classes.count
        else:
            held = _balanced_choice(clients, classes.count, self.classes_per_client, generator)
        samples, owners = [], []
        sizes = np.zeros(clients, np.int64)
        by_class = np.argsort(held, axis=None, kind="stable") // self.classes_per_client
        class_holders = np.split(by_class, np.cumsum(np.bincount(held.ravel(), minlength=classes.count))[:-1])
        for column, pool in enumerate(classes.pools(generator)):
            holders = class_holders[column]
            if len(holders) > len(pool):
                raise ValueError(
                    f"classes_per_client={self.classes_per_client} with {clients} clients makes "
                    f"{len(holders)} clients share the {len(pool)} samples of class "
                    f"{classes.values[column]}: use fewer classes per client or fewer clients"
                )
            if len(holders) == 0:
                continue
            # The odd samples go to the clients that have least, or they would pile up on a few.
            holders = holders[np.argsort(sizes[holders], kind="stable")]
            shards = even_sizes(len(pool), len(holders))
            sizes[holders] += shards
            samples.append(pool)
            owners.append(np.repeat(holders, shards))
        return np.concatenate(samples), np.concatenate(owners)


@register("pathological_independent")
class PathologicalIndependent(Partition):
    """Exactly `classes_per_client` classes each, drawn without regard to the other clients."""

    classes_per_client: Count

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_classes_per_client(self.classes_per_client)
        classes.check_table(clients)
        sizes = even_sizes(classes.samples, clients)
        if sizes.min() < self.classes_per_client:
            raise ValueError(
                f"classes_per_client={self.classes_per_client} is more than the {sizes.min()} samples "
                f"of a client: use at most {sizes.min()} or fewer clients"
            )
        every_class = np.tile(np.arange(classes.count), (clients, 1))
        held = generator.permuted(every_class, axis=1)[:, : self.classes_per_client]
        share, odd = np.divmod(sizes[:, None], self.classes_per_client)
        demand = np.zeros((clients, classes.count), np.int64)
        np.put_along_axis(demand, held, share + (np.arange(self.classes_per_client) < odd), axis=1)
        return assign_with_refill(demand, classes, generator)


def _balanced_choice(clients: int, classes: int, per_client: int, generator: Generator) -> Indices:
    """Random classes for each client, distinct within it, each used equally often to within one.

    Systematic sampling: lay the uses left of each class end to end (in random order) and step through
    them with a stride of the clients left. No class has more uses left than there are clients left, so
    a stride never hits one class twice, and it never misses a class that every remaining client needs.
    """
    uses = generator.permutation(even_sizes(clients * per_client, classes))
    held = np.empty((clients, per_client), np.int64)
    for client in range(clients):
        left = clients - client
        order = generator.permutation(classes)
        hits = generator.integers(left) + left * np.arange(per_client)
        held[client] = order[np.searchsorted(np.cumsum(uses[order]), hits, side="right")]
        uses[held[client]] -= 1
    return held
