"""FedSpeed: prox-correction with a mixed perturbed gradient (Sun et al., 2023).

    ε   ← ρ g(y)/‖g(y)‖
    y   ← y − η ((1 − α) g(y) + α g(y + ε) + (1/λ) (y − x + h_i))
    h_i ← h_i + (y_K − x)
    x   ← mean over participants of (y_K + h_i)

`proximal_weight` is 1/λ and `mix` is α.

Paper: Y. Sun et al. ICLR 2023, arXiv:2302.10429.

Limits: ρ = 0 or α = 0 is FedDyn(1/λ) when every client takes part; with duals = "server" always.
Deviations: the participants' corrected models are averaged, as in the paper; one simulator adds the mean
dual of all clients instead (duals = "server"). The ascent step is normalised, as in the authors' code;
`normalize=False` is the other reading.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Share
from flatfed.parts import DynamicRegulariser, SharpnessAware, ranges


@register
def fedspeed(
    radius: ranges.Radius = 0.1,
    mix: Share = 1.0,
    proximal_weight: ranges.RegulariserWeight = 0.1,
    duals: Literal["participants", "server"] = "participants",
    normalize: bool = True,
) -> Algorithm:
    return Algorithm(
        gradient=SharpnessAware(radius, mix, normalize),
        correct=DynamicRegulariser(proximal_weight, duals),
    )
