"""The command line. Every module of this folder registers its command with the one application."""

import importlib
import pkgutil

from flatfed.cli.terminal import app

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

__all__ = ["app", "main"]


def main() -> None:
    app()
