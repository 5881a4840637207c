"""FedSAGD: stable accelerated steps with a hybrid proximal term.

    y ← y − η (g(y) + β v + λ (y − x) + μ y)
    v ← β/(1 + β) v − Δ̄ / ((1 + β) Σ η_k)      Δ̄ = mean(y_K − x)
    x ← x + η_g Δ̄

`proximal_weight` is λ and `decay_weight` is μ, which is ordinary weight decay: give baselines the same, or
the comparison is confounded.

Paper: Anonymous authors. Submission to ICLR 2026, openreview.net/forum?id=AjgyGqMw1P.

Limits: β = λ = μ = 0 is FedAvg; β = μ = 0 is FedProx(λ); β = λ = 0 is FedAvg with weight decay μ.
Deviations: +μ y, as in the algorithm box; the appendix prints −μ y, which makes the round expand. The
1/(1 + β) in v is kept as printed, although the step has no (1 + β) for it to invert: for λ = μ = 0,
v ← 2β/(1 + β) v + mean gradient/(1 + β).
The paper's bound on stability assumes ‖v‖ ≤ Θ, the longest gradient, which the rule does not give.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative, Positive
from flatfed.parts import Average, GlobalMomentum, HybridProximal, ranges


@register
def fedsagd(
    momentum_decay: ranges.Momentum = 0.9,
    proximal_weight: ranges.ProximalWeight = 0.01,
    decay_weight: NonNegative = 0.001,
    server_rate: Positive = 1.0,
) -> Algorithm:
    momentum = GlobalMomentum(
        gradient_weight=1.0,
        momentum_weight=momentum_decay,
        memory=momentum_decay / (1 + momentum_decay),
        gain=1 / (1 + momentum_decay),
        assumed_length=1.0,
    )
    return Algorithm(
        correct=(momentum, HybridProximal(proximal_weight, decay_weight)), server=Average(server_rate)
    )
