"""Clients and their data.

A federation holds pooled samples and, for each client, which of them are its own; or it loads a client's
data on demand, so that a population may be far larger than memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flatfed.core.errors import FlatfedError
from flatfed.data.transform import AsStored, Transform

Samples = tuple[Tensor, Tensor]


class ClientData(NamedTuple):
    """One client's samples: `rows` of the pooled tensors, or all of them when `rows` is None."""

    inputs: Tensor
    targets: Tensor
    rows: Tensor | None = None

    def __len__(self) -> int:
        return len(self.inputs if self.rows is None else self.rows)

    def batch(self, positions: Tensor) -> Samples:
        rows = positions if self.rows is None else self.rows[positions]
        return self.inputs[rows], self.targets[rows]


def stacked_batch(clients: Sequence[ClientData], positions: Sequence[Tensor]) -> Samples:
    """Batches of equal shape, one a client, as [C, B, …]; one gather when the samples are pooled."""
    first = clients[0]
    if first.rows is not None and all(client.inputs is first.inputs for client in clients):
        rows = torch.stack(
            [client.rows[chosen] for client, chosen in zip(clients, positions, strict=True)]  # type: ignore[index]
        )
        return first.inputs[rows], first.targets[rows]
    batches = [client.batch(chosen) for client, chosen in zip(clients, positions, strict=True)]
    return torch.stack([inputs for inputs, _ in batches]), torch.stack([targets for _, targets in batches])


class Federation(ABC):
    """Clients numbered 0 … N−1, their data, and test data of the whole.

    Samples are as stored; `transform` makes them what the model sees.
    """

    test: Samples | None
    transform: Transform = AsStored()
    classes: int | None = None
    """The number of classes, where somebody knows."""

    @abstractmethod
    def __len__(self) -> int:
        """The number of clients."""

    @abstractmethod
    def client(self, number: int) -> ClientData: ...

    @property
    @abstractmethod
    def total_samples(self) -> int | None:
        """Samples of all clients together, None if nobody knows without loading them."""

    @property
    @abstractmethod
    def common_size(self) -> int | None:
        """The number of samples of each client if all have the same, else None."""

    @abstractmethod
    def to(self, device: torch.device) -> Federation: ...

    @staticmethod
    def from_tensors(clients: Sequence[Samples], test: Samples | None = None) -> PooledFederation:
        """A federation from each client's (inputs, targets)."""
        if not clients:
            raise FlatfedError("clients: the list is empty; give at least one (inputs, targets)")
        clients = [as_samples(f"clients[{number}]", pair) for number, pair in enumerate(clients)]
        for number, (inputs, targets) in enumerate(clients):
            _check_samples(f"clients[{number}]", inputs, targets)
            if inputs.shape[1:] != clients[0][0].shape[1:]:
                raise FlatfedError(
                    f"clients[{number}]: its inputs are shaped {list(inputs.shape[1:])}, those of client 0 "
                    f"{list(clients[0][0].shape[1:])}; use one shape"
                )
        inputs = torch.cat([inputs for inputs, _ in clients])
        targets = torch.cat([targets for _, targets in clients])
        ends = torch.tensor([len(inputs) for inputs, _ in clients]).cumsum(0).tolist()
        rows = [torch.arange(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]
        return PooledFederation(inputs, targets, rows, test)

    @staticmethod
    def from_dataset(
        dataset: Dataset[Any], indices: Sequence[Sequence[int]], test: Dataset[Any] | Samples | None = None
    ) -> PooledFederation:
        """A federation from a map-style dataset of (input, target) and each client's sample numbers.

        The dataset is read once and kept as tensors; random transforms in it are therefore drawn once.
        """
        inputs, targets = _as_tensors(dataset)
        rows = [torch.as_tensor(chosen, dtype=torch.int64) for chosen in indices]
        return PooledFederation(
            inputs, targets, rows, _as_tensors(test) if isinstance(test, Dataset) else test
        )

    @staticmethod
    def from_function(
        clients: int, load: Callable[[int], Samples], test: Samples | None = None
    ) -> LoadedFederation:
        """A federation whose clients' data are loaded when they take part; `load(client)` must be pure."""
        return LoadedFederation(clients, load, test)


def _as_tensors(dataset: Dataset[Any]) -> Samples:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0], dataset.tensors[1]
    samples = [dataset[index] for index in range(len(dataset))]  # type: ignore[arg-type]
    if not samples:
        raise FlatfedError("dataset: it is empty; give it samples")
    return (
        torch.stack([torch.as_tensor(inputs) for inputs, _ in samples]),
        torch.stack([torch.as_tensor(target) for _, target in samples]),
    )


def as_samples(name: str, pair: Any) -> Samples:
    """(inputs, targets) as tensors, from tensors, arrays or lists."""
    try:
        inputs, targets = pair
        return torch.as_tensor(inputs), torch.as_tensor(targets)
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FlatfedError(f"{name}: give (inputs, targets) as tensors or arrays ({reason})") from None


def _check_samples(name: str, inputs: Tensor, targets: Tensor) -> None:
    if len(inputs) == 0:
        raise FlatfedError(f"{name}: it has no samples; leave it out or give it data")
    if len(inputs) != len(targets):
        raise FlatfedError(f"{name}: {len(inputs)} inputs but {len(targets)} targets; give as many of each")
    for what, tensor in (("inputs", inputs), ("targets", targets)):
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise FlatfedError(f"{name}: its {what} contain NaN or infinity; clean the data first")


class PooledFederation(Federation):
    """All samples in two tensors, and the row numbers of each client."""

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        rows: Sequence[Tensor],
        test: Samples | None = None,
        transform: Transform = AsStored(),  # noqa: B008 (frozen)
        classes: int | None = None,
    ) -> None:
        _check_samples("data", inputs, targets)
        if not rows:
            raise FlatfedError("clients: the list is empty; give at least one client's samples")
        for number, chosen in enumerate(rows):
            if len(chosen) == 0:
                raise FlatfedError(
                    f"clients[{number}]: it has no samples; leave it out or split the data differently"
                )
        self.inputs, self.targets, self.test = inputs, targets, test
        self.transform, self.classes = transform, classes
        # One flat tensor with offsets: a list of a million small tensors would cost a kilobyte each.
        self._rows = torch.cat(list(rows))
        ends = torch.tensor([len(chosen) for chosen in rows]).cumsum(0)
        self._offsets = torch.cat([torch.zeros(1, dtype=torch.int64), ends])
        if int(self._rows.min()) < 0 or int(self._rows.max()) >= len(inputs):
            bad = int(self._rows.max()) if int(self._rows.max()) >= len(inputs) else int(self._rows.min())
            raise FlatfedError(f"clients: sample number {bad} is outside the data (0 … {len(inputs) - 1})")
        if test is not None:
            self.test = as_samples("test", test)
            _check_samples("test", *self.test)
            if self.test[0].shape[1:] != inputs.shape[1:]:
                raise FlatfedError(
                    f"test: its inputs are shaped {list(self.test[0].shape[1:])}, the clients' "
                    f"{list(inputs.shape[1:])}; use one shape"
                )

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def rows(self, number: int) -> Tensor:
        return self._rows[int(self._offsets[number]) : int(self._offsets[number + 1])]

    def client(self, number: int) -> ClientData:
        return ClientData(self.inputs, self.targets, self.rows(number))

    @property
    def all_rows(self) -> Tensor:
        """The clients' row numbers, one client after the other."""
        return self._rows

    @property
    def sizes(self) -> Tensor:
        return self._offsets.diff()

    @property
    def total_samples(self) -> int:
        return len(self._rows)

    @property
    def common_size(self) -> int | None:
        sizes = self.sizes
        return int(sizes[0]) if bool((sizes == sizes[0]).all()) else None

    def to(self, device: torch.device) -> PooledFederation:
        if self.inputs.device == device:
            return self
        moved = object.__new__(PooledFederation)
        moved.inputs, moved.targets = self.inputs.to(device), self.targets.to(device)
        moved.test = self.test and (self.test[0].to(device), self.test[1].to(device))
        moved._rows, moved._offsets = self._rows.to(device), self._offsets
        moved.transform, moved.classes = self.transform, self.classes
        return moved


class LoadedFederation(Federation):
    """Clients whose data come from a function."""

    def __init__(self, clients: int, load: Callable[[int], Samples], test: Samples | None) -> None:
        if clients < 1:
            raise FlatfedError(f"clients = {clients}: must be at least 1")
        self._clients, self._load, self.test = clients, load, test
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        return self._clients

    def client(self, number: int) -> ClientData:
        inputs, targets = as_samples(f"clients[{number}]", self._load(number))
        _check_samples(f"clients[{number}]", inputs, targets)
        return ClientData(inputs.to(self._device), targets.to(self._device))

    @property
    def total_samples(self) -> None:
        return None

    @property
    def common_size(self) -> None:
        return None

    def to(self, device: torch.device) -> LoadedFederation:
        moved = LoadedFederation(
            self._clients, self._load, self.test and (self.test[0].to(device), self.test[1].to(device))
        )
        moved._device, moved.transform = device, self.transform
        return moved
