"""Plain modules by name: each is a function of the input shape, the number of classes and options.

To add one, put a file into this folder with such a function under `@register`.
"""

import importlib
import pkgutil

from flatfed.models.base import MODELS, register

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["MODELS", "register"]
