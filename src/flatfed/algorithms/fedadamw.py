"""FedAdamW: AdamW on the clients, with a second moment and a direction that the server passes on.

    m ← β₁ m + (1−β₁) g(y),  v ← β₂ v + (1−β₂) g(y)²      from m = 0 and the server's v
    y ← y − η (m̂/(√v̂ + ε) + α G + λ y)
    v ← mean over each tensor of the clients' v_K, averaged
    G ← −Δ̄ / Σ η_k                                        Δ̄ = mean(y_K − x), G = 0 at first
    x ← x + Δ̄

λ is the training's `weight_decay`, which is decoupled here; the authors use 0.01, and α = 0.5.

Liu, Shang, Zhu, Liu, Liu, Liu, "FedAdamW: A Communication-Efficient Optimizer with Convergence and
Generalization Guarantees for Federated Large Models", 2025.

Limits: α = 0 is AdamW on the clients whose second moment is shared; in the first round it is FedAvg with the
optimizer AdamW. β₁ = 0 and ε → ∞ at the step size ε η is the global momentum G alone.
Deviations: the printed step subtracts λ y, which would make weights grow. m is corrected for the steps of the
round, in which it starts at zero (released code counts all rounds, which makes every round's first steps
short), v for all its steps, exactly so where clients take unequal numbers of them. The paper's blocks are
those of a transformer's Hessian; here, as in code, they are tensors.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Decay, Positive
from flatfed.parts import AdamW, GlobalMomentum, ranges


@register
def fedadamw(
    global_weight: ranges.AddedMomentum = 0.5, beta1: Decay = 0.9, beta2: Decay = 0.999, eps: Positive = 1e-8
) -> Algorithm:
    return Algorithm(
        optimizer=AdamW(beta1, beta2, eps, state="blocks"), correct=GlobalMomentum(1.0, global_weight)
    )
