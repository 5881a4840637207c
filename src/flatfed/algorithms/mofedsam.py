"""MoFedSAM: sharpness-aware local steps with a global momentum (Qu et al., 2022).

    ε ← ρ g(y)/‖g(y)‖
    y ← y − η (β g(y + ε) + (1 − β) m)
    m ← −Δ̄ / Σ η_k                             Δ̄ = mean(y_K − x)
    x ← x + η_g Δ̄

Paper: Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu. ICML 2022, arXiv:2206.02618.

Limits: β = 1 is FedSAM; ρ = 0 is FedCM(β).
Deviations: the appendix drops the minus of m, which would step uphill. The server step is in the units of
the model: η_g = 1 in the units of a gradient (units = "gradient") would break the limit β = 1 that the
paper claims.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Positive
from flatfed.parts import Average, GlobalMomentum, SharpnessAware, ranges


@register
def mofedsam(
    radius: ranges.Radius = 0.5,
    fresh_weight: ranges.FreshWeight = 0.1,
    server_rate: Positive = 1.0,
    units: Literal["model", "gradient"] = "model",
) -> Algorithm:
    return Algorithm(
        gradient=SharpnessAware(radius),
        correct=GlobalMomentum(fresh_weight, 1 - fresh_weight),
        server=Average(server_rate, units),
    )
