"""SCAFFOLD: stochastic controlled averaging (Karimireddy et al., 2020).

    y   ← y − η (g(y) − c_i + c)
    c_i ← c_i − c + (x − y_K) / Σ η_k          option II, the mean gradient of the round
    c_i ← ∇F_i(x)                              option I, one more pass over the client's data
    c   ← mean of all clients' c_i
    x   ← x + η_g mean(y_K − x)

Paper: S. P. Karimireddy et al. ICML 2020, arXiv:1910.06378.

Limits: K = 1 with every client taking part has FedAvg's global iterates.
Deviations: Σ η_k uses the step sizes of the round itself; one released implementation divides by the
undecayed step size.
"""

from typing import Literal

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import Average, ControlVariate, ranges


@register
def scaffold(option: Literal["I", "II"] = "II", server_rate: ranges.ServerRate = 1.0) -> Algorithm:
    return Algorithm(correct=ControlVariate(option), server=Average(server_rate))
