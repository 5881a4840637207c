"""FedASAM: adaptive sharpness-aware local steps (Caldarola et al., 2022).

    T ← |y| + offset on weights, 1 elsewhere
    ε ← ρ T² g(y) / ‖T g(y)‖
    y ← y − η g(y + ε)
    x ← x + η_g mean(y_K − x)

Paper: D. Caldarola, B. Caputo, M. Ciccone. ECCV 2022, arXiv:2203.11834.

Limits: ρ = 0 is FedAvg; T = 1 is FedSAM(ρ), T = c is FedSAM(c ρ).
Deviations: weights are the parameters whose name contains "weight", normalisation layers included, as in
the authors' code; `scale_norms=False` leaves those out. Their optional averaging of late global models is
the server's rule `late_average`, without their cyclical step sizes.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative
from flatfed.parts import AdaptiveSharpnessAware, Average, ranges


@register
def fedasam(
    radius: ranges.Radius = 0.7,
    offset: NonNegative = 0.2,
    scale_norms: bool = True,
    server_rate: ranges.ServerRate = 1.0,
) -> Algorithm:
    return Algorithm(
        gradient=AdaptiveSharpnessAware(radius, offset, scale_norms), server=Average(server_rate)
    )
