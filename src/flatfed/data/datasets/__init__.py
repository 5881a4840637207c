"""Data sets, each loaded as a `TrainTest` by a function of keyword options, one of which is `folder`.

To add one, put a file into this folder with its `DatasetInfo` and a loader under `@register(info)`; the
config reader and `flatfed data list`, `get` and `check` then know it.
"""

import importlib
import pkgutil

from flatfed.data.datasets.base import TrainTest
from flatfed.data.datasets.catalog import CATALOG, DATASETS, data_folder
from flatfed.data.datasets.digits import load_digits_tensors

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["CATALOG", "DATASETS", "TrainTest", "data_folder", "load_digits_tensors"]
