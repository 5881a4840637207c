"""FedGloSS: sharpness-aware minimisation on the server's side too, at no extra traffic.

    x̃ ← x − ρ u(Δ̄ of the round before)          what clients receive; x̃ = x in the first round
    y ← y − η (g(y + ρ_l u(g(y))) + α (y − x̃ + h_i))       from y = x̃
    h_i ← h_i + Δ_i                               Δ_i = y_K − x̃
    h ← h + (S/N) Δ̄
    x ← x + Δ̄ + h

`regularisation` is α, which the paper writes 1/β.

Caldarola, Cagnasso, Caputo, Ciccone, "Beyond Local Sharpness: Communication-Efficient Global Sharpness-aware
Minimization for Federated Learning", CVPR 2025, arXiv:2412.03752.

Limits: ρ = ρ_l = 0 is FedDyn(α); ρ = 0 is FedSpeed with the server's duals and nothing mixed in; ρ_l = 0
without the regulariser is FedLESAM with the server's memory.
Deviations: h is the mean over all N clients; the released code divides by N times S. The radius does not grow
over the first rounds, which that code means to do. Its proximal centre and dual are renewed every epoch, here
every round. x is evaluated, not x̃.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import NonNegative
from flatfed.parts import DynamicRegulariser, PerturbedStart, SharpnessAware, ranges


@register
def fedgloss(
    server_radius: NonNegative = 0.15,
    radius: ranges.Radius = 0.15,
    regularisation: ranges.RegulariserWeight = 0.1,
) -> Algorithm:
    return Algorithm(
        start=PerturbedStart(server_radius),
        gradient=SharpnessAware(radius),
        correct=DynamicRegulariser(regularisation),
    )
