"""The engine that a training asks for, ready to train."""

from pathlib import Path

from flatfed.core.algorithm import Algorithm
from flatfed.core.settings import Training
from flatfed.engines.engine import Engine
from flatfed.engines.execution import Execution
from flatfed.engines.local import LocalEngine
from flatfed.engines.planning import make_plan
from flatfed.engines.threads import single_threaded
from flatfed.engines.trial import plain_torch
from flatfed.training.task import Task


@plain_torch()
def start_engine(
    task: Task, algorithm: Algorithm, training: Training, execution: Execution, folder: Path | None = None
) -> Engine:
    """Tries the task's model once and starts the workers; scratch files go into the folder."""
    with single_threaded():
        plan = make_plan(
            task.model, task.federation, algorithm, task.loss, task.used_metrics, training, execution.device
        )
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    if execution.engine == "ray":
        from flatfed.engines.ray import RayEngine  # noqa: PLC0415  (an extra)

        return RayEngine(plan, task.model, task.federation, execution, folder)
    return LocalEngine(plan, task.model, task.federation, execution, folder)
