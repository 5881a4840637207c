"""What comes back from a round: the uploads of a cohort, reduced to what the parts declared."""

from dataclasses import dataclass

import torch
from torch import Tensor

from flatfed.core.state import State


@dataclass(frozen=True)
class Aggregate:
    """A cohort's uploads reduced over its clients, and what the loop records; the same in all engines.

    Means are weighted as the training says: every client counts the same, or by its number of samples.
    """

    clients: int
    """Clients whose uploads were merged."""
    weight: float
    """What they weigh together."""
    uploads: State
    """Every declared upload and statistic by key, reduced by the algorithm's aggregation rule."""
    buffers: State
    """The change of the model's buffers, reduced like an upload."""
    displacement: Tensor | None
    """The mean displacement of the clients' models, whatever they uploaded; None if that did not travel."""
    squared_displacement: float
    """The mean squared length of the clients' displacements."""
    drift: float
    """The mean squared distance from the received model, over clients and steps."""
    loss: float
    """The mean training loss."""
    total_rate: float
    """The mean of Σ η_k."""
    gradient_evaluations: int
    """Minibatch gradients taken."""
    bytes_up: int
    """What the uploads took on the wire, without buffers."""

    @property
    def flatness_distance(self) -> float | None:
        """mean ‖Δ_i − Δ̄‖², as the mean square less the square of the mean; None without Δ̄."""
        if self.displacement is None:
            return None
        return max(0.0, self.squared_displacement - float(torch.linalg.vector_norm(self.displacement)) ** 2)
