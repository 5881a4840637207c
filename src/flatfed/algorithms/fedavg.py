"""FedAvg: federated averaging (McMahan et al., 2017).

    y ← y − η g(y)                 K local steps from the global model x
    x ← x + η_g mean(y_K − x)

Paper: B. McMahan et al. AISTATS 2017, arXiv:1602.05629.

Limits: K = 1 with every client taking part is gradient descent on the mean loss.
Deviations: the mean over participants is uniform unless weighting by sample counts is asked for.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, ranges


@register
def fedavg(server_rate: ranges.ServerRate = 1.0) -> Algorithm:
    return Algorithm(server=Average(server_rate))
