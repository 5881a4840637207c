"""Who takes part in a round, and in which order a client's samples come.

Both depend on (seed, round, client) alone: two algorithms under one seed see the same clients and batches.
"""

import math

import torch
from torch import Tensor

from flatfed.core.errors import FlatfedError
from flatfed.core.random import numpy_generator, torch_generator
from flatfed.core.settings import Training


def cohort(training: Training, clients: int, round_number: int) -> list[int]:
    """The participants of a round in ascending order; takes memory for them, not for the population."""
    generator = numpy_generator(training.seed, "cohort", round_number)
    size = training.cohort_size(clients)
    if training.sampling == "fixed":
        return sorted(generator.choice(clients, size, replace=False).tolist())
    probability = size / clients if training.participation is None else training.participation
    first = _first_of_some(clients, probability, float(generator.random()))
    after = clients - first - 1
    others = generator.choice(after, int(generator.binomial(after, probability)), replace=False)
    return [first, *sorted((others + first + 1).tolist())]


def _first_of_some(clients: int, probability: float, uniform: float) -> int:
    """The first participant, given that there is one: a geometric draw cut off at the last client.

    The clients after it then decide for themselves. That has the distribution of drawing again until there is
    a participant, without taking longer when participants are rare.
    """
    if probability == 1:
        return 0
    at_least_one = -math.expm1(clients * math.log1p(-probability))
    return min(clients - 1, int(math.log1p(-uniform * at_least_one) / math.log1p(-probability)))


def batches(training: Training, samples: int, round_number: int, client: int) -> list[Tensor]:
    """The positions of each local step's samples among the client's own."""
    generator = torch_generator(training.seed, "batches", round_number, client)
    size = training.batch_size
    _check_work(training, samples)
    if size is None:
        steps = training.local_steps or training.local_epochs or 1
        return [torch.arange(samples)] * steps
    if training.local_steps is None:
        epochs = training.local_epochs or 1
        return [
            chosen
            for _ in range(epochs)
            for chosen in torch.randperm(samples, generator=generator).split(size)
        ]
    needed = training.local_steps * size
    orders = [torch.randperm(samples, generator=generator) for _ in range(-(-needed // samples))]
    return list(torch.cat(orders)[:needed].split(size))


def _check_work(training: Training, samples: int) -> None:
    """Refuses a round of one client whose batches alone would take minutes or gigabytes to draw."""
    steps, size = local_steps(training, samples), training.batch_size or samples
    drawn = steps * size if training.local_steps is not None else (training.local_epochs or 1) * samples
    passes = -(-drawn // max(1, samples))
    for count, most, unit in (
        (steps, 10**7, "steps"),
        (drawn if training.batch_size else 0, 10**8, "samples"),
        (passes if training.batch_size else 0, 10**6, "passes over its data"),
    ):
        if count > most:
            names = [
                name for name in ("local_epochs", "local_steps", "batch_size") if getattr(training, name)
            ]
            raise FlatfedError(
                f"{', '.join(f'{name} = {getattr(training, name)}' for name in names)}: a round of a client "
                f"with {samples} samples would be {count:.2g} {unit}; use at most {most:.0e}"
            )


def local_steps(training: Training, samples: int) -> int:
    """How many batches a client has in a round, without drawing them."""
    if training.local_steps is not None:
        return training.local_steps
    epochs = training.local_epochs or 1
    return epochs if training.batch_size is None else epochs * -(-samples // training.batch_size)


def divided_rates(training: Training, rates: list[float]) -> tuple[list[float], list[float]]:
    """Of a round's step sizes those for private entries and those for shared ones, which may be the same."""
    steps = training.sharing.private_steps
    if steps is None:
        return rates, rates
    if steps >= len(rates):
        raise FlatfedError(
            f"sharing.private_steps = {steps}: a client takes {len(rates)} local steps, so that none is left "
            "for what is shared; use fewer of them or more local steps"
        )
    return rates[:steps], rates[steps:]


def equal_batches(training: Training, common_size: int | None) -> bool:
    """Whether every client takes the same number of steps with batches of the same sizes."""
    in_steps = training.local_steps is not None and training.batch_size is not None
    return in_steps or common_size is not None
