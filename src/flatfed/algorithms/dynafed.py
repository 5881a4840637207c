"""DynaFed: averaging, refined on synthetic data distilled from the global models (Pi et al., 2023).

    rounds before there are L models x_0 … x_{L−1}:  FedAvg
    then once:                                       samples D with soft labels, by trajectory matching
    every round after:                               x ← x + mean(y_K − x), then Adam on D

Paper: R. Pi et al. CVPR 2023, arXiv:2211.10878.

Limits: before the distillation it is FedAvg.
Deviations: clients descend by plain gradient steps, as everywhere here, where the released code uses Adam.
"""

from flatfed.algorithms.registry import register
from flatfed.core.algorithm import Algorithm
from flatfed.core.types import Count, NonNegative, Positive
from flatfed.parts import FineTune, TrajectoryMatching, ranges


@register
def dynafed(
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
    matching = TrajectoryMatching(
        models=models,
        samples_per_class=samples_per_class,
        iterations=iterations,
        steps=steps,
        span=span,
        sample_rate=sample_rate,
        inner_rate=inner_rate,
        inner_rate_rate=inner_rate_rate,
        soft_labels=True,
        average_targets=True,
        augment=augment,
    )
    return Algorithm(
        server=FineTune(epochs=epochs, rate=fine_tuning_rate, augment=augment), synthetic=matching
    )
