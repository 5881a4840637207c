"""FedLESAM: sharpness-aware steps with a locally estimated global perturbation (Fan et al., 2024).

    δ ← ρ u(x_old − x)                         x_old: the model the client received last; constant in a round
    y ← y − η g(y + δ)                         one gradient per step
    x ← x + η_g mean(y_K − x)

δ = 0 the first time a client takes part. memory = "server" uses the global model of the round before for
everyone, which is the same only when every client takes part in every round.

Paper: Z. Fan et al. ICML 2024, arXiv:2405.18890.

Limits: ρ = 0 is FedAvg; memory = "server" is FedNSAM with λ = 0.
Deviations: none from the paper. In the released code the perturbation vector is indexed by the number of
the parameter tensor, so each tensor is shifted by one scalar.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, LastModel, ranges


@register
def fedlesam(
    radius: ranges.Radius = 0.1,
    memory: Literal["client", "server"] = "client",
    server_rate: ranges.ServerRate = 1.0,
) -> Algorithm:
    return Algorithm(gradient=LastModel(radius, memory), server=Average(server_rate))
