"""Data sets, one per file, each loaded as a `TrainTest`."""

from __future__ import annotations

from collections.abc import Callable

from flatfed.data.datasets.base import TrainTest
from flatfed.data.datasets.digits import load_digits_tensors

DATASETS: dict[str, Callable[[], TrainTest]] = {"digits": load_digits_tensors}

__all__ = ["DATASETS", "TrainTest", "load_digits_tensors"]
