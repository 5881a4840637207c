"""FedANAG: Nesterov's acceleration with a global momentum, a baseline of the FedSAGD paper.

    y ← y − η ((1 + β) g(y) + β² m)
    m ← β/(1 + β) m − Δ̄ / ((1 + β) Σ η_k)      Δ̄ = mean(y_K − x)
    x ← x + η_g Δ̄

so that m ← β m + the mean gradient of the round.

Limits: β = 0 is FedAvg.
Deviations: none; released code keeps −m.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, GlobalMomentum, ranges


@register
def fedanag(momentum_decay: ranges.Momentum = 0.9, server_rate: ranges.ServerRate = 1.0) -> Algorithm:
    momentum = GlobalMomentum(
        gradient_weight=1 + momentum_decay,
        momentum_weight=momentum_decay**2,
        memory=momentum_decay / (1 + momentum_decay),
        gain=1 / (1 + momentum_decay),
    )
    return Algorithm(correct=momentum, server=Average(server_rate))
