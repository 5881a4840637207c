"""Clients as they occur in the data: one client per writer, speaker, device or site.

Rule: samples with the same group id belong to one client. Groups below `minimum` samples are left out; if
more groups remain than clients are asked for, a random choice of them takes part. Clients are ordered by
group id. The usual split of LEAF's FEMNIST (by writer) and Shakespeare (by role).

Sizes: whatever the groups are. Duplicates: none. Unused: the samples of groups that do not take part.
"""

from dataclasses import field
from typing import Annotated, Any

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from pydantic import BeforeValidator

from flatfed.core.types import Count
from flatfed.data.partition.base import Assignment, Classes, Partition, register


def _read_groups(groups: object) -> NDArray[Any]:
    """A read-only copy, so that a frozen partition cannot change when the caller's array does."""
    copy = np.array(groups)
    if copy.ndim != 1 or copy.dtype.kind not in "iubUS":
        raise ValueError(
            f"groups has shape {copy.shape} and type {copy.dtype}: pass one integer or string id per sample"
        )
    copy.flags.writeable = False
    return copy


# Comparing arrays has no single truth value, so two of these are equal only if identical.
@register("natural", eq=False)
class Natural(Partition):
    """One client per group id, `groups` giving the id of each sample."""

    groups: Annotated[np.ndarray[Any, Any], BeforeValidator(_read_groups)] = field(repr=False)
    minimum: Count = 1

    @property
    def clients(self) -> int:
        """How many groups have enough samples."""
        return int((np.unique(self.groups, return_counts=True)[1] >= self.minimum).sum())

    def assign(self, classes: Classes, clients: int, generator: Generator) -> Assignment:
        if len(self.groups) != classes.samples:
            raise ValueError(
                f"groups has length {len(self.groups)} for {classes.samples} labels: pass one id per sample"
            )
        _, group, sizes = np.unique(self.groups, return_inverse=True, return_counts=True)
        eligible = np.flatnonzero(sizes >= self.minimum)
        if clients > len(eligible):
            raise ValueError(
                f"clients={clients} is more than the {len(eligible)} groups with at least "
                f"minimum={self.minimum} samples: use fewer clients or a lower minimum"
            )
        chosen = np.sort(generator.choice(eligible, clients, replace=False))
        client_of_group = np.full(len(sizes), -1)
        client_of_group[chosen] = np.arange(clients)
        owners = client_of_group[group]
        samples = np.flatnonzero(owners >= 0)
        return samples, owners[samples]
