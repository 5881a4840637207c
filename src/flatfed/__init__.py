"""flatfed: federated learning that finds flat, stable minima.

    import flatfed as ff
    task = ff.Task(model, federation)
    run = ff.train(task, ff.fedmoswa(), ff.Training(rounds=100, participation=0.1, local_steps=10))

Every algorithm of `flatfed list` is a function here; `ff.Algorithm` with `ff.parts` composes new ones.
"""

import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatfed import diagnostics, parts, theory
    from flatfed.algorithms import ALGORITHMS, build
    from flatfed.core.algorithm import Algorithm
    from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning
    from flatfed.core.flat import model_to_vector, vector_to_model
    from flatfed.core.settings import Sharing, Training
    from flatfed.data.federation import Federation
    from flatfed.engines.execution import Execution
    from flatfed.engines.metrics import whole
    from flatfed.models.lora import lora
    from flatfed.race.recommend import recommend
    from flatfed.report.comparison import compare
    from flatfed.runs.load import load_run
    from flatfed.runs.train import Run, plot, train
    from flatfed.runs.tuning import tune
    from flatfed.training.callbacks import MLflow, TensorBoard, Wandb
    from flatfed.training.config import load_task
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
    "MLflow",
    "Progress",
    "Run",
    "Sharing",
    "Task",
    "TensorBoard",
    "Training",
    "Wandb",
    "accuracy",
    "build",
    "compare",
    "diagnostics",
    "load_run",
    "load_task",
    "lora",
    "model_to_vector",
    "parts",
    "plot",
    "recommend",
    "theory",
    "train",
    "tune",
    "vector_to_model",
    "whole",
]

# Imported when first used: torch takes a second, and the command line prints its help without it.
_MODULES = {
    "algorithms": ("ALGORITHMS", "build"),
    "core.algorithm": ("Algorithm",),
    "core.errors": ("DivergedError", "FlatfedError", "FlatfedWarning"),
    "core.flat": ("model_to_vector", "vector_to_model"),
    "core.settings": ("Sharing", "Training"),
    "data.federation": ("Federation",),
    "engines.execution": ("Execution",),
    "engines.metrics": ("whole",),
    "models.lora": ("lora",),
    "race.recommend": ("recommend",),
    "report.comparison": ("compare",),
    "runs.load": ("load_run",),
    "runs.train": ("Run", "plot", "train"),
    "runs.tuning": ("tune",),
    "training.callbacks": ("MLflow", "TensorBoard", "Wandb"),
    "training.config": ("load_task",),
    "training.loop": ("Progress",),
    "training.task": ("Task", "accuracy"),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"flatfed.{module}"), name)
    if not name.startswith("_"):
        if importlib.util.find_spec(f"flatfed.{name}") is not None:
            return importlib.import_module(f"flatfed.{name}")
        algorithms = importlib.import_module("flatfed.algorithms").ALGORITHMS
        if name in algorithms:
            return algorithms[name]
    raise AttributeError(f"module 'flatfed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *__all__, *importlib.import_module("flatfed.algorithms").ALGORITHMS])
