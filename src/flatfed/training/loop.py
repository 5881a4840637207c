"""The rounds of a training, one after the other: broadcast, cohort, aggregate, merge, record."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from flatfed.core.aggregate import Aggregate
from flatfed.core.algorithm import short_names
from flatfed.core.context import MergeContext, ServerContext, TaskStep
from flatfed.core.errors import DivergedError, FlatfedError, name_of, shown
from flatfed.core.flat import all_finite, apply_buffer_change, buffers_of, no_longer_finite
from flatfed.core.part import ServerTask
from flatfed.core.rounds import broadcast, server_round
from flatfed.core.sampling import cohort, local_steps
from flatfed.core.state import Dimensions, State, initial_state
from flatfed.core.tree import versions
from flatfed.data.samples import Samples
from flatfed.engines.client_store import ClientStore
from flatfed.engines.engine import Engine
from flatfed.engines.evaluator import Snapshot
from flatfed.engines.planning import Plan
from flatfed.engines.server_loss import server_loss
from flatfed.engines.trial import plain_torch
from flatfed.training.best import Record, best_record, ended_early

CHECKPOINT_SECONDS = 30.0
History = list[dict[str, Any]]


@dataclass(frozen=True)
class Progress:
    """What a callback sees after a round; look at the vectors, but do not change them."""

    round: int
    """Rounds finished so far."""
    server: State
    """The server's vectors; "model" is the flat global model, others are called PART.NAME."""
    buffers: State
    """The global model's buffers."""
    record: Mapping[str, Any]
    """The round's line in the history."""
    cohort: Sequence[int]
    dimensions: Dimensions
    before: State = field(default_factory=dict)
    """The server's vectors before the round."""


Callback = Callable[[Progress], Mapping[str, float] | None]
"""Called after every round; numbers that it returns go into the history."""


def _returned(callback: Callback, progress: Progress) -> dict[str, float]:
    """The numbers that a callback adds to the history; it may only look at everything else."""
    seen = {"server": progress.server, "buffers": progress.buffers, "before": progress.before}
    untouched = versions(seen)
    own = dict(progress.record)
    returned = callback(replace(progress, record=own))
    if versions(seen) != untouched:
        raise FlatfedError(
            f"callbacks: {name_of(callback)} changes the server's vectors or buffers; let it change clones"
        )
    if own != progress.record:
        raise FlatfedError(
            f"callbacks: {name_of(callback)} changes the round's record; let it return what it adds"
        )
    try:
        numbers = {name: float(value) for name, value in (returned or {}).items()}
    except (AttributeError, TypeError, ValueError, RuntimeError, OverflowError):
        numbers = None
    if numbers is None or not all(isinstance(name, str) and name and name.isprintable() for name in numbers):
        raise FlatfedError(
            f"callbacks: {name_of(callback)} returns {shown(returned)}; return nothing, or a dictionary of "
            "names and numbers"
        )
    return numbers


Statistics = Callable[[Tensor, State], dict[str, Tensor]]
"""Makes a model's buffers from the model and its buffers so far."""


@runtime_checkable
class WatchesTasks(Protocol):
    """A callback that also wants to hear of the server's own tasks, such as iterations of a distillation."""

    def task_step(self, step: TaskStep) -> None: ...


@dataclass
class TrainingState:
    """What a training remembers between rounds, besides its clients' state."""

    server: dict[str, Tensor]
    buffers: dict[str, Tensor]
    round: int = 0
    history: History = field(default_factory=list)
    best: Snapshot | None = None
    """The model of the round that is the best by the validation samples, if there are some."""

    @classmethod
    def initial(cls, plan: Plan, model: nn.Module) -> TrainingState:
        vector = plan.layout.vector(model).to(plan.device)
        vectors = initial_state(plan.algorithm.server_vectors, plan.dimensions, vector)
        buffers = {name: value.to(plan.device) for name, value in buffers_of(model).items()}
        return cls({"model": vector, **vectors}, buffers)

    @property
    def snapshot(self) -> Snapshot:
        return Snapshot(self.server["model"], self.buffers)


class Recorder(Protocol):
    """Where a training is recorded while it goes on."""

    def append(self, record: Mapping[str, Any]) -> None:
        """Adds a finished round's line to the history."""
        ...

    def save(self, state: TrainingState, clients: ClientStore) -> None:
        """Makes this the state from which an interrupted training goes on, perhaps a little later."""
        ...

    def wait(self) -> None:
        """Returns once what was saved is safely stored; raises what went wrong with it."""
        ...

    def kept(self, round_number: int) -> str:
        """Where the state after a round can be found: the end of a sentence."""
        ...


class TrainingLoop:
    """Carries a training from its present state to its last round."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        state: TrainingState,
        evaluated: Mapping[str, Samples],
        callbacks: Sequence[Callback] = (),
        recorder: Recorder | None = None,
        checkpoint_every: int = 10,
        statistics: Statistics | None = None,
    ) -> None:
        """`statistics`, if given, makes those of the global model after every round."""
        self.engine, self.model, self.state, self.evaluated = engine, model, state, evaluated
        self.callbacks, self.recorder, self.checkpoint_every = callbacks, recorder, checkpoint_every
        self.plan, self.algorithm, self.training = engine.plan, engine.plan.algorithm, engine.plan.training
        self.statistics = statistics
        self._between_rounds, self._unsaved, self._saved_at = True, False, time.monotonic()
        best = best_record(state.history, self.training.best_by)
        self._best: list[Record] = [] if best is None else [best]

    @plain_torch()
    def run(self) -> None:
        """All rounds that are left; if they end early, the state is that of the last finished round."""
        try:
            while self.state.round < self.training.rounds and not self._is_over():
                self._one_round()
                self._save_if_due(self.state.round % self.checkpoint_every == 0)
        except (KeyboardInterrupt, FlatfedError):
            # A full disk or a kill falls back to the last file instead.
            self.engine.clients.discard()
            if self._between_rounds and self._unsaved:
                self._save()
            self._wait()
            raise
        if self._unsaved:
            self._save()
        self._wait()

    def _save_if_due(self, due: bool = False) -> None:
        self._unsaved = True
        if due or time.monotonic() - self._saved_at > CHECKPOINT_SECONDS:
            self._save()

    def _save(self) -> None:
        if self.recorder is not None:
            self.recorder.save(self.state, self.engine.clients)
            if self.checkpoint_every == 1:
                # Whoever wants every round kept wants it before the next one begins.
                self.recorder.wait()
        self._unsaved, self._saved_at = False, time.monotonic()

    def _wait(self) -> None:
        if self.recorder is not None:
            self.recorder.wait()

    def _one_round(self) -> None:
        began = time.perf_counter()
        state, number = self.state, self.state.round
        task_record = self._before_round()
        clients = cohort(self.training, self.plan.population.clients, number)
        sent = broadcast(self.algorithm, state.server, self.plan.division.travelling(state.buffers))
        mean = self.engine.train(sent, number, clients)
        buffers = apply_buffer_change(state.buffers, mean.buffers)
        self._check_finite(mean, buffers)
        context = MergeContext(
            round=number,
            fraction=mean.weight / self.plan.population.weight(self.training),
            total_rate=mean.total_rate,
            radius_factor=self.training.radius_factor(number),
        )
        server = server_round(self.algorithm, state.server, mean.uploads, context)
        for member in self.algorithm.server_tasks:
            assert isinstance(member.part, ServerTask)
            changed = member.part.after_round(member.seen(server), self._server_context(buffers))
            server |= member.keyed(member.server, changed)
        if not all_finite(server["model"]):
            raise self._divergence("the global model is no longer finite")
        if self.statistics is not None:
            buffers = self.statistics(server["model"], buffers)
        record = self._record(mean, server, buffers, time.perf_counter() - began)
        evaluated = self._evaluate(record, mean, server, buffers)
        for name, value in task_record.items():
            record[name] = record.get(name, 0) + value
        progress = Progress(
            round=number + 1,
            server=server,
            buffers=buffers,
            record=record,
            cohort=clients,
            dimensions=self.plan.dimensions,
            before=self.state.server,
        )
        for callback in self.callbacks:
            for name, value in _returned(callback, progress).items():
                if name in record:
                    raise FlatfedError(f"callbacks: the history has its own {name!r}; use another name")
                record[name] = value
        # The round becomes visible all at once; an interrupt in between must not be saved.
        self._between_rounds = False
        self.engine.clients.commit()
        state.server, state.buffers, state.round = server, buffers, number + 1
        state.history.append(record)
        if best_record([*self._best, record], self.training.best_by) is record:
            self._best, state.best = [record], evaluated
        if self.recorder is not None:
            self.recorder.append(record)
        self._between_rounds = True

    def _before_round(self) -> dict[str, float]:
        """The server's own tasks before a round, which are saved on the way; what to record of them."""
        state, record = self.state, dict[str, float]()
        for member in self.algorithm.server_tasks:
            assert isinstance(member.part, ServerTask)
            context = self._server_context(state.buffers)
            for step in member.part.before_round(member.seen(state.server), context):
                state.server = state.server | member.keyed(member.server, step.server)
                record |= step.record
                if step.publishes:
                    size = sum(state.server[key].nbytes for key in self.algorithm.sent_once)
                    record["bytes_down"] = self.plan.population.clients * size
                for callback in self.callbacks:
                    if isinstance(callback, WatchesTasks):
                        callback.task_step(step)
                self._save_if_due()
        return record

    def _server_context(self, buffers: State) -> ServerContext:
        steps = local_steps(self.training, self.plan.population.first_samples)
        rates = self.algorithm.schedule.rates(self.training.rate(self.state.round), steps)
        return ServerContext(
            round=self.state.round,
            seed=self.training.seed,
            dimensions=self.plan.dimensions,
            total_rate=sum(rates),
            loss=server_loss(self.plan, self.model, buffers),
        )

    def _record(self, mean: Aggregate, server: State, buffers: State, seconds: float) -> dict[str, Any]:
        algorithm, training, finished = self.algorithm, self.training, self.state.round + 1
        always = set(algorithm.broadcast) - set(algorithm.sent_once)
        down = sum(server[key].nbytes for key in always)
        travelling = self.plan.division.travelling(buffers).values()
        buffer_bytes = sum(value.numel() * value.element_size() for value in travelling)
        displacement = mean.uploads["displacement"]
        if algorithm.compress.estimates and "displacement" in algorithm.compressed:
            # What is sent is a change of the displacement, which the server keeps.
            displacement = server[algorithm.estimate_key("displacement")]
        distance = mean.flatness_distance
        return {
            "round": finished,
            "train_loss": mean.loss,
            "participants": mean.clients,
            "lr": training.rate(self.state.round),
            "update_norm": float(torch.linalg.vector_norm(displacement)),
            **{f"state_norm_{name}": float(server[key].norm()) for key, name in self._recorded_norms},
            **({} if distance is None else {"flatness_distance": distance}),
            "client_drift": mean.drift,
            "bytes_down": mean.clients * (down + buffer_bytes),
            "bytes_up": mean.bytes_up + mean.clients * buffer_bytes,
            "gradient_evaluations": mean.gradient_evaluations,
            "seconds": seconds,
        }

    def _evaluate(
        self, record: dict[str, Any], mean: Aggregate, server: State, buffers: State
    ) -> Snapshot | None:
        """Adds loss and metrics to a round's record if they are due; returns the model that they are of."""
        training, finished = self.training, self.state.round + 1
        due = finished % training.evaluate_every == 0 or finished == training.rounds
        if not self.evaluated or not due:
            return None
        model = server["model"]
        if training.evaluate == "active_mean":
            assert mean.displacement is not None, "an engine without it refuses this setting"
            start = broadcast(self.algorithm, self.state.server, buffers).vectors["model"]
            model = start + mean.displacement
        evaluated = Snapshot(model, buffers)
        for samples_name, samples in self.evaluated.items():
            metrics = self.engine.evaluate(evaluated, samples)
            record.update({f"{samples_name}_{name}": value for name, value in metrics.items()})
        return evaluated

    def _is_over(self) -> bool:
        """Whether there was no better round for as long as the training's patience."""
        last = self.state.history[-1:]
        return ended_early([*self._best, *last], self.training.patience, self.training.best_by)

    @property
    def _recorded_norms(self) -> list[tuple[str, str]]:
        """The server's vectors that are as long as the model, and what the history calls them."""
        vectors = self.algorithm.server_vectors
        model_sized = [vector.name for vector in vectors if vector.size == "model" and vector.count == 1]
        names = short_names(vector.name for vector in vectors)
        return [("model", "model"), *((key, names[key]) for key in model_sized)]

    def _check_finite(self, mean: Aggregate, buffers: State) -> None:
        if not math.isfinite(mean.loss):
            raise self._divergence(f"the training loss is {mean.loss}")
        for key, value in mean.uploads.items():
            if not all_finite(value):
                raise self._divergence(f"the mean upload {key!r} is not finite")
        diverged = no_longer_finite(self.state.buffers, buffers)
        if diverged is not None:
            raise self._divergence(f"the buffer {diverged!r} is no longer finite")

    def _divergence(self, what: str) -> DivergedError:
        finished = self.state.round
        kept = f"; {self.recorder.kept(finished)}" if self.recorder is not None and finished else ""
        return DivergedError(
            f"round {finished + 1}: {what}; lower lr (now {self.training.lr:g}) or set clip (now "
            f"{self.training.clip}){kept}"
        )
