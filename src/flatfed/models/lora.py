"""Low-rank adapters (LoRA) beside frozen weights, through the optional package `peft`."""

import copy
import importlib
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import Field
from torch import nn

from flatfed.core import random
from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.core.sharing import matches
from flatfed.core.types import Count, Positive, Seed, Share
from flatfed.models import checked

Names = tuple[str, ...]


@checked
def lora(
    model: nn.Module,
    rank: Annotated[Count, Field(le=4096)] = 8,
    alpha: Positive = 16.0,
    targets: Annotated[Names, Field(min_length=1)] | None = None,
    train: Names = (),
    freeze_a: bool = False,
    dropout: Share = 0.0,
    seed: Seed = 0,
) -> nn.Module:
    """A copy of a model whose linear layers W are frozen and have trained adapters: W + (alpha/rank) · B A.

    A and B have the given rank. `targets` are the names of linear layers, or the ends of their names such as
    "query", with * for anything; all linear layers unless given. Everything else is frozen but for what
    `train` names, such as the last layer. A is drawn under `seed` and B is zero, so that the model begins as
    it was; with `freeze_a` only B is trained (FFA-LoRA). `dropout` is that before A.

    Frozen weights never travel. What is averaged is A and B, each by itself (FedIT); a policy keeps B with
    the clients (FedSA-LoRA): `Sharing(private=["*.lora_B.*", …])`.
    """
    peft = _peft()
    linear = [name for name, part in model.named_modules() if isinstance(part, nn.Linear) and name]
    parameters = [name for name, _ in model.named_parameters()]
    for option, name in [
        *(("train", name) for name in train),
        *(("targets", name) for name in targets or ()),
    ]:
        fits = [name] if option == "train" else _ends([name])
        if not any(matches(known, fits) for known in (parameters if option == "train" else linear)):
            hint = did_you_mean(name, {known.rpartition(".")[2] for known in linear})
            raise FlatfedError(f"lora.{option}: the model has no {name!r}; {hint}")
    chosen = [
        name
        for name in linear
        if not matches(name, train) and (targets is None or matches(name, _ends(targets)))
    ]
    if not chosen:
        raise FlatfedError("lora.targets: there are no linear layers but those in train; name others")
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen, lora_dropout=dropout)
    with random.routed(random.torch_generator(seed, "adapters")):
        adapted: nn.Module = peft.inject_adapter_in_model(config, copy.deepcopy(model))
    for name, value in adapted.named_parameters():
        adapter = ".lora_" in name and not (freeze_a and ".lora_A." in name)
        value.requires_grad_(adapter or matches(name, train))
    return adapted


OPTIONS = ("rank", "alpha", "targets", "train", "freeze_a", "dropout")
"""What a config's table may say; the seed is that of the training."""


def _ends(targets: Sequence[str] | None) -> list[str]:
    """Patterns for whole names, and for what they end with."""
    return [pattern for target in targets or () for pattern in (target, f"*.{target}")]


def _peft() -> Any:
    try:
        return importlib.import_module("peft")
    except ImportError:
        raise FlatfedError("peft: not installed; pip install 'flatfed[peft]'") from None
