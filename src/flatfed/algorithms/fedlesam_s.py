"""FedLESAM-S: FedLESAM's perturbation with SCAFFOLD's control variates (Fan et al., 2024).

    δ   ← ρ u(x_old − x)
    y   ← y − η (g(y + δ) − c_i + c)
    c_i ← c_i − c + (x − y_K) / Σ η_k,   c ← mean of all clients' c_i
    x   ← x + mean(y_K − x)

Paper: Z. Fan et al. ICML 2024, arXiv:2405.18890.

Limits: ρ = 0 is SCAFFOLD.
Deviations: the correction has weight 1; released code uses `control_weight=0.1`.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative
from flatfed.parts import ControlVariate, LastModel, ranges


@register
def fedlesam_s(
    radius: ranges.Radius = 0.1,
    memory: Literal["client", "server"] = "client",
    control_weight: NonNegative = 1.0,
) -> Algorithm:
    return Algorithm(gradient=LastModel(radius, memory), correct=ControlVariate(weight=control_weight))
