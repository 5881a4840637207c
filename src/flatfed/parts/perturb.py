"""Which gradient drives the step: gradients at perturbed points, and of perturbed inputs."""

from typing import Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.context import Carry, ClientContext, Finish, MergeContext, Oracle, Stepped
from flatfed.core.flat import divisor, unit
from flatfed.core.part import Gradient, Upload
from flatfed.core.state import Reads, State, Vector, Vectors
from flatfed.core.types import NonNegative, Share
from flatfed.parts import ranges
from flatfed.parts.server import Momentum


class PerturbedGradient(Gradient):
    """A gradient at another point is no longer than the longest."""

    bounded = True


@dataclass(frozen=True)
class SharpnessAware(PerturbedGradient):
    """g(y + ε) with ε = ρ g(y)/‖g(y)‖; `mix` < 1 blends it with g(y), as FedSpeed does."""

    radius: ranges.Radius
    mix: Share = 1.0
    normalize: bool = True

    evaluations = 2

    def gradient(self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry) -> Stepped:
        here, radius = oracle(point), self.radius * context.radius_factor
        if self.normalize:
            there = oracle(torch.addcdiv(point, here, divisor(here), value=radius))
        else:
            there = oracle(point.add(here, alpha=radius))
        return (there if self.mix == 1 else torch.lerp(here, there, self.mix)), carry


@dataclass(frozen=True)
class AdaptiveSharpnessAware(PerturbedGradient):
    """g(y + ε) with ε = ρ T² g/‖T g‖, where T = |y| + offset on weights and 1 elsewhere.

    "Weights" are the parameters whose name contains that word, normalisation layers included;
    `scale_norms=False` leaves out those with fewer than two dimensions.
    """

    radius: ranges.Radius
    offset: NonNegative = 0.2
    scale_norms: bool = True

    evaluations = 2

    def begin(self, context: ClientContext) -> Carry:
        origin = context.origin
        scaled = context.layout.weight_entries(origin.device, minimum_dimensions=0 if self.scale_norms else 2)
        # T = slope · |y| + least
        return {"slope": scaled.to(origin), "least": torch.ones_like(origin).masked_fill(scaled, self.offset)}

    def gradient(self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry) -> Stepped:
        scale = torch.addcmul(carry["least"], carry["slope"], point.abs())
        ascent = unit(scale * oracle(point))
        radius = self.radius * context.radius_factor
        return oracle(torch.addcmul(point, scale, ascent, value=radius)), carry


@dataclass(frozen=True)
class LastModel(PerturbedGradient):
    """g(y + δ) with δ = ρ u(x_old − x), constant during the round and at no extra gradient.

    x_old is the model that the client received the last time it took part (`memory="client"`) or the
    global model of the round before (`memory="server"`); δ = 0 when there is none.
    """

    radius: ranges.Radius
    memory: Literal["client", "server"] = "client"

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        return (Vector("previous_model", initial="model", broadcast=True),) if self.memory == "server" else ()

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        return (Vector("last_model", initial="model"),) if self.memory == "client" else ()

    def constant_shift(self, context: ClientContext) -> Tensor:
        by_client = self.memory == "client"
        old = context.client["last_model"] if by_client else context.received["previous_model"]
        difference = old - context.origin
        return difference.mul_(self.radius * context.radius_factor / divisor(difference))

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        return Finish(client={"last_model": context.origin} if self.memory == "client" else {})

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        return {"previous_model": server["model"]} if self.memory == "server" else {}


@dataclass(frozen=True)
class AlongMomentum(PerturbedGradient):
    """g(y + λ m − ρ u(m)): a look-ahead along the server's momentum and an ascent against it.

    The shift is the same for all steps and all clients of a round.
    """

    radius: ranges.Radius
    lookahead: Share = 0.0

    reads = (Reads(Momentum, "momentum", broadcast=True),)

    def constant_shift(self, context: ClientContext) -> Tensor:
        momentum = context.received["momentum"]
        return self.lookahead * momentum - self.radius * context.radius_factor * unit(momentum)


@dataclass(frozen=True)
class ConsensusPerturbation(PerturbedGradient):
    """FedSMOO's perturbation, pulled towards one that all clients agree on.

    ŝ = ρ u(g(y) − μ_i − s), μ_i ← μ_i + ŝ − s, and the gradient is g(y + ŝ). Clients upload μ_i − ŝ after
    the last step (`upload="residual"`) or μ_i alone (`upload="dual"`); s ← ρ u(mean upload).
    """

    radius: ranges.Radius
    upload: Literal["residual", "dual"] = "residual"

    evaluations = 2
    server_vectors = (Vector("perturbation", broadcast=True),)
    client_vectors = (Vector("perturbation_dual"),)
    uploads = (Upload("perturbation"),)

    def begin(self, context: ClientContext) -> Carry:
        return {"known": context.client["perturbation_dual"] + context.received["perturbation"]}

    def gradient(self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry) -> Stepped:
        # With μ_i + s kept as one vector, and ŝ written only as a quotient, a step takes fewer passes.
        ascent = oracle(point).sub_(carry["known"])
        norm, radius = divisor(ascent), self.radius * context.radius_factor
        there = oracle(torch.addcdiv(point, ascent, norm, value=radius))
        known = torch.addcdiv(carry["known"], ascent, norm, value=radius)
        return there, {"known": known.sub_(context.received["perturbation"]), "ascent": ascent}

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        dual = carry["known"] - context.received["perturbation"]
        last = self.radius * context.radius_factor * unit(carry["ascent"])
        sent = dual - last if self.upload == "residual" else dual
        return Finish(client={"perturbation_dual": dual}, upload={"perturbation": sent})

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        return {"perturbation": self.radius * context.radius_factor * unit(mean["perturbation"])}


@dataclass(frozen=True)
class ShiftedInputs(Gradient):
    """FedRobust's worst-case affine shift of a client's inputs, z ↦ Λ z + δ, which never leaves it.

    At every step, at the same point: the gradient for the model, and one ascent step on Λ and δ for
    mean loss − scale_penalty ‖Λ − I‖² − offset_penalty ‖δ‖². `shift` says what Λ is: a "full" matrix, its
    "diagonal", or one factor and one offset per "channel". Λ is stored as Λ − I.
    """

    scale_rate: ranges.InputRate
    offset_rate: NonNegative
    scale_penalty: NonNegative
    offset_penalty: NonNegative
    shift: Literal["full", "diagonal", "channel"] = "diagonal"

    needs_float_inputs = True

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        if self.shift == "full":
            return (Vector("scale", size="inputs_squared"), Vector("offset", size="inputs"))
        size: Literal["channels", "inputs"] = "channels" if self.shift == "channel" else "inputs"
        return (Vector("scale", size=size), Vector("offset", size=size))

    def begin(self, context: ClientContext) -> Carry:
        return {"scale": context.client["scale"], "offset": context.client["offset"]}

    def _shifted(self, inputs: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        """A batch [B, …] under the shift."""
        if self.shift == "channel" and inputs.dim() > 1:
            per_channel = (1, -1, *(1 for _ in inputs.shape[2:]))
            return torch.addcmul(offset.view(per_channel), inputs, 1 + scale.view(per_channel))
        flat = inputs.reshape(len(inputs), -1)
        if self.shift == "full":
            moved = flat + flat @ scale.view(flat.shape[1], flat.shape[1]).T + offset
        else:
            moved = torch.addcmul(offset, flat, 1 + scale)
        return moved.view(inputs.shape)

    def gradient(self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry) -> Stepped:
        scale, offset = carry["scale"], carry["offset"]
        gradient, (scale_slope, offset_slope) = oracle.shifted(point, self._shifted, (scale, offset))
        return gradient, {
            "scale": scale + self.scale_rate * (scale_slope - 2 * self.scale_penalty * scale),
            "offset": offset + self.offset_rate * (offset_slope - 2 * self.offset_penalty * offset),
        }

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        return Finish(client=carry)
