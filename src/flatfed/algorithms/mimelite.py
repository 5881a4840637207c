"""MimeLite: a server momentum of full gradients, frozen during the round (Karimireddy et al., 2020).

    y ← y − η ((1 − β) g(y) + β m)
    m ← (1 − β) mean ∇F_i(x) + β m             participants also compute their full gradient at x
    x ← x + mean(y_K − x)

Paper: S. P. Karimireddy et al. 2020, arXiv:2008.03606.

Limits: β = 0 is FedAvg.
Deviations: none. β weighs the old momentum; where a paper's β weighs the fresh gradient, use 1 − β.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import FullGradientMomentum, ranges


@register
def mimelite(momentum_decay: ranges.Momentum = 0.9) -> Algorithm:
    return Algorithm(correct=FullGradientMomentum(momentum_decay))
