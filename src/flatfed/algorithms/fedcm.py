"""FedCM: client-level momentum (Xu et al., 2021).

    y ← y − η (α g(y) + (1 − α) m)
    m ← −Δ̄ / Σ η_k                             Δ̄ = mean(y_K − x), m in the units of a gradient
    x ← x + η_g Δ̄

so that m is α times the mean gradient of the round plus (1 − α) times the old m.

Paper: J. Xu et al. 2021, arXiv:2106.10874.

Limits: α = 1 is FedAvg.
Deviations: the server step is in the units of the model, x + η_g Δ̄; printed in the units of a gradient,
η_g = 1 would move the model by 1/(K η) times as much (units = "gradient").
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, GlobalMomentum, ranges


@register
def fedcm(
    fresh_weight: ranges.FreshWeight = 0.1,
    server_rate: ranges.ServerRate = 1.0,
    units: Literal["model", "gradient"] = "model",
) -> Algorithm:
    return Algorithm(
        correct=GlobalMomentum(fresh_weight, 1 - fresh_weight), server=Average(server_rate, units)
    )
