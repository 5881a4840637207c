"""Clients and their data.

A federation holds pooled samples and, for each client, which of them are its own; or it loads a client's
data on demand, so that a population may be far larger than memory. Inputs and targets are tensors
[samples, …] or trees of such (`core.tree`): tuples, dictionaries or dataclasses.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import Dataset

from flatfed.core import random
from flatfed.core.errors import FlatfedError, first_line, shown
from flatfed.core.tree import (
    Tree,
    cloned,
    first_leaf,
    joined,
    map_tree,
    stacked,
)
from flatfed.core.types import plain
from flatfed.data.samples import (
    INTEGERS,
    Samples,
    all_ignored,
    as_tensors,
    checked_samples,
    copied_samples,
    has_label,
)
from flatfed.data.transform import AsStored, Transform
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


def _unflattened(tree: Tree, shape: torch.Size) -> Tree:
    return map_tree(lambda tensor: tensor.unflatten(0, shape), tree)


def _moved(samples: Samples, device: torch.device) -> Samples:
    return map_tree(lambda tensor: tensor.to(device), samples)


class Federation(ABC):
    """Clients numbered 0 … N−1, their data, and data of the whole to test and to choose settings by.

    Samples are as stored; `transform` makes them what the model sees.
    """

    test: Samples | None
    validation: Samples | None = None
    transform: Transform = AsStored()
    classes: int | None = None  # where known
    total_samples: int | None = None  # of all clients together, where known without loading them
    common_size: int | None = None  # the number of samples of each client, if known and the same for all

    @abstractmethod
    def __len__(self) -> int:
        """The number of clients."""

    @abstractmethod
    def client(self, number: int) -> ClientData: ...

    @abstractmethod
    def to(self, device: torch.device) -> Federation: ...

    def client_test(self, number: int) -> ClientData | None:
        """Test data that look like this client's own, where there are any."""
        return None

    def tensors(self) -> list[Tree] | None:
        """All clients' data, to tell one federation from another; None if that would mean loading them."""
        return None

    @property
    def evaluated(self) -> dict[str, Samples]:
        """What global models are evaluated on, by the name that it has in histories."""
        samples = {"test": self.test, "validation": self.validation}
        return {name: pair for name, pair in samples.items() if pair is not None}

    def with_validation(self, validation: float | Samples, seed: int = 0) -> Self:
        """This federation with validation samples, to choose settings by without looking at the test data.

        A share, such as 0.1, of the clients' samples is held out: of every class and every client alike, the
        same samples under the same seed, and no client trains on them. Each client keeps at least one
        sample. Or give (inputs, targets) of your own, which are copied.
        """
        if self.validation is not None:
            raise FlatfedError(
                f"validation = {shown(validation)}: there are validation samples already; give them only once"
            )
        changed = copy.copy(self)
        if isinstance(validation, tuple | list):
            inputs, targets, _ = self.client(0)
            changed.validation = cloned(checked_samples("validation", validation, (inputs, targets)))
        elif isinstance(share := plain(validation), float) and 0 < share < 1:
            changed.validation = changed._hold_out(share, seed)
        else:
            raise FlatfedError(
                f"validation = {shown(validation)}: give a share, more than 0 and less than 1, or (inputs, "
                "targets)"
            )
        return changed

    def _hold_out(self, share: float, seed: int) -> Samples:
        """Takes a share of the samples away from the clients."""
        raise FlatfedError(
            f"validation = {share:g}: the clients' data are not all in memory to choose from; give (inputs, "
            "targets)"
        )

    @staticmethod
    def from_tensors(
        clients: Sequence[Samples],
        test: Samples | None = None,
        client_tests: Sequence[Samples] | None = None,
    ) -> PooledFederation:
        """A federation from each client's (inputs, targets), and from each one's own test samples.

        Both are tensors or arrays [samples, …], or tuples, dictionaries or dataclasses of such. Everything is
        copied: later changes of the tensors do not reach the federation, nor its work them.
        """
        tests = None if client_tests is None else Pool.joined("client_tests", client_tests)
        return PooledFederation(Pool.joined("clients", clients), copied_samples(test), client_tests=tests)

    @staticmethod
    def from_dataset(
        dataset: Dataset[Any] | Sequence[Any],
        indices: Sequence[Sequence[int]],
        test: Dataset[Any] | Samples | Sequence[Any] | None = None,
        client_tests: Sequence[Sequence[int]] | None = None,
        collate: Callable[[list[Any]], Samples] | None = None,
    ) -> PooledFederation:
        """A federation from a map-style dataset of (input, target) and each client's sample numbers.

        `client_tests` are the numbers of each client's samples in `test`; clients may share them. The dataset
        is read once and copied; random transforms in it are therefore drawn once, and later changes of it do
        not reach the federation.

        `collate` makes (inputs, targets) of a list of samples of any kind, for instance by padding sequences
        to the longest. It is called once, with the samples of the dataset and behind them those of `test`
        (unless that is a tuple of inputs and targets), so that all are padded alike.
        """
        samples, test_samples = as_tensors(dataset, collate, test)
        pool = Pool("clients", *samples, indices)
        if client_tests is None:
            return PooledFederation(pool, test_samples)
        if test_samples is None:
            raise FlatfedError("client_tests: they are sample numbers of the test data; give test as well")
        tests = Pool("client_tests", *checked_samples("test", test_samples), client_tests)
        return PooledFederation(pool, test_samples, client_tests=tests)

    @staticmethod
    def from_function(
        clients: int,
        load: Callable[[int], Samples],
        test: Samples | None = None,
        client_tests: Callable[[int], Samples] | None = None,
    ) -> LoadedFederation:
        """A federation whose clients' data are loaded when they take part; `load(client)` must be pure.

        Workers may be forked processes: open files (of h5py, say) inside `load`, not before the training.
        `client_tests(client)` loads a client's own test samples in the same way. What it returns is used as
        it is and never changed; `test` is copied.
        """
        return LoadedFederation(clients, load, copied_samples(test), client_tests)


class Pool:
    """Samples in two trees of tensors, and the row numbers of each client."""

    def __init__(
        self, name: str, inputs: Tree, targets: Tree, rows: Sequence[Sequence[int] | Tensor]
    ) -> None:
        if len(rows) == 0:
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
        moved = copy.copy(self)
        moved.inputs, moved.targets = _moved((self.inputs, self.targets), device)
        moved.rows = self.rows.to(device)
        return moved


class PooledFederation(Federation):
    """A federation whose clients' samples, and test samples if they have some, are all in memory."""

    total_samples: int

    def __init__(
        self,
        pool: Pool,
        test: Samples | None = None,
        transform: Transform = AsStored(),  # noqa: B008 (frozen)
        classes: int | None = None,
        client_tests: Pool | None = None,
    ) -> None:
        self.client_tests = client_tests
        self._use(pool)
        self.test = None if test is None else checked_samples("test", test, (pool.inputs, pool.targets))
        self.transform, self.classes = transform, classes
        if client_tests is not None:
            if len(client_tests) != len(pool):
                raise FlatfedError(
                    f"client_tests: there are {len(client_tests)} for {len(pool)} clients; give one for each"
                )
            samples = (client_tests.inputs, client_tests.targets)
            checked_samples("client_tests", samples, (pool.inputs, pool.targets))

    def _use(self, pool: Pool) -> None:
        self.pool, sizes = pool, pool.offsets.diff()
        self.total_samples = len(pool.rows)
        self.common_size = int(sizes[0]) if bool((sizes == sizes[0]).all()) else None

    def _hold_out(self, share: float, seed: int) -> Samples:
        pool, samples = self.pool.hold_out(share, seed)
        self._use(pool)
        return samples

    def __len__(self) -> int:
        return len(self.pool)

    def client(self, number: int) -> ClientData:
        return self.pool.client(number)

    def client_test(self, number: int) -> ClientData | None:
        return None if self.client_tests is None else self.client_tests.client(number)

    @property
    def inputs(self) -> Tree:
        return self.pool.inputs

    @property
    def targets(self) -> Tree:
        return self.pool.targets

    def tensors(self) -> list[Tree]:
        pools = [self.pool] if self.client_tests is None else [self.pool, self.client_tests]
        return [part for pool in pools for part in (pool.inputs, pool.targets, pool.rows, pool.offsets)]

    def rows(self, number: int) -> Tensor:
        return self.pool.client_rows(number)

    def to(self, device: torch.device) -> PooledFederation:
        if first_leaf(self.inputs).device == device:
            return self
        moved = copy.copy(self)
        moved.pool = self.pool.to(device)
        moved.client_tests = self.client_tests and self.client_tests.to(device)
        moved.test = self.test and _moved(self.test, device)
        moved.validation = self.validation and _moved(self.validation, device)
        return moved


class LoadedFederation(Federation):
    """Clients whose data come from a function."""

    def __init__(
        self,
        clients: int,
        load: Callable[[int], Samples],
        test: Samples | None,
        load_test: Callable[[int], Samples] | None = None,
    ) -> None:
        if not isinstance(clients, int) or isinstance(clients, bool) or clients < 1:
            raise FlatfedError(f"clients = {clients!r}: must be a whole number, at least 1")
        self.test = None if test is None else checked_samples("test", test)
        self._clients, self._load, self._load_test = clients, load, load_test
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        return self._clients

    def client(self, number: int) -> ClientData:
        return self._checked(f"clients[{number}]", self._load(number))

    def client_test(self, number: int) -> ClientData | None:
        return self._load_test and self._checked(f"client_tests[{number}]", self._load_test(number))

    def _checked(self, name: str, samples: Samples) -> ClientData:
        inputs, targets = checked_samples(name, samples, self.test, "those of the test data")
        return ClientData(*_moved((inputs, targets), self._device))

    def to(self, device: torch.device) -> LoadedFederation:
        moved = copy.copy(self)
        moved.test = self.test and _moved(self.test, device)
        moved.validation = self.validation and _moved(self.validation, device)
        moved._device = device
        return moved
