"""FedNSAM-D: FedNSAM with FedDyn's regulariser.

    δ   ← −ρ u(m)
    y   ← y − η (g(y + λ m + δ) + α (y − x + h_i))
    h_i ← h_i + (y_K − x),   h = mean of all clients' h_i
    m   ← λ m + mean(y_K − x)
    x   ← x + m + h

Paper: J. Liu, F. Shang, Y. Tian, H. Liu, Y. Liu. 2026, arXiv:2602.23827.

Limits: ρ = λ = 0 is FedDyn(α).
Deviations: the paper names this variant without printing its formulas. h stays outside the momentum;
`dual_in_momentum=True` puts it inside, which is unstable at λ = 0.85 even on a toy problem.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative
from flatfed.parts import AlongMomentum, DynamicRegulariser, Momentum, ranges


@register
def fednsam_d(
    lookahead: ranges.Momentum = 0.85,
    radius: ranges.Radius = 0.1,
    regularisation: NonNegative = 0.1,
    dual_in_momentum: bool = False,
) -> Algorithm:
    return Algorithm(
        gradient=AlongMomentum(radius, lookahead),
        correct=DynamicRegulariser(regularisation),
        server=Momentum(lookahead, absorb_shift=dual_in_momentum),
    )
