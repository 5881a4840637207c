"""Whether losses and metrics compare each output with its own target."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import USER_ERRORS, FlatfedError
from flatfed.core.outputs import judged


def check_alignment(name: str, function: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> None:
    """Refuses a function that torch's broadcasting makes compare every output with every target.

    Outputs [B, 1] and targets [B] become [B, B] without an error. Whether a function minds is seen by what it
    returns for outputs that have the shape of the targets; a function that cannot take these is left alone.
    """
    if (
        not isinstance(outputs, Tensor)
        or not isinstance(targets, Tensor)
        or not _one_of_each(outputs, targets)
    ):
        return
    seen, own = outputs.detach(), targets.detach()
    if len(own) == 1:  # which shows no difference, but other batches may be larger
        seen, own = torch.cat([seen, seen + 1]), torch.cat([own, own + 1])
    # Absolute errors of outputs that lie on one side of all targets have the same mean either way, and so
    # have squares if all outputs are alike; those of different targets, each met exactly, have not.
    places = torch.arange(len(own), device=own.device).reshape(-1, *[1] * (own.dim() - 1))
    met = own + places
    exact = met.reshape(seen.shape).to(seen.dtype)
    if _shape_matters(function, seen, own) or _shape_matters(function, exact, met):
        raise FlatfedError(
            f"{name}: outputs are {list(outputs.shape)} and targets {list(targets.shape)}, so it compares "
            "every output with every target; give both one shape, for instance by targets[:, None]"
        )


def _shape_matters(function: Callable[[Any, Any], Any], outputs: Tensor, targets: Tensor) -> bool:
    def value_of(seen: Tensor) -> Tensor:
        with torch.no_grad(), random.routed(torch.Generator(seen.device).manual_seed(0)):
            return torch.as_tensor(judged(function, seen.clone(), targets.clone())).detach()

    try:
        value, again, alike = value_of(outputs), value_of(outputs), value_of(outputs.reshape(targets.shape))
        same = torch.equal(value, again) and value.shape == alike.shape
        return same and not torch.allclose(value, alike, rtol=1e-3, equal_nan=True)
    except USER_ERRORS:
        return False


def _one_of_each(outputs: Tensor, targets: Tensor) -> bool:
    """Whether there is a target for each output, in another shape."""
    if outputs.shape == targets.shape or not outputs.dim() or not targets.dim():
        return False
    return len(outputs) == len(targets) and outputs.squeeze().shape == targets.squeeze().shape
