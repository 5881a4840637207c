"""Which direction is taken: drift corrections, momentum and proximal terms."""

from collections.abc import Mapping
from typing import Literal

from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.context import Affine, Carry, ClientContext, Finish, MergeContext
from flatfed.core.part import Correction, Upload
from flatfed.core.state import State, Vector, Vectors
from flatfed.core.types import NonNegative, Real
from flatfed.parts import ranges


@dataclass(frozen=True)
class Proximal(Correction):
    """d + μ (y − x): a pull towards the point where the round began."""

    weight: ranges.ProximalWeight

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        return Affine(spring=self.weight)


@dataclass(frozen=True)
class HybridProximal(Correction):
    """d + λ (y − x) + μ y: a pull towards the received model and one towards zero."""

    weight: ranges.ProximalWeight
    decay: NonNegative

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        return Affine(spring=self.weight + self.decay, pull=-self.decay * context.origin)


@dataclass(frozen=True)
class _Controlled(Correction):
    """d − c_i + c, where c_i stands for the client's own gradient and c for everyone's.

    Option I takes for c_i the client's full gradient at the received model. Option II recovers the mean of
    the gradients it used, weighted by their step sizes, from how far it moved; of an optimizer's steps c_i is
    the mean step, and corrects steps.
    """

    option: Literal["I", "II"] = "II"
    weight: NonNegative = 1.0

    server_vectors = (Vector("control", broadcast=True),)
    client_vectors = (Vector("control"),)
    uploads = (Upload("control_change"),)

    @property
    def full_gradients(self) -> int:
        return 1 if self.option == "I" else 0

    @property
    def measures_steps(self) -> bool:
        return self.option == "II"

    @property
    def sums(self) -> Mapping[str, str]:
        return {"control": "control_change"}

    def begin(self, context: ClientContext) -> Carry:
        surplus = context.client["control"] - context.received["control"]
        return {"surplus": surplus if self.weight == 1 else surplus.mul_(self.weight)}

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        return Affine(pull=carry["surplus"])

    def reference(self, context: ClientContext) -> Tensor:
        """What the uploaded change of c_i is counted from."""
        return context.client["control"]

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        if self.option == "I":
            control = context.full_gradient()
        else:
            # The mean direction −Δ/Σ η_k was the mean gradient less the surplus.
            control = carry["surplus"] - displacement / context.total_rate
        return Finish({"control": control}, {"control_change": control - self.reference(context)})


@dataclass(frozen=True)
class ControlVariate(_Controlled):
    """SCAFFOLD's control variate: c stays the mean of all clients' c_i."""

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        return {"control": server["control"] + context.fraction * mean["control_change"]}


@dataclass(frozen=True)
class MomentumControlVariate(_Controlled):
    """FedMoSWA's control variate: c is a running mean of the participants' c_i at rate γ.

    `warm_start` uses rate 1 in the first round, as the authors' code does.
    """

    rate: ranges.FreshWeight = 0.2
    warm_start: bool = False

    def reference(self, context: ClientContext) -> Tensor:
        return context.received["control"]

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        rate = 1.0 if self.warm_start and context.round == 0 else self.rate
        return {"control": server["control"] + rate * mean["control_change"]}


@dataclass(frozen=True)
class DynamicRegulariser(Correction):
    """d + α (y − x + h_i) with h_i ← h_i + Δ_i (FedDyn), in the units of the model.

    `duals="server"`: the server keeps h, the mean of all clients' h_i, and adds it to the new model.
    `duals="participants"`: each participant uploads Δ_i + h_i instead, and no h is kept (FedSpeed).
    """

    weight: ranges.RegulariserWeight
    duals: Literal["server", "participants"] = "server"

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        return (Vector("dual"),) if self.duals == "server" else ()

    client_vectors = (Vector("dual"),)

    @property
    def sums(self) -> Mapping[str, str]:
        return {"dual": "displacement"} if self.duals == "server" else {}

    @property
    def alters_displacement(self) -> bool:
        return self.duals == "participants"

    @property
    def shifts_model(self) -> bool:
        return self.duals == "server"

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        return Affine(spring=self.weight, pull=-self.weight * context.client["dual"])

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        dual = context.client["dual"] + displacement
        return Finish(
            client={"dual": dual},
            upload={"displacement": displacement + dual} if self.alters_displacement else {},
        )

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        if self.duals == "participants":
            return {}
        return {"dual": server["dual"] + context.fraction * mean["displacement"]}

    def shift(self, server: State) -> Tensor:
        return server["dual"]


@dataclass(frozen=True)
class GlobalMomentum(Correction):
    """d ← a d + b m, where the server measures m from how far the participants moved.

    m ← memory · m − gain · Δ̄ / Σ η_k, in the units of a gradient (or of an optimizer's step, which it then
    corrects). With unequal step counts Σ η_k is the participants' mean.
    """

    gradient_weight: Real
    momentum_weight: Real
    memory: NonNegative = 0.0
    gain: NonNegative = 1.0
    assumed_length: NonNegative | None = None
    """The longest m that the paper's bound on stability assumes, in units of the longest gradient, whatever
    the rule allows. Training does not depend on it."""

    reads_displacement = True
    measures_steps = True

    server_vectors = (Vector("momentum_gradient", broadcast=True),)

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        pull = -self.momentum_weight * context.received["momentum_gradient"]
        return Affine(scale=self.gradient_weight, pull=pull)

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        fresh = -mean["displacement"] / context.total_rate
        return {"momentum_gradient": self.memory * server["momentum_gradient"] + self.gain * fresh}


@dataclass(frozen=True)
class FullGradientMomentum(Correction):
    """d ← (1−β) d + β m with m frozen during the round; m ← (1−β) mean ∇F_i(x) + β m (MimeLite)."""

    decay: ranges.Momentum

    server_vectors = (Vector("momentum_gradient", broadcast=True),)
    uploads = (Upload("full_gradient"),)
    full_gradients = 1

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        return Affine(scale=1 - self.decay, pull=-self.decay * context.received["momentum_gradient"])

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        return Finish(upload={"full_gradient": context.full_gradient()})

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        fresh = (1 - self.decay) * mean["full_gradient"]
        return {"momentum_gradient": fresh + self.decay * server["momentum_gradient"]}
