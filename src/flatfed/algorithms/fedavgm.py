"""FedAvgM: momentum on the server (Hsu et al., 2019).

    y ← y − η g(y)
    m ← β m + mean(y_K − x)
    x ← x + η_g m

Paper: T.-M. H. Hsu, H. Qi, M. Brown. 2019, arXiv:1909.06335.

Limits: β = 0 is FedAvg.
Deviations: none.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Momentum, ranges


@register
def fedavgm(momentum_decay: ranges.Momentum = 0.9, server_rate: ranges.ServerRate = 1.0) -> Algorithm:
    return Algorithm(server=Momentum(momentum_decay, server_rate))
