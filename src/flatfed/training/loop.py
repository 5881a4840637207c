"""Training from start to end: rounds, evaluation, history, checkpoints."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Unpack, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm, estimate_of
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning
from flatfed.core.flat import (
    Loss,
    all_finite,
    apply_buffer_change,
    load_buffers,
    load_vector,
    no_longer_finite,
)
from flatfed.core.part import Cohort, Part, ServerContext, Work
from flatfed.core.rounds import broadcast, server_round
from flatfed.core.sampling import cohort, local_steps
from flatfed.core.settings import Settings, SettingsOptions
from flatfed.core.state import Dimensions, State, initial_state
from flatfed.data.federation import Federation
from flatfed.engines.client_store import ClientStore
from flatfed.engines.local import LocalEngine
from flatfed.engines.sums import Totals
from flatfed.engines.worker import Metric
from flatfed.runs.folder import Checkpoint, History, RunFolder, save_module
from flatfed.runs.identity import fingerprint
from flatfed.training.checks import check_arguments, check_labels, too_short
from flatfed.training.evaluation import ClientSpread, client_spreads

CHECKPOINT_SECONDS = 30.0


def accuracy(outputs: Tensor, targets: Tensor) -> Tensor:
    """The share of samples whose largest output is the target (or where the target is largest)."""
    if targets.shape == outputs.shape:
        targets = targets.argmax(1)
    return (outputs.argmax(1) == targets).double().mean()


@dataclass(frozen=True)
class Progress:
    """What a callback sees after a round; look at the vectors, but do not change them."""

    round: int
    """Rounds finished so far."""
    server: State
    """The server's vectors; "model" is the flat global model."""
    buffers: State
    """The global model's buffers."""
    record: Mapping[str, Any]
    """The round's line in the history."""
    cohort: Sequence[int]
    dimensions: Dimensions
    """The lengths of the server's vectors: parameters, inputs, classes."""


Callback = Callable[[Progress], Mapping[str, float] | None]
"""Called after every round; numbers that it returns go into the history."""


@runtime_checkable
class WatchesWork(Protocol):
    """A callback that also wants to hear of the server's own work, such as iterations of a distillation."""

    def work(self, work: Work) -> None: ...


@dataclass
class Run:
    """A finished training: the global model, what happened, and the final state."""

    model: nn.Module
    history: History
    algorithm: Algorithm
    settings: Settings
    server: dict[str, Tensor]
    clients: ClientStore = field(repr=False)
    loss: Loss = F.cross_entropy
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    path: str = "client"
    """How clients were trained: as a "matrix" or "client" by client."""
    path_reason: str = ""
    per_client: list[dict[str, float]] = field(default_factory=list, repr=False)
    """Samples, loss and metrics of the final model on each client's data, when asked for; with a "test_" in
    front, on the client's own test data."""

    @property
    def client_spreads(self) -> dict[str, ClientSpread]:
        """The accuracy over clients on "train" and, if they have some, "test" data of their own."""
        return client_spreads(self.per_client)

    def save(self, path: str | Path) -> Path:
        """Writes the global model's parameters and buffers as a safetensors file."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_module(self.model, path)
        return path


def train(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    *,
    loss: Loss = F.cross_entropy,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Sequence[Callback] = (),
    folder: str | Path | None = None,
    config: Mapping[str, Any] | None = None,
    evaluate_clients: bool = False,
    **options: Unpack[SettingsOptions],
) -> Run:
    """Trains a model on a federation's clients and returns the run.

    `model` gives the architecture and the first weights and is left as it is. `loss(outputs, targets)` is
    the mean over a batch. `metrics` are functions of (outputs, targets) that average over samples; with
    the default loss there is "accuracy". With a `folder` the run is recorded and checkpointed there, and
    goes on from the last checkpoint if there is one. `config` is kept in the folder in place of the settings
    and the algorithm. `evaluate_clients` also evaluates the final model on every client's data, and on its
    own test data if the federation has some. All other keyword arguments are fields of `Settings`.
    """
    check_arguments(model, federation, algorithm, callbacks)
    settings = Settings.checked(**options)
    settings.cohort_size(len(federation))
    if settings.weighting == "samples" and federation.total_samples is None:
        raise FlatfedError(
            "weighting = 'samples': the federation does not know its clients' sizes; use uniform"
        )
    if metrics is None:
        metrics = default_metrics(loss)
    if _is_cross_entropy(loss):
        check_labels(model, federation)
    if (note := too_short(algorithm, settings)) is not None:
        warnings.warn(note, FlatfedWarning, stacklevel=2)
    engine = _engine(settings)(model, federation, algorithm, loss, settings, metrics)
    return run_engine(
        engine, Path(folder) if folder is not None else None, config, callbacks, evaluate_clients
    )


def run_engine(
    engine: LocalEngine,
    folder: Path | None,
    config: Mapping[str, Any] | None,
    callbacks: Sequence[Callback],
    evaluate_clients: bool,
) -> Run:
    """All rounds of a training with an engine that is ready, which is closed afterwards."""
    try:
        training = _Training(engine, folder, config)
        try:
            return training.run(callbacks, evaluate_clients)
        finally:
            if training.folder is not None:
                training.folder.close()
    finally:
        engine.close()


def _engine(settings: Settings) -> type[LocalEngine]:
    if settings.engine == "local":
        return LocalEngine
    from flatfed.engines.ray import RayEngine  # noqa: PLC0415  (an extra)

    return RayEngine


class _Training:
    """The state of a training between rounds."""

    def __init__(self, engine: LocalEngine, folder: Path | None, config: Mapping[str, Any] | None) -> None:
        self.engine, self.plan = engine, engine.plan
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self.algorithm, self.settings = engine.plan.algorithm, engine.plan.settings
        vector = engine.initial_vector
        self.store = ClientStore(
            engine.client_vectors,
            engine.plan.dimensions,
            engine.client_dtype,
            int(self.settings.client_memory * 2**20),
            folder,
        )
        self.round, self.consistent = 0, True
        self.unsaved, self.saved_at = False, time.monotonic()
        self.buffers: dict[str, Tensor] = engine.initial_buffers
        self.server = {
            "model": vector,
            **initial_state(self.algorithm.server_vectors, engine.plan.dimensions, vector),
        }
        self.history: History = []
        self.folder: RunFolder | None = None
        self.fingerprint = ""
        if folder is not None:
            self.fingerprint = fingerprint(engine)
            self.folder = RunFolder(folder)
            asked = config or {
                "algorithm": self.algorithm.describe(),
                "training": self.settings.model_dump(),
            }
            try:
                self._open(self.folder, asked)
            except BaseException:
                self.folder.close()
                raise

    def _open(self, folder: RunFolder, asked: Mapping[str, Any]) -> None:
        """Takes the folder and goes on from its checkpoint; nothing is written before all is in order."""
        folder.open(asked)
        checkpoint = folder.load()
        if checkpoint is not None:
            self._check_checkpoint(folder, checkpoint)
            folder.load_clients(self.store)
            device = self.plan.device
            self.round = checkpoint.round
            self.server = {name: value.to(device) for name, value in checkpoint.server.items()}
            self.buffers = {name: value.to(device) for name, value in checkpoint.buffers.items()}
            self.history = folder.read_history(self.round)
            if len(self.history) != self.round:
                raise FlatfedError(
                    f"{folder.history_path}: it has {len(self.history)} of the checkpoint's {self.round} "
                    "rounds; restore it or choose another folder"
                )
        chosen = {
            "path": self.plan.path,
            "reason": self.plan.path_reason,
            "workers": self.engine.workers,
            "parameters": self.plan.layout.size,
        }
        folder.begin(asked, chosen, self.history)

    def _check_checkpoint(self, folder: RunFolder, checkpoint: Checkpoint) -> None:
        def shapes(vectors: State) -> dict[str, Any]:
            return {name: (value.shape, value.dtype) for name, value in vectors.items()}

        same = shapes(checkpoint.server) == shapes(self.server)
        if not same or shapes(checkpoint.buffers) != shapes(self.buffers):
            raise FlatfedError(f"{folder.path}: its checkpoint is of another model or algorithm")
        if checkpoint.fingerprint != self.fingerprint:
            raise FlatfedError(
                f"{folder.path}: its checkpoint was made with another model, data, loss or settings; choose "
                "another folder or remove it"
            )
        if checkpoint.round > self.settings.rounds:
            raise FlatfedError(
                f"rounds = {self.settings.rounds}: {folder.path} already has {checkpoint.round}; ask for at "
                "least that many or choose another folder"
            )

    def run(self, callbacks: Sequence[Callback], evaluate_clients: bool) -> Run:
        try:
            while self.round < self.settings.rounds:
                self._one_round(callbacks)
                self._checkpoint_if_due(self.round % self.settings.checkpoint_every == 0)
        except (KeyboardInterrupt, FlatfedError) as error:
            # The state is that of the last finished round; a full disk or a kill falls back to the last file.
            self.store.discard()
            if self.consistent and self.unsaved:
                self._checkpoint()
            if self.folder is not None and isinstance(error, DivergedError):
                self.folder.note_divergence(str(error))
            raise
        if self.unsaved:
            self._checkpoint()
        final = copy.deepcopy(self.engine.model)
        load_vector(final, self.plan.layout, self.server["model"].cpu())
        load_buffers(final, self.buffers)
        clients = range(len(self.engine.federation)) if evaluate_clients else []
        per_client = self.engine.evaluate_clients(self.server["model"], self.buffers, clients)
        if self.folder is not None:
            self.folder.finish(final, per_client)
        return Run(
            model=final,
            history=self.history,
            algorithm=self.algorithm,
            settings=self.settings,
            server=self.server,
            clients=self.store,
            loss=self.plan.loss,
            metrics=self.plan.metrics,
            path=self.plan.path,
            path_reason=self.plan.path_reason,
            per_client=per_client,
        )

    def _checkpoint_if_due(self, due: bool = False) -> None:
        self.unsaved = True
        if due or time.monotonic() - self.saved_at > CHECKPOINT_SECONDS:
            self._checkpoint()

    def _checkpoint(self) -> None:
        if self.folder is not None:
            checkpoint = Checkpoint(self.round, self.fingerprint, self.server, self.buffers)
            self.folder.save(checkpoint, self.store)
        self.unsaved, self.saved_at = False, time.monotonic()

    def _one_round(self, callbacks: Sequence[Callback]) -> None:
        began = time.perf_counter()
        prepared = self._before_round(callbacks)
        clients = cohort(self.settings, len(self.engine.federation), self.round)
        received = broadcast(self.algorithm, self.server)
        mean = self.engine.train(received, self.buffers, self.store, self.round, clients)
        buffers = apply_buffer_change(self.buffers, mean.buffers)
        self._check_finite(mean, buffers)
        members = Cohort(
            round=self.round,
            fraction=mean.weight / self._population_weight(),
            total_rate=mean.rate,
        )
        server = server_round(self.algorithm, self.server, mean.upload, members)
        for part in self._alone:
            server |= part.refine(server, self._server_context(buffers))
        if not all_finite(server["model"]):
            raise DivergedError(self._advice("the global model is no longer finite"))
        record = self._record(mean, server, buffers, time.perf_counter() - began)
        for name, value in prepared.items():
            record[name] = record.get(name, 0) + value
        progress = Progress(self.round + 1, server, buffers, record, clients, self.plan.dimensions)
        for callback in callbacks:
            for name, value in (callback(progress) or {}).items():
                if name in record:
                    raise FlatfedError(f"callbacks: the history has its own {name!r}; use another name")
                record[name] = float(value)
        # The round becomes visible all at once; an interrupt in between must not be saved.
        self.consistent = False
        self.store.commit()
        self.server, self.buffers, self.round = server, buffers, self.round + 1
        self.history.append(record)
        if self.folder is not None:
            self.folder.append_history(record)
        self.consistent = True

    def _before_round(self, callbacks: Sequence[Callback]) -> dict[str, float]:
        """The server's own work before a round, which is saved on the way; what to record of it."""
        record: dict[str, float] = {}
        for part in self._alone:
            for work in part.before_round(self.server, self._server_context(self.buffers)):
                self.server = self.server | work.server
                record |= work.record
                if work.sends:
                    size = sum(self.server[name].nbytes for name in self.algorithm.sent_once)
                    record["bytes_down"] = len(self.engine.federation) * size
                for callback in callbacks:
                    if isinstance(callback, WatchesWork):
                        callback.work(work)
                self._checkpoint_if_due()
        return record

    @property
    def _alone(self) -> list[Part]:
        return [part for part in self.algorithm.parts if part.works_alone]

    def _server_context(self, buffers: State) -> ServerContext:
        engine = self.engine
        steps = local_steps(self.settings, len(engine.federation.client(0)))
        rates = self.algorithm.schedule.rates(self.settings.rate(self.round), steps)
        return ServerContext(
            round=self.round,
            seed=self.settings.seed,
            dimensions=self.plan.dimensions,
            total_rate=sum(rates),
            loss=engine.server_loss(buffers),
        )

    def _population_weight(self) -> float:
        if self.settings.weighting == "samples":
            return float(self.engine.federation.total_samples or 0)
        return float(len(self.engine.federation))

    def _record(self, mean: Totals, server: State, buffers: State, seconds: float) -> dict[str, Any]:
        engine, settings, finished = self.engine, self.settings, self.round + 1
        always = set(self.algorithm.broadcast) - set(self.algorithm.sent_once)
        down = sum(server[name].nbytes for name in always)
        buffer_bytes = sum(value.numel() * value.element_size() for value in buffers.values())
        # EF21 sends changes of the displacement, which the server keeps.
        displacement = server.get(estimate_of("displacement"), mean.upload["displacement"])
        record: dict[str, Any] = {
            "round": finished,
            "train_loss": mean.loss,
            "participants": mean.clients,
            "lr": settings.rate(self.round),
            "update_norm": float(torch.linalg.vector_norm(displacement)),
            **{f"state_norm_{name}": float(server[name].norm()) for name in self._watched},
            "flatness_distance": mean.flatness_distance,
            "client_drift": mean.drift,
            "bytes_down": mean.clients * (down + buffer_bytes),
            "bytes_up": mean.bytes_up + mean.clients * buffer_bytes,
            "gradient_evaluations": mean.evaluations,
            "seconds": seconds,
        }
        test = engine.federation.test
        due = finished % settings.evaluate_every == 0 or finished == settings.rounds
        if test is not None and due:
            model = server["model"]
            if settings.evaluate == "active_mean":
                model = self.algorithm.start.start(self.server) + mean.displacement
            found = engine.evaluate(model, buffers, test)
            record |= {f"test_{name}": value for name, value in found.items()}
        return record

    @property
    def _watched(self) -> list[str]:
        """The server's vectors that are as long as the model."""
        alike = (each for each in self.algorithm.server_vectors if each.size == "model" and each.count == 1)
        return ["model", *(vector.name for vector in alike)]

    def _check_finite(self, mean: Totals, buffers: State) -> None:
        if not math.isfinite(mean.loss):
            raise DivergedError(self._advice(f"the training loss is {mean.loss}"))
        for name, value in mean.upload.items():
            if not all_finite(value):
                raise DivergedError(self._advice(f"the mean upload {name!r} is not finite"))
        spoilt = no_longer_finite(self.buffers, buffers)
        if spoilt is not None:
            raise DivergedError(self._advice(f"the buffer {spoilt!r} is no longer finite"))

    def _advice(self, what: str) -> str:
        kept = (
            f"; the state after round {self.round} is kept in {self.folder.path}"
            if self.folder and self.round
            else ""
        )
        return (
            f"round {self.round + 1}: {what}; lower lr (now {self.settings.lr:g}) or set clip (now "
            f"{self.settings.clip}){kept}"
        )


def default_metrics(loss: Loss) -> dict[str, Metric]:
    return {"accuracy": accuracy} if _is_cross_entropy(loss) else {}


def _is_cross_entropy(loss: Loss) -> bool:
    return loss is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
