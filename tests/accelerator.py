"""An accelerator that is not there: every tensor on it is one of torch's meta tensors, which have no numbers.

torch's own fake tensors would do for the algebra, but without a GPU they cannot be differentiated. Whatever a
program does with an accelerator's tensors that needs the host, or another device, is seen here:

- a tensor left on the CPU is refused where it meets one of the accelerator (single numbers may, as on CUDA);
- what travels up or down is noted, with the function of flatfed that sent it;
- where the host waits for numbers (`item`, `bool`, `float`, `tolist`, `equal`, shapes that depend on numbers)
  that is noted too, and numbers are made up, so that the program can go on.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flatfed
from flatfed.data import samples, transform
from flatfed.engines import planning, threads, worker

DEVICE = torch.device("meta")
PACKAGE = Path(flatfed.__file__).parent
_PASSED_THROUGH = {"core/tree.py", "core/random.py"}
aten = torch.ops.aten
_INDEXED = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index, aten._index_put_impl_}
_MAKES_TENSORS = {torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor}


class _HostGenerator(torch.Generator):
    """In place of an accelerator's own, which torch has none of without it."""

    def __new__(cls, device: Any = "cpu") -> _HostGenerator:
        return super().__new__(cls)


class Event(NamedTuple):
    """Something for which the accelerator and the host need each other."""

    kind: str
    """"up", "down" or "wait"."""
    file: str
    function: str


class NotThere(RuntimeError):
    """What an accelerator would refuse, or what cannot go on without numbers."""


class Accelerator(TorchDispatchMode):
    """Notes what happens; `number` is the floating-point number that the host reads wherever it waits."""

    def __init__(self, number: float = 0.5, count: int = 1, flag: bool = True) -> None:
        super().__init__()
        self.number, self.count, self.flag = number, count, flag
        self.outside: Counter[Event] = Counter()
        self.in_steps: Counter[Event] = Counter()
        """What happened before and after local steps, and in them."""
        self._stepping = False

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if packet is aten._to_copy:
            return self._moved(func, args, kwargs)
        if packet is aten.copy_:
            return self._copied(func, args, kwargs)
        if not any(tensor.is_meta for tensor in tensors):
            return func(*args, **kwargs)
        if packet is aten._local_scalar_dense:
            self.note("wait")
            return self._answer(args[0].dtype)
        if packet is aten.equal:
            self.note("wait")
            return True
        if packet in _INDEXED:
            args = self._indexed(args)
        elif torch.Tag.dynamic_output_shape in func.tags and kwargs.get("output_size") is None:
            self.note("wait")
            raise NotThere(f"{func}: the host would have to wait for a shape")
        elif any(not tensor.is_meta and tensor.dim() for tensor in tensors):
            raise NotThere(f"{func}: one tensor is on the CPU and another on the accelerator")
        if "generator" in kwargs:
            kwargs = {**kwargs, "generator": None}
        return func(*_without_generators(args), **kwargs)

    def note(self, kind: str) -> None:
        events = self.in_steps if self._stepping else self.outside
        events[Event(kind, *_caller())] += 1

    def watched_steps(self, client_round: Callable[..., Any]) -> Callable[..., Any]:
        """The same `client_round`, whose steps last from the first oracle that it takes to the end of all."""

        def steps(oracles: Iterable[Any]) -> Iterator[Any]:
            self._stepping = True
            try:
                yield from oracles
            finally:
                self._stepping = False

        return lambda algorithm, context, oracles, *rest: client_round(
            algorithm, context, steps(oracles), *rest
        )

    def _answer(self, dtype: torch.dtype) -> bool | int | float:
        if dtype == torch.bool:
            return self.flag
        # A model is compared with itself when it is first tried, and is the same.
        tried = _caller()[1] == "_matrix_obstacle"
        return (0.0 if tried else self.number) if dtype.is_floating_point else self.count

    def _moved(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        source, target = args[0], torch.device(kwargs.get("device") or args[0].device)
        if source.device == target:
            return func(*args, **kwargs)
        self.note("up" if target == DEVICE else "down")
        if target == DEVICE:
            return func(*args, **kwargs)
        return self._numbers(source.shape, kwargs.get("dtype") or source.dtype)

    def _numbers(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, self._answer(dtype), dtype=dtype)

    def _copied(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        target, source, *_ = args
        if target.device == source.device:
            return func(*args, **kwargs)
        self.note("up" if target.device == DEVICE else "down")
        if target.device != DEVICE:
            target.fill_(self._answer(target.dtype))
        return target

    def _indexed(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """With all indices on the accelerator, where torch would bring them."""
        self_, indices, *others = args
        moved = []
        for index in indices:
            if index is not None and index.dtype in {torch.bool, torch.uint8}:
                self.note("wait")
                raise NotThere("index: the host would have to wait for the number of chosen elements")
            if index is not None and not index.is_meta and index.dim():
                self.note("up")
                moved.append(index.to(DEVICE))
            else:
                moved.append(index)
        return self_, moved, *others


def _without_generators(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(None if isinstance(argument, torch.Generator) else argument for argument in args)


class _Literals(TorchFunctionMode):
    """Notes tensors that are made of numbers of the host; torch does that out of sight of dispatch modes."""

    def __init__(self, accelerator: Accelerator) -> None:
        super().__init__()
        self.accelerator = accelerator

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        if func in _MAKES_TENSORS and isinstance(made, Tensor) and made.is_meta:
            given = args[1] if func is Tensor.new_tensor else args[0]
            if not isinstance(given, Tensor):
                self.accelerator.note("up")
        return made


def _caller() -> tuple[str, str]:
    """The innermost function of flatfed: its file there, and its name."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            file = path.relative_to(PACKAGE).as_posix()
            if file not in _PASSED_THROUGH:
                return file, frame.f_code.co_qualname.partition(".<locals>")[0]
        frame = frame.f_back
    return "", ""


class _AtOnce:
    """In place of a pool of threads, which would not see the modes of this one."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        pass

    def submit(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(work(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future

    def shutdown(self, **options: Any) -> None:
        pass


@contextmanager
def pretended(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> Iterator[Accelerator]:
    """The accelerator as the device "cuda" of every training inside, and what it has seen."""
    with monkeypatch.context() as patch:
        patch.setattr(
            planning, "usable_device", lambda name: DEVICE if name == "cuda" else torch.device(name)
        )
        patch.setattr(torch, "Generator", _HostGenerator)
        patch.setattr(samples, "_check_tensors", lambda *arguments: None)  # which refuses meta tensors
        patch.setattr(threads, "ThreadPoolExecutor", _AtOnce)
        transform._pixels.cache_clear()
        accelerator = Accelerator(**answers)
        patch.setattr(worker, "client_round", accelerator.watched_steps(worker.client_round))
        with accelerator, _Literals(accelerator):
            yield accelerator
