"""How the global model is updated from the mean displacement Δ̄.

`shift` is what corrections add to the new model, as FedDyn's does.
"""

from typing import Annotated, Literal

import torch
from pydantic import AfterValidator
from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.context import MergeContext
from flatfed.core.errors import FlatfedError
from flatfed.core.part import Server, ServerTask, Upload, plus_shift, squared_norm
from flatfed.core.state import State, Vector, Vectors
from flatfed.core.types import LARGEST, Count, Decay, Positive, PositiveShare, Share
from flatfed.parts import ranges


@dataclass(frozen=True)
class Average(Server):
    """x + rate · Δ̄; a rate above 1 extrapolates, one below 1 is a running mean.

    With `units="gradient"` Δ̄ is divided by Σ η_k first, so that the rate is a step size of the server's own.
    """

    rate: ranges.ServerRate = 1.0
    units: Literal["model", "gradient"] = "model"

    @property
    def reads_displacement(self) -> bool:
        return self.units == "gradient"

    def update(self, server: State, mean: State, shift: Tensor | None, context: MergeContext) -> Vectors:
        rate = self.rate if self.units == "model" else self.rate / context.total_rate
        return {"model": plus_shift(server["model"] + rate * mean["displacement"], shift)}


@dataclass(frozen=True)
class Momentum(Server):
    """m ← β m + Δ̄, x ← x + rate · m. `absorb_shift` feeds the shift into m instead of adding it after."""

    decay: ranges.Momentum
    rate: ranges.ServerRate = 1.0
    absorb_shift: bool = False

    server_vectors = (Vector("momentum"),)

    def update(self, server: State, mean: State, shift: Tensor | None, context: MergeContext) -> Vectors:
        displacement = mean["displacement"]
        if self.absorb_shift:
            displacement, shift = plus_shift(displacement, shift), None
        momentum = self.decay * server["momentum"] + displacement
        return {"momentum": momentum, "model": plus_shift(server["model"] + self.rate * momentum, shift)}


@dataclass(frozen=True)
class Adam(Server):
    """m ← β₁ m + (1−β₁) Δ̄, v ← β₂ v + (1−β₂) Δ̄², x ← x + rate · m/(√v + τ); v starts at τ²."""

    rate: ranges.AdaptiveServerRate
    first_decay: Decay = 0.9
    second_decay: Share = 0.99
    stability: Positive = 1e-3

    def __post_init__(self) -> None:
        if self.stability**2 > LARGEST:
            raise FlatfedError(
                f"stability = {self.stability:g}: its square is beyond single precision; use at most 1.8e19"
            )

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        return (Vector("momentum"), Vector("second_moment", initial=self.stability**2))

    @property
    def majorant(self) -> Server:
        """v = 0 makes the longest steps."""
        return Momentum(self.first_decay, self.rate * (1 - self.first_decay) / self.stability)

    def update(self, server: State, mean: State, shift: Tensor | None, context: MergeContext) -> Vectors:
        displacement = mean["displacement"]
        first = self.first_decay * server["momentum"] + (1 - self.first_decay) * displacement
        second = self.second_decay * server["second_moment"] + (1 - self.second_decay) * displacement.square()
        step = self.rate * first / (second.sqrt() + self.stability)
        return {
            "momentum": first,
            "second_moment": second,
            "model": plus_shift(server["model"] + step, shift),
        }


@dataclass(frozen=True)
class Extrapolate(Server):
    """x + η_g Δ̄ with η_g = max(1, mean ‖Δ_i‖² / (2 (‖Δ̄‖² + ε))); ε shrinks by `stability_decay` a round."""

    stability: ranges.Stability
    stability_decay: PositiveShare = 1.0

    reads_displacement = True
    uploads = (Upload("squared_displacement", "one", squared_norm, of="displacement"),)

    def update(self, server: State, mean: State, shift: Tensor | None, context: MergeContext) -> Vectors:
        displacement = mean["displacement"]
        stability = self.stability * self.stability_decay**context.round
        spread = mean["squared_displacement"] / (2 * (squared_norm(displacement) + stability))
        # Without ε, displacements that cancel are divided by 0; there is then nothing to extrapolate.
        rate = spread.nan_to_num(nan=1.0, posinf=1.0).clamp(min=1)
        return {"model": plus_shift(server["model"] + rate * displacement, shift)}


def _linear_in_place(rule: Server) -> Server:
    if isinstance(rule, ServerTask | LateAverage):
        raise ValueError(f"{type(rule).__name__} works on the model that is sent; give another rule")
    return rule


@dataclass(frozen=True)
class LateAverage(Server):
    """z ← the rule `of` on z; x ← the mean of z after rounds `first`, first + every, …, and z before (SWA).

    x is evaluated and kept, and z is what local training goes on from with the start `unaveraged`; without
    that start every round begins at the average.
    """

    first: Count
    every: Count = 1
    of: Annotated[Server, AfterValidator(_linear_in_place)] = Server()

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        return (*self.of.server_vectors, Vector("unaveraged", initial="model"))

    @property
    def uploads(self) -> tuple[Upload, ...]:
        return self.of.uploads

    @property
    def reads_displacement(self) -> bool:
        return self.of.reads_displacement

    def update(self, server: State, mean: State, shift: Tensor | None, context: MergeContext) -> Vectors:
        changed = self.of.update({**server, "model": server["unaveraged"]}, mean, shift, context)
        last, since = changed["model"], context.round + 1 - self.first
        model = last if since < 0 else server["model"]
        if since >= 0 and since % self.every == 0:
            model = torch.lerp(server["model"], last, 1 / (1 + since // self.every))
        return {**changed, "unaveraged": last, "model": model}
