"""FedNSAM-S: FedNSAM with SCAFFOLD's control variates.

    δ   ← −ρ u(m)
    y   ← y − η (g(y + λ m + δ) − c_i + c)
    c_i ← c_i − c + (x − y_K) / Σ η_k,   c ← mean of all clients' c_i
    m   ← λ m + mean(y_K − x)
    x   ← x + m

Paper: J. Liu, F. Shang, Y. Tian, H. Liu, Y. Liu. 2026, arXiv:2602.23827.

Limits: ρ = λ = 0 is SCAFFOLD.
Deviations: the paper names this variant without printing its formulas; this is the direct composition.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import AlongMomentum, ControlVariate, Momentum, ranges


@register
def fednsam_s(lookahead: ranges.Momentum = 0.85, radius: ranges.Radius = 0.1) -> Algorithm:
    return Algorithm(
        gradient=AlongMomentum(radius, lookahead),
        correct=ControlVariate(),
        server=Momentum(lookahead),
    )
