"""Clients and their data.

A federation holds pooled samples and, for each client, which of them are its own; or it loads a client's
data on demand, so that a population may be far larger than memory. Inputs and targets are tensors
[samples, …] or trees of such (`core.tree`): tuples, dictionaries or dataclasses.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor
from torch.utils.data import Dataset

from flatfed.core.errors import FlatfedError, checked_client, name_of, shown, user_errors
from flatfed.core.tree import Tree, cloned, first_leaf, moved
from flatfed.core.types import plain
from flatfed.data.collected import CollectedSamples
from flatfed.data.columns import Categories, ColumnNames
from flatfed.data.datasets.folder import read_folder
from flatfed.data.huggingface import read_huggingface
from flatfed.data.lazy import LazySamples
from flatfed.data.partition import PARTITIONS, Partition
from flatfed.data.pool import ClientData, Pool
from flatfed.data.samples import Samples, as_tensors, checked_samples, copied_samples
from flatfed.data.transform import AsStored, Augmentation, Transform


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
    client_names: tuple[str, ...] = ()  # where clients have names
    categories: Mapping[str, tuple[str, ...]] = MappingProxyType(
        {}
    )  # the texts that columns' numbers stand for

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

    @overload
    @staticmethod
    def from_dataset(
        dataset: Dataset[Any] | Sequence[Any],
        indices: Sequence[Sequence[int]],
        test: Dataset[Any] | Samples | Sequence[Any] | None = None,
        client_tests: Sequence[Sequence[int]] | None = None,
        collate: Callable[[list[Any]], Samples] | None = None,
        *,
        lazy: Literal[False] = False,
    ) -> PooledFederation: ...

    @overload
    @staticmethod
    def from_dataset(
        dataset: Dataset[Any] | Sequence[Any],
        indices: Sequence[Sequence[int]],
        test: Dataset[Any] | Samples | Sequence[Any] | None = None,
        *,
        collate: Callable[[list[Any]], Samples] | None = None,
        lazy: Literal[True],
        loaders: int = 1,
    ) -> LoadedFederation: ...

    @staticmethod
    def from_dataset(
        dataset: Dataset[Any] | Sequence[Any],
        indices: Sequence[Sequence[int]],
        test: Dataset[Any] | Samples | Sequence[Any] | None = None,
        client_tests: Sequence[Sequence[int]] | None = None,
        collate: Callable[[list[Any]], Samples] | None = None,
        *,
        lazy: bool = False,
        loaders: int = 1,
    ) -> PooledFederation | LoadedFederation:
        """A federation from a map-style dataset of (input, target) and each client's sample numbers.

        `client_tests` are the numbers of each client's samples in `test`; clients may share them. The dataset
        is read once and copied; random transforms in it are therefore drawn once, and later changes of it do
        not reach the federation.

        With `lazy` a client's samples are read by `dataset[number]` whenever it takes part, by so many
        `loaders` (threads of each worker) at once, and never kept; only `test` is read once. What a
        transform draws from torch depends on the sample's number alone, so it is the same every time.

        `collate` makes (inputs, targets) of a list of samples of any kind, for instance by padding sequences
        to the longest. It is called once, with the samples of the dataset and behind them those of `test`
        (unless that is a tuple of inputs and targets), so that all are padded alike.
        """
        if lazy:
            if client_tests is not None:
                raise FlatfedError("client_tests: not with lazy, which reads no sample before it is needed")
            samples_of = LazySamples(dataset, indices, collate, loaders)
            if test is None or isinstance(test, tuple):
                test_samples = copied_samples(test)
            else:
                test_samples = as_tensors(test, collate, None)[0]
            federation = LoadedFederation(len(indices), samples_of, test_samples)
            federation.total_samples, federation.common_size = samples_of.total, samples_of.common_size
            return federation
        if loaders != 1:
            raise FlatfedError(
                f"loaders = {shown(loaders)}: only with lazy=True; all is read at once otherwise"
            )
        samples, test_samples = as_tensors(dataset, collate, test)
        pool = Pool("clients", *samples, indices)
        if client_tests is None:
            return PooledFederation(pool, test_samples)
        if test_samples is None:
            raise FlatfedError("client_tests: they are sample numbers of the test data; give test as well")
        tests = Pool("client_tests", *checked_samples("test", test_samples), client_tests)
        return PooledFederation(pool, test_samples, client_tests=tests)

    @staticmethod
    def from_folder(
        folder: str | Path,
        inputs: ColumnNames | None = None,
        targets: ColumnNames | None = None,
        *,
        test: float | None = None,
        categories: Categories | None = None,
        channels: int = 3,
        augmentation: Augmentation = "none",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> PooledFederation:
        """A federation from a folder with a file (parquet, csv, npz) or a folder for each client.

        `inputs` and `targets` are columns: a name stands for one column of its own type, in which whole
        numbers stay what they are and texts are numbered; a list of names for a matrix of floats; a
        dictionary of such for a model that is called by name. Without `inputs` they are all other columns.
        Of images in CLIENT/CLASS/ the classes are the targets.

        Test samples are in a file or folder called test, or `test` is the share of each client's samples that
        are its own test samples. `categories` gives the texts of columns in the order of their numbers, which
        else is that of the alphabet; the federation's `categories` and `client_names` say what came of it.
        """
        return _collected(
            read_folder(folder, inputs, targets, test, categories, channels, augmentation, mean, std)
        )

    @staticmethod
    def from_huggingface(
        dataset: Any,
        inputs: ColumnNames,
        targets: ColumnNames,
        clients: str | int | Sequence[Sequence[int]],
        *,
        test: Any = None,
        partition: Partition | None = None,
        seed: int = 0,
        categories: Categories | None = None,
        channels: int = 3,
        augmentation: Augmentation = "none",
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> PooledFederation:
        """A federation from a `datasets.Dataset`, which is one split; columns as in `from_folder`.

        `clients` names the column that says whose a row is; or gives each client's row numbers; or is the
        number of clients among which a `partition` (equal parts unless one is given) divides the rows.
        `test` is another data set, or the share of each client's rows that are its own test samples.
        """
        return _collected(
            read_huggingface(
                dataset,
                inputs,
                targets,
                clients,
                test,
                partition or PARTITIONS["iid"](),
                seed,
                categories or {},
                channels,
                augmentation,
                mean,
                std,
            )
        )

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
        return self.pool.client(checked_client(number, len(self)))

    def client_test(self, number: int) -> ClientData | None:
        checked_client(number, len(self))
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
        other = copy.copy(self)
        other.pool = self.pool.to(device)
        other.client_tests = self.client_tests and self.client_tests.to(device)
        other.test = self.test and moved(self.test, device)
        other.validation = self.validation and moved(self.validation, device)
        return other


def _collected(data: CollectedSamples) -> PooledFederation:
    rows = torch.arange(sum(data.sizes)).split(data.sizes)
    tests = None
    if data.test is not None and data.test_sizes is not None and min(data.test_sizes) > 0:
        tests = Pool("test", *data.test, torch.arange(sum(data.test_sizes)).split(data.test_sizes))
    pool = Pool("clients", data.inputs, data.targets, rows)
    federation = PooledFederation(pool, data.test, data.transform, data.classes, tests)
    federation.client_names, federation.categories = data.names, data.categories
    return federation


class LoadedFederation(Federation):
    """Clients whose data come from a function."""

    def __init__(
        self,
        clients: int,
        load: Callable[[int], Samples],
        test: Samples | None,
        load_test: Callable[[int], Samples] | None = None,
    ) -> None:
        if not isinstance(clients, int) or isinstance(clients, bool) or not 1 <= clients < 2**63:
            raise FlatfedError(
                f"clients = {shown(clients)}: must be a whole number, at least 1 and below 2**63"
            )
        self.test = None if test is None else checked_samples("test", test)
        self._clients, self._load, self._load_test = clients, load, load_test
        self._device = torch.device("cpu")

    def __len__(self) -> int:
        return self._clients

    def client(self, number: int) -> ClientData:
        return self._loaded("clients", self._load, number)

    def client_test(self, number: int) -> ClientData | None:
        return self._load_test and self._loaded("client_tests", self._load_test, number)

    def _loaded(self, name: str, load: Callable[[int], Samples], number: int) -> ClientData:
        place = f"{name}[{number}]"
        with user_errors(f"{place}: {name_of(load)}"):
            samples = load(number)
        inputs, targets = checked_samples(place, samples, self.test, "those of the test data")
        return ClientData(*moved((inputs, targets), self._device))

    def to(self, device: torch.device) -> LoadedFederation:
        other = copy.copy(self)
        other.test = self.test and moved(self.test, device)
        other.validation = self.validation and moved(self.validation, device)
        other._device = device
        return other
