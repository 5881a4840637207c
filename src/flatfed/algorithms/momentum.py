"""Momentum on clients, and acceleration."""

from typing import Literal

from flatfed.algorithms import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Decay, NonNegative, Positive, Share
from flatfed.parts import Average, FullGradientMomentum, GlobalMomentum, HybridProximal, LocalNesterov


@register
def fedcm(
    fresh_weight: Share = 0.1,
    server_rate: Positive = 1.0,
    units: Literal["model", "gradient"] = "model",
) -> Algorithm:
    """FedCM: client-level momentum (Xu et al., 2021).

        y ← y − η (α g(y) + (1 − α) m)
        m ← −Δ̄ / Σ η_k                             Δ̄ = mean(y_K − x), m in the units of a gradient
        x ← x + η_g Δ̄

    so that m is α times the mean gradient of the round plus (1 − α) times the old m.

    Limits: α = 1 is FedAvg.
    Deviations: the server step is in the units of the model, x + η_g Δ̄; printed in the units of a gradient,
    η_g = 1 would move the model by 1/(K η) times as much (units = "gradient").
    """
    return Algorithm(
        correct=GlobalMomentum(fresh_weight, 1 - fresh_weight), server=Average(server_rate, units)
    )


@register
def fedanag(momentum_decay: Decay = 0.9, server_rate: Positive = 1.0) -> Algorithm:
    """FedANAG: Nesterov's acceleration with a global momentum, a baseline of the FedSAGD paper.

        y ← y − η ((1 + β) g(y) + β² m)
        m ← β/(1 + β) m − Δ̄ / ((1 + β) Σ η_k)      Δ̄ = mean(y_K − x)
        x ← x + η_g Δ̄

    so that m ← β m + the mean gradient of the round.

    Limits: β = 0 is FedAvg.
    Deviations: none; released code keeps −m.
    """
    momentum = GlobalMomentum(
        gradient_weight=1 + momentum_decay,
        momentum_weight=momentum_decay**2,
        memory=momentum_decay / (1 + momentum_decay),
        gain=1 / (1 + momentum_decay),
    )
    return Algorithm(correct=momentum, server=Average(server_rate))


@register
def fedlnag(momentum_decay: Decay = 0.9, communicate: bool = True, server_rate: Positive = 1.0) -> Algorithm:
    """FedLNAG: Nesterov's accelerated gradient inside each round, a baseline of the FedSAGD paper.

        u ← β u + g(y)
        y ← y − η (g(y) + β u)                     u starts from the server's
        u ← mean of the clients' u_K
        x ← x + η_g mean(y_K − x)

    `communicate=False` starts u at zero every round and halves the traffic (FedLNAG*).

    Limits: β = 0 is FedAvg.
    Deviations: the look-ahead form y = x − β m printed by the FedSAGD paper lacks the step size; with it, its
    look-ahead points are these iterates at step size (1 − β) η. Weight decay is part of g.
    """
    return Algorithm(correct=LocalNesterov(momentum_decay, communicate), server=Average(server_rate))


@register
def mimelite(momentum_decay: Decay = 0.9) -> Algorithm:
    """MimeLite: a server momentum of full gradients, frozen during the round (Karimireddy et al., 2020).

        y ← y − η ((1 − β) g(y) + β m)
        m ← (1 − β) mean ∇F_i(x) + β m             participants also compute their full gradient at x
        x ← x + mean(y_K − x)

    Limits: β = 0 is FedAvg.
    Deviations: none. β weighs the old momentum; where a paper's β weighs the fresh gradient, use 1 − β.
    """
    return Algorithm(correct=FullGradientMomentum(momentum_decay))


@register
def fedsagd(
    momentum_decay: Decay = 0.9,
    proximal_weight: NonNegative = 0.01,
    decay_weight: NonNegative = 0.001,
    server_rate: Positive = 1.0,
) -> Algorithm:
    """FedSAGD: stable accelerated steps with a hybrid proximal term.

        y ← y − η (g(y) + β v + λ (y − x) + μ y)
        v ← β/(1 + β) v − Δ̄ / ((1 + β) Σ η_k)      Δ̄ = mean(y_K − x)
        x ← x + η_g Δ̄

    `proximal_weight` is λ and `decay_weight` is μ, which is ordinary weight decay: give baselines the same,
    or the comparison is confounded.

    Limits: β = λ = μ = 0 is FedAvg; β = μ = 0 is FedProx(λ); β = λ = 0 is FedAvg with weight decay μ.
    Deviations: +μ y, as in the algorithm box; the appendix prints −μ y, which makes the round expand. The
    1/(1 + β) in v is kept as printed, although the step has no (1 + β) for it to invert: for λ = μ = 0,
    v ← 2β/(1 + β) v + mean gradient/(1 + β).
    Bounds on stability assume ‖v‖ ≤ Θ, the longest gradient, as the paper does; the rule allows Θ/(1 − β).
    """
    momentum = GlobalMomentum(
        gradient_weight=1.0,
        momentum_weight=momentum_decay,
        memory=momentum_decay / (1 + momentum_decay),
        gain=1 / (1 + momentum_decay),
        assumed_length=1.0,
    )
    return Algorithm(
        correct=(momentum, HybridProximal(proximal_weight, decay_weight)), server=Average(server_rate)
    )
