"""The five papers' results tables, and each of their cells as a run.

`tables.json` holds the numbers as printed, percent accuracies throughout. Cells that contradict themselves
carry an "impossible" note. Table names are paper/table, for instance fedsagd/table2. Figures are there for
the accuracies in their captions; those that show something else say what ("diagnostic").

`tuned.json` holds what sweeps of ours found: for some tables' cells of one data set (all of them, or those
with "part" in their title) the best settings of each method, and how they were found.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

from flatfed.core.errors import FlatfedError, did_you_mean


@functools.cache
def tables() -> dict[str, Any]:
    return _read("tables.json")


@functools.cache
def sweeps() -> list[dict[str, Any]]:
    return _read("tuned.json")


def _read(name: str) -> Any:
    return json.loads(resources.files(__name__).joinpath(name).read_text())


def table(name: str) -> dict[str, Any]:
    if name not in tables():
        raise FlatfedError(f"table = {name!r}: unknown; {did_you_mean(name, tables())}")
    return tables()[name]
