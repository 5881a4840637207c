"""Clients as they occur in the data: one client per writer, speaker, device or site.

Rule: samples with the same group id belong to one client. Groups below `minimum` samples are left out;
if more groups remain than clients are asked for, a random choice of them takes part. Clients are
ordered by group id. The usual split for LEAF's FEMNIST (by writer) and Shakespeare (by role).

Sizes: whatever the groups are. Duplicates: none. Unused: the samples of groups that do not take part.
"""

from __future__ import annotations

from dataclasses import field
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass

from flatfed.data.partition.base import STRICT, Indices, Partition, PositiveCount, collect, read_classes


def _read_groups(groups: object) -> NDArray[Any]:
    """A private copy, so that a frozen scheme cannot change under its owner's hands."""
    copy = np.array(groups)
    if copy.ndim != 1 or copy.dtype.kind not in "iubUS":
        raise ValueError(
            f"groups has shape {copy.shape} and type {copy.dtype}: pass one integer or string id per sample"
        )
    copy.flags.writeable = False
    return copy


# Comparing arrays field by field has no single truth value, so two schemes are equal only if identical.
@dataclass(frozen=True, eq=False, config=ConfigDict(**STRICT, arbitrary_types_allowed=True))
class Natural(Partition):
    """One client per group id, `groups` giving the id of each sample."""

    groups: Annotated[np.ndarray[Any, Any], BeforeValidator(_read_groups)] = field(repr=False)
    minimum: PositiveCount = 1

    def split(self, labels: NDArray[Any], clients: int, generator: np.random.Generator) -> list[Indices]:
        classes = read_classes(labels, clients)
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
        return collect(samples, owners[samples], clients)
