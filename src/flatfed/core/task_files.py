"""Modules made of users' own files, which are on no path that Python would find them by.

What is pickled of them is found by their names, so a process that begins anew makes them again first.
"""

import importlib.util
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

PREFIX = "task_file_"


def load(path: Path) -> ModuleType:
    """A file as a module, which may import what is beside it."""
    # One name wherever it is called from, because a run's identity has its classes' names; and no package's.
    name = PREFIX + re.sub(r"\W", "_", path.stem)
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))  # as if Python had been called with the file
    sys.modules[name] = module
    try:
        specification.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def loaded() -> list[str]:
    """The files whose modules this process has."""
    modules = [module for name, module in sys.modules.items() if name.startswith(PREFIX)]
    return [module.__file__ for module in modules if module.__file__]


def load_again(files: Sequence[str]) -> None:
    """The modules of another process's files, as far as this machine has these."""
    present = set(loaded())
    for path in map(Path, files):
        if str(path) not in present and path.is_file():
            load(path)
