"""Federations: from tensors, from a data set, from a function; and what they refuse."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from flatfed import Federation, FlatfedError
from flatfed.data.pool import stacked_batches


def samples(count: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.arange(start, start + count, dtype=torch.float32)[:, None].expand(count, 3).clone()
    return inputs, torch.arange(start, start + count)


class Plain(Dataset):
    def __len__(self):
        return 6

    def __getitem__(self, index):
        return torch.full((2,), float(index)), index * 10


def test_from_tensors_keeps_every_client_apart():
    federation = Federation.from_tensors([samples(3), samples(5, 100), samples(1, 7)])
    assert len(federation) == 3
    assert [len(federation.client(number)) for number in range(3)] == [3, 5, 1]
    inputs, targets = federation.client(1).batch(torch.tensor([4, 0]))
    assert targets.tolist() == [104, 100]
    assert inputs[0].tolist() == [104.0] * 3
    assert federation.common_size is None
    assert federation.total_samples == 9


def test_from_dataset_reads_any_map_style_dataset():
    for dataset in (Plain(), TensorDataset(torch.arange(6.0)[:, None].expand(6, 2), torch.arange(0, 60, 10))):
        federation = Federation.from_dataset(dataset, [[5, 1], [0]], test=dataset)
        assert federation.client(0).batch(torch.arange(2))[1].tolist() == [50, 10]
        assert federation.test is not None and len(federation.test[0]) == 6


def test_from_function_loads_on_demand():
    asked = []

    def load(client):
        asked.append(client)
        return samples(2, client)

    federation = Federation.from_function(10**9, load)
    assert len(federation) == 10**9
    assert asked == []
    assert federation.client(123456789).batch(torch.tensor([1]))[1].tolist() == [123456790]


def test_stacked_batches_are_the_clients_batches():
    pooled = Federation.from_tensors([samples(4), samples(4, 50)])
    loaded = Federation.from_function(2, lambda client: samples(4, 50 * client))
    positions = [[torch.tensor([3, 1]), torch.tensor([2])], [torch.tensor([0, 2]), torch.tensor([1])]]
    for federation in (pooled, loaded):
        first, last = stacked_batches([federation.client(0), federation.client(1)], positions)
        assert first[0].shape == (2, 2, 3)
        assert first[1].tolist() == [[3, 1], [50, 52]]
        assert last[0].shape == (2, 1, 3)
        assert last[1].tolist() == [[2], [51]]
        for inputs, targets in (first, last):
            for client in (0, 1):
                own = federation.client(client).batch(targets[client] - 50 * client)
                assert torch.equal(inputs[client], own[0])


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Federation.from_tensors([]), "clients: the list is empty"),
        (lambda: Federation.from_tensors([samples(2), samples(0)]), "clients[1]: it has no samples"),
        (lambda: Federation.from_tensors([(torch.ones(3, 2), torch.ones(2))]), "3 inputs but 2 targets"),
        (
            lambda: Federation.from_tensors([(torch.tensor([[float("nan")]]), torch.zeros(1))]),
            "contain NaN or infinity",
        ),
        (
            lambda: Federation.from_tensors([samples(2), (torch.ones(2, 4), torch.ones(2))]),
            "clients[1]: its inputs are shaped [4]",
        ),
        (lambda: Federation.from_dataset(Plain(), [[0], []]), "clients[1]: it has no samples"),
        (lambda: Federation.from_dataset(Plain(), [[0, 6]]), "sample number 6 is outside"),
        (lambda: Federation.from_dataset(Plain(), [[-1]]), "sample number -1 is outside"),
        (lambda: Federation.from_function(0, samples), "clients = 0"),
        (
            lambda: Federation.from_function(1, lambda _: samples(0)).client(0),
            "clients[0]: it has no samples",
        ),
    ],
)
def test_bad_data_are_refused_in_one_line(make, complaint):
    with pytest.raises(FlatfedError) as caught:
        make()
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)
