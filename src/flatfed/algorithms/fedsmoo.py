"""FedSMOO: dynamic regularisation with a perturbation that clients agree on (Sun et al., 2023).

    ŝ   ← ρ u(g(y) − μ_i − s)                  u(v) = v/‖v‖
    μ_i ← μ_i + ŝ − s
    y   ← y − η (g(y + ŝ) + α (y − x + h_i))
    h_i ← h_i + (y_K − x),   h = mean of all clients' h_i
    s   ← ρ u(mean(μ_i − ŝ_K))
    x   ← x + mean(y_K − x) + h

Paper: Y. Sun et al. ICML 2023, arXiv:2305.11584.

Limits: ρ = 0 is FedDyn(α).
Deviations: clients upload μ_i − ŝ_K; the authors' code uploads μ_i alone (upload = "dual").
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import ConsensusPerturbation, DynamicRegulariser, ranges


@register
def fedsmoo(
    radius: ranges.Radius = 0.1,
    regularisation: ranges.RegulariserWeight = 0.1,
    upload: Literal["residual", "dual"] = "residual",
) -> Algorithm:
    return Algorithm(
        gradient=ConsensusPerturbation(radius, upload), correct=DynamicRegulariser(regularisation)
    )
