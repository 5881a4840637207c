"""Dirichlet splits: of each client's labels, of each class, or of the clients' sizes.

`dirichlet_client`: q_i ~ Dirichlet(concentration * 1) over the classes that occur, without replacement:
clients of equal size are filled in random order. Whoever is next draws a class from its q_i, draws again
while that class has run out, and takes a random sample of it. This is the per-client prior of Hsu et al. with
the fill of the FedDyn code, used for FedDyn, FedSAM and FedSAGD (FedDyn and FedSAGD cite Yurochkin et al.,
whose rule is `dirichlet_class`). FedACG uses the same prior but weighs single samples, not classes, by it.
FedDyn picks the next client uniformly among those not yet full; here all slots of all clients are in
uniformly random order.
    Sizes: equal to within one sample, or with a `size_spread` log-normal ones whose logarithms deviate by
    it, as the FedDyn code has them on request. Duplicates: none. Unused: none.
    Redrawing takes forever when the classes that are left have next to no mass in q_i. Such a client draws
    from then on in proportion to the samples left in each class. As everything is handed out, the last slots
    take what remains, whatever the priors say. With few clients this limits the skew: over ten equal classes
    it stops growing below a concentration of about 0.02 for 20 clients and 0.005 for 100, and then falls
    slightly.

`dirichlet_client_refill`: the same q_i, with class pools that are refilled: client i draws the class of each
of its samples from q_i. A class hands out its samples in random order; when all are gone, the whole class is
shuffled and handed out again. Clients therefore follow their priors exactly, whatever the others take.
FL-Simulator, FedLESAM, FedSWA and FedNSAM split data this way.
    Sizes: equal to within one sample. Duplicates: yes, between clients and, for a class handed out more than
    once, within a client. Unused: yes, the samples of classes in low demand; a small concentration with few
    clients can leave whole classes out, see `summary`.

`dirichlet_class`: for each class draw shares p ~ Dirichlet(concentration * 1) over clients and cut the
shuffled class by the running sum of p. Clients that already hold samples / clients or more get no share of
the next class, unless `cap` is false: then small concentrations give a few clients most samples. The whole
is drawn again until every client has `minimum` samples. The cut is Yurochkin et al.'s; the cap and the
minimum of 10 are NIID-Bench's, which rounds the cuts down where this scheme rounds them without bias.
    Sizes: unequal. Duplicates: none. Unused: none.
    Drawing again cannot succeed when the concentration is small and clients are many, so it stops after
    `redraws` attempts or 10^8 numbers, or at once when so many clients are short that success is out of the
    question. Then the attempt with the fewest missing samples is topped up: every client above the minimum
    gives in proportion to its surplus, of all its classes alike, and the clients below the minimum receive
    exactly what they lack, in runs of few classes so that they stay skewed.

`quantity_skew`: every client gets `minimum` samples; the rest is shared by p ~ Dirichlet(concentration * 1)
over clients; who gets which sample is random. NIID-Bench's quantity skew draws p again until every client has
enough; setting the minimum aside first needs no second draw and cannot fail.
    Sizes: unequal. Duplicates: none. Unused: none.
"""

from typing import Annotated, Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import Field

from flatfed.core.types import Count, NonNegative
from flatfed.data.partition.base import (
    Assignment,
    Classes,
    Concentration,
    Indices,
    Partition,
    apportion,
    assign_with_refill,
    even_sizes,
    register,
)

# Drawing again would take 10^12 attempts. Far smaller masses are not to be trusted either: they come from
# 1 - v with v close to 1, so classes that the Dirichlet draw happens to visit late are rounded to zero.
NEGLIGIBLE_MASS = 1e-12

# Every closed class means sorting a block again: small enough for many classes, large enough for numpy.
SLOTS_AT_ONCE = 1 << 16

# With k clients below the minimum on average, an attempt without any succeeds about once in exp(k).
MAX_SHORT_CLIENTS = 10
MOST_DRAWS = 10**8  # of single numbers, a matter of seconds
DRAWS_PER_CALL = 10**5  # what is done around an attempt counts as so many


@register("dirichlet_client")
class DirichletClient(Partition):
    """Clients with Dirichlet class proportions, equal ones unless told, every sample used once."""

    concentration: Concentration
    size_spread: NonNegative = 0.0

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_table(clients)
        priors = generator.dirichlet(np.full(classes.count, self.concentration), size=clients)
        sizes = even_sizes(classes.samples, clients)
        if self.size_spread:
            sizes = log_normal_sizes(classes.samples, clients, self.size_spread, generator)
        owners = generator.permutation(np.repeat(np.arange(clients), sizes))
        chosen = fill(priors, owners, classes.counts, generator)
        return classes.shuffled(generator), owners[np.argsort(chosen, kind="stable")]


@register("dirichlet_client_refill")
class DirichletClientRefill(Partition):
    """Equal clients with Dirichlet class proportions, samples reused when a class runs out."""

    concentration: Concentration

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_table(clients)
        priors = generator.dirichlet(np.full(classes.count, self.concentration), size=clients)
        demand = generator.multinomial(even_sizes(classes.samples, clients), priors)
        return assign_with_refill(demand, classes, generator)


@register("dirichlet_class")
class DirichletClass(Partition):
    """Every class cut over the clients by Dirichlet shares, with a smallest client size."""

    concentration: Concentration
    minimum: Count = 10
    cap: bool = True
    redraws: Annotated[int, Field(ge=0)] = 100

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_minimum(self.minimum, clients)
        classes.check_table(clients)
        holdings = self._draw_holdings(classes.counts, clients, generator)
        # One entry per sample, ordered by client and then class.
        owners = np.repeat(np.arange(clients), holdings.sum(axis=1))
        held_class = np.repeat(np.tile(np.arange(classes.count), clients), holdings.ravel())
        owners = _top_up(owners, clients, self.minimum)
        return classes.shuffled(generator), owners[np.argsort(held_class, kind="stable")]

    def _draw_holdings(self, counts: Indices, clients: int, generator: Generator) -> Indices:
        """Samples per client and class of the first sufficient attempt, or of the best one."""
        best = _cut(counts, clients, self.concentration, self.cap, generator)
        for _ in range(min(self.redraws, MOST_DRAWS // (best.size + DRAWS_PER_CALL))):
            lacking = self._lacking(best)
            if not 0 < np.count_nonzero(lacking) <= MAX_SHORT_CLIENTS:
                break
            holdings = _cut(counts, clients, self.concentration, self.cap, generator)
            if self._lacking(holdings).sum() < lacking.sum():
                best = holdings
        return best

    def _lacking(self, holdings: Indices) -> Indices:
        """The number of samples by which each client misses the minimum."""
        return np.asarray(np.maximum(self.minimum - holdings.sum(axis=1), 0))


@register("quantity_skew")
class QuantitySkew(Partition):
    """Dirichlet client sizes above a minimum, random labels."""

    concentration: Concentration
    minimum: Count = 1

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        classes.check_minimum(self.minimum, clients)
        rest = classes.samples - self.minimum * clients
        shares = generator.dirichlet(np.full(clients, self.concentration))
        sizes = self.minimum + apportion(shares, rest, generator)
        return generator.permutation(classes.samples), np.repeat(np.arange(clients), sizes)


def log_normal_sizes(samples: int, clients: int, spread: float, generator: Generator) -> Indices:
    """Sizes in proportion to log-normal numbers; every client has at least one sample."""
    weights = generator.lognormal(sigma=spread, size=clients)
    return 1 + apportion(weights / weights.sum(), samples - clients, generator)


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


def _cut(counts: Indices, clients: int, concentration: float, cap: bool, generator: Generator) -> Indices:
    """One attempt: the samples of each class that each client gets, [clients, classes]."""
    holdings = np.zeros((clients, len(counts)), np.int64)
    sizes = np.zeros(clients, np.int64)
    for column, count in enumerate(counts):
        # A Dirichlet vector with some entries struck out and the rest rescaled is a Dirichlet vector
        # over the rest. Drawing that directly is the same rule and cannot divide by a vanished sum.
        sharing = np.flatnonzero(sizes * clients < counts.sum()) if cap else np.arange(clients)
        shares = generator.dirichlet(np.full(len(sharing), concentration))
        holdings[sharing, column] = apportion(shares, count, generator)
        sizes += holdings[:, column]
    return holdings


def _top_up(owners: Indices, clients: int, minimum: int) -> Indices:
    """Move samples from clients above the minimum to those below; `owners` is sorted by client."""
    sizes = np.bincount(owners, minlength=clients)
    lacking = np.maximum(minimum - sizes, 0)
    surplus = np.maximum(sizes - minimum, 0)
    if not lacking.any():
        return owners
    # Differences of rounded-down running sums are whole numbers that add up exactly.
    gives = np.diff(np.cumsum(surplus) * lacking.sum() // surplus.sum(), prepend=0)
    position = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    rate, size = gives[owners], sizes[owners]
    # The same rounding picks `rate` of `size` positions at even distances, hence from all classes alike.
    moved = (position + 1) * rate // size > position * rate // size
    topped_up = owners.copy()
    topped_up[moved] = np.repeat(np.arange(clients), lacking)
    return topped_up
