"""FedMo: FedMoSWA without weight averaging (Liu et al., 2025).

    y   ← y − η (g(y) − c_i + m)
    c_i ← c_i − m + (x − y_K) / Σ η_k          option II; option I: ∇F_i(x)
    m   ← m + γ mean(c_i − m)
    x   ← x + mean(y_K − x)

Paper: J. Liu, Y. Liu, F. Shang, H. Liu, J. Liu, W. Feng. ICML 2025, arXiv:2507.20016.

Limits: γ = 1 with every client taking part is SCAFFOLD.
Deviations: those of FedMoSWA.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import MomentumControlVariate, ranges


@register
def fedmo(
    momentum_rate: ranges.FreshWeight = 0.2, option: Literal["I", "II"] = "II", warm_start: bool = False
) -> Algorithm:
    return Algorithm(correct=MomentumControlVariate(option, rate=momentum_rate, warm_start=warm_start))
