"""Which step is made of a gradient: momentum, AdamW, Muon.

What an optimizer remembers starts every round at zero (`state="reset"`), stays with the client until it takes
part again ("kept"), or is averaged by the server and sent on ("averaged").
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.context import Carry, ClientContext, Finish, MergeContext, Stepped
from flatfed.core.flat import Entry
from flatfed.core.part import Optimizer, Upload
from flatfed.core.state import State, Vector, Vectors
from flatfed.core.types import Decay, Positive, Range
from flatfed.parts import ranges

Keeping = Literal["reset", "kept", "averaged"]


class RememberingOptimizer(Optimizer):
    """One whose memory is reset, kept or averaged, as its `state` says."""

    state: str

    @property
    def alone(self) -> Self:
        return replace(self, state="kept") if self.server_vectors else self  # type: ignore[type-var]

    @property
    def memory(self) -> tuple[Vector, ...]:
        """What it remembers from step to step, and from round to round unless that is reset."""
        return ()

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        averaged = self.state not in {"reset", "kept"}
        return tuple(replace(vector, broadcast=True) for vector in self.memory) if averaged else ()

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        return self.memory if self.state == "kept" else ()

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return tuple(Upload(vector.name, vector.size) for vector in self.server_vectors)

    def begin(self, context: ClientContext) -> Carry:
        stored: State = {**context.client, **context.received}
        cohort = context.displacement.shape[:-1]
        carry = {}
        for vector in self.memory:
            if self.state == "reset":
                size = context.layout.size if vector.size == "model" else 1
                carry[vector.name] = context.origin.new_zeros(*cohort, size)
            else:
                carry[vector.name] = stored[vector.name].expand(*cohort, -1)
        return carry

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        remembered = {vector.name: carry[vector.name] for vector in self.memory}
        if self.state == "kept":
            return Finish(client=remembered)
        return Finish(upload=remembered if self.server_vectors else {})

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        return {vector.name: mean[vector.name] for vector in self.server_vectors}


@dataclass(frozen=True)
class LocalMomentum(RememberingOptimizer):
    """u ← β u + d, then the step u (heavy ball) or d + β u (Nesterov's).

    As in torch's SGD, weight decay is part of the gradients that u accumulates. `damped` has (1 − β) d in
    place of d in both.
    """

    decay: ranges.Momentum = 0.9
    nesterov: bool = False
    state: Keeping = "reset"
    damped: bool = False

    memory = (Vector("buffer"),)
    decays_gradient = True

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> Stepped:
        if self.damped:
            direction = (1 - self.decay) * direction
        buffer = direction.add(carry["buffer"], alpha=self.decay)
        step = direction.add(buffer, alpha=self.decay) if self.nesterov else buffer
        return step, {"buffer": buffer}


ADAM_MEMORY = (
    Vector("first_moment"),
    Vector("second_moment"),
    Vector("first_filled", "one"),
    Vector("second_filled", "one"),
)
"""The moments, and how much of each running mean is filled: 1 − βⁿ after n steps.

As numbers of their own, those can be averaged over clients that took unequal numbers of steps.
"""


def adam_step(gradient: Tensor, carry: Carry, beta1: float, beta2: float, eps: float) -> Stepped:
    """m̂/(√v̂ + ε), and the moments after it."""
    first = torch.lerp(carry["first_moment"], gradient, 1 - beta1)
    second = torch.addcmul(beta2 * carry["second_moment"], gradient, gradient, value=1 - beta2)
    first_filled = beta1 * carry["first_filled"] + (1 - beta1)
    second_filled = beta2 * carry["second_filled"] + (1 - beta2)
    divisor = second.sqrt().div_(second_filled.sqrt()).add_(eps).mul_(first_filled)
    moments = {"first_moment": first, "second_moment": second}
    return first / divisor, {**moments, "first_filled": first_filled, "second_filled": second_filled}


@dataclass(frozen=True)
class AdamW(RememberingOptimizer):
    """m ← β₁ m + (1−β₁) d, v ← β₂ v + (1−β₂) d², then the step m̂/(√v̂ + ε); weight decay is decoupled.

    With `state="blocks"` m starts every round at zero, and of v the mean of each tensor is averaged and sent
    on, which costs next to no traffic (FedAdamW).
    """

    beta1: Decay = 0.9
    beta2: Decay = 0.999
    eps: Positive = 1e-8
    state: Literal["reset", "kept", "averaged", "blocks"] = "reset"

    label = "adamw"
    step_sizes = Range(1e-4, 0.03)

    @property
    def memory(self) -> tuple[Vector, ...]:
        if self.state == "blocks":
            return (Vector("second_moment", "tensors"), Vector("second_filled", "one"))
        return ADAM_MEMORY

    def begin(self, context: ClientContext) -> Carry:
        carry = super().begin(context)
        if self.state == "blocks":
            zeros = torch.zeros_like(context.displacement)
            means = context.layout.spread(carry["second_moment"])
            carry |= {"second_moment": means, "first_moment": zeros, "first_filled": zeros[..., :1]}
        return carry

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> Stepped:
        return adam_step(direction, carry, self.beta1, self.beta2, self.eps)

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        if self.state == "blocks":
            carry = carry | {"second_moment": context.layout.tensor_means(carry["second_moment"])}
        return super().finish(context, carry, displacement)


def orthogonalized(matrices: Tensor) -> Tensor:
    """Five steps of Newton and Schulz on [..., rows, columns]: singular values between about 0.7 and 1.2.

    In the dtype that they have; torch's own Muon rounds to bfloat16.
    """
    tall = matrices.shape[-2] > matrices.shape[-1]
    wide = matrices.mT if tall else matrices
    wide = wide / torch.linalg.matrix_norm(wide, keepdim=True).clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.mT
        wide = 3.4445 * wide + (-4.7750 * gram + 2.0315 * (gram @ gram)) @ wide
    return wide.mT if tall else wide


@dataclass(frozen=True)
class Muon(RememberingOptimizer):
    """M ← β M + (1−β) d, then for each matrix the step ratio · s · O, O the nearest orthogonal to M.

    Matrices are all parameters with two or more dimensions, as outputs × rest; `nesterov` orthogonalizes
    (1−β) d + β M instead. s is √max(1, outputs/rest) ("original"), 0.2 √max(outputs, rest)
    ("match_rms_adamw") or 1 ("none"). Other parameters take AdamW's steps, whose moments start every round at
    zero whatever the `state` of M. Weight decay is decoupled.
    """

    momentum: Decay = 0.95
    nesterov: bool = True
    scale: Literal["original", "match_rms_adamw", "none"] = "original"
    ratio: Positive = 1.0
    beta1: Decay = 0.9
    beta2: Decay = 0.95
    eps: Positive = 1e-10
    state: Keeping = "reset"

    memory = (Vector("momentum"),)
    step_sizes = Range(1e-3, 0.1)

    def begin(self, context: ClientContext) -> Carry:
        zeros, entries = torch.zeros_like(context.displacement), context.layout.entries
        others = zeros[..., : sum(entry.size for entry in entries if not is_matrix(entry))]
        adam = {vector.name: others if vector.size == "model" else zeros[..., :1] for vector in ADAM_MEMORY}
        return super().begin(context) | adam

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> Stepped:
        entries = context.layout.entries
        momentum = torch.lerp(carry["momentum"], direction, 1 - self.momentum)
        smooth = torch.lerp(direction, momentum, self.momentum) if self.nesterov else momentum
        pieces = direction.split(context.layout.sizes, -1)
        others = [piece for piece, entry in zip(pieces, entries, strict=True) if not is_matrix(entry)]
        moments = {key: value for key, value in carry.items() if key != "momentum"}
        if others:
            step, moments = adam_step(torch.cat(others, -1), moments, self.beta1, self.beta2, self.eps)
            others = list(step.split([piece.shape[-1] for piece in others], -1))
        steps = [
            self._matrix_step(piece, entry.shape) if is_matrix(entry) else others.pop(0)
            for piece, entry in zip(smooth.split(context.layout.sizes, -1), entries, strict=True)
        ]
        return torch.cat(steps, -1) if steps else direction, {"momentum": momentum, **moments}

    def _matrix_step(self, piece: Tensor, shape: Sequence[int]) -> Tensor:
        # Convolutions are stored channels-last, which only reorders the columns.
        rows, columns = shape[0], piece.shape[-1] // shape[0]
        scales = {
            "original": max(1, rows / columns) ** 0.5,
            "match_rms_adamw": 0.2 * max(rows, columns) ** 0.5,
            "none": 1.0,
        }
        matrix = orthogonalized(piece.unflatten(-1, (rows, columns)))
        return (self.ratio * scales[self.scale] * matrix).flatten(-2)


def is_matrix(entry: Entry) -> bool:
    return len(entry.shape) >= 2 and entry.size > 0
