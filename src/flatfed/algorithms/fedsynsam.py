"""FedSynSAM: sharpness-aware steps guided by synthetic data, for compressed uplinks.

    rounds t ≤ R:  FedSAM; the server keeps x_0 … x_{R+1}
    then once:     samples D on which a few gradient steps from x_r lead to x_{r+s}; sent to everybody
    rounds t > R:  ĝ ← β g_i(y) + (1 − β) ∇ℓ(y; batch of D)
                   y ← y − η g_i(y + ρ ĝ/‖ĝ‖)               local data only in the descent
    x ← x + η_g mean(C(y_K − x))                             C: the compressor, if one is set

Paper: Y. Gu, R. Jin, Z. Zhang, H. Dai. 2026, arXiv:2602.11584.

Limits: β = 1 is FedSAM; ρ = 0 is FedAvg.
Deviations: the matching loss is divided by ‖x_r − x_{r+s}‖², as the printed step sizes presuppose; D starts
from noise, where the paper also uses a generative network; the inner step size, whose first value is not
printed, starts at Σ η_k; each step takes the next 128 samples of D. After round R a step costs three
gradients, where the paper counts two.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Count, NonNegative, Positive, Share
from flatfed.parts import Average, SyntheticMix, TrajectoryMatching, ranges


@register
def fedsynsam(
    radius: ranges.Radius = 0.05,
    local_weight: Share = 0.9,
    warm_rounds: Count = 30,
    samples_per_class: Count = 20,
    iterations: Count = 200,
    span: Count = 3,
    sample_rate: Positive = 0.05,
    inner_rate: Positive | None = None,
    inner_rate_rate: NonNegative = 1e-5,
    sample_optimizer: Literal["adam", "sgd"] = "adam",
    synthetic_batch: Count = 128,
    initial: str | None = None,
    server_rate: Positive = 1.0,
) -> Algorithm:
    matching = TrajectoryMatching(
        models=warm_rounds + 2,
        samples_per_class=samples_per_class,
        iterations=iterations,
        steps=span,
        sample_rate=sample_rate,
        inner_rate=inner_rate,
        inner_rate_rate=inner_rate_rate,
        optimizer=sample_optimizer,
        initial=initial,
    )
    return Algorithm(
        gradient=SyntheticMix(radius, local_weight, synthetic_batch),
        server=Average(server_rate),
        synthetic=matching,
    )
