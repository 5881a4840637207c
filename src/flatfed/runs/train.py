"""A whole training: from a task to a run, in a folder of its own if one is given."""

from __future__ import annotations

import copy
import html
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, shown
from flatfed.core.flat import Loss, load_buffers, load_vector
from flatfed.core.settings import Training
from flatfed.core.state import check_like
from flatfed.data.samples import Samples
from flatfed.engines.client_store import ClientStore
from flatfed.engines.engine import Engine
from flatfed.engines.execution import Execution
from flatfed.engines.metrics import Metric
from flatfed.engines.worker import Snapshot
from flatfed.runs import curves
from flatfed.runs.files import RunFolderError, module_bytes, write_atomically
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import Identity, run_identity
from flatfed.training.checks import check_before_training, notes
from flatfed.training.config import Config
from flatfed.training.evaluation import ClientSpread, client_spreads, evaluate_clients
from flatfed.training.loop import Callback, History, TrainingLoop, TrainingState
from flatfed.training.start import start_engine
from flatfed.training.task import Task

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure


@dataclass(repr=False)
class Run:
    """A finished training: the global model, what happened, and the final state."""

    model: nn.Module
    history: History
    algorithm: Algorithm
    training: Training
    server: dict[str, Tensor]
    """The server's vectors; "model" is the flat global model, others are called PART.NAME."""
    clients: ClientStore = field(repr=False)
    loss: Loss = F.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    path: str = "client"
    """How clients were trained: as a "matrix" or "client" by client."""
    path_reason: str = ""
    continued: Callable[[int], Run] | None = field(default=None, compare=False)
    """Trains on in the run's folder, if it has one, up to a number of rounds."""
    per_client: list[dict[str, float]] = field(default_factory=list, repr=False)
    """Samples, loss and metrics of the final model on each client's data, if it was evaluated there; with a
    "test_" in front, on the client's own test data."""

    @property
    def client_spreads(self) -> dict[str, ClientSpread]:
        """The accuracy over clients on "train" and, if they have some, "test" data of their own."""
        return client_spreads(self.per_client)

    def __repr__(self) -> str:
        return f"Run({self.algorithm.name}: {curves.described(self.history)})"

    def _repr_html_(self) -> str:
        """As notebooks show it."""
        return f"<p>{html.escape(repr(self))}</p>{curves.picture({self.algorithm.name: self.history})}"

    def to_dataframe(self) -> pandas.DataFrame:
        """The history, one row a round (needs pandas)."""
        return curves.data_frame({self.algorithm.name: self.history})

    def plot(self, value: str | None = None) -> Figure:
        """A number of the history over the rounds, as a plotly figure; the test accuracy unless named."""
        return plot([self], value)

    def resume(self, rounds: int) -> Run:
        """The run that goes on in this one's folder up to so many rounds, as if it had never stopped."""
        if self.continued is None:
            raise FlatfedError("folder: the run has none to go on in; call train with folder=…")
        return self.continued(rounds)

    def save(self, path: str | Path) -> Path:
        """Writes the global model's parameters and buffers as a safetensors file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, module_bytes(self.model))
        return path


def plot(runs: Run | Sequence[Run] | Mapping[str, Run], value: str | None = None) -> Figure:
    """A number of several runs, which may have labels, over the rounds, as one plotly figure."""
    runs = [runs] if isinstance(runs, Run) else runs
    several = list(runs.values()) if isinstance(runs, Mapping) else runs
    if (
        not isinstance(several, list | tuple)
        or not all(isinstance(run, Run) for run in several)
        or not several
    ):
        raise FlatfedError(f"runs = {shown(runs)}: give runs, in a list or a dictionary with labels")
    if value is not None and not isinstance(value, str):
        raise FlatfedError(f"value = {shown(value)}: give the name of a number in the history")
    if not isinstance(runs, Mapping):
        histories = curves.labelled([(run.algorithm.name, run.history) for run in runs])
    else:
        histories = {label: run.history for label, run in runs.items()}
    return curves.figure(histories, value)


def train(
    task: Task,
    algorithm: Algorithm,
    training: Training,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    *,
    callbacks: Sequence[Callback] = (),
    folder: str | Path | None = None,
    evaluate_on_clients: bool = False,
    config: Mapping[str, Any] | None = None,
) -> Run:
    """Trains a task's model on its clients and returns the run.

    With a `folder` the run is recorded and checkpointed there, and goes on from the last checkpoint if there
    is one. `evaluate_on_clients` also evaluates the final model on every client's data, and on its own test
    data if the federation has some. `config` is recorded in the folder in place of algorithm and settings.
    """
    check_before_training(task, algorithm, training, callbacks)
    for note in notes(algorithm, training, execution.device):
        warnings.warn(note, FlatfedWarning, stacklevel=2)
    if folder == "":
        raise FlatfedError("folder = '': missing; give the run's folder a name")
    path = None if folder is None else Path(folder)
    if path is not None:
        RunFolder(path).check_usable()
    engine = start_engine(task, algorithm, training, execution, path)

    def on_clients(snapshot: Snapshot) -> list[dict[str, float]]:
        clients = range(len(task.federation)) if evaluate_on_clients else ()
        return evaluate_clients(engine.evaluate, task.federation, snapshot, clients)

    if config is None:
        settings = {"training": training.model_dump(), "execution": execution.model_dump()}
        config = {"algorithm": algorithm.describe(), **settings}
    try:
        run = run_engine(
            engine,
            task.model,
            task.federation.evaluated,
            callbacks,
            on_clients,
            path,
            config,
            None if path is None else run_identity(task, engine.plan),
            execution.checkpoint_every,
        )
    finally:
        engine.close()

    if path is not None:
        run.continued = partial(
            go_on, task, algorithm, training, execution, callbacks, path, evaluate_on_clients, config
        )
    return run


def go_on(
    task: Task,
    algorithm: Algorithm,
    training: Training,
    execution: Execution,
    callbacks: Sequence[Callback],
    folder: Path,
    evaluate_on_clients: bool,
    config: Mapping[str, Any],
    rounds: int,
) -> Run:
    """Trains on in a run's folder, where only the number of rounds may be another."""
    more = training.replaced(rounds=rounds)
    return train(
        task,
        algorithm,
        more,
        execution,
        callbacks=callbacks,
        folder=folder,
        evaluate_on_clients=evaluate_on_clients,
        config={**config, "training": more.model_dump(mode="json")},
    )


def run_config(
    config: Config,
    folder: Path | None = None,
    callbacks: Sequence[Callback] = (),
    task: Task | None = None,
) -> Run:
    """Trains what a config describes, its `task` if made already, and evaluates the model on every client."""
    return train(
        task or config.make_task(),
        config.make_algorithm(),
        config.training,
        config.execution,
        callbacks=callbacks,
        folder=folder,
        evaluate_on_clients=True,
        config=json.loads(config.model_dump_json()),
    )


def run_engine(
    engine: Engine,
    model: nn.Module,
    evaluated: Mapping[str, Samples],
    callbacks: Sequence[Callback],
    on_clients: Callable[[Snapshot], list[dict[str, float]]],
    path: Path | None,
    config: Mapping[str, Any],
    identity: Identity | None,
    checkpoint_every: int,
) -> Run:
    """All rounds of a training with an engine that is ready, from where the folder's run stopped."""
    state = TrainingState.initial(engine.plan, model)
    folder = None
    try:
        if path is not None and identity is not None:
            folder = RunFolder(path)
            _open(folder, engine, state, config, identity)
        loop = TrainingLoop(engine, model, state, evaluated, callbacks, folder, checkpoint_every)
        try:
            loop.run()
        except DivergedError as error:
            if folder is not None:
                folder.note_divergence(str(error))
            raise
        final = copy.deepcopy(model)
        load_vector(final, engine.plan.layout, state.server["model"].cpu())
        load_buffers(final, state.buffers)
        per_client = on_clients(state.snapshot)
        if folder is not None:
            folder.finish(final, per_client)
    finally:
        if folder is not None:
            folder.close()
    plan = engine.plan
    return Run(
        model=final,
        history=state.history,
        algorithm=plan.algorithm,
        training=plan.training,
        server=state.server,
        clients=engine.clients,
        loss=plan.loss,
        metrics=plan.metrics,
        path=plan.path,
        path_reason=plan.path_reason,
        per_client=per_client,
    )


def _open(
    folder: RunFolder, engine: Engine, state: TrainingState, config: Mapping[str, Any], identity: Identity
) -> None:
    """Takes the folder and goes on from its checkpoint; nothing is written before all is in order."""
    plan = engine.plan
    folder.open(config, identity)
    checkpoint = folder.checkpoints.load()
    if checkpoint is not None:
        try:
            for stored, expected in ((checkpoint.server, state.server), (checkpoint.buffers, state.buffers)):
                check_like(stored, expected, str(folder.checkpoints.server_path))
        except FlatfedError as error:
            raise RunFolderError(str(error)) from None
        if checkpoint.identity != identity.digest:
            raise FlatfedError(
                f"{folder.path}: its checkpoint was made with another model, data, loss or settings; choose "
                "another folder or remove it"
            )
        if checkpoint.round > plan.training.rounds:
            raise FlatfedError(
                f"rounds = {plan.training.rounds}: {folder.path} already has {checkpoint.round}; ask for at "
                "least that many or choose another folder"
            )
        folder.checkpoints.load_clients(engine.clients)
        state.round = checkpoint.round
        state.server = {name: value.to(plan.device) for name, value in checkpoint.server.items()}
        state.buffers = {name: value.to(plan.device) for name, value in checkpoint.buffers.items()}
        state.history = folder.checkpoint_history()
        if len(state.history) != state.round:
            raise RunFolderError(
                f"{folder.history.path}: it has {len(state.history)} of the checkpoint's {state.round} "
                "rounds; restore it or choose another folder"
            )
    chosen = {
        "path": plan.path,
        "reason": plan.path_reason,
        "workers": engine.workers,
        "parameters": plan.layout.size,
    }
    if identity.uncovered:
        warnings.warn(
            f"{folder.path}: once begun, this run cannot be continued, because nothing will tell whether it "
            f"is the same ({identity.uncovered[0]}); give the task a name and version to change that",
            FlatfedWarning,
            stacklevel=4,
        )
    folder.begin(config, chosen)
