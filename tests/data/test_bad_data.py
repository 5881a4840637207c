"""Data and splits that nobody can train on are refused; what a user gives is copied and never changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch.utils.data import Dataset, TensorDataset

from data.fake import refused
from flatfed import Federation
from flatfed.data.client_tests import matching_rows
from flatfed.data.partition import PARTITIONS


def samples(count=4, width=3):
    return torch.randn(count, width), torch.arange(count) % 2


class Numbered(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


def every_tensor(federation):
    return [tensor.clone() for tensor in (*(federation.tensors() or []), *(federation.test or ()))]


@pytest.mark.parametrize("kind", ["tensors", "arrays", "dataset", "tensors of a dataset", "function"])
def test_later_changes_of_the_users_tensors_do_not_reach_a_federation(kind):
    clients, test, own_test = [samples(), samples()], samples(), [samples(), samples()]
    if kind == "arrays":
        clients = [(inputs.numpy(), targets.numpy()) for inputs, targets in clients]
        test = tuple(part.numpy() for part in test)
    if kind in {"tensors", "arrays"}:
        federation = Federation.from_tensors(clients, test, own_test)
    elif kind == "function":
        federation = Federation.from_function(2, lambda number: samples(), test)
    else:
        inputs, targets = clients[0]
        dataset = Numbered(list(zip(inputs, targets, strict=True)))
        if kind == "tensors of a dataset":
            dataset = TensorDataset(inputs, targets)
        federation = Federation.from_dataset(dataset, [[0, 1], [2, 3]], test)
    before = every_tensor(federation)
    for part in (*clients[0], *clients[1], *test, *own_test[0]):
        part[:] = 0
    after = every_tensor(federation)
    assert before and all(map(torch.equal, before, after))


def test_a_single_client_is_copied_as_well():
    inputs, targets = samples()
    federation = Federation.from_tensors([(inputs, targets)])
    assert federation.inputs.data_ptr() != inputs.data_ptr()
    batch, _ = federation.client(0).batch(torch.arange(4))
    batch.zero_()
    assert bool(federation.inputs.any()) and bool(inputs.any())


def test_gradients_of_the_users_tensors_are_left_out():
    inputs, targets = samples()
    federation = Federation.from_tensors([(inputs.requires_grad_(), targets)])
    assert not federation.inputs.requires_grad


IGNORED = (torch.randn(3, 2), torch.full((3,), -100))
NUMBERS = TensorDataset(torch.randn(4, 2), torch.tensor([0, -100, -100, 1]))
DOUBLES = (torch.randn(4, 3).double(), torch.arange(4))
REAL_TARGETS, WIDE_TARGETS = (torch.randn(4, 3), torch.ones(4)), (torch.randn(4, 3), torch.ones(4, 2).long())
INFINITE = (torch.full((1, 2), float("inf")), torch.arange(1))
NOT_A_NUMBER = (torch.full((1, 2), complex(0, float("nan"))), torch.arange(1))


@pytest.mark.parametrize(
    ("clients", "test", "said"),
    [
        (3, None, "clients: give a list"),
        ([5], None, "clients[0]: give (inputs, targets)"),
        ([([2**70], [1])], None, "clients[0]: give (inputs, targets)"),
        (
            [samples(), (torch.tensor(1.0), torch.tensor(1))],
            None,
            "clients[1]: its inputs are no plain",
        ),
        ([(torch.empty(4, 3, device="meta"), torch.arange(4))], None, "its inputs are no plain tensor"),
        ([(torch.eye(4).to_sparse(), torch.arange(4))], None, "its inputs are no plain tensor"),
        ([samples(), DOUBLES], None, "clients[1]: its inputs are of type torch.float64"),
        ([samples(), REAL_TARGETS], None, "clients[1]: its targets are of type torch.float32"),
        ([samples(), WIDE_TARGETS], None, "clients[1]: its targets are shaped [2]"),
        ([samples()], REAL_TARGETS, "test: its targets are of type torch.float32"),
        ([samples()], 3, "test: give (inputs, targets)"),
        (
            [(torch.ones(4, 0), torch.arange(4))],
            None,
            "clients[0]: its inputs are [4, 0], which is no number",
        ),
        ([NOT_A_NUMBER], None, "clients[0]: its inputs contain NaN or infinity"),
        ([samples(width=2), IGNORED], None, "clients[1]: all its targets are -100"),
    ],
)
def test_tensors_that_cannot_be_trained_on_are_refused(clients, test, said):
    with refused(said):
        Federation.from_tensors(clients, test)


@pytest.mark.parametrize(
    ("dataset", "indices", "said"),
    [
        (NUMBERS, [[0, 1], [1, 2]], "clients[1]: all its targets are -100"),
        (NUMBERS, [[0.7, 1.2]], "clients[0]: its sample numbers are torch.float32"),
        (NUMBERS, [[True, False, True, True]], "clients[0]: its sample numbers are torch.bool"),
        (NUMBERS, [[[0, 1]]], "clients[0]: its sample numbers are torch.int64 [1, 2]"),
        (NUMBERS, [[2**70]], "clients: give each client's sample numbers"),
        (NUMBERS, [3], "clients: give each client's sample numbers"),
        (NUMBERS, 3, "clients: the list is empty"),
        (Numbered([1, 2]), [[0]], "dataset: its samples are not (input, target)"),
        (Numbered([("a", 2)]), [[0]], "dataset: its samples are not (input, target)"),
        (Numbered([(torch.ones(1), 0), (torch.ones(2), 0)]), [[0]], "of one shape"),
        (iter([]), [[0]], "dataset: it has no length"),
    ],
)
def test_data_sets_that_cannot_be_trained_on_are_refused(dataset, indices, said):
    with refused(said):
        Federation.from_dataset(dataset, indices)


@pytest.mark.parametrize(
    ("clients", "loaded", "test", "said"),
    [
        (1, IGNORED, None, "clients[0]: all its targets are -100"),
        (1, samples(), samples(width=4), "clients[0]: its inputs are shaped [3], those of the test data [4]"),
        (1, samples(), INFINITE, "test: its inputs contain NaN or infinity"),
        (2.5, samples(), None, "clients = 2.5: must be a whole number"),
        (True, samples(), None, "clients = True: must be a whole number"),
    ],
)
def test_loaded_data_that_cannot_be_trained_on_are_refused(clients, loaded, test, said):
    with refused(said):
        Federation.from_function(clients, lambda _: loaded, test).client(0)


class Broken(Numbered):
    """Says why it cannot be read, by whatever it has in place of a sample."""

    def __len__(self):
        if isinstance(self.items, Exception):
            raise self.items
        return len(self.items)

    def __getitem__(self, index):
        if isinstance(self.items[index], Exception | SystemExit):
            raise self.items[index]
        return self.items[index]


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([(torch.ones(1), 0), KeyError("gone")], "dataset[1]: Broken raised KeyError: 'gone'"),
        ([SystemExit(0)], "dataset[0]: Broken raised SystemExit: 0"),
        ([OSError("")], "dataset[0]: Broken raised OSError: OSError"),
        (LookupError("no index\nfile"), "dataset: the length of Broken raised LookupError: no index"),
    ],
)
def test_errors_of_a_data_set_say_where_they_come_from(items, said):
    with refused(said) as error:
        Federation.from_dataset(Broken(items), [[0]])
    assert error.value.__cause__ is (items if isinstance(items, Exception) else items[-1])


def unreadable(number):
    if number == 3:
        raise KeyError("gone")
    return samples()


@pytest.mark.parametrize("which", ["clients", "client_tests"])
def test_errors_of_a_function_that_loads_say_where_they_come_from(which):
    loads = {"load": lambda number: samples(), "client_tests": None}
    loads["load" if which == "clients" else which] = unreadable
    federation = Federation.from_function(4, **loads)
    read = federation.client if which == "clients" else federation.client_test
    assert read(2) is not None or which == "client_tests"
    with refused(f"{which}[3]: unreadable raised KeyError: 'gone'") as error:
        read(3)
    assert isinstance(error.value.__cause__, KeyError)


LABELS = np.arange(60_000)
WITH_CONCENTRATION = ["dirichlet_client", "dirichlet_client_refill", "dirichlet_class", "quantity_skew"]
ABSURD = [
    ("dirichlet_client", {"concentration": 0.1}),
    ("dirichlet_client_refill", {"concentration": 0.1}),
    ("dirichlet_class", {"concentration": 0.1, "minimum": 1}),
    ("pathological_balanced", {"classes_per_client": 1}),
    ("pathological_independent", {"classes_per_client": 1}),
]


@pytest.mark.parametrize(("name", "options"), ABSURD)
def test_a_table_that_does_not_fit_is_refused(name, options):
    with pytest.raises(ValueError, match="need a table of 3600000000 numbers, more than 50000000"):
        PARTITIONS[name](**options).split(LABELS, 60_000, np.random.default_rng(0))


@pytest.mark.parametrize("clients", [10**9, 10**400, 0, -1, 2.0, True, "3", None, float("nan")])
@pytest.mark.parametrize("name", PARTITIONS)
def test_an_absurd_number_of_clients_is_refused(name, clients):
    required = {"concentration": 1.0, "classes_per_client": 1, "groups": [0] * 50}
    partition = PARTITIONS[name]
    options = {key: value for key, value in required.items() if key in partition.__dataclass_fields__}
    with pytest.raises(ValueError, match="clients="):
        partition(**options).split(np.zeros(50, int), clients, np.random.default_rng(0))


@pytest.mark.parametrize("concentration", [5e-324, 1e-300, 1e-100, 1e6])
@pytest.mark.parametrize(
    "name", ["dirichlet_client", "dirichlet_client_refill", "dirichlet_class", "quantity_skew"]
)
def test_any_allowed_concentration_gives_a_split(name, concentration):
    options = {} if "client" in name else {"minimum": 1}
    partition = PARTITIONS[name](concentration=concentration, **options)
    parts = partition.split(np.arange(500) % 10, 20, np.random.default_rng(0))
    assert len(parts) == 20 and all(len(part) for part in parts)


@pytest.mark.parametrize("value", [1e300, 0, -1, float("nan"), float("inf"), "0.1", True, None, [1.0]])
@pytest.mark.parametrize(
    "name", ["dirichlet_client", "dirichlet_client_refill", "dirichlet_class", "quantity_skew"]
)
def test_other_concentrations_are_refused(name, value):
    with pytest.raises(ValidationError, match="concentration"):
        PARTITIONS[name](concentration=value)


def test_redrawing_ends_however_often_it_is_asked_for():
    # One class that goes to one of two clients as a whole, whatever is drawn.
    partition = PARTITIONS["dirichlet_class"](concentration=1e-300, minimum=50, redraws=10**12)
    parts = partition.split(np.zeros(100, int), 2, np.random.default_rng(0))
    assert [len(part) for part in parts] == [50, 50]


def test_more_shards_than_samples_are_refused_before_they_are_dealt():
    labels = np.arange(10_000) % 5000
    with pytest.raises(ValueError, match="makes 25000000 shards of 10000 samples"):
        PARTITIONS["pathological_balanced"](classes_per_client=5000).split(
            labels, 5000, np.random.default_rng(0)
        )


@pytest.mark.parametrize("size", [10**9, 10**400])
def test_more_test_samples_than_there_are_cannot_match(size):
    labels = np.arange(50) % 2
    with pytest.raises(ValueError, match="there are 50 test samples"):
        matching_rows([np.arange(50)], labels, labels, size, np.random.default_rng(0))
