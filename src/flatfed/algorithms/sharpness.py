"""Sharpness-aware and worst-case local steps."""

from typing import Literal

from flatfed.algorithms import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative, Positive, Share
from flatfed.parts import AdaptiveSharpnessAware, Average, GlobalMomentum, SharpnessAware, ShiftedInputs


@register
def fedsam(radius: NonNegative = 0.5, server_rate: Positive = 1.0) -> Algorithm:
    """FedSAM: sharpness-aware local steps (Qu et al., 2022; Caldarola et al., 2022).

        ε ← ρ g(y)/‖g(y)‖
        y ← y − η g(y + ε)                         both gradients on the same batch
        x ← x + η_g mean(y_K − x)

    Limits: ρ = 0 is FedAvg.
    Deviations: the printed sign(∇F) is left out (sign(∇F)·∇F is not the maximiser); the ball is ‖ε‖ ≤ ρ,
    where one equation prints ‖ε‖² ≤ ρ.
    """
    return Algorithm(gradient=SharpnessAware(radius), server=Average(server_rate))


@register
def fedasam(
    radius: NonNegative = 0.7,
    offset: NonNegative = 0.2,
    scale_norms: bool = True,
    server_rate: Positive = 1.0,
) -> Algorithm:
    """FedASAM: adaptive sharpness-aware local steps (Caldarola et al., 2022).

        T ← |y| + offset on weights, 1 elsewhere
        ε ← ρ T² g(y) / ‖T g(y)‖
        y ← y − η g(y + ε)
        x ← x + η_g mean(y_K − x)

    Limits: ρ = 0 is FedAvg; T = 1 is FedSAM(ρ), T = c is FedSAM(c ρ).
    Deviations: weights are the parameters whose name contains "weight", normalisation layers included, as in
    the authors' code; `scale_norms=False` leaves those out. Their optional averaging of late global models on
    the server is not included.
    """
    return Algorithm(
        gradient=AdaptiveSharpnessAware(radius, offset, scale_norms), server=Average(server_rate)
    )


@register
def mofedsam(
    radius: NonNegative = 0.5,
    fresh_weight: Share = 0.1,
    server_rate: Positive = 1.0,
    units: Literal["model", "gradient"] = "model",
) -> Algorithm:
    """MoFedSAM: sharpness-aware local steps with a global momentum (Qu et al., 2022).

        ε ← ρ g(y)/‖g(y)‖
        y ← y − η (β g(y + ε) + (1 − β) m)
        m ← −Δ̄ / Σ η_k                             Δ̄ = mean(y_K − x)
        x ← x + η_g Δ̄

    Limits: β = 1 is FedSAM; ρ = 0 is FedCM(β).
    Deviations: the appendix drops the minus of m, which would step uphill. The server step is in the units of
    the model: η_g = 1 in the units of a gradient (units = "gradient") would break the limit β = 1 that the
    paper claims.
    """
    return Algorithm(
        gradient=SharpnessAware(radius),
        correct=GlobalMomentum(fresh_weight, 1 - fresh_weight),
        server=Average(server_rate, units),
    )


@register
def fedrobust(
    scale_rate: NonNegative = 0.05,
    offset_rate: NonNegative = 1.25,
    scale_penalty: NonNegative = 2.0,
    offset_penalty: NonNegative = 0.08,
    shift: Literal["full", "diagonal", "channel"] = "diagonal",
) -> Algorithm:
    """FedRobust: training against a worst-case affine shift of clients' inputs (Reisizadeh et al., 2020).

        f_i(w, Λ, δ) = mean loss at inputs Λ z + δ, less λ₁ ‖Λ − I‖² + λ₂ ‖δ‖²
        y   ← y − η ∇_w f_i(y, Λ_i, δ_i)           all three at the same point: one backward pass
        Λ_i ← Λ_i + η_Λ ∇_Λ f_i
        δ_i ← δ_i + η_δ ∇_δ f_i
        x   ← x + mean(y_K − x)                    Λ_i and δ_i never leave the client

    Limits: η_Λ = η_δ = 0 is FedAvg.
    Deviations: the authors multiply the loss by the batch size of 50 and use λ₁ = 100, λ₂ = 4, η_Λ = 0.001,
    η_δ = 0.025; the defaults are the same for a mean loss (penalties divided by 50, rates multiplied). Their
    Λ is a full matrix, (inputs)² numbers on every client; the default here is its diagonal. They take no
    local steps; here K is free.
    """
    return Algorithm(gradient=ShiftedInputs(scale_rate, offset_rate, scale_penalty, offset_penalty, shift))
