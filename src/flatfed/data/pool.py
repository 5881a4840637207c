"""Samples that lie together: one client's, and those of all clients with the rows of each."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence, Sized
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from flatfed.core import random
from flatfed.core.errors import FlatfedError, first_line
from flatfed.core.tree import Tree, first_leaf, joined, map_tree, moved, stacked
from flatfed.data.samples import INTEGERS, Samples, all_ignored, checked_samples, has_label
from flatfed.data.validation import held_out_rows


class ClientData(NamedTuple):
    """One client's samples: `rows` of the pooled tensors, or all of them when `rows` is None."""

    inputs: Tree
    targets: Tree
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(first_leaf(self.inputs) if self.rows is None else self.rows)

    @property
    def device(self) -> torch.device:
        return first_leaf(self.inputs).device

    def batch(self, positions: Tensor) -> Samples:
        rows = positions if self.rows is None else self.rows.index_select(0, positions)
        return _chosen(self.inputs, rows), _chosen(self.targets, rows)

    def whole(self) -> Samples:
        """All samples, by themselves."""
        return self.batch(torch.arange(len(self), device=self.device))


def _chosen(tree: Tree, rows: Tensor) -> Tree:
    return map_tree(lambda tensor: _chosen_rows(tensor, rows), tree)


def _chosen_rows(samples: Tensor, rows: Tensor) -> Tensor:
    """Some samples. Whole ones are copied, where indexing with brackets would go number by number."""
    if samples.dim() == 4 and samples.is_contiguous(memory_format=torch.channels_last):
        return samples.permute(0, 2, 3, 1).index_select(0, rows).permute(0, 3, 1, 2)
    return samples.index_select(0, rows)


def stacked_batches(
    clients: Sequence[ClientData], positions: Sequence[Sequence[Tensor]]
) -> Iterator[Samples]:
    """Step by step the clients' batches as [C, B, …], from each client's positions of every step.

    All clients take the same number of steps, with batches of the same sizes. One gather a step when the
    samples are pooled.
    """
    inputs, targets, rows = clients[0]
    if rows is None or any(client.inputs is not inputs for client in clients):
        for step_positions in zip(*positions, strict=True):
            batches = [client.batch(own) for client, own in zip(clients, step_positions, strict=True)]
            step_inputs, step_targets = zip(*batches, strict=True)
            yield stacked(step_inputs), stacked(step_targets)
        return
    client_rows = [
        client.rows.index_select(0, torch.cat(list(own)))
        for client, own in zip(clients, positions, strict=True)
        if client.rows is not None
    ]
    for step in torch.stack(client_rows).split([len(own) for own in positions[0]], dim=1):
        flat = step.reshape(-1)
        yield (
            _unflattened(_chosen(inputs, flat), step.shape),
            _unflattened(_chosen(targets, flat), step.shape),
        )


def all_labelled(clients: Sequence[ClientData]) -> bool:
    """Whether no target of these clients is negative, as those are that losses leave out."""
    own = (targets if rows is None else _chosen_rows(targets, rows) for _, targets, rows in clients)
    return bool((torch.stack([targets.min() for targets in own]) >= 0).all())


def _unflattened(tree: Tree, shape: torch.Size) -> Tree:
    return map_tree(lambda tensor: tensor.unflatten(0, shape), tree)


class Pool:
    """Samples in two trees of tensors, and the row numbers of each client."""

    def __init__(
        self, name: str, inputs: Tree, targets: Tree, rows: Sequence[Sequence[int] | Tensor]
    ) -> None:
        if not isinstance(rows, Sized) or len(rows) == 0:
            raise FlatfedError(f"{name}: the list is empty; give at least one client's samples")
        try:
            numbers = [torch.as_tensor(own) for own in rows]
            sizes = torch.tensor([len(own) for own in numbers])
        except (TypeError, ValueError, RuntimeError, OverflowError) as error:
            raise FlatfedError(
                f"{name}: give each client's sample numbers as a list or tensor ({first_line(error)})"
            ) from None
        if (sizes == 0).any():
            number = int((sizes == 0).nonzero()[0])
            raise FlatfedError(
                f"{name}[{number}]: it has no samples; leave it out or split the data differently"
            )
        for number, own in enumerate(numbers):
            if own.dim() != 1 or own.dtype not in INTEGERS:
                raise FlatfedError(
                    f"{name}[{number}]: its sample numbers are {own.dtype} {list(own.shape)}; give a list of "
                    "whole numbers"
                )
        self.inputs, self.targets = checked_samples(name, (inputs, targets))
        # One flat tensor with offsets: a list of a million small tensors would cost a kilobyte each.
        self.rows = torch.cat([own.to(torch.int64) for own in numbers])
        self.offsets = F.pad(sizes.cumsum(0), (1, 0))
        count = len(first_leaf(self.inputs))
        for row in (int(self.rows.max()), int(self.rows.min())):
            if not 0 <= row < count:
                raise FlatfedError(f"{name}: sample number {row} is outside the data (0 … {count - 1})")
        labelled = has_label(self.targets)
        if not bool(labelled.all()):
            per_client = F.pad(labelled[self.rows].cumsum(0), (1, 0))[self.offsets].diff()
            if (per_client == 0).any():
                raise all_ignored(f"{name}[{int((per_client == 0).nonzero()[0])}]")

    @classmethod
    def joined(cls, name: str, clients: Sequence[Samples]) -> Pool:
        """The pool of each client's own (inputs, targets)."""
        if not isinstance(clients, Sequence):
            raise FlatfedError(f"{name}: give a list of (inputs, targets), one for each client")
        if not clients:
            raise FlatfedError(f"{name}: the list is empty; give at least one (inputs, targets)")
        first = checked_samples(f"{name}[0]", clients[0])
        checked = [first] + [
            checked_samples(f"{name}[{number}]", pair, first, "those of client 0")
            for number, pair in enumerate(clients[1:], 1)
        ]
        inputs, targets = map(joined, zip(*checked, strict=True))
        sizes = [len(first_leaf(own)) for own, _ in checked]
        return cls(name, inputs, targets, torch.arange(sum(sizes)).split(sizes))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def client_rows(self, number: int) -> Tensor:
        return self.rows[int(self.offsets[number]) : int(self.offsets[number + 1])]

    def client(self, number: int) -> ClientData:
        return ClientData(self.inputs, self.targets, self.client_rows(number))

    def hold_out(self, share: float, seed: int) -> tuple[Pool, Samples]:
        """The pool whose clients lack a share of the samples, and these; the others are not copied."""
        labels = self.targets
        classes = isinstance(labels, Tensor) and labels.dim() == 1 and labels.dtype in INTEGERS
        owners = torch.arange(len(self)).repeat_interleave(self.offsets.diff())
        chosen = held_out_rows(
            self.rows.cpu().numpy(),
            owners.numpy(),
            labels.cpu().numpy() if classes else None,
            share,
            random.numpy_generator(seed, "validation"),
        )
        held = torch.zeros(len(first_leaf(self.inputs)), dtype=torch.bool)
        held[torch.from_numpy(chosen)] = True
        # A client keeps one sample to train on, which must have a label.
        rows, labelled = self.rows.cpu(), has_label(self.targets).cpu()
        useful = labelled.expand(len(held))[rows]
        trained = F.pad((useful & ~held[rows]).cumsum(0), (1, 0))[self.offsets].diff()
        for client in (trained == 0).nonzero().flatten().tolist():
            span = slice(int(self.offsets[client]), int(self.offsets[client + 1]))
            held[rows[span][useful[span]][0]] = False
        if not bool(held.any()):
            raise FlatfedError(
                f"validation = {share:g}: of {len(rows)} samples of {len(self)} clients, who keep one each, "
                "that is none; raise it or give the clients more samples"
            )
        kept, smaller = ~held[rows], copy.copy(self)
        smaller.rows = self.rows[kept.to(self.rows.device)]
        smaller.offsets = F.pad(kept.cumsum(0), (1, 0))[self.offsets]
        numbers = held.nonzero().flatten().to(self.rows.device)
        return smaller, (_chosen(self.inputs, numbers), _chosen(self.targets, numbers))

    def to(self, device: torch.device) -> Pool:
        other = copy.copy(self)
        other.inputs, other.targets = moved((self.inputs, self.targets), device)
        other.rows = self.rows.to(device)
        return other
