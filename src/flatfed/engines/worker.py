"""Training some clients with one model: the piece of work that every engine hands out.

A worker owns a private copy of the model. It trains one client in place, or a chunk of clients as a matrix
[C, P], and returns weighted sums, which engines add up in a fixed order.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.context import ClientContext, Oracle
from flatfed.core.errors import USER_ERRORS, DivergedError, FlatfedError, first_line, memory_ran_out
from flatfed.core.flat import (
    all_finite,
    buffer_change,
    no_longer_finite,
)
from flatfed.core.rounds import Broadcast, ClientResult, client_round, encode_uploads, reduced_uploads
from flatfed.core.sampling import batches, divided_rates
from flatfed.core.sharing import PRIVATE_BUFFERS
from flatfed.core.state import State, Vectors
from flatfed.core.tree import Tree, first_leaf, map_tree, sample_bytes, stacked
from flatfed.data.federation import Federation
from flatfed.data.pool import ClientData, all_labelled, stacked_batches
from flatfed.engines.devices import set_products
from flatfed.engines.evaluator import Evaluator
from flatfed.engines.oracles import (
    UNEXPECTED_DRAWS,
    MatrixGradients,
    MatrixOracle,
    ModuleOracle,
    SplitOracle,
)
from flatfed.engines.planning import Plan
from flatfed.engines.private import PrivateEntries
from flatfed.engines.sums import CohortSums, rows_of
from flatfed.engines.trial import check_finite_inputs, check_some_targets

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
    except USER_ERRORS as error:
        if memory_ran_out(error):
            alone = "" if len(members) == 1 else " or path = 'client'"
            raise FlatfedError(
                f"round {round_number + 1}: memory ran out with the data of {clients} "
                f"({first_line(error)}); use fewer workers or a smaller batch_size{alone}"
            ) from error
        raise FlatfedError(
            f"round {round_number + 1}: the model cannot be trained on the data of {clients}: "
            f"{first_line(error)}"
        ) from error
    if watch.rerouted:
        raise FlatfedError(UNEXPECTED_DRAWS)
    return result


class Worker(Evaluator):
    """One model and the data, ready to train clients."""

    def __init__(self, plan: Plan, model: nn.Module, federation: Federation) -> None:
        super().__init__(plan, model, federation.transform)
        self.federation = federation
        self.matrix = MatrixGradients(
            self.bound.module, self.bound.layout, plan.loss, plan.training.precision
        )

    def train(
        self, members: Sequence[int], broadcast: Broadcast, states: Sequence[State], round_number: int
    ) -> tuple[CohortSums, list[dict[str, Tensor]]]:
        """The sums of a chunk's rounds and its clients' new vectors; the client path takes one at a time."""
        set_products(self.plan.training.precision, self.plan.device)
        if self.plan.path == "matrix":
            return _supervised(
                members, round_number, lambda: self._train_matrix(members, broadcast, states, round_number)
            )
        (client,), (state,) = members, states
        trained = self.train_client(client, broadcast, state, round_number)
        rows = {key: value[None] for key, value in trained.result.upload.items()}
        received, (memory,), bytes_up = self._encoded(
            rows, [state], [trained.result.client], round_number, [client]
        )
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
        set_products(self.plan.training.precision, self.plan.device)
        return _supervised(
            [client], round_number, lambda: self._train_client(client, broadcast, state, round_number)
        )

    def _context(
        self,
        received: State,
        state: State,
        rates: Sequence[float],
        round_number: int,
        full_gradient: Callable[[], Tensor],
        point: Tensor,
    ) -> ClientContext:
        return ClientContext(
            round=round_number,
            received=received,
            client=state,
            rates=rates,
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
        self._load_buffers(buffers, state)
        bound.train()
        data = self.federation.client(client)
        positions = self._positions(len(data), round_number, client)
        data, ready = self._staged(data, sum(len(chosen) for chosen in positions))
        losses: list[Tensor] = []
        evaluations = self._full_passes(len(data))

        def oracle(chosen: Tensor, purpose: str, step: int) -> ModuleOracle:
            inputs, targets = data.batch(chosen)
            if not ready and purpose == "step":
                inputs = self._augmented(inputs, round_number, client, step)
            elif not ready:
                inputs = self.transform.evaluate(inputs)
            key = None
            if plan.draws_random_numbers:
                key = random.key(plan.training.seed, purpose, round_number, client, step)
            moves_buffers, precision = purpose == "step", plan.training.precision
            return ModuleOracle(bound, plan.loss, (inputs, targets), key, moves_buffers, precision)

        rates, private = self._private_entries(state, len(positions), round_number)

        def oracles() -> Iterator[Oracle]:
            nonlocal evaluations
            for step, chosen in enumerate(positions):
                current = oracle(chosen, "step", step)
                yield from (current,) if private is None else private.beside(current, step, model)
                # Not the oracle, whose batch the next one's can now overwrite.
                losses.append(current.loss)
                evaluations += current.evaluations

        def full_gradient() -> Tensor:
            def beside_private(step: int, chosen: Tensor) -> Oracle:
                current = oracle(chosen, "full", step)
                return current if private is None else SplitOracle(current, private.start)

            return _full_gradient(model, len(data), beside_private)

        point = model.clone()
        context = self._context(received, state, rates, round_number, full_gradient, point)
        result = client_round(plan.algorithm, context, oracles(), plan.training, point)
        loss = float(torch.stack(losses).mean())
        if not math.isfinite(loss):
            self._check_batches([client], round_number)
        kept = self._kept(private, [client], round_number)
        if PRIVATE_BUFFERS in state:
            before = plan.division.unpacked(state[PRIVATE_BUFFERS])
            if (name := no_longer_finite(before, bound.buffers)) is not None:
                raise self._diverged(f"the buffer {name!r}", [client], round_number)
            kept[PRIVATE_BUFFERS] = plan.division.packed(bound.buffers)
        return TrainedClient(
            result=result._replace(client=result.client | kept),
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
        plan = self.plan
        received_models = received["model"].expand(len(members), -1)  # [C, P]
        self._load_buffers(buffers, {})
        self.bound.train()
        data = [self.federation.client(client) for client in members]
        positions = [
            self._positions(len(own), round_number, client) for own, client in zip(data, members, strict=True)
        ]
        labelled = self._labelled(data)
        losses: list[Tensor] = []
        evaluations = 0
        stacked_state = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        rates, private = self._private_entries(stacked_state, len(positions[0]), round_number)

        def oracles() -> Iterator[Oracle]:
            nonlocal evaluations
            for step, (stored, targets) in enumerate(stacked_batches(data, positions)):
                if self.transform.draws:
                    inputs = stacked(
                        [
                            self._augmented(_of_client(stored, index), round_number, client, step)
                            for index, client in enumerate(members)
                        ]
                    )
                else:
                    inputs = self._evaluated(stored)
                current = MatrixOracle(self.matrix, inputs, targets, labelled)
                yield from (current,) if private is None else private.beside(current, step, received_models)
                losses.append(current.loss)
                evaluations += current.evaluations

        def full_gradient_of(places: Sequence[int]) -> Tensor:
            owners = [data[place] for place in places]

            def oracle(_: int, chosen: Tensor) -> Oracle:
                ((inputs, targets),) = stacked_batches(owners, [[chosen]] * len(owners))
                current = MatrixOracle(self.matrix, self._evaluated(inputs), targets, labelled)
                return current if private is None else SplitOracle(current, private.start[span])

            span = slice(places[0], places[-1] + 1)

            return _full_gradient(received_models[: len(owners)], len(owners[0]), oracle)

        def full_gradient() -> Tensor:
            # Neighbours together where they have the same number of samples.
            alike = itertools.groupby(range(len(data)), lambda place: len(data[place]))
            return torch.cat([full_gradient_of(list(places)) for _, places in alike])

        point = received_models.clone()
        context = self._context(received, stacked_state, rates, round_number, full_gradient, point)
        result = client_round(plan.algorithm, context, oracles(), plan.training, point)
        # A vector without a client axis is the same for all clients.
        kept = [
            {key: value[index] if value.dim() > 1 else value for key, value in result.client.items()}
            for index in range(len(members))
        ]
        seen, memories, bytes_up = self._encoded(result.upload, states, kept, round_number, members)
        uploads = reduced_uploads(plan.algorithm, seen)
        by_samples = plan.training.weighting == "samples"
        weights = point.new_tensor([plan.weight(len(own)) for own in data])  # [C]

        def summed(rows: Tensor) -> Tensor:
            return (weights[:, None] * rows if by_samples else rows).sum(0)

        streams = plan.algorithm.aggregate.streams
        loss = float((weights * torch.stack(losses).mean(0)).sum())  # of [K, C]
        if not math.isfinite(loss):
            self._check_batches(members, round_number)
        own_parts = self._kept(private, members, round_number)
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
        new_states = [
            vectors | {key: value[index] for key, value in own_parts.items()} | memory
            for index, (vectors, memory) in enumerate(zip(kept, memories, strict=True))
        ]
        return sums, new_states

    def _private_entries(
        self, state: State, steps: int, round_number: int
    ) -> tuple[list[float], PrivateEntries | None]:
        """The step sizes of the shared entries, and the private entries with theirs, if there are any."""
        plan = self.plan
        rates = plan.algorithm.schedule.rates(plan.training.rate(round_number), steps)
        if not plan.division.private.entries:
            return rates, None
        private, shared = divided_rates(plan.training, rates)
        return shared, PrivateEntries(plan, state, private, round_number)

    def _kept(self, private: PrivateEntries | None, members: Sequence[int], round_number: int) -> Vectors:
        """What clients keep of their private entries, if there are any."""
        if private is None:
            return {}
        if not private.finite:
            raise self._diverged("the private part", members, round_number)
        return private.finished()

    def _diverged(self, what: str, members: Sequence[int], round_number: int) -> DivergedError:
        clients = f"client {members[0]}" if len(members) == 1 else f"one of clients {list(members)}"
        return DivergedError(
            f"round {round_number + 1}: {what} of {clients} is no longer finite; lower lr (now "
            f"{self.plan.training.lr:g}) or set clip (now {self.plan.training.clip})"
        )

    def _encoded(
        self,
        upload: State,
        states: Sequence[State],
        kept: Sequence[State],
        round_number: int,
        members: Sequence[int],
    ) -> tuple[State, list[dict[str, Tensor]], int]:
        """The uploads [C, P] as the server sees them, what clients remember of them, and their bytes."""
        algorithm, training = self.plan.algorithm, self.plan.training
        if not algorithm.compressed:
            return upload, [{} for _ in members], sum(value.nbytes for value in upload.values())
        encoded = []
        for index, (client, state, new) in enumerate(zip(members, states, kept, strict=True)):
            own = {key: value[index] for key, value in upload.items()}
            for key, value in own.items():
                if not all_finite(value):
                    raise DivergedError(
                        f"round {round_number + 1}: the upload {key!r} of client {client} is not finite; "
                        f"lower lr (now {training.lr:g}) or set clip (now {training.clip})"
                    )
            encoded.append(encode_uploads(algorithm, own, state, new, training.seed, round_number, client))
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

    def _positions(self, samples: int, round_number: int, client: int) -> list[Tensor]:
        """Those of a client's samples in every step; to an accelerator they travel together."""
        positions, device = batches(self.plan.training, samples, round_number, client), self.plan.device
        if device.type == "cpu":
            return positions
        if self.plan.training.batch_size is None:
            return [positions[0].to(device)] * len(positions)
        return list(torch.cat(positions).to(device).split([len(chosen) for chosen in positions]))

    def _labelled(self, owners: Sequence[ClientData]) -> bool | None:
        """Whether no target of theirs is left out, where closed forms need to know before the steps.

        On the CPU each step looks at its own batch; it would have to wait for an accelerator.
        """
        if self.plan.device.type == "cpu" or self.matrix.layers is None:
            return None
        return isinstance(owners[0].targets, Tensor) and all_labelled(owners)

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
    positions = torch.arange(samples, device=point.device)
    slices = positions.tensor_split(-(-samples // FULL_GRADIENT_SLICE))
    for number, chosen in enumerate(slices):
        total += oracle(number, chosen)(point) * (len(chosen) / samples)
    return total
