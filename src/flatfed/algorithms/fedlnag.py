"""FedLNAG: Nesterov's accelerated gradient inside each round, a baseline of the FedSAGD paper.

    u ← β u + g(y)
    y ← y − η (g(y) + β u)                     u starts from the server's
    u ← mean of the clients' u_K
    x ← x + η_g mean(y_K − x)

`communicate=False` starts u at zero every round and halves the traffic (FedLNAG*). With `damped=True` u is β
u + (1 − β) g(y) and the step η ((1 − β) g(y) + β u), the form that the FedSAGD paper prints.

Limits: β = 0 is FedAvg.
Deviations: the look-ahead form y = x − β m printed by the FedSAGD paper lacks the step size; with it, its
look-ahead points are these iterates at step size (1 − β) η, which `damped=True` has at η. It ends with the
model y + β η u of its last look-ahead point; here that point itself is sent. Weight decay is part of g.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, LocalMomentum, ranges


@register
def fedlnag(
    momentum_decay: ranges.Momentum = 0.9,
    communicate: bool = True,
    server_rate: ranges.ServerRate = 1.0,
    damped: bool = False,
) -> Algorithm:
    state: Literal["averaged", "reset"] = "averaged" if communicate else "reset"
    momentum = LocalMomentum(momentum_decay, nesterov=True, state=state, damped=damped)
    return Algorithm(optimizer=momentum, server=Average(server_rate))
