"""FedAdam: Adam on the server (Reddi et al., 2021).

    y ← y − η g(y)
    m ← β₁ m + (1 − β₁) Δ̄                      Δ̄ = mean(y_K − x)
    v ← β₂ v + (1 − β₂) Δ̄²                     v starts at τ²
    x ← x + η_g m / (√v + τ)

Paper: S. Reddi et al. ICLR 2021, arXiv:2003.00295.

Limits: β₁ = 0, β₂ = 1, η_g = 2τ is FedAvg; β₂ = 1, η_g = 2τ/(1 − β₁) is FedAvgM(β₁).
Deviations: τ stands outside the root, as in the original; FedSAGD's appendix prints √(v + τ).
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Decay, Positive, Share
from flatfed.parts import Adam, ranges


@register
def fedadam(
    server_rate: ranges.AdaptiveServerRate = 0.1,
    first_decay: Decay = 0.9,
    second_decay: Share = 0.99,
    stability: Positive = 1e-3,
) -> Algorithm:
    return Algorithm(server=Adam(server_rate, first_decay, second_decay, stability))
