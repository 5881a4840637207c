"""Looking into a model and its training: flatness, curvature, drift, stability, generalization.

    with ff.diagnostics.inspect(task, run=run) as subject:
        ff.diagnostics.hessian(subject)["global"]["eigenvalues"]

Every diagnostic is a function of a subject that returns plain data, the "result" of the files that
`flatfed diagnose` writes. Each has its own file in this folder, which is imported and registers it.
"""

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

from flatfed.diagnostics.drift import flatness_distance
from flatfed.diagnostics.during import DuringTraining
from flatfed.diagnostics.folder import diagnose
from flatfed.diagnostics.line import between
from flatfed.diagnostics.registry import DIAGNOSTICS, Diagnostic, diagnostic
from flatfed.diagnostics.subject import Subject, inspect, inspect_folder

__all__ = [
    "DIAGNOSTICS",
    "Diagnostic",
    "DuringTraining",
    "Subject",
    "between",
    "diagnose",
    "diagnostic",
    "flatness_distance",
    "inspect",
    "inspect_folder",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

# The functions take the names of the modules that they are in.
globals().update({name: known.measure for name, known in DIAGNOSTICS.items()})


def __getattr__(name: str) -> Callable[..., dict[str, Any]]:
    """A diagnostic that was registered from elsewhere."""
    if name in DIAGNOSTICS:
        return DIAGNOSTICS[name].measure
    raise AttributeError(f"module 'flatfed.diagnostics' has no attribute {name!r}")
