"""One short file per algorithm; every file in this folder is imported and registers itself."""

import importlib
import pkgutil

from flatfed.algorithms.registry import ALGORITHMS, build, equations

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["ALGORITHMS", "build", "equations"]
