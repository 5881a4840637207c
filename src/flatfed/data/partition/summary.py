"""What a partition came out as: sizes, classes held, and samples left out or given twice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from flatfed.data.partition.base import Indices


@dataclass(frozen=True)
class PartitionSummary:
    """Counts that tell whether a partition is the one that was meant."""

    clients: int
    empty_clients: int
    samples_used: int  # distinct samples held by anyone
    samples_unused: int
    samples_duplicated: int  # holdings beyond the first of each sample, in the same or another client
    smallest_client: int
    median_client: float
    largest_client: int
    fewest_classes: int  # per client
    mean_classes: float
    most_classes: int
    classes: int
    uncovered_classes: tuple[int, ...]  # labels that occur in the data and that no client holds


def summary(parts: Sequence[Indices], labels: NDArray[Any]) -> PartitionSummary:
    """Describe the partition `parts` of the samples labelled `labels`."""
    labels = np.asarray(labels)
    values, codes = np.unique(labels, return_inverse=True)
    counts = class_counts(parts, codes, len(values))
    sizes = counts.sum(axis=1)
    classes_held = np.count_nonzero(counts, axis=1)
    used = len(np.unique(np.concatenate(parts)))
    return PartitionSummary(
        clients=len(parts),
        empty_clients=int(np.count_nonzero(sizes == 0)),
        samples_used=used,
        samples_unused=len(labels) - used,
        samples_duplicated=int(sizes.sum()) - used,
        smallest_client=int(sizes.min()),
        median_client=float(np.median(sizes)),
        largest_client=int(sizes.max()),
        fewest_classes=int(classes_held.min()),
        mean_classes=float(classes_held.mean()),
        most_classes=int(classes_held.max()),
        classes=len(values),
        uncovered_classes=tuple(int(value) for value in values[counts.sum(axis=0) == 0]),
    )


def class_counts(parts: Sequence[Indices], labels: NDArray[Any], classes: int) -> Indices:
    """Samples of each class held by each client, [clients, classes], labels being 0..classes-1."""
    if len(parts) == 0:
        raise ValueError("parts has length 0: pass the indices of at least one client")
    owners = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    held = np.asarray(labels)[np.concatenate(parts)].astype(np.int64)
    if len(held) > 0 and not 0 <= held.min() <= held.max() < classes:
        raise ValueError(
            f"labels run from {held.min()} to {held.max()} but classes={classes}: "
            f"number the labels from 0 and pass classes={max(int(held.max()) + 1, 1)} or more"
        )
    flat = np.bincount(owners * classes + held, minlength=len(parts) * classes)
    return flat.reshape(len(parts), classes)
