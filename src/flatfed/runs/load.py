"""A run that was trained before, from its folder."""

from contextlib import closing
from functools import partial
from pathlib import Path

from flatfed.algorithms import build
from flatfed.core.errors import FlatfedError
from flatfed.core.files import as_path
from flatfed.core.settings import Training
from flatfed.engines.evaluator import Snapshot
from flatfed.engines.execution import Execution
from flatfed.runs.files import read_json
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import run_identity
from flatfed.runs.train import Run, chosen_best, go_on, module_of
from flatfed.training.config import Config
from flatfed.training.start import start_engine
from flatfed.training.task import Task


def load_run(folder: str | Path, task: Task | None = None) -> Run:
    """The run in a folder, as far as its last checkpoint; nothing is written.

    A run of the command line knows its task; for one that was made from Python, give the same `task` again.
    """
    path = as_path("folder", folder)
    existing = RunFolder.existing(path)
    values = existing.read_config()
    if "federation" in values:
        raise FlatfedError(f"{path}: a federation's run, whose clients' data are elsewhere")
    if task is None:
        if not {"data", "task"} & values.keys():
            raise FlatfedError(
                f"{path}: made from Python, whose model and data are not in the folder; give the task, too"
            )
        task = Config.checked(values).make_task()
    algorithm, training = build(values["algorithm"]), Training(**values["training"])
    checkpoint, execution = existing.last_checkpoint(), Execution()
    with closing(start_engine(task, algorithm, training, execution.replaced(workers=1))) as engine:
        plan = engine.plan
        if run_identity(task, plan).digest != checkpoint.identity:
            raise FlatfedError(
                f"{path}: it was made with another model, data, loss or settings; give its own task"
            )
        existing.checkpoints.load_clients(engine.clients)
    model = module_of(task.model, plan, Snapshot(checkpoint.server["model"], checkpoint.buffers))
    history = existing.checkpoint_history()
    per_client = read_json(existing.clients_path)["clients"] if existing.clients_path.exists() else []
    return Run(
        model=model,
        history=history,
        algorithm=algorithm,
        training=training,
        server=dict(checkpoint.server),
        clients=engine.clients,
        loss=task.loss,
        metrics=task.used_metrics,
        path=plan.path,
        path_reason=plan.path_reason,
        continued=partial(
            go_on, task, algorithm, training, execution, (), path, bool(per_client), values, None
        ),
        per_client=per_client,
        chosen=chosen_best(task.model, plan, checkpoint.best, history),
        population=plan.population.clients,
    )
