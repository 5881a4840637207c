"""What every partition scheme shares: the interface, the input checks and the bookkeeping.

A scheme decides which client owns which sample. It gets class labels and a random generator, and
returns one sorted int64 array of sample indices per client. The result depends on nothing else, so
the same generator state gives the same partition.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field

Indices = NDArray[np.int64]

# A misspelt option must not silently leave the default in place.
STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)

# Above a million a Dirichlet draw is uniform to three digits; asking for more means `iid` was wanted.
Concentration = Annotated[float, Field(gt=0, le=1e6)]
PositiveCount = Annotated[int, Field(ge=1)]


class Partition(ABC):
    """A rule that hands samples to clients; subclasses are frozen dataclasses holding its settings."""

    @abstractmethod
    def split(self, labels: NDArray[Any], clients: int, generator: np.random.Generator) -> list[Indices]:
        """Return the sample indices of each client, sorted, at least one per client.

        Raises ValueError when the labels, the number of clients and the settings do not fit together.
        """


@dataclass(frozen=True)
class Classes:
    """Labels renumbered 0..C-1 over the classes that occur, so that schemes never meet an empty class."""

    values: NDArray[Any]  # [C] the original label of each class
    codes: NDArray[np.integer[Any]]  # [samples] the class of each sample
    counts: Indices  # [C] samples per class

    @property
    def samples(self) -> int:
        return len(self.codes)

    @property
    def count(self) -> int:
        return len(self.counts)

    def shuffled(self, generator: np.random.Generator) -> Indices:
        """All sample indices, class after class, in random order within each class."""
        order = generator.permutation(self.samples)
        return order[np.argsort(self.codes[order], kind="stable")]


def read_classes(labels: NDArray[Any], clients: int) -> Classes:
    """Check the arguments common to all schemes and renumber the labels."""
    labels = np.asarray(labels)
    if labels.ndim != 1:
        raise ValueError(f"labels has shape {labels.shape}: pass one label per sample, shape (samples,)")
    if len(labels) == 0:
        raise ValueError("labels has length 0: pass at least one sample")
    if labels.dtype.kind not in "iub":
        raise ValueError(f"labels has type {labels.dtype}: pass integer class labels")
    if clients < 1:
        raise ValueError(f"clients={clients} leaves nobody to hold the samples: ask for at least 1")
    if clients > len(labels):
        raise ValueError(
            f"clients={clients} is more than the {len(labels)} samples: ask for at most {len(labels)} clients"
        )
    values, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    # numpy sorts small integers by radix, which makes every later sort by class linear.
    return Classes(values, codes.astype(np.min_scalar_type(len(values) - 1)), counts.astype(np.int64))


def check_minimum(minimum: int, clients: int, samples: int) -> None:
    """Refuse a smallest client size that the samples cannot provide."""
    if minimum * clients > samples:
        raise ValueError(
            f"minimum={minimum} needs {minimum * clients} samples for {clients} clients, "
            f"there are {samples}: lower minimum to {samples // clients} or use fewer clients"
        )


def check_classes_per_client(classes_per_client: int, classes: int) -> None:
    """Refuse to give a client more distinct classes than the labels contain."""
    if classes_per_client > classes:
        raise ValueError(
            f"classes_per_client={classes_per_client} is more than the {classes} classes in the labels: "
            f"use at most {classes}"
        )


def even_sizes(samples: int, clients: int) -> Indices:
    """Sizes that add up to `samples` and differ by at most one, larger ones first."""
    return np.full(clients, samples // clients, np.int64) + (np.arange(clients) < samples % clients)


def apportion(shares: NDArray[np.float64], total: int, generator: np.random.Generator) -> Indices:
    """Whole numbers that add up to `total` and are `shares * total` on average, off by less than one.

    Always rounding the running sum down would hand the last client a sample whatever its share.
    """
    ends = np.floor(np.cumsum(shares) * total + generator.random()).astype(np.int64)
    ends[-1] = total
    return np.diff(np.minimum(ends, total), prepend=0)


def collect(samples: Indices, owners: Indices, clients: int) -> list[Indices]:
    """Turn parallel arrays (sample, the client that gets it) into one sorted index array per client."""
    order = np.lexsort((samples, owners))
    ends = np.cumsum(np.bincount(owners, minlength=clients))
    return np.split(samples[order].astype(np.int64, copy=False), ends[:-1])
