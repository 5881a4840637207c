"""Norms of layers, and the FedSAM paper's generalisation bound by margins, Theorem 3.5 (C.3).

With d dense layers W_j of h units, inputs no longer than A, n samples, N clients, margin γ and confidence 1
− ζ; ‖·‖ is the spectral norm, ‖·‖_F Frobenius's. Convolutions, biases and normalisation are outside the
theorem.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from flatfed.theory.statement import Statement, at_most


@dataclass(frozen=True)
class LayerNorms:
    """The norms of a network's dense layers, from the first to the last."""

    spectral: Sequence[float]
    frobenius: Sequence[float]

    @property
    def product(self) -> float:
        return math.prod(self.spectral)

    @property
    def mean(self) -> float:
        """φ, the geometric mean of the spectral norms."""
        return self.product ** (1 / len(self.spectral))

    @property
    def imbalance(self) -> float:
        """M: how far a spectral norm is from their mean."""
        return max(max(norm / self.mean, self.mean / norm) for norm in self.spectral)

    @property
    def complexity(self) -> float:
        """Q as printed: Π‖W_j‖ · Σ ‖W_j‖_F²/‖W_j‖."""
        pairs = zip(self.spectral, self.frobenius, strict=True)
        return self.product * math.fsum(whole**2 / largest for largest, whole in pairs)

    @property
    def squared_complexity(self) -> float:
        """Q₂ of the literature: Π‖W_j‖² · Σ (‖W_j‖_F/‖W_j‖)²."""
        pairs = zip(self.spectral, self.frobenius, strict=True)
        return self.product**2 * math.fsum((whole / largest) ** 2 for largest, whole in pairs)


def log_term(norms: LayerNorms, clients: int, samples: float, doubt: float) -> float:
    """d ln(N n d ln M/ζ); ln M is left out where all norms are equal."""
    depth, spread = len(norms.spectral), math.log(norms.imbalance)
    return depth * math.log(clients * samples * depth * (spread if spread > 1e-12 else 1.0) / doubt)


def margin_bound(
    norms: LayerNorms,
    *,
    width: int,
    largest_input: float,
    margin: float,
    samples: float,
    clients: int,
    doubt: float,
) -> Statement:
    """How far the margin loss of all data may be above that of the samples.

    The value is the printed fraction; `terms` have the root that the literature has, and that with its
    constants.
    """
    depth, logarithm = len(norms.spectral), log_term(norms, clients, samples, doubt)
    per_margin = margin**2 * samples
    size = depth**2 * width * math.log(depth * width)
    printed = (32 * largest_input * size * norms.complexity + logarithm) / per_margin
    root = math.sqrt((largest_input**2 * size * norms.squared_complexity + logarithm) / per_margin)
    divergence = 1024 * math.e**2 * depth**2 * largest_input**2 * width * math.log(4 * width * depth)
    divergence *= norms.squared_complexity / margin**2
    explicit = math.sqrt((2 * divergence + logarithm) / (2 * (samples - 1)))
    return Statement(
        "Theorem 3.5",
        printed,
        "as printed",
        (at_most("bound on a share", printed, 1.0),),
        {"log term": logarithm, "literature": root, "divergence": divergence, "with constants": explicit},
        remark="Lemma C.1's square root was lost, and ‖W‖_F/‖W‖ is unsquared; says nothing above 1",
    )


def output_change(norms: LayerNorms, changes: Sequence[float], largest_input: float) -> Statement:
    """Lemma C.2: how far outputs of a bias-free dense network move when layers change by these spectral
    norms."""
    pairs = list(zip(changes, norms.spectral, strict=True))
    value = math.e * largest_input * norms.product * math.fsum(change / norm for change, norm in pairs)
    worst = max(change / norm for change, norm in pairs)
    condition = at_most("‖δ_j‖/‖W_j‖", worst, 1 / len(pairs))
    return Statement("Lemma C.2", value, "bound", (condition,), remark="the condition is printed without 1/d")
