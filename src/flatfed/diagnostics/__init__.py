"""Looking into a model and its training: flatness, curvature, drift, stability, generalization.

    with ff.diagnostics.examine(model, federation, run=run) as subject:
        ff.diagnostics.hessian(subject)["global"]["eigenvalues"]

Every diagnostic is a function of a subject that returns plain data, the "result" of the files that
`flatfed diagnose` writes.
"""

from flatfed.diagnostics.drift import drift, flatness_distance
from flatfed.diagnostics.flatness import perturbation, sharpness
from flatfed.diagnostics.folder import CHEAP, DIAGNOSTICS, diagnose
from flatfed.diagnostics.generalization import clients, generalization
from flatfed.diagnostics.hessian import hessian
from flatfed.diagnostics.stability import global_stability, local_stability
from flatfed.diagnostics.subject import Subject, examine, examine_folder
from flatfed.diagnostics.surface import between, line, plane, surface
from flatfed.diagnostics.theory import theory

__all__ = [
    "CHEAP",
    "DIAGNOSTICS",
    "Subject",
    "between",
    "clients",
    "diagnose",
    "drift",
    "examine",
    "examine_folder",
    "flatness_distance",
    "generalization",
    "global_stability",
    "hessian",
    "line",
    "local_stability",
    "perturbation",
    "plane",
    "sharpness",
    "surface",
    "theory",
]
