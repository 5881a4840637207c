"""Control variates against the drift of clients."""

from typing import Literal

from flatfed.algorithms import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative, Positive, Share
from flatfed.parts import Average, ControlVariate, LinearDecay, MomentumControlVariate, SharpnessAware


@register
def scaffold(option: Literal["I", "II"] = "II", server_rate: Positive = 1.0) -> Algorithm:
    """SCAFFOLD: stochastic controlled averaging (Karimireddy et al., 2020).

        y   ← y − η (g(y) − c_i + c)
        c_i ← c_i − c + (x − y_K) / Σ η_k          option II, the mean gradient of the round
        c_i ← ∇F_i(x)                              option I, one more pass over the client's data
        c   ← mean of all clients' c_i
        x   ← x + η_g mean(y_K − x)

    Limits: K = 1 with every client taking part has FedAvg's global iterates.
    Deviations: Σ η_k uses the step sizes of the round itself; one released implementation divides by the
    undecayed step size.
    """
    return Algorithm(correct=ControlVariate(option), server=Average(server_rate))


@register
def fedmo(
    momentum_rate: Share = 0.2, option: Literal["I", "II"] = "II", warm_start: bool = False
) -> Algorithm:
    """FedMo: FedMoSWA without weight averaging (Liu et al., 2025).

        y   ← y − η (g(y) − c_i + m)
        c_i ← c_i − m + (x − y_K) / Σ η_k          option II; option I: ∇F_i(x)
        m   ← m + γ mean(c_i − m)
        x   ← x + mean(y_K − x)

    Limits: γ = 1 with every client taking part is SCAFFOLD.
    Deviations: those of FedMoSWA.
    """
    return Algorithm(correct=MomentumControlVariate(option, rate=momentum_rate, warm_start=warm_start))


@register
def fedmoswa(
    final_rate: NonNegative = 0.1,
    server_rate: Positive = 1.5,
    momentum_rate: Share = 0.2,
    option: Literal["I", "II"] = "II",
    warm_start: bool = False,
) -> Algorithm:
    """FedMoSWA: momentum-based stochastic controlled weight averaging (Liu et al., 2025).

        y   ← y − η_k (g(y) − c_i + m)             η_k falls linearly from η to ρη, restarts every round
        c_i ← c_i − m + (x − y_K) / Σ η_k          option II; option I: ∇F_i(x)
        m   ← m + γ mean(c_i − m)
        x   ← x + α mean(y_K − x)

    Limits: ρ = α = 1 is FedMo; ρ = α = γ = 1 with every client taking part is SCAFFOLD.
    Deviations: K steps, where the printed loop has K + 1, and the exact Σ η_k, so that c_i is the weighted
    mean gradient; option I takes the gradient at the received model. γ holds from the first round on;
    released code uses γ = 1 there (`warm_start=True`).
    """
    return Algorithm(
        correct=MomentumControlVariate(option, rate=momentum_rate, warm_start=warm_start),
        schedule=LinearDecay(final_rate),
        server=Average(server_rate),
    )


@register
def fedgamma(radius: NonNegative = 0.01, server_rate: Positive = 1.0) -> Algorithm:
    """FedGAMMA: sharpness-aware local steps with control variates (Dai et al., 2023).

        ε   ← ρ g(y)/‖g(y)‖                        no control variate inside the perturbation
        y   ← y − η (g(y + ε) − c_i + c)
        c_i ← c_i − c + (x − y_K) / Σ η_k,   c ← mean of all clients' c_i
        x   ← x + η_g mean(y_K − x)

    Limits: ρ = 0 is SCAFFOLD.
    Deviations: the correction acts on the step. In released code that adds it to the loss as a plain number
    it carries no gradient, and the method is FedSAM.
    """
    return Algorithm(gradient=SharpnessAware(radius), correct=ControlVariate(), server=Average(server_rate))
