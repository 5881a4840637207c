"""What of a model is shared, and what every client keeps to itself.

To the server a private parameter is what a frozen one is: it keeps its first value and is in no vector that
the server keeps, sends or receives. Parts and compressors therefore see the shared entries alone, as if they
were the model. Only a client's worker puts them together with the client's private entries, which are vectors
of the client's state like any others.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.core.flat import Entry, Layout
from flatfed.core.part import ServerTask, part_name
from flatfed.core.settings import Sharing
from flatfed.core.state import Dimensions, State, Vectors, initial_state

PRIVATE_MODEL, PRIVATE_BUFFERS = "private.model", "private.buffers"
"""The keys of a client's own entries and buffers in its state; what its optimizer remembers of them is there
under private.PART.NAME."""
NORMALISATIONS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


class KeptBuffer(NamedTuple):
    """A buffer that clients keep, which lies in their state among numbers of the model's dtype."""

    name: str
    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class Division:
    """Which parameters and buffers of a model are shared and which are private."""

    shared: Layout
    private: Layout
    whole: Layout
    """All that clients train, the shared entries first."""
    private_buffers: tuple[KeptBuffer, ...] = ()
    stationary: frozenset[str] = frozenset()
    """The buffers that do not travel."""
    evaluating: tuple[str, ...] = ()
    """The modules that stay in evaluation mode while clients train."""
    recomputed: tuple[str, ...] = ()
    """The modules whose statistics the server makes by itself."""

    @property
    def personal(self) -> bool:
        """Whether every client has a model of its own."""
        return bool(self.private.entries or self.private_buffers)

    def joined(self, shared: Tensor, private: Tensor) -> Tensor:
        """The whole vector of shared and private entries, which both are [..., n]."""
        return torch.cat([shared, private], -1) if self.private.entries else shared

    def travelling(self, buffers: State) -> State:
        return {name: value for name, value in buffers.items() if name not in self.stationary}

    def packed(self, buffers: State) -> Tensor:
        """The buffers that a client keeps as one vector."""
        pieces = []
        for name, _, dtype in self.private_buffers:
            value = buffers[name].reshape(-1)
            pieces.append(value.to(self.whole.dtype))
            if not torch.equal(pieces[-1].to(dtype), value):
                raise FlatfedError(
                    f"sharing: the buffer {name!r} of {dtype} holds numbers that {self.whole.dtype} cannot "
                    "hold, as which clients keep their own; keep it in the model's dtype"
                )
        return torch.cat(pieces)

    def unpacked(self, vector: Tensor) -> Vectors:
        """The inverse of `packed`."""
        pieces = vector.split([shape.numel() for _, shape, _ in self.private_buffers])
        return {
            name: piece.to(dtype).view(shape)
            for piece, (name, shape, dtype) in zip(pieces, self.private_buffers, strict=True)
        }


def divided(model: nn.Module, sharing: Sharing) -> Division:
    """How a policy divides a model; one that fits nothing of it is refused."""
    everything = Layout(model)
    if sharing == Sharing():
        return Division(everything, Layout.of((), everything.dtype), everything)
    kinds = {name: part for name, part in model.named_modules() if isinstance(part, NORMALISATIONS)}
    policy = sharing.normalisation
    if policy != "average" and not kinds:
        raise FlatfedError(
            f"sharing.normalisation = {policy!r}: the model has no normalisation layers of torch's; use "
            "average, or name the layers in sharing.private"
        )
    normalising = [f"{name}.*" if name else "*" for name in kinds]
    entries = list(everything.entries)
    buffers = dict(model.named_buffers())
    stationary: set[str] = set()
    if policy == "frozen":
        entries = [entry for entry in entries if not matches(entry.name, normalising)]
        stationary = {name for name in buffers if matches(name, normalising)}
        if not entries:
            raise FlatfedError(
                "sharing.normalisation = 'frozen': the model has no other trainable parameters; use average"
            )
    names = [*(entry.name for entry in entries), *(name for name in buffers if name not in stationary)]
    for pattern in sharing.private:
        if not any(matches(name, [pattern]) for name in names):
            raise FlatfedError(
                f"sharing.private = {pattern!r}: the model trains nothing of that name; "
                f"{did_you_mean(pattern, {name.partition('.')[0] for name in names})}"
            )
    patterns = [*sharing.private, *(normalising if policy == "local" else ())]
    private = [entry for entry in entries if matches(entry.name, patterns)]
    shared = [entry for entry in entries if entry not in private]
    kept = [
        KeptBuffer(name, value.shape, value.dtype)
        for name, value in buffers.items()
        if name not in stationary and matches(name, patterns)
    ]
    recomputed = _with_statistics(kinds) if policy == "recompute" else ()
    stationary |= {kept_name for kept_name, _, _ in kept}
    stationary |= {name for name in buffers if matches(name, [f"{module}.*" for module in recomputed])}

    def layout(entries: Iterable[Entry]) -> Layout:
        return Layout.of(entries, everything.dtype)

    return Division(
        shared=layout(shared),
        private=layout(private),
        whole=layout([*shared, *private]),
        private_buffers=tuple(kept),
        stationary=frozenset(stationary),
        evaluating=tuple(kinds) if policy == "frozen" else (),
        recomputed=recomputed,
    )


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a name, or that of a module around it, fits one of the patterns."""
    return any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*") for pattern in patterns)


def _with_statistics(normalising: Mapping[str, nn.Module]) -> tuple[str, ...]:
    # Statistics of other kinds of layers cannot be the mean over batches.
    batch_norm = nn.modules.batchnorm._BatchNorm
    names = tuple(
        name
        for name, part in normalising.items()
        if isinstance(part, batch_norm) and part.running_mean is not None
    )
    if not names:
        raise FlatfedError(
            'sharing.normalisation = "recompute": the model has no BatchNorm with running statistics; use '
            "average"
        )
    return names


def private_state(division: Division, algorithm: Algorithm, model: nn.Module) -> Vectors:
    """What a client keeps of its own before it first takes part, by key."""
    state: Vectors = {}
    if division.private.entries:
        first = division.private.vector(model)
        dimensions = Dimensions(division.private.size, (), tensors=len(division.private.entries))
        remembered = initial_state(algorithm.alone.client_vectors, dimensions, first)
        state = {PRIVATE_MODEL: first, **{f"private.{key}": value for key, value in remembered.items()}}
    if division.private_buffers:
        state[PRIVATE_BUFFERS] = division.packed(dict(model.named_buffers()))
    return state


def check_sharing(division: Division, algorithm: Algorithm) -> None:
    """Refuses algorithms whose server would need what it does not have."""
    for part in algorithm.parts:
        if isinstance(part, ServerTask) and division.personal:
            raise FlatfedError(
                f"sharing: {part_name(part)} makes samples for the whole model on the server, which does not "
                "have the private part of it; share everything, or use another algorithm"
            )
