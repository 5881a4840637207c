"""A site's side: trains and evaluates on its own data when the server asks."""

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.flat import apply_buffer_change, buffers_of, no_longer_finite
from flatfed.core.rounds import Broadcast, encode_uploads
from flatfed.core.state import State, initial_state
from flatfed.core.tree import form, sample_shapes
from flatfed.data.federation import LoadedFederation
from flatfed.data.samples import Samples
from flatfed.deployment import wire
from flatfed.deployment.site_store import SiteStore
from flatfed.deployment.spec import FederationSpec
from flatfed.engines.evaluator import Evaluator, Snapshot
from flatfed.engines.planning import make_plan
from flatfed.engines.precision import slow_precision
from flatfed.engines.threads import WorkerThreads, single_threaded
from flatfed.engines.worker import TrainedClient, Worker
from flatfed.training.evaluation import evaluate_clients
from flatfed.training.own_models import OwnModels

STATE = "flatfed-state"

log = logging.getLogger("flwr.flatfed")

Load = Callable[[Context], Samples]
LoadTest = Callable[[Context], Samples | None]


def client_app(spec: FederationSpec, load: Load, load_test: LoadTest | None = None) -> ClientApp:
    """A Flower ClientApp that takes part in any of flatfed's algorithms.

    `load(context)` returns this site's (inputs, targets) and `load_test(context)` test samples of its own, or
    None if it has none; `context.node_config` is what the site's operator gave to its SuperNode. Of that,
    flatfed reads `name` (for nodes that have no registered one), `device`, `threads` (1 gives the bits of the
    local engine, more are faster for large models) and `state`, the folder in which the client keeps its
    vectors, by default flatfed-state in the SuperNode's working folder.
    """
    app = ClientApp()

    def federation(context: Context, with_tests: bool = True) -> LoadedFederation:
        """This site as a federation in which every client is itself."""
        samples = load(context)
        tests = load_test(context) if load_test and with_tests else None
        site = LoadedFederation(1, lambda _: samples, None, None if tests is None else lambda _: tests)
        site.transform = spec.transform
        return site

    @app.query()
    def query(message: Message, context: Context) -> Message:
        # Once in a run, before it begins.
        if (note := slow_precision(spec.training.precision, _device(spec, context))) is not None:
            log.warning("%s", note)
        return _reply(message, lambda: _describe(federation(context, with_tests=False), context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _Site(spec, message.content, federation, context).train())

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _reply(message, lambda: _Site(spec, message.content, federation, context).evaluate())

    return app


def _reply(message: Message, work: Callable[[], RecordDict]) -> Message:
    """A reply with what the work gives, or with the one line that says why not."""
    try:
        return Message(work(), reply_to=message)
    except FlatfedError as error:
        log.error("%s", wire.plain(str(error), 2000))
        code = wire.DIVERGED if isinstance(error, DivergedError) else wire.REFUSED
        return Message(Error(code, str(error)), reply_to=message)


def _describe(federation: LoadedFederation, context: Context) -> RecordDict:
    data = federation.client(0)
    inputs, targets = data.batch(torch.arange(1))
    seen = federation.transform.evaluate(inputs)
    return wire.content(
        wire.SiteDescription(
            name=str(context.node_config.get("name", "")),
            samples=len(data),
            input_shape=sample_shapes(seen),
            input_dtype=form(seen, lambda tensor: wire.dtype_name(tensor.dtype)),
            target_shape=sample_shapes(targets),
            target_dtype=form(targets, lambda tensor: wire.dtype_name(tensor.dtype)),
        )
    )


def _device(spec: FederationSpec, context: Context) -> str:
    return str(context.node_config.get("device", spec.execution.device))


class _Site:
    """One message's request, and what it takes to carry it out."""

    def __init__(
        self,
        spec: FederationSpec,
        message: RecordDict,
        federation: Callable[[Context], LoadedFederation],
        context: Context,
    ) -> None:
        self.request, self.message = wire.read_header(wire.Request, message), message
        self.model = spec.model()
        if self.request.spec != spec.digest(self.model):
            raise FlatfedError(
                "spec: this site's app has another model, algorithm or settings than the server's"
            )
        self.federation = federation(context)
        device = _device(spec, context)
        metrics, training = spec.used_metrics, spec.site_training
        with single_threaded():
            self.plan = make_plan(
                self.model, self.federation, spec.algorithm, spec.loss, metrics, training, device
            )
        self.threads = int(context.node_config.get("threads", 1))
        root = Path(str(context.node_config.get("state", STATE)))
        self.store = SiteStore(root, self.request.run, self.request.client)

    def train(self) -> RecordDict:
        plan, request = self.plan, self.request
        broadcast = Broadcast(self._received(), self._buffers())
        fresh = self._fresh(broadcast.vectors["model"])
        state = self.store.read_state(request, fresh) if fresh else None
        state = fresh if state is None else state
        worker = Worker(plan, self.model, self.federation.to(plan.device))
        with single_threaded():
            torch.set_num_threads(self.threads)
            trained = worker.train_client(request.client, broadcast, state, request.round)
        self._check_finite(trained, broadcast.buffers)
        encoded = encode_uploads(
            plan.algorithm,
            trained.result.upload,
            state,
            trained.result.client,
            plan.training.seed,
            request.round,
            request.client,
        )
        if fresh:
            self.store.write_state(request.round, trained.result.client | encoded.memory)
        header = wire.TrainReply(
            **request.model_dump(include=set(wire.Answer.model_fields)),
            samples=trained.samples,
            loss=trained.loss,
            drift=float(trained.result.drift.mean()),
            squared_displacement=float(trained.result.drift[-1]),
            gradient_evaluations=trained.gradient_evaluations,
            kept=tuple(filter(None, request.kept.values())),
        )
        buffers = wire.pack(trained.buffers)
        return wire.content(header, vectors=wire.pack_payloads(encoded.payloads), buffers=buffers)

    def _fresh(self, model: Tensor) -> dict[str, Tensor]:
        """The client's state before it first takes part."""
        plan = self.plan
        own = {key: value.to(plan.device) for key, value in plan.private_state.items()}
        return initial_state(plan.algorithm.client_vectors, plan.dimensions, model) | own

    def _check_finite(self, trained: TrainedClient, buffers: State) -> None:
        """Divergence is reported as such, before the server would refuse the numbers as forged."""
        limit = wire.largest(self.plan.layout.dtype)
        reached = {
            f"upload {key!r}": (float(value.abs().max()), limit)
            for key, value in trained.result.upload.items()
        }
        drift, square = float(trained.result.drift.mean()), float(trained.result.drift[-1])
        numbers = {"loss": abs(trained.loss), "drift": drift, "squared displacement": square}
        reached |= {name: (number, wire.LARGEST) for name, number in numbers.items()}
        diverged = no_longer_finite(buffers, apply_buffer_change(buffers, trained.buffers))
        if diverged is not None:
            reached[f"buffer {diverged!r}"] = (math.inf, wire.LARGEST)
        for name, (number, most) in reached.items():
            self._check_size(name, number, most)

    def _check_size(self, name: str, number: float, most: float) -> None:
        if not number <= most:  # so that NaN is caught, too
            raise DivergedError(f"round {self.request.round + 1}: the {name} reaches {number:g}; lower lr")

    def evaluate(self) -> RecordDict:
        plan = self.plan
        expected = {"model": ((plan.layout.size,), plan.layout.dtype)}
        vectors = wire.unpack(wire.array_record(self.message, "vectors"), expected)
        snapshot = Snapshot(vectors["model"].to(plan.device), self._buffers())
        threads = WorkerThreads([Evaluator(plan, self.model, self.federation.transform)])
        try:
            torch.set_num_threads(self.threads)
            fresh = self._fresh(snapshot.model)
            state = (
                self.store.committed_state(self.request.merged, fresh) if plan.division.personal else fresh
            )
            own = OwnModels(plan, self.model, self.federation, lambda _: state)
            (metrics,) = evaluate_clients(threads.evaluate, self.federation, snapshot, [0], own)
        finally:
            threads.close()
        for name, value in metrics.items():
            self._check_size(name, abs(value), wire.LARGEST)
        answered = self.request.model_dump(include=set(wire.Answer.model_fields))
        return wire.content(wire.EvaluateReply(**answered, metrics=metrics))

    def _received(self) -> dict[str, Tensor]:
        """The broadcast; vectors that are sent once may be on this site's disk, or not made yet."""
        plan = self.plan
        arrays, kept = wire.array_record(self.message, "vectors"), self.request.kept
        expected = wire.broadcast_shapes(plan.algorithm, plan.dimensions, plan.layout.dtype)
        if set(kept) != set(plan.algorithm.sent_once):
            raise FlatfedError("message: it does not say which vectors this site should have")
        declared = {vector.name: vector for vector in plan.algorithm.server_vectors}
        absent = kept.keys() - arrays.keys()
        received = wire.unpack(arrays, {key: shape for key, shape in expected.items() if key not in absent})
        for key in kept:
            if key in arrays:
                self.store.write_once(key, received[key])
                continue
            initial = initial_state([declared[key]], plan.dimensions, received["model"])[key]
            received[key] = self.store.read_once(key, kept[key], initial) if kept[key] else initial
        return {key: received[key].to(plan.device) for key in expected}

    def _buffers(self) -> dict[str, Tensor]:
        expected = wire.shapes(self.plan.division.travelling(buffers_of(self.model)))
        buffers = wire.unpack(wire.array_record(self.message, "buffers"), expected, finite=False)
        return {name: value.to(self.plan.device) for name, value in buffers.items()}
