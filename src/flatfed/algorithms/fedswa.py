"""FedSWA: stochastic weight averaging across rounds (Liu et al., 2025).

    y ← y − η_k g(y)                           η_k falls linearly from η to ρη, restarts every round
    x ← x + α mean(y_K − x)

Paper: J. Liu, Y. Liu, F. Shang, H. Liu, J. Liu, W. Feng. ICML 2025, arXiv:2507.20016.

Limits: ρ = 1 is FedAvg with server rate α; ρ = α = 1 is FedAvg.
Deviations: K steps, where the printed loop has K + 1. α = 1.5 extrapolates, though the paper speaks of a
moving average. The authors' code (f725be9) has ρ = 0, no α and twice the step size: `variant="released"`,
with twice the lr. Its first upload (6f3e52c) follows the paper.
"""

from flatfed.algorithms.registry import register, variant
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, LinearDecay, ranges


@variant("released", final_rate=0.0, server_rate=1.0)
@register
def fedswa(final_rate: ranges.FinalRate = 0.1, server_rate: ranges.ServerRate = 1.5) -> Algorithm:
    return Algorithm(schedule=LinearDecay(final_rate), server=Average(server_rate))
