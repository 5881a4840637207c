"""Training some clients with one model: the piece of work that every engine hands out.

A worker owns a private copy of the model. It trains one client in place, or a chunk of clients as a matrix
[C, P], and returns weighted sums, which engines add up in a fixed order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.flat import BoundModel, Layout, Loss, all_finite, buffer_change, load_buffers
from flatfed.core.part import ClientContext
from flatfed.core.rounds import ClientResult, client_round, send
from flatfed.core.sampling import batches
from flatfed.core.settings import Settings
from flatfed.core.state import Dimensions, State
from flatfed.data.federation import ClientData, Federation, Samples, stacked_batches
from flatfed.engines.oracles import UNEXPECTED_DRAWS, MatrixGradients, MatrixOracle, ModuleOracle
from flatfed.engines.sums import Totals

FULL_GRADIENT_SLICE = 512
STAGED_BYTES = 8 * 2**20
"""Clients with more data than that are not copied for a round."""

Metric = Callable[[Tensor, Tensor], Tensor]


class Trained(NamedTuple):
    """One client's round before anything of it travels."""

    result: ClientResult
    buffers: dict[str, Tensor]
    """What training did to them."""
    samples: int
    rate: float
    """Σ η_k"""
    loss: float
    evaluations: int


@dataclass(frozen=True)
class Plan:
    """What all workers of a training have in common."""

    algorithm: Algorithm
    loss: Loss
    settings: Settings
    metrics: Mapping[str, Metric]
    layout: Layout
    dimensions: Dimensions
    device: torch.device
    draws_random_numbers: bool
    """Whether the model does, in training."""
    draws_in_evaluation: bool
    path: str
    """"matrix" or "client"."""
    path_reason: str

    def weight(self, samples: int) -> float:
        """How much a client counts."""
        return float(samples) if self.settings.weighting == "samples" else 1.0

    def evaluation_generator(self) -> torch.Generator | None:
        """For models that are random even in evaluation mode: the same draws every time."""
        if not self.draws_in_evaluation:
            return None
        return torch.Generator(self.device).manual_seed(random.key(self.settings.seed, "evaluation"))


@contextmanager
def _explained(members: Sequence[int], round_number: int) -> Iterator[None]:
    """Whatever a user's model raises in training becomes one line that says where."""
    try:
        yield
    except FlatfedError:
        raise
    except (RuntimeError, ValueError, IndexError, TypeError) as error:
        who = f"client {members[0]}" if len(members) == 1 else f"one of clients {list(members)}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FlatfedError(
            f"round {round_number + 1}: the model cannot be trained on the data of {who}: {reason}"
        ) from error


@contextmanager
def no_unexpected_draws(plan: Plan) -> Iterator[None]:
    """Refuses a training that touched torch's global random stream though its model seemed not to draw."""
    before = torch.get_rng_state()
    yield
    if not plan.draws_random_numbers and not torch.equal(before, torch.get_rng_state()):
        raise FlatfedError(UNEXPECTED_DRAWS)


class Worker:
    """One model and the data, ready to train clients and to evaluate."""

    def __init__(self, plan: Plan, model: nn.Module, federation: Federation) -> None:
        self.plan, self.federation = plan, federation
        self.bound = BoundModel(model, plan.layout, plan.device)
        self.matrix = MatrixGradients(self.bound.module, plan.layout, plan.loss)

    def train(
        self,
        members: Sequence[int],
        received: State,
        buffers: State,
        states: Sequence[State],
        round_number: int,
    ) -> tuple[Totals, list[dict[str, Tensor]]]:
        """The sums of a chunk's rounds and its clients' new vectors; the client path takes one at a time."""
        if self.plan.path == "matrix":
            with _explained(members, round_number):
                load_buffers(self.bound.module, buffers)
                self.bound.module.train()
                return self._train_matrix(members, received, states, round_number)
        (client,), (state,) = members, states
        trained = self.train_client(client, received, buffers, state, round_number)
        rows = {name: value[None] for name, value in trained.result.upload.items()}
        received_rows, (memory,), bytes_up = self._send(rows, [state], round_number, [client])
        totals = Totals(
            upload={name: value[0] for name, value in received_rows.items()},
            moved=self._moved(trained.result),
            buffers=trained.buffers,
            rate=trained.rate,
            loss=trained.loss,
            evaluations=trained.evaluations,
            bytes_up=bytes_up,
            drift=float(trained.result.drift.mean()),
            squared=float(trained.result.drift[-1]),
        )
        return totals.times(self.plan.weight(trained.samples)), [trained.result.client | memory]

    def train_client(
        self, client: int, received: State, buffers: State, state: State, round_number: int
    ) -> Trained:
        """One client's round, in place."""
        with _explained([client], round_number):
            return self._train_client(client, received, buffers, state, round_number)

    def evaluate(self, model: Tensor, buffers: State, samples: Samples) -> Tensor:
        """The mean loss and the metrics of a model on stored samples, in evaluation mode."""
        inputs, targets = (tensor.to(self.plan.device) for tensor in samples)
        self.bound.bind(model)
        load_buffers(self.bound.module, buffers)
        self.bound.module.eval()
        with torch.no_grad(), random.routed(self.plan.evaluation_generator()):
            outputs = self.bound.module(self.federation.transform.evaluate(inputs))
            functions = (self.plan.loss, *self.plan.metrics.values())
            values = [torch.as_tensor(function(outputs, targets)) for function in functions]
            return torch.stack([value.double().cpu().reshape(()) for value in values])

    def _context(
        self,
        received: State,
        state: State,
        steps: int,
        round_number: int,
        full_gradient: Callable[[], Tensor],
        point: Tensor,
    ) -> ClientContext:
        kept: list[Tensor] = []

        def once() -> Tensor:
            # Parts that want the full gradient share one pass.
            if not kept:
                kept.append(full_gradient())
            return kept[0]

        return ClientContext(
            round=round_number,
            received=received,
            client=state,
            rates=self.plan.algorithm.schedule.rates(self.plan.settings.rate(round_number), steps),
            layout=self.plan.layout,
            input_shape=self.plan.dimensions.input_shape,
            full_gradient=once,
            moved=torch.zeros_like(point),
        )

    def _train_client(
        self, client: int, received: State, buffers: State, state: State, round_number: int
    ) -> Trained:
        plan, bound, model = self.plan, self.bound, received["model"]
        load_buffers(bound.module, buffers)
        bound.module.train()
        data = self.federation.client(client)
        positions = batches(plan.settings, len(data), round_number, client)
        data, ready = self._staged(data, sum(len(chosen) for chosen in positions))
        losses: list[Tensor] = []
        evaluations = self._full_passes(len(data))

        def oracle(chosen: Tensor, purpose: str, step: int) -> ModuleOracle:
            inputs, targets = data.batch(chosen.to(plan.device))
            if not ready and purpose == "step":
                inputs = self._augmented(inputs, round_number, client, step)
            elif not ready:
                inputs = self.federation.transform.evaluate(inputs)
            key = None
            if plan.draws_random_numbers:
                key = random.key(plan.settings.seed, purpose, round_number, client, step)
            return ModuleOracle(bound, plan.loss, (inputs, targets), key, moves_buffers=purpose == "step")

        def each_step() -> Iterator[ModuleOracle]:
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
        result = client_round(plan.algorithm, context, each_step(), plan.settings.step_rule, point)
        return Trained(
            result=result,
            buffers=buffer_change(buffers, bound.buffers),
            samples=len(data),
            rate=context.total_rate,
            loss=float(torch.stack(losses).mean()),
            evaluations=evaluations,
        )

    def _train_matrix(
        self, members: Sequence[int], received: State, states: Sequence[State], round_number: int
    ) -> tuple[Totals, list[dict[str, Tensor]]]:
        plan, model = self.plan, received["model"]
        data = [self.federation.client(client) for client in members]
        positions = [
            batches(plan.settings, len(own), round_number, client)
            for own, client in zip(data, members, strict=True)
        ]
        steps = len(positions[0])
        losses: list[Tensor] = []
        evaluations = 0

        def each_step() -> Iterator[MatrixOracle]:
            nonlocal evaluations
            for step, (inputs, targets) in enumerate(self._stacked(data, positions)):
                if self.federation.transform.draws:
                    seen = torch.stack(
                        [
                            self._augmented(own, round_number, client, step)
                            for own, client in zip(inputs, members, strict=True)
                        ]
                    )
                else:
                    seen = self._evaluated(inputs)
                current = MatrixOracle(self.matrix, seen, targets)
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
            steps,
            round_number,
            # Neighbours together where they have the same number of samples.
            lambda: torch.cat([full_gradient_of(list(same)) for _, same in itertools.groupby(data, len)]),
            point,
        )
        result = client_round(plan.algorithm, context, each_step(), plan.settings.step_rule, point)
        upload, memories, bytes_up = self._send(result.upload, states, round_number, members)
        by_samples = plan.settings.weighting == "samples"
        weights = model.new_tensor([plan.weight(len(own)) for own in data])  # [C]

        def summed(vectors: State) -> dict[str, Tensor]:
            return {
                name: (weights[:, None] * value if by_samples else value).sum(0)
                for name, value in vectors.items()
            }

        totals = Totals(
            weight=float(weights.sum()),
            clients=len(members),
            upload=summed(upload),
            moved=summed(self._moved(result)),
            rate=float(weights.sum()) * context.total_rate,
            loss=float((weights * torch.stack(losses).mean(0)).sum()),  # of [K, C]
            evaluations=evaluations * len(members) + sum(self._full_passes(len(own)) for own in data),
            bytes_up=bytes_up,
            drift=float((weights * result.drift.mean(0)).sum()),
            squared=float((weights * result.drift[-1]).sum()),
        )
        # A vector without a client axis is the same for everybody.
        new_states = [
            {name: value[index] if value.dim() > 1 else value for name, value in result.client.items()}
            | memory
            for index, memory in enumerate(memories)
        ]
        return totals, new_states

    def _send(
        self, upload: State, states: Sequence[State], round_number: int, members: Sequence[int]
    ) -> tuple[State, list[dict[str, Tensor]], int]:
        """The uploads [C, P] as the server sees them, what clients remember of them, and their bytes."""
        algorithm, settings = self.plan.algorithm, self.plan.settings
        if not algorithm.compressed:
            return upload, [{} for _ in members], sum(value.nbytes for value in upload.values())
        sent = []
        for index, (client, state) in enumerate(zip(members, states, strict=True)):
            own = {name: value[index] for name, value in upload.items()}
            for name, value in own.items():
                if not all_finite(value):
                    raise DivergedError(
                        f"round {round_number + 1}: the upload {name!r} of client {client} is not finite; "
                        f"lower lr (now {settings.lr:g}) or set clip (now {settings.clip})"
                    )
            sent.append(send(algorithm, own, state, settings.seed, round_number, client))
        seen = {name: torch.stack([each.decoded[name] for each in sent]) for name in upload}
        size = sum(len(payload) for each in sent for payload in each.payloads.values())
        return seen, [each.memory for each in sent], size

    def _staged(self, data: ClientData, wanted: int) -> tuple[ClientData, bool]:
        """A client's samples in one block if its steps want each of them, and whether as the model sees them.

        What is done to a sample whenever it is seen is then done once.
        """
        samples = len(data)
        if wanted < samples or data.inputs[:1].nbytes * samples > STAGED_BYTES:
            return data, False
        inputs, targets = data.batch(torch.arange(samples, device=data.inputs.device))
        if self.federation.transform.draws:
            return ClientData(inputs, targets), False
        seen = self.federation.transform.evaluate(inputs)
        if self.plan.layout.channels_last and seen.dim() == 4:
            seen = seen.contiguous(memory_format=torch.channels_last)
        return ClientData(seen, targets), True

    def _stacked(
        self, owners: Sequence[ClientData], positions: Sequence[Sequence[Tensor]]
    ) -> Iterator[Samples]:
        here = [[chosen.to(self.plan.device) for chosen in own] for own in positions]
        return stacked_batches(owners, here)

    def _evaluated(self, inputs: Tensor) -> Tensor:
        """Stored inputs [C, B, …] as the model sees them, without augmentation."""
        seen = self.federation.transform.evaluate(inputs.flatten(0, 1))
        return seen.unflatten(0, inputs.shape[:2])

    def _augmented(self, inputs: Tensor, round_number: int, client: int, step: int) -> Tensor:
        """A training batch as the model sees it, augmented from the client's stream."""
        transform = self.federation.transform
        if not transform.draws:
            return transform.evaluate(inputs)
        generator = random.torch_generator(self.plan.settings.seed, "augment", round_number, client, step)
        return transform.train(inputs, generator)

    def _moved(self, result: ClientResult) -> dict[str, Tensor]:
        unchanged = result.upload["displacement"] is result.moved and not self.plan.algorithm.compressed
        return {} if unchanged else {"moved": result.moved}

    def _full_passes(self, samples: int) -> int:
        """Minibatch gradients that a client's passes over all of its data count as."""
        passes = -(-samples // (self.plan.settings.batch_size or samples))
        return passes * self.plan.algorithm.full_gradients


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
