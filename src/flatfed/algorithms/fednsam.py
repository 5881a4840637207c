"""FedNSAM: Nesterov-aligned sharpness-aware minimisation.

    δ ← −ρ u(m)                                m points downhill, so −m climbs
    y ← y − η g(y + λ m + δ)                   one gradient per step
    m ← λ m + mean(y_K − x)
    x ← x + m

Paper: J. Liu, F. Shang, Y. Tian, H. Liu, Y. Liu. 2026, arXiv:2602.23827.

Limits: ρ = λ = 0 is FedAvg; ρ = 0 is FedACG without its proximal term; λ = 0 is FedLESAM with the server's
memory.
Deviations: one printed equation perturbs along +m, the algorithm along −m. The look-ahead is added at every
step; starting at x + λm instead gives the same displacements without weight decay, which acts on y here.
Clients use the m of the round before.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import AlongMomentum, Momentum, ranges


@register
def fednsam(lookahead: ranges.Momentum = 0.85, radius: ranges.Radius = 0.1) -> Algorithm:
    return Algorithm(gradient=AlongMomentum(radius, lookahead), server=Momentum(lookahead))
