"""Training some clients with one model: the piece of work that every engine hands out.

A worker owns a private copy of the model. It trains one client in place, or a chunk of clients as a matrix
[C, P], and returns weighted sums, which engines add up in a fixed order.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.context import ClientContext
from flatfed.core.errors import DivergedError, FlatfedError, first_line
from flatfed.core.flat import BoundModel, all_finite, buffer_change, load_buffers
from flatfed.core.outputs import ignored_label, judged
from flatfed.core.rounds import Broadcast, ClientResult, client_round, encode_uploads, reduced_uploads
from flatfed.core.sampling import batches
from flatfed.core.state import State
from flatfed.core.tree import Tree, call, first_leaf, map_tree, sample_bytes, stacked
from flatfed.data.federation import Federation
from flatfed.data.pool import ClientData, stacked_batches
from flatfed.data.samples import Samples
from flatfed.data.transform import Transform
from flatfed.engines.metrics import Measured, is_streaming, named_errors, one_number
from flatfed.engines.oracles import UNEXPECTED_DRAWS, MatrixGradients, MatrixOracle, ModuleOracle
from flatfed.engines.planning import Plan
from flatfed.engines.precision import computing_in, forbid_tf32, widened
from flatfed.engines.sums import CohortSums, rows_of
from flatfed.engines.trial import check_finite_inputs, check_some_targets, protect_inputs

FULL_GRADIENT_SLICE = 512
STAGED_BYTES = 8 * 2**20
"""Clients with more data than that are not copied for a round."""
Result = TypeVar("Result")


class TrainedClient(NamedTuple):
    """One client's round before anything of it travels."""

    result: ClientResult
    buffers: dict[str, Tensor]
    """What training did to them."""
    samples: int
    total_rate: float
    loss: float
    gradient_evaluations: int


class Snapshot(NamedTuple):
    """A model at some moment: its flat vector and its buffers."""

    model: Tensor
    buffers: State


def _supervised(members: Sequence[int], round_number: int, work: Callable[[], Result]) -> Result:
    """Whatever a user's model raises in training becomes one line that says where.

    Work that touches torch's global random stream is refused: its result would depend on the order of work.
    """
    clients = f"client {members[0]}" if len(members) == 1 else f"one of clients {list(members)}"
    before = torch.get_rng_state()
    try:
        result = work()
        if torch.equal(before, torch.get_rng_state()):
            return result
        # Perhaps it was another thread of the program. Once more, with an eye on this one alone.
        with random.RouteRandomness(torch.Generator()) as watch:
            result = work()
    except FlatfedError:
        raise
    except Exception as error:
        if isinstance(error, MemoryError) or "can't allocate memory" in str(error):
            raise FlatfedError(
                f"round {round_number + 1}: memory ran out with the data of {clients} "
                f"({first_line(error)}); use fewer workers or a smaller batch_size"
            ) from error
        raise FlatfedError(
            f"round {round_number + 1}: the model cannot be trained on the data of {clients}: "
            f"{first_line(error)}"
        ) from error
    if watch.rerouted:
        raise FlatfedError(UNEXPECTED_DRAWS)
    return result


class Evaluator:
    """A private copy of the model, ready to be evaluated."""

    def __init__(self, plan: Plan, model: nn.Module, transform: Transform) -> None:
        self.plan, self.transform = plan, transform
        forbid_tf32(plan.device)
        self.bound = BoundModel(model, plan.layout, plan.device)
        means = {name: metric for name, metric in plan.metrics.items() if not is_streaming(metric)}
        functions: dict[str, Any] = {"loss": plan.loss, **means}
        self._means = {name: (function, ignored_label(function)) for name, function in functions.items()}
        if plan.edits_inputs:
            protect_inputs(self.bound.module)

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> Measured:
        """What a model's loss and metrics are on some stored samples, in evaluation mode."""
        # Copies: the model, the transform or a metric may edit them in place.
        inputs, targets = map_tree(lambda tensor: tensor.to(self.plan.device, copy=True), samples)
        precision = self.plan.training.precision
        self.bound.bind(snapshot.model)
        load_buffers(self.bound.module, snapshot.buffers)
        self.bound.module.eval()
        sums, weights, kept = [], [], Measured(torch.empty(0), torch.empty(0))
        with torch.no_grad(), random.routed(self.plan.evaluation_generator()):
            with named_errors("model", inputs):
                seen = self.transform.evaluate(inputs)
                with computing_in(precision, self.plan.device):
                    raw = call(self.bound.module, seen)
            outputs = widened(precision, raw)
            if any(map(is_streaming, self.plan.metrics.values())):
                kept = kept._replace(outputs=_set_aside(outputs), targets=_set_aside(targets))
            for name, (function, ignored) in self._means.items():
                with named_errors(name, inputs):
                    weight = _weight(targets, ignored)
                    if name == "loss":
                        with computing_in(precision, self.plan.device):
                            value = judged(function, raw, targets)
                    else:
                        value = judged(function, outputs, targets)
                    number = one_number(name, value)
                    sums.append(number * weight if weight else torch.zeros_like(number))
                    weights.append(weight)
        return kept._replace(sums=torch.stack(sums), weights=torch.tensor(weights, dtype=torch.float64))


def _set_aside(tree: Tree) -> Tree:
    """Tensors that nobody else will edit."""
    return map_tree(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _weight(targets: Tree, ignored: int | None) -> float:
    """How much a batch weighs in a mean: its samples, or the share of them whose targets are not left out."""
    samples = len(first_leaf(targets))
    if ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return float(samples)
    return float((targets != ignored).sum()) * samples / max(1, targets.numel())


class Worker(Evaluator):
    """One model and the data, ready to train clients."""

    def __init__(self, plan: Plan, model: nn.Module, federation: Federation) -> None:
        super().__init__(plan, model, federation.transform)
        self.federation = federation
        self.matrix = MatrixGradients(self.bound.module, plan.layout, plan.loss, plan.training.precision)

    def train(
        self, members: Sequence[int], broadcast: Broadcast, states: Sequence[State], round_number: int
    ) -> tuple[CohortSums, list[dict[str, Tensor]]]:
        """The sums of a chunk's rounds and its clients' new vectors; the client path takes one at a time."""
        if self.plan.path == "matrix":
            return _supervised(
                members, round_number, lambda: self._train_matrix(members, broadcast, states, round_number)
            )
        (client,), (state,) = members, states
        trained = self.train_client(client, broadcast, state, round_number)
        rows = {key: value[None] for key, value in trained.result.upload.items()}
        received, (memory,), bytes_up = self._encoded(rows, [state], round_number, [client])
        weight = self.plan.weight(trained.samples)
        sums = CohortSums(
            displacement=None if self.plan.algorithm.sums_displacements else trained.result.displacement,
            total_rate=trained.total_rate,
            loss=trained.loss,
            gradient_evaluations=trained.gradient_evaluations,
            bytes_up=bytes_up,
            drift=float(trained.result.drift.mean()),
            squared_displacement=float(trained.result.drift[-1]),
        )
        uploads = reduced_uploads(self.plan.algorithm, received)
        if self.plan.algorithm.aggregate.streams:
            sums.uploads = {key: value[0] for key, value in uploads.items()}
            sums.buffers = trained.buffers
        else:
            changes = {name: change[None] for name, change in trained.buffers.items()}
            sums.rows = rows_of(torch.tensor([weight], dtype=torch.float64), uploads, changes)
        return sums.times(weight), [trained.result.client | memory]

    def train_client(
        self, client: int, broadcast: Broadcast, state: State, round_number: int
    ) -> TrainedClient:
        """One client's round, in place."""
        return _supervised(
            [client], round_number, lambda: self._train_client(client, broadcast, state, round_number)
        )

    def _context(
        self,
        received: State,
        state: State,
        steps: int,
        round_number: int,
        full_gradient: Callable[[], Tensor],
        point: Tensor,
    ) -> ClientContext:
        return ClientContext(
            round=round_number,
            received=received,
            client=state,
            rates=self.plan.algorithm.schedule.rates(self.plan.training.rate(round_number), steps),
            layout=self.plan.layout,
            input_shape=self.plan.dimensions.input_shape,
            # Parts that want the full gradient share one pass.
            full_gradient=functools.cache(full_gradient),
            displacement=torch.zeros_like(point),
            radius_factor=self.plan.training.radius_factor(round_number),
        )

    def _train_client(
        self, client: int, broadcast: Broadcast, state: State, round_number: int
    ) -> TrainedClient:
        received, buffers = broadcast
        plan, bound, model = self.plan, self.bound, received["model"]
        load_buffers(bound.module, buffers)
        bound.module.train()
        data = self.federation.client(client)
        positions = batches(plan.training, len(data), round_number, client)
        data, ready = self._staged(data, sum(len(chosen) for chosen in positions))
        losses: list[Tensor] = []
        evaluations = self._full_passes(len(data))

        def oracle(chosen: Tensor, purpose: str, step: int) -> ModuleOracle:
            inputs, targets = data.batch(chosen.to(plan.device))
            if not ready and purpose == "step":
                inputs = self._augmented(inputs, round_number, client, step)
            elif not ready:
                inputs = self.transform.evaluate(inputs)
            key = None
            if plan.draws_random_numbers:
                key = random.key(plan.training.seed, purpose, round_number, client, step)
            moves_buffers, precision = purpose == "step", plan.training.precision
            return ModuleOracle(bound, plan.loss, (inputs, targets), key, moves_buffers, precision)

        def oracles() -> Iterator[ModuleOracle]:
            nonlocal evaluations
            for step, chosen in enumerate(positions):
                current = oracle(chosen, "step", step)
                yield current
                # Not the oracle, whose batch the next one's can now overwrite.
                losses.append(current.loss)
                evaluations += current.evaluations

        def full_gradient() -> Tensor:
            return _full_gradient(model, len(data), lambda step, chosen: oracle(chosen, "full", step))

        point = model.clone()
        context = self._context(received, state, len(positions), round_number, full_gradient, point)
        result = client_round(plan.algorithm, context, oracles(), plan.training, point)
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            self._check_batches([client], round_number)
        return TrainedClient(
            result=result,
            buffers=buffer_change(buffers, bound.buffers),
            samples=len(data),
            total_rate=context.total_rate,
            loss=loss,
            gradient_evaluations=evaluations,
        )

    def _train_matrix(
        self, members: Sequence[int], broadcast: Broadcast, states: Sequence[State], round_number: int
    ) -> tuple[CohortSums, list[dict[str, Tensor]]]:
        received, buffers = broadcast
        plan, model = self.plan, received["model"]
        load_buffers(self.bound.module, buffers)
        self.bound.module.train()
        data = [self.federation.client(client) for client in members]
        sizes = map(len, data)
        positions = [
            batches(plan.training, size, round_number, client)
            for size, client in zip(sizes, members, strict=True)
        ]
        losses: list[Tensor] = []
        evaluations = 0

        def oracles() -> Iterator[MatrixOracle]:
            nonlocal evaluations
            for step, (stored, targets) in enumerate(self._stacked(data, positions)):
                if self.transform.draws:
                    inputs = stacked(
                        [
                            self._augmented(_of_client(stored, index), round_number, client, step)
                            for index, client in enumerate(members)
                        ]
                    )
                else:
                    inputs = self._evaluated(stored)
                current = MatrixOracle(self.matrix, inputs, targets)
                yield current
                losses.append(current.loss)
                evaluations += current.evaluations

        def full_gradient_of(owners: Sequence[ClientData]) -> Tensor:
            def oracle(_: int, chosen: Tensor) -> MatrixOracle:
                ((inputs, targets),) = self._stacked(owners, [[chosen]] * len(owners))
                return MatrixOracle(self.matrix, self._evaluated(inputs), targets)

            return _full_gradient(model.expand(len(owners), -1), len(owners[0]), oracle)

        point = model.expand(len(members), -1).clone()  # [C, P]
        stacked_state = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        context = self._context(
            received,
            stacked_state,
            len(positions[0]),
            round_number,
            # Neighbours together where they have the same number of samples.
            lambda: torch.cat([full_gradient_of(list(same)) for _, same in itertools.groupby(data, len)]),
            point,
        )
        result = client_round(plan.algorithm, context, oracles(), plan.training, point)
        seen, memories, bytes_up = self._encoded(result.upload, states, round_number, members)
        uploads = reduced_uploads(plan.algorithm, seen)
        by_samples = plan.training.weighting == "samples"
        weights = model.new_tensor([plan.weight(len(own)) for own in data])  # [C]

        def summed(rows: Tensor) -> Tensor:
            return (weights[:, None] * rows if by_samples else rows).sum(0)

        streams = plan.algorithm.aggregate.streams
        loss = float((weights * torch.stack(losses).mean(0)).sum())  # of [K, C]
        if not math.isfinite(loss):
            self._check_batches(members, round_number)
        sums = CohortSums(
            weight=float(weights.sum()),
            clients=len(members),
            uploads={key: summed(rows) for key, rows in uploads.items()} if streams else {},
            displacement=None if plan.algorithm.sums_displacements else summed(result.displacement),
            total_rate=float(weights.sum()) * context.total_rate,
            loss=loss,
            gradient_evaluations=evaluations * len(members)
            + sum(self._full_passes(len(own)) for own in data),
            bytes_up=bytes_up,
            drift=float((weights * result.drift.mean(0)).sum()),
            squared_displacement=float((weights * result.drift[-1]).sum()),
            rows={} if streams else rows_of(weights, uploads, {}),
        )
        # A vector without a client axis is the same for all clients.
        new_states = [
            {key: value[index] if value.dim() > 1 else value for key, value in result.client.items()} | memory
            for index, memory in enumerate(memories)
        ]
        return sums, new_states

    def _encoded(
        self, upload: State, states: Sequence[State], round_number: int, members: Sequence[int]
    ) -> tuple[State, list[dict[str, Tensor]], int]:
        """The uploads [C, P] as the server sees them, what clients remember of them, and their bytes."""
        algorithm, training = self.plan.algorithm, self.plan.training
        if not algorithm.compressed:
            return upload, [{} for _ in members], sum(value.nbytes for value in upload.values())
        encoded = []
        for index, (client, state) in enumerate(zip(members, states, strict=True)):
            own = {key: value[index] for key, value in upload.items()}
            for key, value in own.items():
                if not all_finite(value):
                    raise DivergedError(
                        f"round {round_number + 1}: the upload {key!r} of client {client} is not finite; "
                        f"lower lr (now {training.lr:g}) or set clip (now {training.clip})"
                    )
            encoded.append(encode_uploads(algorithm, own, state, training.seed, round_number, client))
        decoded = {key: torch.stack([sent.decoded[key] for sent in encoded]) for key in upload}
        size = sum(len(payload) for sent in encoded for payload in sent.payloads.values())
        return decoded, [sent.memory for sent in encoded], size

    def _check_batches(self, members: Sequence[int], round_number: int) -> None:
        """Refuses batches whose loss no learning rate would make finite."""
        for client in members:
            data = self.federation.client(client)
            for positions in batches(self.plan.training, len(data), round_number, client):
                inputs, targets = data.batch(positions.to(data.device))
                check_some_targets(self.plan.loss, targets, f"client {client}")
                check_finite_inputs(self.transform.evaluate(inputs), f"client {client}")

    def _staged(self, data: ClientData, wanted: int) -> tuple[ClientData, bool]:
        """A client's samples in one block if its steps want each of them, and whether as the model sees them.

        What is done to a sample whenever it is seen is then done once.
        """
        samples = len(data)
        if wanted < samples or sample_bytes(data.inputs) * samples > STAGED_BYTES:
            return data, False
        inputs, targets = data.whole()
        if self.transform.draws:
            return ClientData(inputs, targets), False
        seen = self.transform.evaluate(inputs)
        if self.plan.layout.channels_last:
            seen = map_tree(_channels_last, seen)
        return ClientData(seen, targets), True

    def _stacked(
        self, owners: Sequence[ClientData], positions: Sequence[Sequence[Tensor]]
    ) -> Iterator[Samples]:
        here = [[chosen.to(self.plan.device) for chosen in own] for own in positions]
        return stacked_batches(owners, here)

    def _evaluated(self, inputs: Tree) -> Tree:
        """Stored inputs [C, B, …] as the model sees them, without augmentation."""
        shape = first_leaf(inputs).shape[:2]
        seen = self.transform.evaluate(map_tree(lambda tensor: tensor.flatten(0, 1), inputs))
        return map_tree(lambda tensor: tensor.unflatten(0, shape), seen)

    def _augmented(self, inputs: Tree, round_number: int, client: int, step: int) -> Tree:
        """A training batch as the model sees it, augmented from the client's stream."""
        transform = self.transform
        if not transform.draws:
            return transform.evaluate(inputs)
        generator = random.torch_generator(self.plan.training.seed, "augment", round_number, client, step)
        return transform.train(inputs, generator)

    def _full_passes(self, samples: int) -> int:
        """Minibatch gradients that a client's passes over all of its data count as."""
        passes = -(-samples // (self.plan.training.batch_size or samples))
        return passes * self.plan.algorithm.full_gradients


def _of_client(tree: Tree, index: int) -> Tree:
    return map_tree(lambda tensor: tensor[index], tree)


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor


def _full_gradient(
    point: Tensor, samples: int, oracle: Callable[[int, Tensor], Callable[[Tensor], Tensor]]
) -> Tensor:
    """The gradient of the mean loss over all of a client's samples, in slices."""
    total = torch.zeros_like(point)
    # Even slices: a last one of a single sample would break batch normalisation.
    slices = torch.arange(samples).tensor_split(-(-samples // FULL_GRADIENT_SLICE))
    for number, chosen in enumerate(slices):
        total += oracle(number, chosen)(point) * (len(chosen) / samples)
    return total
