"""Messages between processes: what is in them is pickled, but for the tensors, which travel as they are."""

import io
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


class _Pickler(pickle.Pickler):
    """Hands out the tensors of a message and writes down what it is given for each."""

    def __init__(self, file: io.BytesIO, put: Callable[[Tensor], Any]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._put = put
        # With the tensors themselves, so that none of them takes another's number.
        self._places = dict[int, tuple[Any, Tensor]]()

    def persistent_id(self, item: Any) -> Any:
        # A parameter is pickled as what it is with a tensor, which comes here then.
        if not isinstance(item, Tensor) or isinstance(item, nn.Parameter) or item.layout != torch.strided:
            return None
        if item.numel() == 0:
            return None
        if id(item) not in self._places:
            axes = None if item.is_contiguous() else _axes_in_memory(item)
            laid = item.detach() if axes is None else item.detach().permute(axes)
            self._places[id(item)] = (self._put(laid), laid.dtype, laid.shape, axes), item
        return self._places[id(item)][0]


def _axes_in_memory(tensor: Tensor) -> tuple[int, ...]:
    """From the outermost to the innermost, so that channels that are last stay there."""
    return tuple(sorted(range(tensor.dim()), key=tensor.stride, reverse=True))


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, get: Callable[[Any, torch.dtype, torch.Size], Tensor]) -> None:
        super().__init__(file)
        self._get = get

    def persistent_load(self, place: tuple[Any, torch.dtype, torch.Size, tuple[int, ...] | None]) -> Tensor:
        *where, axes = place
        tensor = self._get(*where)
        return tensor if axes is None else tensor.permute([axes.index(axis) for axis in range(len(axes))])


def dump(message: Any, put: Callable[[Tensor], Any]) -> memoryview:
    """A message as bytes without the numbers of its tensors; `put` takes each tensor and says where it is."""
    written = io.BytesIO()
    _Pickler(written, put).dump(message)
    return written.getbuffer()


def load(content: bytes, get: Callable[[Any, torch.dtype, torch.Size], Tensor]) -> Any:
    """The inverse of `dump`: `get` has a tensor by its place, dtype and shape."""
    return _Unpickler(io.BytesIO(content), get).load()


class Packed(NamedTuple):
    """A message whose tensors are arrays of bytes, which Ray moves without pickling them."""

    content: bytes
    arrays: list[NDArray[np.uint8]]

    @classmethod
    def of(cls, message: Any) -> "Packed":
        arrays: list[NDArray[np.uint8]] = []

        def put(tensor: Tensor) -> tuple[int, str]:
            arrays.append(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
            return len(arrays) - 1, tensor.device.type

        return cls(bytes(dump(message, put)), arrays)

    def message(self) -> Any:
        """The message, with tensors of its own: the arrays may lie in memory that cannot be written to."""

        def get(place: tuple[int, str], dtype: torch.dtype, shape: torch.Size) -> Tensor:
            number, device = place
            return torch.from_numpy(self.arrays[number].copy()).view(dtype).view(shape).to(device)

        return load(self.content, get)
