"""Label skew by a Dirichlet prior per client: q_i ~ Dirichlet(concentration * 1) over the classes that occur.

`dirichlet_client`, without replacement: clients of equal size are filled in random order. Whoever is next
draws a class from its q_i, draws again while that class has run out, and takes a random sample of it. This is
the per-client prior of Hsu et al. with the fill of the FedDyn code, used for FedDyn, FedSAM and FedSAGD
(FedDyn and FedSAGD cite Yurochkin et al., whose rule is the per-class cut of `dirichlet_class`). FedACG uses
the same prior but weighs single samples, not classes, by it. FedDyn picks the next client uniformly among
those not yet full; here all slots of all clients are in uniformly random order.
    Sizes: equal to within one sample. Duplicates: none. Unused: none.

`dirichlet_client_refill`, with class pools that are refilled: client i draws the class of each of its samples
from q_i. A class hands out its samples in random order; when all are gone, the whole class is shuffled and
handed out again. Clients therefore follow their priors exactly, whatever the others take. FL-Simulator,
FedLESAM, FedSWA and FedNSAM split data this way.
    Sizes: equal to within one sample. Duplicates: yes, between clients and, for a class handed out more than
    once, within a client. Unused: yes, the samples of classes in low demand; a small concentration with few
    clients can leave whole classes out, see `summary`.

Without replacement, redrawing takes forever when the classes that are left have next to no mass in q_i. Such
a client draws from then on in proportion to the samples left in each class. As everything is handed out, the
last slots take what remains, whatever the priors say. With few clients this limits the skew: over ten equal
classes it stops growing below a concentration of about 0.02 for 20 clients and 0.005 for 100, and then falls
slightly. `dirichlet_client_refill` has no such limit.
"""

from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from flatfed.data.partition.base import (
    Assignment,
    Classes,
    Concentration,
    Indices,
    Partition,
    assign_with_refill,
    even_sizes,
    register,
)

# Drawing again would take 10^12 attempts. Far smaller masses are not to be trusted either: they come from
# 1 - v with v close to 1, so classes that the Dirichlet draw happens to visit late are rounded to zero.
NEGLIGIBLE_MASS = 1e-12

# Every closed class means sorting a block again: small enough for many classes, large enough for numpy.
SLOTS_AT_ONCE = 1 << 16


@register("dirichlet_client")
class DirichletClient(Partition):
    """Equal clients with Dirichlet class proportions, every sample used once."""

    concentration: Concentration

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        priors = generator.dirichlet(np.full(classes.count, self.concentration), size=clients)
        owners = generator.permutation(np.repeat(np.arange(clients), even_sizes(classes.samples, clients)))
        chosen = fill(priors, owners, classes.counts, generator)
        return classes.shuffled(generator), owners[np.argsort(chosen, kind="stable")]


@register("dirichlet_client_refill")
class DirichletClientRefill(Partition):
    """Equal clients with Dirichlet class proportions, samples reused when a class runs out."""

    concentration: Concentration

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        priors = generator.dirichlet(np.full(classes.count, self.concentration), size=clients)
        demand = generator.multinomial(even_sizes(classes.samples, clients), priors)
        return assign_with_refill(demand, classes, generator)


def fill(
    priors: NDArray[np.float64], owners: Indices, room: Indices, generator: Generator
) -> NDArray[np.integer[Any]]:
    """Choose a class for each slot in turn, never more of a class than there is room for.

    `priors` is [clients, classes], `owners` the client of each slot, `room` the samples of each class;
    there must be as many samples as slots. The outcome has exactly the distribution of the slot by
    slot loop, but a whole block of slots draws at once; the class that overflows first is closed and
    only the slots it turned away draw again. A draw that found room is never touched, which is what
    drawing again on rejection amounts to. Every repetition closes a class, so there are at most as
    many as classes.
    """
    priors, room = priors.copy(), room.copy()
    is_open = np.ones(len(room), bool)
    chosen = np.empty(len(owners), np.min_scalar_type(len(room) - 1))
    for start in range(0, len(owners), SLOTS_AT_ONCE):
        settled, stop = start, min(start + SLOTS_AT_ONCE, len(owners))
        waiting = np.arange(start, stop)
        while True:
            drawing, row = np.unique(owners[waiting], return_inverse=True)
            weights = priors[drawing] * is_open
            exhausted = weights.sum(axis=1) < NEGLIGIBLE_MASS
            weights[exhausted] = room / room.sum()
            priors[drawing[exhausted]] = weights[exhausted]
            chosen[waiting] = _draw(weights, row, generator)

            pending = chosen[settled:stop]
            demand = np.bincount(pending, minlength=len(room))
            overfull = np.flatnonzero(demand > room)
            if len(overfull) == 0:
                room -= demand
                break
            by_class = np.argsort(pending, kind="stable")
            begin = np.cumsum(demand) - demand
            first_rejected = by_class[begin[overfull] + room[overfull]]
            closing = overfull[np.argmin(first_rejected)]
            is_open[closing] = False
            waiting = settled + by_class[begin[closing] + room[closing] : begin[closing] + demand[closing]]
            room -= np.bincount(chosen[settled : waiting[0]], minlength=len(room))
            settled = waiting[0]  # slots before this one are final
    return chosen


def _draw(weights: NDArray[np.float64], rows: Indices, generator: Generator) -> Indices:
    """Draw one column for each entry of `rows`, in proportion to that row of `weights`."""
    cumulative = np.cumsum(weights, axis=1)
    cumulative /= cumulative[:, -1:]
    # Row r occupies the interval [r, r + 1), so one search serves all rows.
    ladder = (cumulative + np.arange(len(weights))[:, None]).ravel()
    # The sum can round up to r + 1, which belongs to the next row.
    position = np.minimum(rows + generator.random(len(rows)), np.nextafter(rows + 1.0, 0.0))
    return np.searchsorted(ladder, position, side="right") - rows * weights.shape[1]
