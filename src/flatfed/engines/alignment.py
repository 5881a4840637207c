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
    says of outputs that have the shape of the targets; a function that cannot be asked that is left alone.
    """
    if (
        not isinstance(outputs, Tensor)
        or not isinstance(targets, Tensor)
        or not _one_of_each(outputs, targets)
    ):
        return
    outputs, targets = outputs.detach(), targets.detach()
    if len(targets) == 1:  # which shows no difference, but other batches may be larger
        outputs, targets = torch.cat([outputs, outputs + 1]), torch.cat([targets, targets + 1])

    def asked(seen: Tensor) -> Tensor:
        with torch.no_grad(), random.routed(torch.Generator(seen.device).manual_seed(0)):
            return torch.as_tensor(judged(function, seen.clone(), targets.clone())).detach()

    try:
        value, again, alike = asked(outputs), asked(outputs), asked(outputs.reshape(targets.shape))
        same = torch.equal(value, again) and value.shape == alike.shape
        differs = same and not torch.allclose(value, alike, rtol=1e-3, equal_nan=True)
    except USER_ERRORS:
        return
    if differs:
        raise FlatfedError(
            f"{name}: outputs are {list(outputs.shape)} and targets {list(targets.shape)}, so it compares "
            "every output with every target; give both one shape, for instance by targets[:, None]"
        )


def _one_of_each(outputs: Tensor, targets: Tensor) -> bool:
    """Whether there is a target for each output, in another shape."""
    if outputs.shape == targets.shape or not outputs.dim() or not targets.dim():
        return False
    return len(outputs) == len(targets) and outputs.squeeze().shape == targets.squeeze().shape
