"""The copies of a user's model that workers train, and what could not be trained or copied."""

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatfed.core.errors import USER_ERRORS, FlatfedError, first_line
from flatfed.core.flat import BoundModel
from flatfed.core.settings import Sharing
from flatfed.core.sharing import Division, divided
from flatfed.core.tree import cloned


def check_model(model: nn.Module, sharing: Sharing) -> Division:
    """Where a model's parameters are in flat vectors, after a look at what could not be trained."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value):
            raise FlatfedError(
                f"model: {name!r} of a lazy module has no shape yet; call the model once first"
            )
        if value.is_meta:
            raise FlatfedError(f"model: {name!r} is on the device meta and has no numbers; initialise it")
    for name, value in model.named_parameters():
        if value._backward_hooks or value._post_accumulate_grad_hooks:
            raise FlatfedError(
                f"model: the parameter {name!r} has a hook for its gradient, which would not be called; do "
                "the same in the model or the loss, or with Training's clip and weight_decay"
            )
        if value.requires_grad and (value.is_complex() or value.layout != torch.strided):
            kind = "complex" if value.is_complex() else "sparse"
            raise FlatfedError(f"model: the parameter {name!r} is {kind}; keep it as dense real numbers")
    _check_memory(model)
    return divided(model, sharing)


def _check_memory(model: nn.Module) -> None:
    """Refuses tensors that share memory with a parameter: they would not follow it in a copy of the model."""
    tensors = {f"{name!r}": value for name, value in [*model.named_parameters(), *model.named_buffers()]}
    for place, module in model.named_modules():
        for name, value in vars(module).items():
            # Reparametrisations by a hook compute the attribute anew from the parameter NAME_orig.
            if isinstance(value, Tensor) and f"{name}_orig" not in module._parameters:
                tensors[f"the attribute {name!r} of {place or 'the model'!r}"] = value
    owners: dict[int, list[tuple[int, int, str, Tensor]]] = {}
    for name, value in tensors.items():
        if value.layout != torch.strided or not value.numel():
            continue
        start = int(value.storage_offset())
        extent = sum((size - 1) * int(step) for size, step in zip(value.shape, value.stride(), strict=True))
        sharing = owners.setdefault(value.untyped_storage().data_ptr(), [])
        for first, last, other_name, other in sharing:
            trained = value.requires_grad or other.requires_grad
            if trained and other is not value and first <= start + extent and start <= last:
                raise FlatfedError(
                    f"model: {name} and {other_name} share memory without being one parameter, which they "
                    "would not in a copy; use one nn.Parameter, and take views of it in the forward pass"
                )
        sharing.append((start, start + extent, name, value))


def bound_copy(model: nn.Module, division: Division, device: torch.device) -> BoundModel:
    try:
        return BoundModel(model, division.whole, device, division.evaluating)
    except USER_ERRORS as error:
        # A user's module may do anything when it is copied.
        raise FlatfedError(
            f"model: it cannot be copied ({first_line(error)}); give it before its first pass, and use "
            "torch.nn.utils.parametrizations.weight_norm, not torch.nn.utils.weight_norm"
        ) from error


def protect_inputs(module: nn.Module) -> None:
    """Lets a module that edits its inputs in place edit a copy of them."""
    module.register_forward_pre_hook(
        lambda _, positional, named: (cloned(positional), cloned(named)), with_kwargs=True
    )
