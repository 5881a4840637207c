"""The only training loop in the program.

`client_round` runs one client (vectors [P]) or a chunk of clients (matrices [C, P]); engines call it and
provide the gradients. `server_round` merges the mean uploads into the server's state.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.algorithm import Algorithm, estimate_of, memory_of
from flatfed.core.part import Affine, ClientContext, Cohort, Compressor, Correction, Oracle
from flatfed.core.state import State


@dataclass(frozen=True)
class StepRule:
    """What happens to the direction of every local step besides the algorithm's own parts.

    The gradient is clipped (`clip_stage="loss"`), corrected, perhaps clipped then ("total"), and decayed at
    the unperturbed local model. A part that accumulates gradients over steps takes the decayed one.
    """

    weight_decay: float = 0.0
    clip: float | None = None
    clip_stage: Literal["loss", "total"] = "loss"


class ClientResult(NamedTuple):
    """A client's (or a chunk's) new vectors, its uploads ("displacement" among them) and how far it moved."""

    client: dict[str, Tensor]
    upload: dict[str, Tensor]
    moved: Tensor
    drift: Tensor
    """The squared distance from the received model after every step, [K, ...]."""


def clipped(gradient: Tensor, limit: float) -> Tensor:
    """Scaled down to a norm of `limit` over the last axis where it is longer."""
    norm = torch.linalg.vector_norm(gradient, dim=-1, keepdim=True)
    return gradient * (limit / norm).clamp(max=1.0)


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


class _Pipeline:
    """The corrections of a round, and what they carry.

    Those that say nothing but which affine map they are do it once, for the round; the last of them are left
    to be folded into the step, unless all together are to be clipped.
    """

    def __init__(self, corrections: Sequence[Correction], context: ClientContext, clipped: bool) -> None:
        self.corrections, self.context = corrections, context
        self.carries = [correction.begin(context) for correction in corrections]
        self.affines = [
            None
            if type(correction).direction is not Correction.direction
            else correction.affine(context, carry)
            for correction, carry in zip(corrections, self.carries, strict=True)
        ]
        self.folded = Affine()
        self.stepwise = len(corrections)
        while not clipped and self.stepwise and (last := self.affines[self.stepwise - 1]) is not None:
            self.folded = last.then(self.folded)
            self.stepwise -= 1

    def direction(self, direction: Tensor) -> Tensor:
        """The direction of a step after those that are not folded."""
        for index, affine in enumerate(self.affines[: self.stepwise]):
            if affine is not None:
                direction = affine(direction, self.context.moved)
            else:
                direction, self.carries[index] = self.corrections[index].direction(
                    direction, self.context, self.carries[index]
                )
        return direction


@contextmanager
def _tiny_as_zero() -> Iterator[None]:
    """Numbers too small for full precision (denormal ones) count as zero, in this thread.

    Processors are slow at them, and the slopes of a client that has one class and has learnt it are full of
    them: its steps took more than twice as long.
    """
    already = sys.float_info.min / 2 == 0  # torch does not say
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(already)


@torch.no_grad()
@_tiny_as_zero()
def client_round(
    algorithm: Algorithm, context: ClientContext, oracles: Iterable[Oracle], rule: StepRule, point: Tensor
) -> ClientResult:
    """K local steps; `point` [..., P] is working memory that already holds the received model.

    `context.moved` is working memory too: zeros at the start, and the displacement at the end.
    """
    gradient_rule, corrections = algorithm.gradient, algorithm.corrections
    carry = gradient_rule.begin(context)
    clip_loss, clip_total = (rule.clip if rule.clip_stage == stage else None for stage in ("loss", "total"))
    pipeline = _Pipeline(corrections, context, clip_total is not None)
    moved, drift = context.moved, []
    start, shift = context.origin, gradient_rule.constant_shift(context)
    if shift is not None:
        # Where gradients are taken moves as the local model does, so that only one of them has to.
        point.add_(shift)
        start = start + shift
    folded, decay = pipeline.folded, rule.weight_decay
    decay_first = decay and any(correction.decays_gradient for correction in corrections)
    if decay and not decay_first:
        folded = folded.then(Affine(spring=decay, pull=-decay * context.origin))
    step = _Step(folded, start)

    for rate, oracle in zip(context.rates, oracles, strict=True):
        direction, carry = gradient_rule.gradient(point, oracle, context, carry)
        if clip_loss is not None:
            direction = clipped(direction, clip_loss)
        if decay_first:
            direction = direction.add(point if shift is None else context.origin + moved, alpha=decay)
        direction = pipeline.direction(direction)
        if clip_total is not None:
            direction = clipped(direction, clip_total)
        step(point, direction, rate)
        torch.sub(point, start, out=moved)
        drift.append(torch.linalg.vector_norm(moved, dim=-1).square())

    client: dict[str, Tensor] = {}
    upload = {"displacement": moved}
    for part, remembered in zip(algorithm.client_parts, (carry, *pipeline.carries), strict=True):
        finish = part.finish(context, remembered, moved)
        client |= finish.client
        upload |= finish.upload
    return ClientResult(client, upload, moved, torch.stack(drift))


class Sent(NamedTuple):
    """What a client puts on the wire, what the server makes of it, and what the client remembers of it."""

    payloads: dict[str, bytes]
    decoded: dict[str, Tensor]
    memory: dict[str, Tensor]


@torch.no_grad()
def send(
    algorithm: Algorithm, upload: State, memory: State, seed: int, round_number: int, client: int
) -> Sent:
    """One client's uploads [P] through the compressor; the quantizer's noise has a stream of its own."""
    sent = Sent({}, {}, {})
    for name, vector in upload.items():
        compress = algorithm.compress if name in algorithm.compressed else Compressor()
        kept = memory[memory_of(name)] if compress.remembers else vector
        target = compress.target(vector, kept)
        generator = random.torch_generator(seed, f"compress {name}", round_number, client)
        payload = compress.encode(target, generator)
        decoded = compress.decode(payload, len(vector), vector.dtype).to(vector.device)
        sent.payloads[name], sent.decoded[name] = payload, decoded
        if compress.remembers:
            sent.memory[memory_of(name)] = compress.memory(target, decoded, kept)
    return sent


@torch.no_grad()
def server_round(algorithm: Algorithm, server: State, mean: State, cohort: Cohort) -> dict[str, Tensor]:
    """The server's state after a round, from its state before and the participants' mean uploads."""
    merged = dict(server)
    if algorithm.compress.estimates:
        mean = dict(mean)
        for name in algorithm.compressed:
            mean[name] = algorithm.compress.estimate(server[estimate_of(name)], mean[name], cohort)
            merged[estimate_of(name)] = mean[name]
    for part in algorithm.parts:
        merged |= part.merge(server, mean, cohort)
    shifts = [shift for part in algorithm.corrections if (shift := part.shift(merged)) is not None]
    total_shift = torch.stack(shifts).sum(0) if shifts else None
    return merged | algorithm.server.update(server, mean["displacement"], total_shift, cohort)


def broadcast(algorithm: Algorithm, server: State) -> dict[str, Tensor]:
    """What the server sends to every participant: where to start, and the vectors that parts asked for."""
    return {
        name: algorithm.start.start(server) if name == "model" else server[name]
        for name in algorithm.broadcast
    }
