"""Test samples for each client that look like its training data.

A model's accuracy on such a shard estimates how well it serves that client; the deviation between clients is
only worth looking at beside the chance of drawing so few samples.

From a pooled test set every client draws equally many samples, its classes in the proportions of its training
data, rounded at random so that they are right on average. Within a client no sample comes twice. Clients draw
independently of each other, so their shards may overlap: disjoint ones cannot follow skewed proportions in
general, because a class that many clients hold would run out.

Natural clients (writers, roles) whose data set has test samples by the same clients get exactly those.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatfed.data.partition.base import Indices, apportion
from flatfed.data.partition.summary import class_counts


def matching_rows(
    parts: Sequence[Indices],
    train_labels: NDArray[Any],
    test_labels: NDArray[Any],
    size: int,
    generator: np.random.Generator,
) -> list[Indices]:
    """For each client `size` rows of the test set, classes as in the client's `parts` of the training set."""
    if size > len(test_labels):
        raise ValueError(f"there are {len(test_labels)} test samples; ask for as many or fewer")
    classes = int(max(train_labels.max(), test_labels.max())) + 1
    pools = [np.flatnonzero(test_labels == label) for label in range(classes)]
    available = np.array([len(pool) for pool in pools])
    rows = []
    for client, held in enumerate(class_counts(parts, train_labels, classes)):
        needed = apportion(held / held.sum(), size, generator)
        if (needed > available).any():
            label = int(np.argmax(needed > available))
            raise ValueError(
                f"client {client} needs {needed[label]} test samples of class {label} to match its training "
                f"data, there are {available[label]}; ask for fewer or split the data more evenly"
            )
        chosen = [
            generator.choice(pools[label], needed[label], replace=False) for label in np.flatnonzero(needed)
        ]
        rows.append(np.sort(np.concatenate(chosen)))
    return rows


def own_rows(
    parts: Sequence[Indices], train_groups: NDArray[Any], test_groups: NDArray[Any]
) -> list[Indices]:
    """The test samples of the natural client whose training samples each of `parts` is."""
    order = np.argsort(test_groups, kind="stable")
    groups = np.array([train_groups[part[0]] for part in parts])
    starts, ends = (np.searchsorted(test_groups[order], groups, side) for side in ("left", "right"))
    rows = [order[start:end] for start, end in zip(starts, ends, strict=True)]
    for client, own in enumerate(rows):
        if len(own) == 0:
            raise ValueError(
                f"client {client} has training but no test samples; raise partition.minimum or leave it out"
            )
    return rows
