"""FedMuon: Muon on the clients, with a momentum and a direction that the server passes on.

    M ← β M + (1−β) g(y)                                  from the server's M
    y ← y − η ((1−α) r s O + α G + λ y)                   O ≈ the orthogonal factor of (1−β) g(y) + β M
    M ← mean of the clients' M_K
    G ← −Δ̄ / Σ η_k                                        Δ̄ = mean(y_K − x), G = 0 at first
    x ← x + Δ̄

for every parameter with two or more dimensions as a matrix outputs × rest, s = √max(1, outputs/rest); in
place of r s O other parameters take AdamW's steps, whose moments start every round at zero. `global_weight`
is α, `momentum` β, `ratio` r, and λ the training's `weight_decay` (the authors: 0.01; η and r 3e-4 and 10 for
a small transformer, 3e-2 and 0.5 for a ResNet).

Liu, Shang, Zhou, Liu, Liu, Liu, "FedMuon: Accelerating Federated Learning with Matrix Orthogonalization",
2025. Two other methods have the same name.

Limits: α = 0 and β = 0 is FedAvg with the optimizer Muon (β = 0); one client and α = 0 is Muon.
Deviations: the printed rule has an exact orthogonal factor, heavy-ball momentum and no s; this is the form of
the released code, with the factor in full precision, one λ for all parameters, and filters of convolutions
flattened before s is taken (there s is 1 for them).
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Decay, Positive
from flatfed.parts import GlobalMomentum, Muon, ranges


@register
def fedmuon(
    global_weight: ranges.MomentumWeight = 0.5, momentum: Decay = 0.98, ratio: Positive = 1.0
) -> Algorithm:
    return Algorithm(
        optimizer=Muon(momentum, ratio=ratio, state="averaged"),
        correct=GlobalMomentum(1 - global_weight, global_weight),
    )
