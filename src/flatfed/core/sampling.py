"""Who takes part in a round, and in which order a client's samples come.

Both depend on (seed, round, client) alone: two algorithms under one seed see the same clients and batches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flatfed.core.random import numpy_generator, torch_generator
from flatfed.core.settings import Settings


def cohort(settings: Settings, clients: int, round_number: int) -> list[int]:
    """The participants of a round in ascending order; takes memory for them, not for the population."""
    generator = numpy_generator(settings.seed, "cohort", round_number)
    size = settings.cohort_size(clients)
    if settings.sampling == "bernoulli":
        probability = size / clients if settings.participation is None else settings.participation
        # Drawing how many first is the same distribution; an empty cohort is drawn again.
        size = 0
        while size == 0:
            size = int(generator.binomial(clients, probability))
    return sorted(generator.choice(clients, size, replace=False).tolist())


def batches(settings: Settings, samples: int, round_number: int, client: int) -> list[Tensor]:
    """The positions of each local step's samples among the client's own."""
    generator = torch_generator(settings.seed, "batches", round_number, client)
    size = settings.batch_size
    if size is None:
        steps = settings.local_steps or settings.local_epochs or 1
        return [torch.arange(samples)] * steps
    if settings.local_steps is None:
        epochs = settings.local_epochs or 1
        return [
            chosen
            for _ in range(epochs)
            for chosen in torch.randperm(samples, generator=generator).split(size)
        ]
    needed = settings.local_steps * size
    orders = [torch.randperm(samples, generator=generator) for _ in range(-(-needed // samples))]
    return list(torch.cat(orders)[:needed].split(size))


def equal_batches(settings: Settings, common_size: int | None) -> bool:
    """Whether every client takes the same number of steps with batches of the same sizes."""
    in_steps = settings.local_steps is not None and settings.batch_size is not None
    return in_steps or common_size is not None
