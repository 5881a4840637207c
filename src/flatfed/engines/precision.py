"""Which numbers a model and its loss are computed in; flat vectors and all algebra keep the model's own.

With "bfloat16", torch's autocast decides by operation: matrix products and convolutions take bfloat16, losses
and what else would suffer stays in float32. "float32" leaves the model in the dtype of its parameters, and so
does "tf32", with which CUDA rounds what it multiplies (`devices.set_products`).
"""

import faulthandler
import functools
import multiprocessing
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flatfed.core.errors import FlatfedError
from flatfed.core.settings import Precision
from flatfed.core.tree import map_tree
from flatfed.engines.processes import can_fork

PROBE_SECONDS = 60.0
_FAST_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}
"""Of x86's and ARM's processors that multiply in bfloat16 by themselves."""


def computing_in(precision: Precision, device: torch.device) -> AbstractContextManager[Any]:
    """The context of a forward pass and its loss; the backward pass follows from what it recorded."""
    if precision != "bfloat16":
        return nullcontext()
    return torch.autocast(device.type, dtype=torch.bfloat16)


def widened(precision: Precision, tree: Any) -> Any:
    """Outputs or a loss as others work with them: the same numbers in float32, where autocast was at work."""
    if precision != "bfloat16":
        return tree
    return map_tree(_widened, tree)


def _widened(leaf: Any) -> Any:
    return leaf.float() if isinstance(leaf, Tensor) and leaf.dtype == torch.bfloat16 else leaf


def check_precision(precision: Precision, dtype: torch.dtype, device: torch.device) -> None:
    """Refuses what autocast would leave alone, and processors that would end the program."""
    if precision == "float32":
        return
    if dtype != torch.float32:
        raise FlatfedError(
            f"precision = {precision!r}: the model's parameters are {dtype}, and only float32 "
            "ones are computed with in less; convert the model by model.float(), or use precision = 'float32'"
        )
    if precision == "tf32":
        if device.type != "cuda":
            raise FlatfedError(f"precision = 'tf32': the device {device.type!r} has none; use 'float32'")
        return
    if not torch.amp.is_autocast_available(device.type):
        raise FlatfedError(
            f"precision = {precision!r}: torch has none on the device {device.type!r}; use 'float32'"
        )
    if device.type == "cpu" and "amx_bf16" in processor_flags() and (ended := _amx_failure()) is not None:
        raise FlatfedError(
            f"precision = {precision!r}: this machine lists AMX, but a matrix product in it ended with "
            f"{ended}; set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16 before Python starts, or use 'float32'"
        )


def slow_precision(precision: Precision, device: str) -> str | None:
    """Why nothing is gained on this machine, if that is so; where flags cannot be seen, nothing is said."""
    flags = processor_flags()
    if precision != "bfloat16" or not device.startswith("cpu") or not flags or flags & _FAST_FLAGS:
        return None
    return (
        f"precision = {precision!r}: this machine's processor has neither avx512_bf16 nor amx_bf16, so "
        "training is no faster than with 'float32', and less exact"
    )


@functools.cache
def processor_flags() -> frozenset[str]:
    """What the first processor says that it can do; nothing where the system has no /proc/cpuinfo."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return frozenset()
    flags = (line.partition(":")[2] for line in lines if line.lower().startswith(("flags", "features")))
    return frozenset(next(flags, "").split())


@functools.cache
def _amx_failure() -> str | None:
    """How a small product ends in a process of its own: virtual machines may list AMX without having it."""
    return failure_of(_small_products)


def failure_of(work: Callable[[], None]) -> str | None:
    """By which signal or code a fork of this process ends that does some work; None if all is well,
    or where processes cannot be forked.
    """
    if not can_fork():
        return None

    def quietly() -> None:
        faulthandler.disable()  # a crash is an answer here, not news
        work()

    process = multiprocessing.get_context("fork").Process(target=quietly, daemon=True)
    process.start()
    process.join(PROBE_SECONDS)
    if process.exitcode is None:
        process.kill()
        process.join()
        return "no answer"
    if process.exitcode < 0:
        return signal.Signals(-process.exitcode).name
    return None if process.exitcode == 0 else f"code {process.exitcode}"


def _small_products() -> None:
    torch.set_num_threads(1)
    matrix = torch.ones(256, 256, dtype=torch.bfloat16)
    torch.nn.functional.linear(matrix, matrix)
    torch.bmm(matrix[None], matrix[None])
