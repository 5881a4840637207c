"""Random streams that depend on what they are for, never on the order of work.

Every draw comes from a stream named by (seed, purpose, coordinates…), for instance
(seed, "batches", round, client). Two algorithms under one seed therefore see the same clients and the
same batches, and a run gives the same bits with one worker or many, left alone or resumed.
"""

import hashlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from flatfed.core.errors import FlatfedError

aten = torch.ops.aten


def key(seed: int, purpose: str, *coordinates: int) -> int:
    """A 63-bit number that names one stream; the same on every platform and in every version."""
    name = "/".join([str(seed), purpose, *map(str, coordinates)])
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def torch_generator(seed: int, purpose: str, *coordinates: int) -> torch.Generator:
    return torch.Generator().manual_seed(key(seed, purpose, *coordinates))


def numpy_generator(seed: int, purpose: str, *coordinates: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key(seed, purpose, *coordinates)))


def _fused_dropout(
    inputs: Tensor, probability: float, train: bool | None, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    if train is False:
        return inputs, torch.ones_like(inputs, dtype=torch.bool)
    kept = torch.empty_like(inputs, dtype=torch.bool).bernoulli_(1 - probability, generator=generator)
    return inputs * kept / max(1 - probability, torch.finfo(inputs.dtype).tiny), kept


def _filled(method: str, like: Tensor, *bounds: int, generator: torch.Generator, **options: Any) -> Tensor:
    return cast(Tensor, getattr(torch.empty_like(like, **options), method)(*bounds, generator=generator))


# Random operations whose schema has no generator, and what does the same with one.
_WITH_GENERATOR: dict[Any, Callable[..., Any]] = {
    aten.rand.default: aten.rand.generator,
    aten.randn.default: aten.randn.generator,
    aten.randint.default: aten.randint.generator,
    aten.randint.low: aten.randint.low_generator,
    aten.randperm.default: aten.randperm.generator,
    aten.rand_like.default: partial(_filled, "uniform_"),
    aten.randn_like.default: partial(_filled, "normal_"),
    aten.randint_like.default: partial(_filled, "random_"),
    aten.randint_like.low_dtype: partial(_filled, "random_"),
    aten.native_dropout.default: _fused_dropout,
}


def _is_random(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    if torch.Tag.nondeterministic_seeded not in operation.tags:
        return False
    # Attention kernels are marked as random even when they drop nothing.
    names = [argument.name for argument in operation._schema.arguments]
    if "dropout_p" not in names:
        return True
    position = names.index("dropout_p")
    return bool(args[position] if len(args) > position else kwargs.get("dropout_p", 0.0))


class RouteRandomness(TorchDispatchMode):
    """Sends the random operations of this thread to one generator.

    torch's default generator is one per process, so dropout would otherwise depend on which thread comes
    first; a dispatch mode is local to its thread.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.drew = self.rerouted = False
        """Whether there was one, and one that would have drawn from torch's global stream."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch imports its compiler on first use, which takes every process a second.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _is_random(func, args, kwargs):
            return func(*args, **kwargs)
        self.drew = True
        if torch._C._current_autograd_node() is not None:
            raise FlatfedError(
                "model: it draws random numbers again in the backward pass, which would not be the same; "
                "switch off activation checkpointing or dropout"
            )
        if func in _WITH_GENERATOR:
            self.rerouted = True
            return _WITH_GENERATOR[func](*args, generator=self.generator, **kwargs)
        names = [argument.name for argument in func._schema.arguments]
        if "generator" not in names:
            raise FlatfedError(
                f"model: it calls the random operation {func}, which cannot be tied to a client's random "
                "stream; use nn.Dropout, torch.bernoulli, uniform_ or normal_ instead"
            )
        position = names.index("generator")
        if kwargs.get("generator") is None and (len(args) <= position or args[position] is None):
            self.rerouted = True
            args = args[:position]
            kwargs = {**kwargs, "generator": self.generator}
        return func(*args, **kwargs)


def routed(generator: torch.Generator | None) -> AbstractContextManager[Any]:
    """Inside, every random operation of torch on this thread draws from `generator` (None: no change)."""
    return nullcontext() if generator is None else RouteRandomness(generator)
