"""FedDyn: dynamic regularisation (Acar et al., 2021).

    y   ← y − η (g(y) + α (y − x + h_i))
    h_i ← h_i + (y_K − x)                      h = mean of all clients' h_i
    x   ← x + mean(y_K − x) + h

The duals are kept in the units of the model; the paper's ĝ_i is −α h_i.

Paper: D. A. E. Acar et al. ICLR 2021, arXiv:2111.04263.

Limits: α = 0 is not FedAvg, because h goes on summing displacements.
Deviations: the broadcast model is evaluated; the authors' script reports the mean of the active clients'
models, for which there is the setting evaluate = "active_mean". All clients use the same α; that script
divides it by the client's relative number of samples.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.parts import DynamicRegulariser, ranges


@register
def feddyn(regularisation: ranges.RegulariserWeight = 0.01) -> Algorithm:
    return Algorithm(correct=DynamicRegulariser(regularisation))
