"""Averages of local models, and rules of the server's own."""

from flatfed.algorithms import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Decay, NonNegative, Positive, PositiveShare, Share
from flatfed.parts import Adam, Average, Extrapolate, LinearDecay, Momentum


@register
def fedavg(server_rate: Positive = 1.0) -> Algorithm:
    """FedAvg: federated averaging (McMahan et al., 2017).

        y ← y − η g(y)                 K local steps from the global model x
        x ← x + η_g mean(y_K − x)

    Limits: K = 1 with every client taking part is gradient descent on the mean loss.
    Deviations: the mean over participants is uniform unless weighting by sample counts is asked for.
    """
    return Algorithm(server=Average(server_rate))


@register
def fedavgm(momentum_decay: Decay = 0.9, server_rate: Positive = 1.0) -> Algorithm:
    """FedAvgM: momentum on the server (Hsu et al., 2019).

        y ← y − η g(y)
        m ← β m + mean(y_K − x)
        x ← x + η_g m

    Limits: β = 0 is FedAvg.
    Deviations: none.
    """
    return Algorithm(server=Momentum(momentum_decay, server_rate))


@register
def fedadam(
    server_rate: Positive = 0.1,
    first_decay: Decay = 0.9,
    second_decay: Share = 0.99,
    stability: Positive = 1e-3,
) -> Algorithm:
    """FedAdam: Adam on the server (Reddi et al., 2021).

        y ← y − η g(y)
        m ← β₁ m + (1 − β₁) Δ̄                      Δ̄ = mean(y_K − x)
        v ← β₂ v + (1 − β₂) Δ̄²                     v starts at τ²
        x ← x + η_g m / (√v + τ)

    Limits: β₁ = 0, β₂ = 1, η_g = 2τ is FedAvg; β₂ = 1, η_g = 2τ/(1 − β₁) is FedAvgM(β₁).
    Deviations: τ stands outside the root, as in the original; FedSAGD's appendix prints √(v + τ).
    """
    return Algorithm(server=Adam(server_rate, first_decay, second_decay, stability))


@register
def fedexp(stability: NonNegative = 1e-3, stability_decay: PositiveShare = 1.0) -> Algorithm:
    """FedExP: federated averaging with a server step that extrapolates as far as the clients disagree.

        y ← y − η g(y)
        η_g ← max(1, mean(‖Δ_i‖²) / (2 (‖Δ̄‖² + ε)))     Δ_i = y_K − x
        x ← x + η_g Δ̄

    Jhunjhunwala, Wang, Joshi, "FedExP: Speeding up Federated Averaging via Extrapolation", ICLR 2023.

    Limits: one participant, clients that move alike, or ε → ∞ is FedAvg; S orthogonal displacements of one
    length give η_g = S/2.
    Deviations: ε is constant, as printed, unless `stability_decay` shrinks it every round (the authors' code
    has 0.998², the square of its decay of η, and multiplies ε by the number of participants). The new model
    is evaluated; that code evaluates the mean of the last two. ‖Δ_i‖² is that of the upload as the server
    receives it.
    """
    return Algorithm(server=Extrapolate(stability, stability_decay))


@register
def fedswa(final_rate: NonNegative = 0.1, server_rate: Positive = 1.5) -> Algorithm:
    """FedSWA: stochastic weight averaging across rounds (Liu et al., 2025).

        y ← y − η_k g(y)                           η_k falls linearly from η to ρη, restarts every round
        x ← x + α mean(y_K − x)

    Limits: ρ = 1 is FedAvg with server rate α; ρ = α = 1 is FedAvg.
    Deviations: K steps, where the printed loop has K + 1. α = 1.5 extrapolates, though the paper speaks of a
    moving average.
    """
    return Algorithm(schedule=LinearDecay(final_rate), server=Average(server_rate))
