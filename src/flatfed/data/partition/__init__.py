"""Ways to divide one labelled data set among clients.

    PARTITIONS["dirichlet_client"](concentration=0.1).split(labels, clients=100, generator=generator)

To add one, put a file into this folder with a `Partition` under `@register("its_name")`; the config reader
and the command line then know it. Its module docstring states the rule, who uses it, whether sizes are equal
and whether samples are repeated or left out.
"""

import importlib
import pkgutil

from flatfed.data.partition.base import PARTITIONS, Partition, register
from flatfed.data.partition.natural import Natural
from flatfed.data.partition.summary import PartitionSummary, class_counts, summary

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["PARTITIONS", "Natural", "Partition", "PartitionSummary", "class_counts", "register", "summary"]
