"""FedProx: a proximal pull towards the received model (Li et al., 2020).

    y ← y − η (g(y) + μ (y − x))
    x ← x + mean(y_K − x)

Paper: T. Li et al. MLSys 2020, arXiv:1812.06127.

Limits: μ = 0 is FedAvg; so is K = 1 for any μ.
Deviations: none.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Proximal, ranges


@register
def fedprox(proximal_weight: ranges.ProximalWeight = 0.01) -> Algorithm:
    return Algorithm(correct=Proximal(proximal_weight))
