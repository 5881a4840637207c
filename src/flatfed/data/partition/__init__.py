"""Ways to divide one labelled data set among clients.

    PARTITIONS["dirichlet_client"](concentration=0.1).split(labels, clients=100, generator=generator)

Each scheme is a frozen dataclass of its settings; its module states the rule, who uses it, whether
sizes are equal and whether samples are repeated or left out. Every client of every scheme holds at
least one sample; settings under which that is impossible raise ValueError.
"""

from __future__ import annotations

from flatfed.data.partition.base import Partition
from flatfed.data.partition.dirichlet_class import DirichletClass
from flatfed.data.partition.dirichlet_client import DirichletClient
from flatfed.data.partition.dirichlet_client_refill import DirichletClientRefill
from flatfed.data.partition.iid import Iid
from flatfed.data.partition.natural import Natural
from flatfed.data.partition.pathological import PathologicalBalanced, PathologicalIndependent
from flatfed.data.partition.quantity_skew import QuantitySkew
from flatfed.data.partition.summary import PartitionSummary, class_counts, summary

PARTITIONS: dict[str, type[Partition]] = {
    "iid": Iid,
    "dirichlet_client": DirichletClient,
    "dirichlet_client_refill": DirichletClientRefill,
    "dirichlet_class": DirichletClass,
    "pathological_balanced": PathologicalBalanced,
    "pathological_independent": PathologicalIndependent,
    "natural": Natural,
    "quantity_skew": QuantitySkew,
}

__all__ = [
    "PARTITIONS",
    "DirichletClass",
    "DirichletClient",
    "DirichletClientRefill",
    "Iid",
    "Natural",
    "Partition",
    "PartitionSummary",
    "PathologicalBalanced",
    "PathologicalIndependent",
    "QuantitySkew",
    "class_counts",
    "summary",
]
