"""FedACG: accelerated client gradient (Kim et al., 2024).

    φ ← x + λ m                                the server sends φ
    y ← y − η (g(y) + β (y − φ))               y_0 = φ
    m ← λ m + mean(y_K − φ)
    x ← x + m                                  the plain mean of the local models

Paper: G. Kim, J. Kim, B. Han. CVPR 2024, arXiv:2201.03172.

Limits: λ = 0 is FedProx(β); β = 0 is FedNSAM without its perturbation.
Deviations: the authors' loss has β/2 = 1e-3 before ‖y − φ‖²; their code also decays η after every local
epoch, which is not done here.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import LookAhead, Momentum, Proximal, ranges


@register
def fedacg(lookahead: ranges.Momentum = 0.85, proximal_weight: ranges.ProximalWeight = 2e-3) -> Algorithm:
    return Algorithm(
        start=LookAhead(lookahead), correct=Proximal(proximal_weight), server=Momentum(lookahead)
    )
