"""Samples drawn from the data of many clients."""

from collections.abc import Sequence

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.tree import joined
from flatfed.data.federation import Federation
from flatfed.data.samples import Samples


def drawn(count: int, limit: int | None, seed: int) -> Tensor:
    """`limit` of so many positions in ascending order, for one seed always the same; all of them if None."""
    if limit is None or limit >= count:
        return torch.arange(count)
    generator = random.torch_generator(seed, "examined samples")
    return torch.randperm(count, generator=generator)[:limit].sort().values


def pooled_samples(
    federation: Federation, limit: int | None, seed: int, clients: Sequence[int] | None = None
) -> Samples:
    """The samples of some clients (all unless given), or `limit` of them drawn at random."""
    members = range(len(federation)) if clients is None else clients
    owned = [federation.client(client) for client in members]
    ends = torch.tensor([len(own) for own in owned]).cumsum(0)
    chosen = drawn(int(ends[-1]), limit, seed)
    # Only the drawn samples are gathered: the whole may be large.
    owner = torch.bucketize(chosen, ends, right=True)
    pieces = []
    for number in owner.unique().tolist():
        own = owned[number]
        positions = chosen[owner == number] - (ends[number] - len(own))
        pieces.append(own.batch(positions.to(own.device)))
    inputs, targets = zip(*pieces, strict=True)
    return joined(inputs), joined(targets)
