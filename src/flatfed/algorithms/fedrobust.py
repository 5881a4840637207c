"""FedRobust: training against a worst-case affine shift of each client's inputs (Reisizadeh et al., 2020).

    f_i(w, Λ, δ) = mean loss at inputs Λ z + δ, less λ₁ ‖Λ − I‖² + λ₂ ‖δ‖²
    y   ← y − η ∇_w f_i(y, Λ_i, δ_i)           all three at the same point: one backward pass
    Λ_i ← Λ_i + η_Λ ∇_Λ f_i
    δ_i ← δ_i + η_δ ∇_δ f_i
    x   ← x + mean(y_K − x)                    Λ_i and δ_i never leave the client

Paper: A. Reisizadeh et al. NeurIPS 2020, arXiv:2006.08907.

Limits: η_Λ = η_δ = 0 is FedAvg.
Deviations: the authors multiply the loss by the batch size of 50 and use λ₁ = 100, λ₂ = 4, η_Λ = 0.001,
η_δ = 0.025; the defaults are the same for a mean loss (penalties divided by 50, rates multiplied). Their
Λ is a full matrix, (inputs)² numbers on every client; the default here is its diagonal. They take no local
steps; here K is free.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative
from flatfed.parts import ShiftedInputs, ranges


@register
def fedrobust(
    scale_rate: ranges.InputRate = 0.05,
    offset_rate: NonNegative = 1.25,
    scale_penalty: NonNegative = 2.0,
    offset_penalty: NonNegative = 0.08,
    shift: Literal["full", "diagonal", "channel"] = "diagonal",
) -> Algorithm:
    return Algorithm(gradient=ShiftedInputs(scale_rate, offset_rate, scale_penalty, offset_penalty, shift))
