"""FedSynSAM: sharpness-aware steps guided by synthetic data, for compressed uplinks.

    rounds t ≤ R:  FedSAM; the server keeps x_0 … x_{R+1}
    then once:     samples D on which a few gradient steps from x_r lead to x_{r+s}; sent to everybody
    rounds t > R:  ĝ ← β g_i(y) + (1 − β) ∇ℓ(y; batch of D)
                   y ← y − η g_i(y + ρ ĝ/‖ĝ‖)               local data only in the descent;
                   descent_mix = γ: (1 − γ) g_i(y + …) + γ ∇ℓ(y + …; batch of D)
    x ← x + η_g mean(C(y_K − x))                             C: the compressor, if one is set

Paper: Y. Gu, R. Jin, Z. Zhang, H. Dai. 2026, arXiv:2602.11584.

Limits: β = 1 is FedSAM; ρ = 0 is FedAvg.
Deviations: the matching loss is divided by ‖x_r − x_{r+s}‖², as the printed step sizes presuppose
(`normalise=False` does not); D starts from noise, where the paper also uses a generative network (`initial`
takes such images); the inner step size, whose first value is not printed, starts at Σ η_k, halved until the
first samples lead nowhere far; each step takes the next 128 samples of D. The descent has local data only, as
in the text, where some lines of the paper write ∇F(w, ξ, ζ), which allows the synthetic ones
(`descent_mix`). After round R a step costs three gradients, where the paper counts two.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Count, Decay, NonNegative, Positive, Share
from flatfed.parts import Average, SyntheticMix, TrajectoryMatching, ranges


@register
def fedsynsam(
    radius: ranges.Radius = 0.05,
    local_weight: Share = 0.9,
    warm_rounds: Count = 30,
    samples_per_class: Count = 20,
    iterations: Count = 200,
    span: Count = 3,
    sample_rate: NonNegative = 0.05,
    inner_rate: Positive | None = None,
    inner_rate_rate: NonNegative = 1e-5,
    sample_optimizer: Literal["adam", "sgd"] = "adam",
    momentum: Decay = 0.0,
    normalise: bool = True,
    synthetic_batch: Count = 128,
    initial: str | None = None,
    descent_mix: Share = 0.0,
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
        momentum=momentum,
        normalise=normalise,
        initial=initial,
    )
    return Algorithm(
        gradient=SyntheticMix(radius, local_weight, synthetic_batch, descent_mix),
        server=Average(server_rate),
        synthetic=matching,
    )
