"""FedExP: federated averaging with a server step that extrapolates as far as the clients disagree.

    y ← y − η g(y)
    η_g ← max(1, mean(‖Δ_i‖²) / (2 (‖Δ̄‖² + ε)))     Δ_i = y_K − x
    x ← x + η_g Δ̄

Jhunjhunwala, Wang, Joshi, "FedExP: Speeding up Federated Averaging via Extrapolation", ICLR 2023,
arXiv:2301.09604.

Limits: one participant, clients that move alike, or ε → ∞ is FedAvg; S orthogonal displacements of one length
give η_g = S/2.
Deviations: ε is constant, as printed, unless `stability_decay` shrinks it every round (the authors' code has
0.998², the square of its decay of η, and multiplies ε by the number of participants). The new model is
evaluated; that code evaluates the mean of the last two. ‖Δ_i‖² is that of the upload as the server receives
it.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import PositiveShare
from flatfed.parts import Extrapolate, ranges


@register
def fedexp(stability: ranges.Stability = 1e-3, stability_decay: PositiveShare = 1.0) -> Algorithm:
    return Algorithm(server=Extrapolate(stability, stability_decay))
