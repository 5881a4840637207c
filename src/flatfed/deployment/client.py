"""A site's side: trains and evaluates on its own data when the server asks."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor

from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.flat import apply_buffer_change, no_longer_finite
from flatfed.core.rounds import send
from flatfed.core.state import State, initial_state
from flatfed.data.federation import LoadedFederation, Samples
from flatfed.deployment.site_store import Shelf
from flatfed.deployment.task import Task
from flatfed.deployment.wire import (
    DIVERGED,
    LARGEST,
    REFUSED,
    Description,
    Evaluation,
    Order,
    Upload,
    array_record,
    broadcast_shapes,
    content,
    dtype_name,
    pack,
    pack_payloads,
    read_header,
    shapes,
    unpack,
)
from flatfed.engines.local import LocalEngine
from flatfed.engines.worker import Trained, no_unexpected_draws

STATE = "flatfed-state"

log = logging.getLogger("flwr.flatfed")

Load = Callable[[Context], Samples]
LoadTest = Callable[[Context], Samples | None]


def client_app(task: Task, load: Load, load_test: LoadTest | None = None) -> ClientApp:
    """A Flower ClientApp that takes part in any of flatfed's algorithms.

    `load(context)` returns this site's (inputs, targets) and `load_test(context)` test samples of its own, or
    None if it has none; `context.node_config` is what the site's operator gave to its SuperNode. Of that,
    flatfed reads `name` (for nodes that have no registered one), `device`, `threads` (1 gives the bits of the
    local engine, more are faster for large models) and `state`, the folder in which the client keeps its
    vectors, by default flatfed-state in the SuperNode's working folder.
    """
    app = ClientApp()

    @app.query()
    def query(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _describe(task, load, context))

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _Site(task, load, load_test, message.content, context).train())

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return _answered(message, lambda: _Site(task, load, load_test, message.content, context).evaluate())

    return app


def _answered(message: Message, work: Callable[[], RecordDict]) -> Message:
    """A reply with what the work gives, or with the one line that says why not."""
    try:
        return Message(work(), reply_to=message)
    except FlatfedError as error:
        log.error("%s", error)
        code = DIVERGED if isinstance(error, DivergedError) else REFUSED
        return Message(Error(code, str(error)), reply_to=message)


def _describe(task: Task, load: Load, context: Context) -> RecordDict:
    data = _federation(task, load, None, context).client(0)
    inputs, targets = data.batch(torch.arange(1))
    seen = task.transform.evaluate(inputs)
    return content(
        Description(
            name=str(context.node_config.get("name", "")),
            samples=len(data),
            input_shape=tuple(seen.shape[1:]),
            input_dtype=dtype_name(seen.dtype),
            target_shape=tuple(targets.shape[1:]),
            target_dtype=dtype_name(targets.dtype),
        )
    )


def _federation(task: Task, load: Load, load_test: LoadTest | None, context: Context) -> LoadedFederation:
    """This site as a federation in which every client is itself."""
    samples = load(context)
    tests = load_test and load_test(context)
    federation = LoadedFederation(1, lambda _: samples, None, None if tests is None else lambda _: tests)
    federation.transform = task.transform
    return federation


class _Site:
    """One message's order, and the engine that carries it out."""

    def __init__(
        self, task: Task, load: Load, load_test: LoadTest | None, asked: RecordDict, context: Context
    ) -> None:
        self.order = read_header(Order, asked)
        model = task.model()
        if self.order.task != task.digest(model):
            raise FlatfedError(
                "task: this site's app has another model, algorithm or settings than the server's"
            )
        self.asked = asked
        settings = task.engine_settings(
            workers=1, device=str(context.node_config.get("device", task.settings.device))
        )
        self.engine = LocalEngine(
            model,
            _federation(task, load, load_test, context),
            task.algorithm,
            task.loss,
            settings,
            task.chosen_metrics,
        )
        torch.set_num_threads(int(context.node_config.get("threads", 1)))
        root = Path(str(context.node_config.get("state", STATE)))
        self.shelf = Shelf(root, self.order.run, self.order.client)

    def train(self) -> RecordDict:
        engine, order = self.engine, self.order
        plan, number = engine.plan, order.client
        try:
            received, buffers = self._received(), self._buffers()
            fresh = initial_state(plan.algorithm.client_vectors, plan.dimensions, received["model"])
            state = self.shelf.take(order.merged, order.round, fresh) if fresh else None
            state = fresh if state is None else state
            with engine.worker() as worker, no_unexpected_draws(plan):
                trained = worker.train_client(number, received, buffers, state, order.round)
            self._check_finite(trained, buffers)
            sent = send(plan.algorithm, trained.result.upload, state, plan.settings.seed, order.round, number)
            if fresh:
                self.shelf.put(order.round, trained.result.client | sent.memory)
        finally:
            engine.close()
        header = Upload(
            run=order.run,
            client=number,
            round=order.round,
            samples=trained.samples,
            loss=trained.loss,
            drift=float(trained.result.drift.mean()),
            evaluations=trained.evaluations,
            kept=tuple(filter(None, order.kept.values())),
        )
        return content(header, vectors=pack_payloads(sent.payloads), buffers=pack(trained.buffers))

    def _check_finite(self, trained: Trained, buffers: State) -> None:
        """Divergence is told as such, before the server would refuse the numbers as forged."""
        reached = {
            f"upload {name!r}": float(value.abs().max()) for name, value in trained.result.upload.items()
        }
        reached |= {"loss": abs(trained.loss), "drift": float(trained.result.drift.mean())}
        spoilt = no_longer_finite(buffers, apply_buffer_change(buffers, trained.buffers))
        if spoilt is not None:
            reached[f"buffer {spoilt!r}"] = math.inf
        for name, number in reached.items():
            if not number <= LARGEST:  # So that NaN is caught, too.
                raise DivergedError(f"round {self.order.round + 1}: the {name} reaches {number:g}; lower lr")

    def evaluate(self) -> RecordDict:
        plan = self.engine.plan
        try:
            vectors = array_record(self.asked, "vectors")
            expected = {"model": ((plan.layout.size,), plan.layout.dtype)}
            model = unpack(vectors, expected)["model"].to(plan.device)
            (found,) = self.engine.evaluate_clients(model, self._buffers(), [self.order.client])
        finally:
            self.engine.close()
        order = self.order
        return content(Evaluation(run=order.run, client=order.client, round=order.round, found=found))

    def _received(self) -> dict[str, Tensor]:
        """The broadcast; vectors that are sent once may be on this site's disk, or not made yet."""
        plan = self.engine.plan
        found, kept = array_record(self.asked, "vectors"), self.order.kept
        expected = broadcast_shapes(plan.algorithm, plan.dimensions, plan.layout.dtype)
        declared = {each.name: each for each in plan.algorithm.server_vectors if each.sent_once}
        once = [name for name in expected if name in declared]
        if set(kept) != set(once):
            raise FlatfedError("message: it does not say which vectors this site should have")
        absent = {name for name in once if name not in found}
        arrived = unpack(found, {name: each for name, each in expected.items() if name not in absent})
        for name in absent:
            initial = initial_state([declared[name]], plan.dimensions, arrived["model"])[name]
            arrived[name] = self.shelf.kept(name, kept[name], initial) if kept[name] else initial
        for name in once:
            if name in found:
                self.shelf.keep(name, arrived[name])
        return {name: arrived[name].to(plan.device) for name in expected}

    def _buffers(self) -> dict[str, Tensor]:
        expected = shapes(self.engine.initial_buffers)
        found = unpack(array_record(self.asked, "buffers"), expected, finite=False)
        return {name: value.to(self.engine.plan.device) for name, value in found.items()}
