"""A model as one flat vector.

`Layout` says where each trainable parameter sits in the vector. Weights of 2-D convolutions are stored in
output-height-width-input order, so that a view of the vector is a channels-last weight without a copy.
`BoundModel` is a module whose parameters are views of whatever vector it was last pointed at.

Parameters with `requires_grad=False` stay as they are: they are neither trained nor sent.

Buffers (the running statistics of BatchNorm) are not part of the vector. Each client starts a round from
the server's buffers; the server adds the mean of the clients' changes, with the weights it uses for the
model. Whole-number buffers are rounded after that; a buffer that no client changes stays bit for bit. Only
the first evaluation of a local step moves them, so a sharpness-aware step counts its batch once, at the
point where it first looks at it.

`length` and `unit` are exact for vectors of any size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from flatfed.core.errors import FlatfedError, shown

Loss = Callable[[Any, Any], Tensor]
"""Of a model's outputs and the targets, each as it is: a tensor, or a container of tensors."""


@dataclass(frozen=True)
class Entry:
    """One parameter's place in the vector."""

    name: str
    shape: torch.Size
    size: int


class Layout:
    """Where every trainable parameter of a module sits in the flat vector."""

    def __init__(self, module: nn.Module) -> None:
        parameters = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
        if not parameters:
            raise FlatfedError("model: it has no trainable parameters; set requires_grad on some of them")
        dtypes = {value.dtype for _, value in parameters}
        if len(dtypes) > 1:
            raise FlatfedError(f"model: parameters have several dtypes {sorted(map(str, dtypes))}; use one")
        self._place([Entry(name, value.shape, value.numel()) for name, value in parameters], dtypes.pop())

    @classmethod
    def of(cls, entries: Iterable[Entry], dtype: torch.dtype) -> Layout:
        """That of some parameters in this order, or of none."""
        layout = cls.__new__(cls)
        layout._place(entries, dtype)
        return layout

    def _place(self, entries: Iterable[Entry], dtype: torch.dtype) -> None:
        self.entries, self.dtype = tuple(entries), dtype
        self.sizes = [entry.size for entry in self.entries]
        self.size = sum(self.sizes)
        self.channels_last = any(len(entry.shape) == 4 for entry in self.entries)

    def views(self, vector: Tensor) -> dict[str, Tensor]:
        """The named parameters as views of a flat vector [P]."""
        pieces = vector.split(self.sizes) if self.entries else ()
        return {
            entry.name: _unfold(entry.shape, piece) for entry, piece in zip(self.entries, pieces, strict=True)
        }

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """The inverse of `views`: tensors in the layout's order become one vector [P]."""
        if not tensors:
            return torch.empty(0, dtype=self.dtype)
        return torch.cat([_fold(tensor) for tensor in tensors])

    def vector(self, module: nn.Module) -> Tensor:
        """A copy of a module's trainable parameters as one vector [P]."""
        parameters = dict(module.named_parameters())
        return self.pack([parameters[entry.name].detach() for entry in self.entries])

    def tensor_means(self, vectors: Tensor) -> Tensor:
        """The mean over every parameter: [..., P] → [..., tensors]."""
        if not self.entries:
            return vectors[..., :0]
        pieces = vectors.split(self.sizes, -1)
        return torch.stack([piece.sum(-1) if piece.numel() == 0 else piece.mean(-1) for piece in pieces], -1)

    def spread(self, means: Tensor) -> Tensor:
        """Every parameter filled with one number: [..., tensors] → [..., P]."""
        if not self.entries:
            return means[..., :0]
        pieces = [
            mean.expand(*mean.shape[:-1], size)
            for mean, size in zip(means.split(1, -1), self.sizes, strict=True)
        ]
        return torch.cat(pieces, -1)

    def weight_entries(self, device: torch.device, minimum_dimensions: int = 0) -> Tensor:
        """[P] booleans: the entries of parameters whose name contains "weight" (ASAM scales these)."""
        chosen = ["weight" in entry.name and len(entry.shape) >= minimum_dimensions for entry in self.entries]
        pieces = [
            torch.full((size,), scaled, device=device)
            for size, scaled in zip(self.sizes, chosen, strict=True)
        ]
        return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.bool, device=device)


def _unfold(shape: torch.Size, piece: Tensor) -> Tensor:
    if len(shape) != 4:
        return piece.view(shape)
    outputs, inputs, height, width = shape
    return piece.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def _fold(tensor: Tensor) -> Tensor:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    return (dense.permute(0, 2, 3, 1) if dense.dim() == 4 else dense).reshape(-1)


def load_vector(module: nn.Module, layout: Layout, vector: Tensor) -> None:
    """Copies a flat vector into a module's own parameters."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for name, view in layout.views(vector).items():
            parameters[name].copy_(view)


def model_to_vector(module: nn.Module) -> Tensor:
    """A copy of a module's trainable parameters as the flat vector [P] that training and callbacks work with.

    Not what torch's `parameters_to_vector` gives: convolutions are stored in another order.
    """
    return Layout(module).vector(module)


def vector_to_model(vector: Tensor, module: nn.Module) -> None:
    """Copies a flat vector [P], such as `Progress.server["model"]`, into a module's trainable parameters."""
    for name, value, kind in (("vector", vector, Tensor), ("module", module, nn.Module)):
        if not isinstance(value, kind):
            raise FlatfedError(f"{name} = {shown(value)}: give a torch {kind.__name__}")
    layout = Layout(module)
    if vector.shape != (layout.size,):
        raise FlatfedError(
            f"vector: its shape is {list(vector.shape)}; give the model's {layout.size} trainable numbers"
        )
    load_vector(module, layout, vector)


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.named_buffers()}


def load_buffers(module: nn.Module, buffers: Mapping[str, Tensor]) -> None:
    own = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in buffers.items():
            own[name].copy_(value)


def buffer_change(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a client's training did to its buffers; exactly zero where nothing changed, infinities too."""
    changes = {}
    for name, value in before.items():
        if value.is_complex() and not torch.equal(value, after[name]):
            raise FlatfedError(f"model: its buffer {name!r} is complex and changes, which cannot be averaged")
        if value.dtype != torch.bool:
            pair = (value, after[name])
            # Small and unsigned whole numbers have no room for every difference.
            old, new = pair if value.is_floating_point() else (tensor.real.long() for tensor in pair)
            changes[name] = torch.where(new == old, 0, new - old).to(torch.float64)
    return changes


def apply_buffer_change(buffers: Mapping[str, Tensor], mean: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The server's buffers after a round; booleans never change."""
    changed = dict(buffers)
    for name, change in mean.items():
        value = buffers[name]
        moved = change if value.is_floating_point() else change.round()
        changed[name] = torch.where(change == 0, value, (value + moved).to(value.dtype))
    return changed


def all_finite(values: Tensor) -> bool:
    """Whether there is no infinity and no NaN among them."""
    # Either spoils the sum, which is the cheapest thing to look at; so does the sum of huge numbers.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def no_longer_finite(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> str | None:
    """The first buffer that lost finite numbers; one that had others before, as masks do, may keep them."""
    for name, value in before.items():
        if not bool((torch.isfinite(after[name]) | ~torch.isfinite(value)).all()):
            return name
    return None


class BoundModel:
    """A copy of a module of its own, whose parameters are views of the vector it was last bound to.

    Parameters that the layout leaves out never change: all copies on the module's own device have the same
    ones. `evaluating` are the names of submodules that stay in evaluation mode.
    """

    def __init__(
        self, module: nn.Module, layout: Layout, device: torch.device, evaluating: Iterable[str] = ()
    ) -> None:
        names = {entry.name for entry in layout.entries}
        constant = [
            value for name, value in module.named_parameters() if name not in names and value.device == device
        ]
        self.module = copy.deepcopy(module, {id(value): value for value in constant}).to(device)
        self.layout = layout
        own = dict(self.module.named_parameters())
        self.parameters = [own[entry.name] for entry in layout.entries]
        self._evaluating = [self.module.get_submodule(name) for name in evaluating]
        self._address: int | None = None

    def train(self, mode: bool = True) -> None:
        """As the module's own, but for what stays in evaluation mode."""
        self.module.train(mode)
        for part in self._evaluating:
            part.eval()

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The buffers as they are now; a module may replace them as well as change them."""
        return dict(self.module.named_buffers())

    def bind(self, vector: Tensor) -> None:
        """Makes the parameters views of `vector` [P]; free when they already are.

        The parameters keep the vector's memory alive, so its address cannot be handed out again meanwhile.
        """
        if vector.data_ptr() == self._address:
            return
        for parameter, view in zip(self.parameters, self.layout.views(vector).values(), strict=True):
            parameter.data = view
        self._address = vector.data_ptr()


def length(vector: Tensor) -> Tensor:
    """‖v‖ over the last axis, kept; also where squares are too small or too large for the dtype."""
    if vector.device.type != "cpu":
        return scaled_length(vector)
    norm = torch.linalg.vector_norm(vector, dim=-1, keepdim=True)
    limits = torch.finfo(vector.dtype)
    # So small that squares which were too small to count may be missing, or no number at all.
    doubtful = (norm < (vector.shape[-1] * limits.tiny / limits.eps) ** 0.5) | ~torch.isfinite(norm)
    if bool(doubtful.any()):
        # Divided by a power of 2, which is exact.
        scale = torch.exp2(torch.frexp(vector.abs().amax(-1, keepdim=True).double()).exponent.double())
        scaled = torch.linalg.vector_norm(vector / scale, dim=-1, keepdim=True, dtype=torch.float64)
        norm = torch.where(doubtful, (scaled * scale).to(norm.dtype), norm)
    return norm


def scaled_length(vector: Tensor) -> Tensor:
    """`length` without a look at the numbers, for which the host would have to wait for an accelerator."""
    largest = vector.abs().amax(-1, keepdim=True)
    whole = largest if largest.dtype.itemsize >= 4 else largest.float()
    # A power of 2 near the largest number, and 1 for a vector of zeros.
    scale = torch.exp2(torch.frexp(whole).exponent.sub(1).to(whole.dtype)).to(vector.dtype)
    scale = torch.where((largest > 0) & torch.isfinite(largest), scale, 1)
    return torch.linalg.vector_norm(vector / scale, dim=-1, keepdim=True) * scale


def unit(vector: Tensor) -> Tensor:
    """v / ‖v‖ over the last axis, and 0 where v = 0."""
    return vector / divisor(vector)


def divisor(vector: Tensor) -> Tensor:
    """What to divide vectors by to give them length 1: ‖v‖ over the last axis, kept, and 1 where v = 0."""
    norm = length(vector)
    return torch.where(norm > 0, norm, 1).clamp(max=torch.finfo(vector.dtype).max)
