"""Perturbations along the way of the global model, at no extra gradient: FedLESAM and FedNSAM."""

from typing import Literal

from flatfed.algorithms import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Decay, NonNegative, Positive
from flatfed.parts import AlongMomentum, Average, ControlVariate, DynamicRegulariser, LastModel, Momentum


@register
def fedlesam(
    radius: NonNegative = 0.1,
    memory: Literal["client", "server"] = "client",
    server_rate: Positive = 1.0,
) -> Algorithm:
    """FedLESAM: sharpness-aware steps with a locally estimated global perturbation (Fan et al., 2024).

        δ ← ρ u(x_old − x)                         x_old: the model received last; constant in a round
        y ← y − η g(y + δ)                         one gradient per step
        x ← x + η_g mean(y_K − x)

    δ = 0 the first time a client takes part. memory = "server" uses the global model of the round before for
    everyone, which is the same only when every client takes part in every round.

    Limits: ρ = 0 is FedAvg; memory = "server" is FedNSAM with λ = 0.
    Deviations: none from the paper. In the released code the perturbation vector is indexed by the number of
    the parameter tensor, so each tensor is shifted by one scalar.
    """
    return Algorithm(gradient=LastModel(radius, memory), server=Average(server_rate))


@register
def fedlesam_d(
    radius: NonNegative = 0.1,
    regularisation: NonNegative = 0.1,
    memory: Literal["client", "server"] = "client",
) -> Algorithm:
    """FedLESAM-D: FedLESAM's perturbation with FedDyn's regulariser (Fan et al., 2024).

        δ   ← ρ u(x_old − x)
        y   ← y − η (g(y + δ) + α (y − x + h_i))
        h_i ← h_i + (y_K − x),   h = mean of all clients' h_i
        x   ← x + mean(y_K − x) + h

    Limits: ρ = 0 is FedDyn(α).
    Deviations: none.
    """
    return Algorithm(gradient=LastModel(radius, memory), correct=DynamicRegulariser(regularisation))


@register
def fedlesam_s(
    radius: NonNegative = 0.1,
    memory: Literal["client", "server"] = "client",
    control_weight: NonNegative = 1.0,
) -> Algorithm:
    """FedLESAM-S: FedLESAM's perturbation with SCAFFOLD's control variates (Fan et al., 2024).

        δ   ← ρ u(x_old − x)
        y   ← y − η (g(y + δ) − c_i + c)
        c_i ← c_i − c + (x − y_K) / Σ η_k,   c ← mean of all clients' c_i
        x   ← x + mean(y_K − x)

    Limits: ρ = 0 is SCAFFOLD.
    Deviations: the correction has weight 1; released code uses `control_weight=0.1`.
    """
    return Algorithm(gradient=LastModel(radius, memory), correct=ControlVariate(weight=control_weight))


@register
def fednsam(lookahead: Decay = 0.85, radius: NonNegative = 0.1) -> Algorithm:
    """FedNSAM: Nesterov-aligned sharpness-aware minimisation.

        δ ← −ρ u(m)                                m points downhill, so −m climbs
        y ← y − η g(y + λ m + δ)                   one gradient per step
        m ← λ m + mean(y_K − x)
        x ← x + m

    Limits: ρ = λ = 0 is FedAvg; ρ = 0 is FedACG without its proximal term; λ = 0 is FedLESAM with the
    server's memory.
    Deviations: one printed equation perturbs along +m, the algorithm along −m. The look-ahead is added at
    every step; starting at x + λm instead gives the same displacements without weight decay, which acts on y
    here. Clients use the m of the round before.
    """
    return Algorithm(gradient=AlongMomentum(radius, lookahead), server=Momentum(lookahead))


@register
def fednsam_d(
    lookahead: Decay = 0.85,
    radius: NonNegative = 0.1,
    regularisation: NonNegative = 0.1,
    dual_in_momentum: bool = False,
) -> Algorithm:
    """FedNSAM-D: FedNSAM with FedDyn's regulariser.

        δ   ← −ρ u(m)
        y   ← y − η (g(y + λ m + δ) + α (y − x + h_i))
        h_i ← h_i + (y_K − x),   h = mean of all clients' h_i
        m   ← λ m + mean(y_K − x)
        x   ← x + m + h

    Limits: ρ = λ = 0 is FedDyn(α).
    Deviations: the paper names this variant without printing its formulas. h stays outside the momentum;
    `dual_in_momentum=True` puts it inside, which is unstable at λ = 0.85 even on a toy problem.
    """
    return Algorithm(
        gradient=AlongMomentum(radius, lookahead),
        correct=DynamicRegulariser(regularisation),
        server=Momentum(lookahead, absorb_shift=dual_in_momentum),
    )


@register
def fednsam_s(lookahead: Decay = 0.85, radius: NonNegative = 0.1) -> Algorithm:
    """FedNSAM-S: FedNSAM with SCAFFOLD's control variates.

        δ   ← −ρ u(m)
        y   ← y − η (g(y + λ m + δ) − c_i + c)
        c_i ← c_i − c + (x − y_K) / Σ η_k,   c ← mean of all clients' c_i
        m   ← λ m + mean(y_K − x)
        x   ← x + m

    Limits: ρ = λ = 0 is SCAFFOLD.
    Deviations: the paper names this variant without printing its formulas; this is the direct composition.
    """
    return Algorithm(
        gradient=AlongMomentum(radius, lookahead),
        correct=ControlVariate(),
        server=Momentum(lookahead),
    )
