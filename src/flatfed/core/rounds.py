"""The only training loop in the program.

`client_round` runs one client (vectors [P]) or a chunk of clients (matrices [C, P]); engines call it and
provide the gradients. `server_round` merges the cohort's mean uploads into the server's state.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.algorithm import Algorithm, ImpossibleComposition, Member
from flatfed.core.context import Affine, Carry, ClientContext, MergeContext, Oracle
from flatfed.core.errors import DivergedError
from flatfed.core.flat import length
from flatfed.core.part import Compressor, Correction, Optimizer, part_name
from flatfed.core.settings import Training
from flatfed.core.state import State, Vectors, owned


class ClientResult(NamedTuple):
    """A client's (or a chunk's) new vectors and uploads by key, and how far it moved."""

    client: dict[str, Tensor]
    upload: dict[str, Tensor]
    displacement: Tensor
    """Of the local model, whatever is uploaded in its place."""
    drift: Tensor
    """The squared distance from the received model after every step, [K, ...]."""


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """Scaled down to a norm of `limit` over the last axis where it is longer."""
    return gradient * (limit / length(gradient)).clamp(max=1.0)


class _Step:
    """y ← y − η (scale · d + spring · (y − start) − pull), in place."""

    def __init__(self, affine: Affine, start: Tensor) -> None:
        self.scale, self.spring, self.pull = affine
        self.balance = start
        strong = self.spring**2 * torch.finfo(start.dtype).max > 1  # so that dividing by it is safe
        if self.pull is not None and strong:
            # A spring and a pull together are one step towards where they balance.
            self.balance, self.pull = start.add(self.pull, alpha=1 / self.spring), None

    def __call__(self, point: Tensor, direction: Tensor, rate: float) -> None:
        if self.spring:
            point.lerp_(self.balance, rate * self.spring)
        if self.pull is not None:
            point.add_(self.pull, alpha=rate)
        point.sub_(direction, alpha=rate * self.scale)


class _Stage:
    """A correction in its round: what it sees and carries, and the affine map that it is, if it is one."""

    def __init__(self, correction: Correction, context: ClientContext) -> None:
        self.correction, self.context = correction, context
        self.carry = correction.begin(context)
        self.decays_gradient = isinstance(correction, Optimizer) and correction.decays_gradient
        overrides = type(correction).direction is not Correction.direction
        foldable = not overrides and not self.decays_gradient
        self.affine = correction.affine(context, self.carry) if foldable else None

    def direction(self, direction: Tensor) -> Tensor:
        if self.affine is not None:
            return self.affine(direction, self.context.displacement)
        direction, self.carry = self.correction.direction(direction, self.context, self.carry)
        return direction


@contextmanager
def flush_denormals() -> Iterator[None]:
    """Numbers too small for full precision (denormal ones) count as zero, in this thread.

    Processors are slow at them, and the gradients of a client that has one class and has learnt it are full
    of them: its steps took more than twice as long.
    """
    already = sys.float_info.min / 2 == 0  # torch does not say
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


class LocalSteps:
    """The local steps of a client or a chunk; `point` [..., P] is working memory that already holds the
    received model.

    The gradient is clipped (`clip_stage="loss"`; full gradients, too), corrected, perhaps clipped then
    ("total"), and decayed at the unperturbed local model. An optimizer that accumulates gradients over steps
    may take the decayed one.
    `context.displacement` is working memory too: zeros at the start, and the displacement at the end.
    """

    def __init__(
        self, algorithm: Algorithm, context: ClientContext, training: Training, point: Tensor
    ) -> None:
        clip_loss = training.clip if training.clip_stage == "loss" else None
        clip_total = training.clip if training.clip_stage == "total" else None
        if clip_loss is not None:
            # What parts make of a full gradient acts beside clipped ones.
            whole = context.full_gradient
            context = replace(context, full_gradient=lambda: clipped(whole(), clip_loss))
        gradient_member, *correction_members = algorithm.client_members
        gradient_context = gradient_member.context(context)
        carry = algorithm.gradient.begin(gradient_context)
        stages = [
            _Stage(correction, member.context(context))
            for correction, member in zip(algorithm.corrections, correction_members, strict=True)
        ]
        # The last affine maps become part of the step, unless all corrections together are to be clipped.
        folded, stepwise = Affine(), list(stages)
        decay = training.weight_decay
        decayed = next((stage for stage in stages if stage.decays_gradient), None) if decay else None
        while clip_total is None and stepwise and (affine := stepwise[-1].affine) is not None:
            folded = affine.then(folded)
            stepwise.pop()
        start, shift = context.origin, algorithm.gradient.constant_shift(gradient_context)
        if shift is not None:
            # Where gradients are taken moves as the local model does, so that only one of them has to.
            point.add_(shift)
            start = start + shift
        if decay and decayed is None:
            folded = folded.then(Affine(spring=decay, pull=-decay * context.origin))
        _check_factors((folded, *(stage.affine or Affine() for stage in stages)), context, training)
        self.algorithm, self.context, self.point = algorithm, context, point
        self._gradient_member, self._gradient_context, self._carry = gradient_member, gradient_context, carry
        self._correction_members, self._stages, self._stepwise = correction_members, stages, stepwise
        self._clip_loss, self._clip_total = clip_loss, clip_total
        self._decay, self._decayed = decay, decayed
        self._start, self._shift, self._step = start, shift, _Step(folded, start)

    def take(self, rate: float, oracle: Oracle) -> None:
        """One step, with the gradients of its batch."""
        point, context = self.point, self.context
        direction, self._carry = self.algorithm.gradient.gradient(
            point, oracle, self._gradient_context, self._carry
        )
        if direction.shape != point.shape:
            raise _misfit(self._gradient_member.owner, direction, point)
        if self._clip_loss is not None:
            direction = clipped(direction, self._clip_loss)
        for stage in self._stepwise:
            if stage is self._decayed:
                local = point if self._shift is None else context.origin + context.displacement
                direction = direction.add(local, alpha=self._decay)
            direction = stage.direction(direction)
        if self._clip_total is not None:
            direction = clipped(direction, self._clip_total)
        self._step(point, direction, rate)
        torch.sub(point, self._start, out=context.displacement)

    def finished(self) -> tuple[Vectors, Vectors]:
        """What the client keeps, and what it uploads."""
        handed: list[Handed] = [(self._gradient_member, self._gradient_context, self._carry)]
        for stage, member in zip(self._stages, self._correction_members, strict=True):
            handed.append((member, stage.context, stage.carry))
        return _finished(self.algorithm, self.context, handed)


@torch.no_grad()
@flush_denormals()
def client_round(
    algorithm: Algorithm, context: ClientContext, oracles: Iterable[Oracle], training: Training, point: Tensor
) -> ClientResult:
    """K local steps from the received model, which `point` [..., P] already holds."""
    steps, displacement, drift = LocalSteps(algorithm, context, training, point), context.displacement, []
    for rate, oracle in zip(context.rates, oracles, strict=True):
        steps.take(rate, oracle)
        drift.append(torch.linalg.vector_norm(displacement, dim=-1).square())
    client, upload = steps.finished()
    return ClientResult(client, upload, displacement, torch.stack(drift))


Handed = tuple[Member, ClientContext, Carry]


def _finished(
    algorithm: Algorithm, context: ClientContext, handed: Iterable[Handed]
) -> tuple[Vectors, Vectors]:
    """What the parts make of the round for the client and for the server, as they declared it."""
    displacement = context.displacement
    client: Vectors = {}
    upload = {"displacement": displacement}
    for member, seen, carry in handed:
        finish = member.part.finish(seen, carry, displacement)
        client |= member.keyed(member.client, finish.client)
        upload |= member.keyed(member.uploads, finish.upload)
    for key in (key for member in algorithm.members for key in member.client.values()):
        # What a part does not hand back it keeps.
        old, new = context.client[key], client.setdefault(key, context.client[key])
        if new.shape[-1:] != old.shape[-1:] or new.dtype != old.dtype:
            raise _misfit(key, new, old)
    for key in algorithm.uploads:
        if key not in upload:
            raise ImpossibleComposition(f"{key}: its part declares this upload and never hands it back")
        if algorithm.declared_uploads[key].size == "model" and upload[key].shape != displacement.shape:
            raise _misfit(key, upload[key], displacement)
    upload = owned(upload, context.received, context.client)
    return owned(client, context.received, context.client, upload, {"": displacement}), upload


def _check_factors(affines: Iterable[Affine], context: ClientContext, training: Training) -> None:
    dtype = context.displacement.dtype
    for affine in affines:
        factor = max(1.0, *context.rates) * max(abs(affine.scale), affine.spring)
        if factor > torch.finfo(dtype).max:
            raise DivergedError(
                f"round {context.round + 1}: a step has the factor {factor:.3g}, which {dtype} cannot hold; "
                f"lower lr (now {training.lr:g}), weight_decay or the algorithm's weights"
            )


def _misfit(name: str, returned: Tensor, expected: Tensor) -> ImpossibleComposition:
    """A vector of another shape would be broadcast, which nobody would notice."""
    return ImpossibleComposition(
        f"{name}: {list(returned.shape)} {returned.dtype} was returned where {list(expected.shape)} "
        f"{expected.dtype} belongs; correct the part"
    )


class Encoded(NamedTuple):
    """What a client puts on the wire, what the server makes of it, and what the client remembers of it.

    The memory has what the compressor keeps, and the client's vectors that follow what the server receives.
    """

    payloads: dict[str, bytes]
    decoded: dict[str, Tensor]
    memory: dict[str, Tensor]


@torch.no_grad()
def encode_uploads(
    algorithm: Algorithm,
    upload: State,
    memory: State,
    kept: State,
    seed: int,
    round_number: int,
    client: int,
) -> Encoded:
    """One client's uploads [P] through the compressor; the quantizer's noise has a stream of its own.

    `memory` is what the client had before the round, `kept` what its parts made of it.
    """
    encoded = Encoded({}, {}, {})
    for key, vector in upload.items():
        compress = algorithm.compress if key in algorithm.compressed else Compressor()
        before = memory[algorithm.memory_key(key)] if compress.remembers else vector
        target = compress.target(vector, before)
        purpose = f"compress {algorithm.short_uploads[key]}"
        payload = compress.encode(target, random.torch_generator(seed, purpose, round_number, client))
        decoded = compress.decode(payload, len(vector), vector.dtype).to(vector.device)
        encoded.payloads[key], encoded.decoded[key] = payload, decoded
        if compress.remembers:
            encoded.memory[algorithm.memory_key(key)] = compress.memory(target, decoded, before)
    for key, source in algorithm.summed.items():
        encoded.memory[key] = kept[key] + (encoded.decoded[source] - upload[source])
    return encoded._replace(memory=owned(encoded.memory, upload, memory, encoded.decoded))


@torch.no_grad()
def reduced_uploads(algorithm: Algorithm, received: State) -> dict[str, Tensor]:
    """What enters the cohort's mean: the uploads [..., n] as the server receives them, and statistics."""
    return {
        key: upload.reduce(received[upload.of or key]) for key, upload in algorithm.declared_uploads.items()
    }


@torch.no_grad()
def server_round(
    algorithm: Algorithm, server: State, mean: State, context: MergeContext
) -> dict[str, Tensor]:
    """The server's state after a round, from its state before and the participants' mean uploads."""
    merged = dict(server)
    if algorithm.compress.estimates:
        mean = dict(mean)
        for key in algorithm.compressed:
            estimate = algorithm.estimate_key(key)
            mean[key] = algorithm.compress.estimate(server[estimate], mean[key], context)
            merged[estimate] = mean[key]
    for member in algorithm.members:
        update = member.part.merge(member.seen(server), member.received(mean), context)
        merged |= member.keyed(member.server, update)
    shift = None
    for correction, member in zip(algorithm.corrections, algorithm.client_members[1:], strict=True):
        if correction.shifts_model:
            shift = correction.shift(member.seen(merged))
    member = algorithm.member(algorithm.server)
    update = algorithm.server.update(member.seen(server), member.received(mean), shift, context)
    merged |= member.keyed(member.server, update)
    changed = {key: vector for key, vector in merged.items() if vector is not server.get(key)}
    for key, vector in changed.items():
        old = server.get(key, vector)
        if (vector.shape, vector.dtype) != (old.shape, old.dtype):
            raise _misfit(key, vector, old)
    return merged | owned(changed, server, mean)


class Broadcast(NamedTuple):
    """What travels down to every participant."""

    vectors: State
    """By key: "model", where local training starts, and the server vectors that parts want on clients."""
    buffers: State


def broadcast(algorithm: Algorithm, server: State, buffers: State) -> Broadcast:
    """What the server sends to every participant."""
    start = algorithm.start.start(algorithm.member(algorithm.start).seen(server))
    if (start.shape, start.dtype) != (server["model"].shape, server["model"].dtype):
        raise _misfit(part_name(algorithm.start), start, server["model"])
    vectors = {key: start if key == "model" else server[key] for key in algorithm.broadcast}
    return Broadcast(vectors, buffers)
