"""DynaFed-syn-only: after the distillation the server trains on D alone and hears nobody.

    rounds before there are L models x_0 … x_{L−1}:  FedAvg
    then once:                                       D, as in DynaFed
    every round after:                               x ← x, then Adam on D; what clients send is ignored

This is how the FedSynSAM paper describes the method that its tables call DynaFed, far below FedAvg; the
published DynaFed refines the clients' average instead.

Limits: before the distillation it is FedAvg.
Deviations: none, as nothing more is known of it.
"""

from dataclasses import replace

from flatfed.algorithms.dynafed import dynafed
from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Count, NonNegative, Positive
from flatfed.parts import FineTune, ranges


@register
def dynafed_syn_only(
    models: Count = 25,
    samples_per_class: Count = 15,
    iterations: Count = 3000,
    steps: Count = 20,
    span: Count = 3,
    sample_rate: Positive = 0.05,
    inner_rate: Positive = 0.04,
    inner_rate_rate: NonNegative = 1e-5,
    epochs: Count = 20,
    fine_tuning_rate: ranges.FineTuningRate = 1e-4,
    augment: bool = True,
) -> Algorithm:
    matching = (models, samples_per_class, iterations, steps, span, sample_rate, inner_rate, inner_rate_rate)
    server = FineTune(epochs=epochs, rate=fine_tuning_rate, augment=augment, aggregate=False)
    return replace(dynafed(*matching, augment=augment), server=server)
