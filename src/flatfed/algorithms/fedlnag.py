"""FedLNAG: Nesterov's accelerated gradient inside each round, a baseline of the FedSAGD paper.

    u ← β u + g(y)
    y ← y − η (g(y) + β u)                     u starts from the server's
    u ← mean of the clients' u_K
    x ← x + η_g mean(y_K − x)

`communicate=False` starts u at zero every round and halves the traffic (FedLNAG*).

Limits: β = 0 is FedAvg.
Deviations: the look-ahead form y = x − β m printed by the FedSAGD paper lacks the step size; with it, its
look-ahead points are these iterates at step size (1 − β) η. Weight decay is part of g.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, LocalMomentum, ranges


@register
def fedlnag(
    momentum_decay: ranges.Momentum = 0.9, communicate: bool = True, server_rate: ranges.ServerRate = 1.0
) -> Algorithm:
    state: Literal["averaged", "reset"] = "averaged" if communicate else "reset"
    momentum = LocalMomentum(momentum_decay, nesterov=True, state=state)
    return Algorithm(optimizer=momentum, server=Average(server_rate))
