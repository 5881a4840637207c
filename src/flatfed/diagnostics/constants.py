"""Estimates of the constants that theorems need, from some clients, batches and samples at two models at
most.

They are lower than the suprema that theorems mean, so what is computed with them is a yardstick and no
guarantee.
"""

import math
import statistics

import torch
from torch import Tensor

from flatfed.core.flat import unit
from flatfed.core.sampling import batches, local_steps
from flatfed.diagnostics.hessian import products, top_eigenvalues
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.theory.fedsagd import gradient_bound as printed_gradient_bounds

HOW = {
    "gradient_bound": "Θ: longest gradient of some batches at two models, with weight decay or without",
    "printed_gradient_bound": "Θ as the FedSAGD paper has it: √(σ_l² + 2σ_g² + 2Z²)",
    "sufficient_gradient_bound": "Θ as its assumptions give it: √(σ_l² + Z²)",
    "smoothness": "L: largest eigenvalue of the Hessians of some clients",
    "lipschitz": "Z: longest gradient of some clients",
    "sample_lipschitz": "Z: longest gradient of some samples",
    "gradient_deviation": "σ_l of batches: root mean square distance to the client's gradient",
    "unit_deviation": "σ_l of unit gradients: the same of gradients scaled to length 1, at most 2",
    "sample_deviation": "σ of single samples: root mean square distance to the client's gradient",
    "heterogeneity": "σ_g: root mean square distance of clients' gradients to their mean",
    "largest_heterogeneity": "σ_g: largest distance of a client's gradient to the mean",
    "mean_heterogeneity": "σ_g: mean distance of clients' gradients to their mean",
    "gradient": "‖∇F‖ of the clients that were looked at",
    "first_loss": "loss of the first model on their data: at least F(x_0) − inf F where no loss is negative",
}
"""What the constants stand for, and how they are estimated."""


def examined_sizes(subject: Subject) -> list[int]:
    """How many samples some clients have."""
    return [len(subject.federation.client(client)) for client in subject.some_clients(20)]


def most_steps(subject: Subject) -> int:
    """The most local steps that an examined client takes in a round."""
    return max(local_steps(subject.training, size) for size in examined_sizes(subject))


def batch_gradients(subject: Subject, model: Tensor, client: int, count: int) -> Tensor:
    """The gradients [B, P] of the first batches that a client's next round would use, without weight
    decay."""
    own = subject.federation.client(client)
    chosen = batches(subject.training, len(own), subject.round, client)[:count]
    return torch.stack([subject.gradient(model, own.batch(batch.to(own.device))) for batch in chosen])


def sample_gradients(subject: Subject, model: Tensor, client: int, count: int) -> Tensor:
    """The gradients [n, P] of `count` of a client's samples, each by itself."""
    own = subject.federation.client(client)
    chosen = torch.linspace(0, len(own) - 1, min(count, len(own))).round().long()
    return torch.stack([subject.gradient(model, own.batch(place[None].to(own.device))) for place in chosen])


def gradient_bound(subject: Subject, clients: int = 10, count: int = 3) -> float:
    """Θ: the longest of some clients' batch gradients at the first and at the present model."""
    longest, decay = 0.0, subject.training.weight_decay
    for model in (first_model(subject), subject.model):
        for client in subject.some_clients(clients):
            gradients = batch_gradients(subject, model, client, count)
            for vectors in (gradients, gradients + decay * model) if decay else (gradients,):
                longest = max(longest, float(torch.linalg.vector_norm(vectors, dim=1).max()))
    return longest


def first_model(subject: Subject) -> Tensor:
    return subject.plan.layout.vector(subject.task.model).to(subject.model)


def _mean_square(vectors: Tensor) -> float:
    return float(vectors.square().sum(1).mean())


def estimated_constants(
    subject: Subject, clients: int | None = 10, count: int = 5, tick: Tick = silent
) -> dict[str, float]:
    """The constants of HOW, at the present model unless it says otherwise."""
    model = subject.model
    whole, of_batches, of_units, of_samples, curvatures, losses = [], [], [], [], [], []
    longest, start = 0.0, first_model(subject)
    for client in ticked(subject.some_clients(clients), tick):
        data = subject.data(client)
        own = subject.gradient(model, data)
        in_batches = batch_gradients(subject, model, client, count)
        of_batches.append(_mean_square(in_batches - own))
        of_units.append(_mean_square(unit(in_batches) - unit(own)))
        alone = sample_gradients(subject, model, client, count)
        of_samples.append(_mean_square(alone - own))
        longest = max(longest, float(torch.linalg.vector_norm(alone, dim=1).max()))
        curvatures.append(top_eigenvalues(products(subject, data), len(model), 1)[0])
        losses.append(subject.evaluate(start, data)["loss"])
        whole.append(own)
    gradients = torch.stack(whole)
    apart = torch.linalg.vector_norm(gradients - gradients.mean(0), dim=1)
    lipschitz = float(torch.linalg.vector_norm(gradients, dim=1).max())
    noise, spread = statistics.fmean(of_batches), float(apart.max())
    printed, sufficient = printed_gradient_bounds(noise, spread**2, lipschitz)
    return {
        "gradient_bound": gradient_bound(subject),
        "printed_gradient_bound": printed,
        "sufficient_gradient_bound": sufficient,
        "smoothness": max(curvatures),
        "lipschitz": lipschitz,
        "sample_lipschitz": longest,
        "gradient_deviation": math.sqrt(noise),
        "unit_deviation": math.sqrt(statistics.fmean(of_units)),
        "sample_deviation": math.sqrt(statistics.fmean(of_samples)),
        "heterogeneity": math.sqrt(float(apart.square().mean())),
        "largest_heterogeneity": spread,
        "mean_heterogeneity": float(apart.mean()),
        "gradient": float(torch.linalg.vector_norm(gradients.mean(0))),
        "first_loss": statistics.fmean(losses),
    }
