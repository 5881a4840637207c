"""FedGAMMA: sharpness-aware local steps with control variates (Dai et al., 2023).

    ε   ← ρ g(y)/‖g(y)‖                        no control variate inside the perturbation
    y   ← y − η (g(y + ε) − c_i + c)
    c_i ← c_i − c + (x − y_K) / Σ η_k,   c ← mean of all clients' c_i
    x   ← x + η_g mean(y_K − x)

Paper: R. Dai et al. IEEE TNNLS 2023, doi:10.1109/TNNLS.2023.3304453.

Limits: ρ = 0 is SCAFFOLD.
Deviations: the correction acts on the step. In released code that adds it to the loss as a plain number it
carries no gradient, and the method is FedSAM.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, ControlVariate, SharpnessAware, ranges


@register
def fedgamma(radius: ranges.Radius = 0.01, server_rate: ranges.ServerRate = 1.0) -> Algorithm:
    return Algorithm(gradient=SharpnessAware(radius), correct=ControlVariate(), server=Average(server_rate))
