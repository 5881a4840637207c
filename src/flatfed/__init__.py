"""flatfed: federated learning that finds flat, stable minima.

    import flatfed as ff
    task = ff.Task(model, federation)
    run = ff.train(task, ff.fedmoswa(), ff.Training(rounds=100, participation=0.1, local_steps=10))

Every algorithm of `flatfed list` is a function here; `ff.Algorithm` with `ff.parts` composes new ones.
"""

from collections.abc import Callable

from flatfed import diagnostics, parts
from flatfed.algorithms import ALGORITHMS, build
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning
from flatfed.core.settings import Training
from flatfed.data.federation import Federation
from flatfed.engines.execution import Execution
from flatfed.engines.metrics import whole
from flatfed.runs.train import Run, train
from flatfed.training.callbacks import TensorBoard
from flatfed.training.loop import Progress
from flatfed.training.task import Task, accuracy

__version__ = "0.1.0"

__all__ = [
    "ALGORITHMS",
    "Algorithm",
    "DivergedError",
    "Execution",
    "Federation",
    "FlatfedError",
    "FlatfedWarning",
    "Progress",
    "Run",
    "Task",
    "TensorBoard",
    "Training",
    "accuracy",
    "build",
    "diagnostics",
    "parts",
    "train",
    "whole",
]


def __getattr__(name: str) -> Callable[..., Algorithm]:
    if name in ALGORITHMS:
        return ALGORITHMS[name]
    raise AttributeError(f"module 'flatfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *ALGORITHMS])
