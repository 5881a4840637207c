"""FedMoSWA: momentum-based stochastic controlled weight averaging (Liu et al., 2025).

    y   ← y − η_k (g(y) − c_i + m)             η_k falls linearly from η to ρη, restarts every round
    c_i ← c_i − m + (x − y_K) / Σ η_k          option II; option I: ∇F_i(x)
    m   ← m + γ mean(c_i − m)
    x   ← x + α mean(y_K − x)

Paper: J. Liu, Y. Liu, F. Shang, H. Liu, J. Liu, W. Feng. ICML 2025, arXiv:2507.20016.

Limits: ρ = α = 1 is FedMo; ρ = α = γ = 1 with every client taking part is SCAFFOLD.
Deviations: K steps, where the printed loop has K + 1, and the exact Σ η_k, so that c_i is the weighted mean
gradient; option I takes the gradient at the received model. γ holds from the first round on; released code
(6f3e52c) uses γ = 1 there (`warm_start=True`) and γ = 0.1 afterwards whatever is asked for. The authors'
present code (f725be9) has a constant step size, γ = 0.4 and no α: `variant="released"`. It keeps c_i by
worker, so that a client that another worker trains next gets a stranger's; here each client has its own.
"""

from typing import Literal

from flatfed.algorithms.registry import register, variant
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative
from flatfed.parts import Average, LinearDecay, MomentumControlVariate, ranges


@variant("released", final_rate=1.0, server_rate=1.0, momentum_rate=0.4)
@register
def fedmoswa(
    final_rate: NonNegative = 0.1,
    server_rate: ranges.ServerRate = 1.5,
    momentum_rate: ranges.FreshWeight = 0.2,
    option: Literal["I", "II"] = "II",
    warm_start: bool = False,
) -> Algorithm:
    return Algorithm(
        correct=MomentumControlVariate(option, rate=momentum_rate, warm_start=warm_start),
        schedule=LinearDecay(final_rate),
        server=Average(server_rate),
    )
