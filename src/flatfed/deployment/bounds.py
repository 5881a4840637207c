"""How long uploads may be, measured by what the others of the cohort send."""

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from flatfed.core.rounds import Broadcast

ENOUGH = 3
"""Uploads of which a median says something."""
STEPS = 1e9
"""Changes of whole-number buffers up to this are never refused: they count steps, which differ."""


class Bound(NamedTuple):
    """Of the norms of one upload or buffer change in a round, and where it comes from."""

    norm: float
    source: str


def norms(vectors: Mapping[str, Tensor]) -> dict[str, float]:
    return {
        name: float(torch.linalg.vector_norm(value, dtype=torch.float64)) for name, value in vectors.items()
    }


def plausible_norms(broadcast: Broadcast, uploads: Iterable[str], ratio: float) -> dict[str, float]:
    """What is accepted whatever the median: an upload no longer than the model that it is about, and a
    change of a buffer up to `ratio` times its size."""
    model = float(torch.linalg.vector_norm(broadcast.vectors["model"], dtype=torch.float64))
    plausible = dict.fromkeys(uploads, max(model, 1.0))
    for name, value in broadcast.buffers.items():
        if value.dtype == torch.bool:  # these never change
            continue
        finite = torch.nan_to_num(value.double(), 0.0, 0.0, 0.0)
        size = ratio * max(float(finite.norm()), math.sqrt(value.numel()))
        plausible[f"buffer {name}"] = size if value.is_floating_point() else max(size, STEPS)
    return plausible


def norm_bounds(
    cohort: Sequence[Mapping[str, float]], plausible: Mapping[str, float], ratio: float
) -> dict[str, Bound]:
    """The largest norms that are accepted, given those of every client's uploads.

    `ratio` times the median (the lower one of an even number, so that half of a cohort cannot raise it), or
    the plausible norm if that is more. Too few uploads have no median: `ratio` times the plausible norm.
    """
    limits = {}
    for name, norm in plausible.items():
        if len(cohort) < ENOUGH:
            limits[name] = Bound(ratio * norm, f"{ratio:g} times {norm:.3g}, the rule for so few uploads")
        else:
            median = statistics.median_low(client[name] for client in cohort)
            source = f"{ratio:g} times the median {median:.3g} of {len(cohort)} uploads"
            limits[name] = Bound(max(ratio * median, norm), source)
    return limits
