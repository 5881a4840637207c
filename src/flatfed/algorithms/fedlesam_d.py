"""FedLESAM-D: FedLESAM's perturbation with FedDyn's regulariser (Fan et al., 2024).

    δ   ← ρ u(x_old − x)
    y   ← y − η (g(y + δ) + α (y − x + h_i))
    h_i ← h_i + (y_K − x),   h = mean of all clients' h_i
    x   ← x + mean(y_K − x) + h

Paper: Z. Fan et al. ICML 2024, arXiv:2405.18890.

Limits: ρ = 0 is FedDyn(α).
Deviations: none.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import DynamicRegulariser, LastModel, ranges


@register
def fedlesam_d(
    radius: ranges.Radius = 0.1,
    regularisation: ranges.RegulariserWeight = 0.1,
    memory: Literal["client", "server"] = "client",
) -> Algorithm:
    return Algorithm(gradient=LastModel(radius, memory), correct=DynamicRegulariser(regularisation))
