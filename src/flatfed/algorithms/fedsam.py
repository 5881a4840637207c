"""FedSAM: sharpness-aware local steps (Qu et al., 2022; Caldarola et al., 2022).

    ε ← ρ g(y)/‖g(y)‖
    y ← y − η g(y + ε)                         both gradients on the same batch
    x ← x + η_g mean(y_K − x)

Paper: Z. Qu, X. Li, R. Duan, Y. Liu, B. Tang, Z. Lu. ICML 2022, arXiv:2206.02618.

Limits: ρ = 0 is FedAvg.
Deviations: the printed sign(∇F) is left out (sign(∇F)·∇F is not the maximiser); the ball is ‖ε‖ ≤ ρ, where
one equation prints ‖ε‖² ≤ ρ.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, SharpnessAware, ranges


@register
def fedsam(radius: ranges.Radius = 0.5, server_rate: ranges.ServerRate = 1.0) -> Algorithm:
    return Algorithm(gradient=SharpnessAware(radius), server=Average(server_rate))
