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
`single_vector=True` sends x + λm − ρ u(m) alone, the 1 × down of the paper's Table 1: clients start there
with plain steps, which is the same without weight decay. Clients use the m of the round before. The authors'
first upload (d41b5e6) skips both shifts, because gradients are None where they are read: that is
`fedavgm:momentum_decay=0.85`. Their present code (c3c9e90) starts at x + λm, takes true SAM steps of radius
0.05 and has m = (1 + λ) mean(y_K − x), without history; it is not offered.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import AlongMomentum, Momentum, PerturbedLookAhead, ranges


@register
def fednsam(
    lookahead: ranges.Momentum = 0.85, radius: ranges.Radius = 0.1, single_vector: bool = False
) -> Algorithm:
    if single_vector:
        return Algorithm(start=PerturbedLookAhead(lookahead, radius), server=Momentum(lookahead))
    return Algorithm(gradient=AlongMomentum(radius, lookahead), server=Momentum(lookahead))
