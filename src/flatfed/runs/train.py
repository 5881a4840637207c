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
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, checked_client, shown
from flatfed.core.files import as_path
from flatfed.core.flat import Loss, load_buffers, load_vector
from flatfed.core.settings import Training
from flatfed.core.sharing import PRIVATE_BUFFERS, PRIVATE_MODEL, divided
from flatfed.core.state import check_like
from flatfed.data.pooling import pooled_samples
from flatfed.data.samples import Samples
from flatfed.engines.client_store import ClientStore
from flatfed.engines.engine import Engine
from flatfed.engines.evaluator import Snapshot
from flatfed.engines.execution import Execution
from flatfed.engines.metrics import Metric
from flatfed.engines.planning import Plan
from flatfed.engines.statistics import ServerStatistics
from flatfed.runs import curves
from flatfed.runs.files import RunFolderError, module_bytes, stored_state, write_atomically
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import Identity, run_identity
from flatfed.training.best import best_record
from flatfed.training.callbacks import announced_end
from flatfed.training.checks import check_before_training, notes
from flatfed.training.config import Config
from flatfed.training.evaluation import ClientSpread, client_spreads, evaluate_clients
from flatfed.training.loop import Callback, History, Statistics, TrainingLoop, TrainingState
from flatfed.training.own_models import OwnModels
from flatfed.training.progress import watched
from flatfed.training.start import start_engine
from flatfed.training.task import Task

if TYPE_CHECKING:
    import pandas
    from plotly.graph_objects import Figure


MOST_EVALUATED = 10**6
"""Clients whose own data the final model is evaluated on."""


@dataclass(frozen=True)
class Best:
    """The model of a run's best round by the validation samples, the first one if several are as good."""

    model: nn.Module
    record: Mapping[str, Any]
    """The round's line in the history."""

    @property
    def round(self) -> int:
        return int(self.record["round"])


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
    chosen: Best | None = field(default=None, repr=False)
    population: int = field(default=0, repr=False)
    """How many clients there are."""

    @property
    def best(self) -> Best:
        """The model of the best round, which validation samples choose."""
        if self.chosen is not None:
            return self.chosen
        if best_record(self.history, self.training.best_by) is not None:
            raise FlatfedError("best: that round was before the run kept its best model; train it again")
        raise FlatfedError(
            "best: the run had no validation samples to choose by; hold some out with "
            "federation.with_validation(0.1)"
        )

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

    def client_model(self, client: int) -> nn.Module:
        """The model that a client has: the global one with what the client keeps to itself."""
        client = checked_client(client, self.population)
        model, division = copy.deepcopy(self.model), divided(self.model, self.training.sharing)
        state = self.clients.read(client, self.server["model"])
        if division.personal and not {PRIVATE_MODEL, PRIVATE_BUFFERS} & state.keys():
            raise FlatfedError(
                "client_model: what a federation's clients keep to themselves is at their sites"
            )
        if PRIVATE_MODEL in state:
            load_vector(model, division.private, state[PRIVATE_MODEL])
        if PRIVATE_BUFFERS in state:
            load_buffers(model, division.unpacked(state[PRIVATE_BUFFERS]))
        return model

    def save(self, path: str | Path, best: bool = False) -> Path:
        """Writes the parameters and buffers of the final, or the best, global model as a safetensors file."""
        path, model = as_path("path", path), self.best.model if best else self.model
        if path.exists() and not path.is_file():
            raise FlatfedError(f"{path}: no regular file, and it would be replaced; choose another name")
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, module_bytes(model))
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
    progress: bool | None = None,
) -> Run:
    """Trains a task's model on its clients and returns the run.

    With a `folder` the run is recorded and checkpointed there, and goes on from the last checkpoint if there
    is one. `evaluate_on_clients` also evaluates the final model on every client's data, and on its own test
    data if the federation has some. `config` is recorded in the folder in place of algorithm and settings.
    A terminal or notebook shows how far the training has come, unless `progress` is False; with True it is
    written anywhere.
    """
    check_before_training(task, algorithm, training, callbacks)
    for note in notes(algorithm, training, execution.device):
        warnings.warn(note, FlatfedWarning, stacklevel=2)
    if folder == "":
        raise FlatfedError("folder = '': missing; give the run's folder a name")
    path = None if folder is None else as_path("folder", folder)
    if path is not None:
        RunFolder(path).check_usable()
        stored_state(task.model)  # now, not when all rounds are done
    engine = start_engine(task, algorithm, training, execution, path)

    def on_clients(snapshot: Snapshot) -> list[dict[str, float]]:
        if not evaluate_on_clients:
            return []
        if len(task.federation) > MOST_EVALUATED:
            warnings.warn(
                f"clients: the final model is not evaluated on {len(task.federation)} clients, more than "
                f"{MOST_EVALUATED}",
                FlatfedWarning,
                stacklevel=4,
            )
            return []
        federation, plan = task.federation, engine.plan
        own = OwnModels(
            plan, task.model, federation, lambda client: engine.clients.read(client, snapshot.model)
        )
        return evaluate_clients(engine.evaluate, federation, snapshot, range(len(federation)), own)

    if config is None:
        settings = {"training": training.model_dump(), "execution": execution.model_dump()}
        config = {"algorithm": algorithm.describe(), **settings}
    try:
        with watched(progress, algorithm.name, training.rounds) as watchers:
            run = run_engine(
                engine,
                task.model,
                _evaluated(task, training, execution),
                [*callbacks, *watchers],
                on_clients,
                path,
                config,
                None if path is None else run_identity(task, engine.plan),
                execution.checkpoint_every,
                _server_statistics(task, engine.plan),
            )
    finally:
        engine.close()

    if path is not None:
        run.continued = partial(
            go_on,
            task,
            algorithm,
            training,
            execution,
            callbacks,
            path,
            evaluate_on_clients,
            config,
            progress,
        )
    return run


def _evaluated(task: Task, training: Training, execution: Execution) -> dict[str, Samples]:
    """What the global model is evaluated on, by the name that it has in the history."""
    samples, count = dict(task.federation.evaluated), execution.training_samples
    if count is not None:
        samples["training"] = pooled_samples(task.federation, count, training.seed)
    return samples


def _server_statistics(task: Task, plan: Plan) -> Statistics | None:
    if not plan.division.recomputed:
        return None
    samples = task.federation.validation
    if samples is None:
        raise FlatfedError(
            'sharing.normalisation = "recompute": the server has no samples; hold some out with '
            "data.validation, or Federation.with_validation"
        )
    return ServerStatistics(plan, task.model, task.federation.transform, samples)


def go_on(
    task: Task,
    algorithm: Algorithm,
    training: Training,
    execution: Execution,
    callbacks: Sequence[Callback],
    folder: Path,
    evaluate_on_clients: bool,
    config: Mapping[str, Any],
    progress: bool | None,
    rounds: int,
) -> Run:
    """Trains on in a run's folder, where only the number of rounds may be another."""
    more = training.continued(rounds)
    return train(
        task,
        algorithm,
        more,
        execution,
        callbacks=callbacks,
        folder=folder,
        evaluate_on_clients=evaluate_on_clients,
        config={**config, "training": more.model_dump(mode="json")},
        progress=progress,
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
        progress=False,  # commands have bars of their own
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
    statistics: Statistics | None = None,
) -> Run:
    """All rounds of a training with an engine that is ready, from where the folder's run stopped."""
    state = TrainingState.initial(engine.plan, model)
    folder = None
    try:
        if path is not None and identity is not None:
            folder = RunFolder(path)
            _open(folder, engine, state, config, identity)
        loop = TrainingLoop(engine, model, state, evaluated, callbacks, folder, checkpoint_every, statistics)
        # What a tracker has to say at the end must not keep the model from being written.
        with announced_end(callbacks):
            try:
                loop.run()
            except DivergedError as error:
                if folder is not None:
                    folder.note_divergence(str(error))
                raise
            final = module_of(model, engine.plan, state.snapshot)
            best = chosen_best(model, engine.plan, state.best, state.history)
            per_client = on_clients(state.snapshot)
            if folder is not None:
                folder.finish(final, per_client, None if best is None else best.model)
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
        chosen=best,
        population=plan.population.clients,
    )


def module_of(model: nn.Module, plan: Plan, snapshot: Snapshot) -> nn.Module:
    """A copy of a model with the parameters and buffers of a snapshot."""
    module = copy.deepcopy(model)
    load_vector(module, plan.layout, snapshot.model.cpu())
    load_buffers(module, snapshot.buffers)
    return module


def chosen_best(model: nn.Module, plan: Plan, best: Snapshot | None, history: History) -> Best | None:
    record = best_record(history, plan.training.best_by)
    return None if best is None or record is None else Best(module_of(model, plan, best), record)


def _open(
    folder: RunFolder, engine: Engine, state: TrainingState, config: Mapping[str, Any], identity: Identity
) -> None:
    """Takes the folder and goes on from its checkpoint; nothing is written before all is in order."""
    plan = engine.plan
    folder.open(config, identity)
    checkpoint = folder.checkpoints.load()
    if checkpoint is not None:
        try:
            pairs = [(checkpoint.server, state.server), (checkpoint.buffers, state.buffers)]
            if checkpoint.best is not None:
                pairs.append(({"model": checkpoint.best.model}, {"model": state.server["model"]}))
                pairs.append((dict(checkpoint.best.buffers), state.buffers))
            for stored, expected in pairs:
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
        if checkpoint.best is not None:
            buffers = {name: value.to(plan.device) for name, value in checkpoint.best.buffers.items()}
            state.best = Snapshot(checkpoint.best.model.to(plan.device), buffers)
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
        **({} if plan.most_clients is None else {"clients_at_a_time": plan.most_clients}),
    }
    if identity.uncovered:
        warnings.warn(
            f"{folder.path}: once begun, this run cannot be continued, because nothing will tell whether it "
            f"is the same ({identity.uncovered[0]}); give the task a name and version to change that",
            FlatfedWarning,
            stacklevel=4,
        )
    folder.begin(config, chosen)
