"""What all partitions share: the interface, the registry, the argument checks and the bookkeeping.

A partition decides which client owns which sample. It is given class labels and a random generator, and
returns one sorted int64 array of sample indices per client. The result depends on nothing else, so the same
generator state gives the same split.
"""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, dataclass_transform

import numpy as np
import pydantic.dataclasses
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

Indices = NDArray[np.int64]
Assignment = tuple[Indices, Indices]  # samples, and the client that gets each

# Above a million a Dirichlet draw is uniform to three digits; `iid` says that more clearly.
Concentration = Annotated[float, Field(gt=0, le=1e6)]

LARGEST_TABLE = 5 * 10**7


@dataclass(frozen=True)
class Classes:
    """Labels renumbered 0..C-1 over the classes that occur, so that no partition meets an empty class."""

    values: NDArray[Any]  # [C] the original label of each class
    codes: NDArray[np.integer[Any]]  # [samples] the class of each sample
    counts: Indices  # [C] samples per class

    @property
    def samples(self) -> int:
        return len(self.codes)

    @property
    def count(self) -> int:
        return len(self.counts)

    def shuffled(self, generator: Generator) -> Indices:
        """All sample indices, class after class, in random order within each class."""
        order = generator.permutation(self.samples)
        return order[np.argsort(self.codes[order], kind="stable")]

    def pools(self, generator: Generator) -> list[Indices]:
        """The sample indices of each class in random order."""
        return np.split(self.shuffled(generator), np.cumsum(self.counts)[:-1])

    def check_minimum(self, minimum: int, clients: int) -> None:
        """Refuse a smallest client size that the samples cannot provide."""
        if minimum * clients > self.samples:
            raise ValueError(
                f"minimum={minimum} needs {minimum * clients} samples for {clients} clients, there are "
                f"{self.samples}: lower minimum to {self.samples // clients} or use fewer clients"
            )

    def check_table(self, clients: int) -> None:
        """Refuse a table [clients, classes] that would not fit into memory."""
        if clients * self.count > LARGEST_TABLE:
            raise ValueError(
                f"clients={clients} of {self.count} classes need a table of {clients * self.count} numbers, "
                f"more than {LARGEST_TABLE}: use at most {LARGEST_TABLE // self.count} clients"
            )

    def check_classes_per_client(self, classes_per_client: int) -> None:
        """Refuse to give a client more distinct classes than the labels contain."""
        if classes_per_client > self.count:
            raise ValueError(
                f"classes_per_client={classes_per_client} is more than the {self.count} classes in the "
                f"labels: use at most {self.count}"
            )


class Partition(ABC):
    """A rule that hands samples to clients; subclasses declare its options as fields."""

    def split(self, labels: NDArray[Any], clients: int, generator: Generator) -> list[Indices]:
        """Return the sample indices of each client, sorted, at least one per client.

        Raises ValueError when the labels, the number of clients and the options do not fit together.
        """
        samples, owners = self.assign(read_classes(labels, clients), clients, generator)
        order = np.lexsort((samples, owners))
        ends = np.cumsum(np.bincount(owners, minlength=clients))
        return np.split(samples[order].astype(np.int64, copy=False), ends[:-1])

    @abstractmethod
    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        """Return, in any order, the samples that are handed out and the client that gets each."""


PARTITIONS: dict[str, type[Partition]] = {}

AnyPartition = TypeVar("AnyPartition", bound=Partition)


@dataclass_transform(frozen_default=True)
def register(name: str, *, eq: bool = True) -> Callable[[type[AnyPartition]], type[AnyPartition]]:
    """Make a class a frozen dataclass with checked options and list it in `PARTITIONS` under `name`."""
    # Without "forbid", a misspelt option would silently leave the default in place.
    config = ConfigDict(extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True, strict=True)

    def add(partition: type[AnyPartition]) -> type[AnyPartition]:
        if name in PARTITIONS:
            raise ValueError(f"partition {name!r} is already registered; choose another name")
        if inspect.isabstract(partition):
            raise ValueError(f"partition {name!r}: it has no method assign; write one")
        checked: Any = pydantic.dataclasses.dataclass(frozen=True, eq=eq, config=config)(partition)
        PARTITIONS[name] = checked
        return checked

    return add


def read_classes(labels: NDArray[Any], clients: int) -> Classes:
    """Check the arguments common to all partitions and renumber the labels."""
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels has shape {labels.shape}: pass one label per sample, shape (samples,)")
    if len(labels) == 0:
        raise ValueError("labels has length 0: pass at least one sample")
    if labels.dtype.kind not in "iub":
        raise ValueError(f"labels has type {labels.dtype}: pass integer class labels")
    if not isinstance(clients, int | np.integer) or isinstance(clients, bool):
        raise ValueError(f"clients={clients!r} is no whole number: ask for at least 1")
    if clients < 1:
        raise ValueError(f"clients={clients} leaves nobody to hold the samples: ask for at least 1")
    if clients > len(labels):
        raise ValueError(
            f"clients={clients} is more than the {len(labels)} samples: ask for at most {len(labels)} clients"
        )
    values, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # numpy sorts small integers by radix, which makes every later sort by class linear.
    return Classes(values, codes.astype(np.min_scalar_type(len(values) - 1)), counts.astype(np.int64))


def even_sizes(samples: int, clients: int) -> Indices:
    """Sizes that add up to `samples` and differ by at most one, larger ones first."""
    return np.full(clients, samples // clients, np.int64) + (np.arange(clients) < samples % clients)


def apportion(shares: NDArray[np.float64], total: int, generator: Generator) -> Indices:
    """Whole numbers that add up to `total` and are `shares * total` on average, off by less than one.

    Always rounding the running sum down would hand the last client a sample whatever its share.
    """
    ends = np.floor(np.cumsum(shares) * total + generator.random()).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def assign_with_refill(demand: Indices, classes: Classes, generator: Generator) -> Assignment:
    """Give each client the demanded number of samples per class, `demand` being [clients, classes].

    A class serves its clients in random order, from as many shuffled copies of itself as it takes.
    """
    samples, owners = [], []
    for pool, class_demand in zip(classes.pools(generator), demand.T, strict=True):
        total = int(class_demand.sum())
        copies = np.tile(pool, (-(-total // len(pool)), 1))
        samples.append(generator.permuted(copies, axis=1).ravel()[:total])
        owners.append(generator.permutation(np.repeat(np.arange(len(demand)), class_demand)))
    return np.concatenate(samples), np.concatenate(owners)
