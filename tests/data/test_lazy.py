"""Samples that are read when their client takes part."""

from __future__ import annotations

import random
import threading

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

import flatfed as ff
from data.fake import refused

ROWS = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


class Numbers(Dataset):
    """Counts what is read of it; what it returns may be drawn."""

    def __init__(self, draw=None, length=12):
        self.read, self.draw, self.length, self.threads = [], draw, length, set()

    def __len__(self):
        return self.length

    def __getitem__(self, number):
        self.read.append(number)
        self.threads.add(threading.get_ident())
        drawn = 0.0 if self.draw is None else self.draw()
        return torch.tensor([float(number), float(drawn)]), number % 2


def train(federation, workers=1, **options):
    torch.manual_seed(0)
    task = ff.Task(nn.Linear(2, 2), federation, name="numbers", version="1")
    training = ff.Training(rounds=3, participants=2, local_epochs=1, batch_size=2, lr=0.01, **options)
    return ff.train(task, ff.fedavg(), training, ff.Execution(workers=workers))


def test_only_what_takes_part_is_read_and_nothing_is_kept():
    dataset = Numbers()
    federation = ff.Federation.from_dataset(dataset, ROWS, lazy=True)
    assert dataset.read == [] and len(federation) == 4
    assert federation.total_samples == 12 and federation.common_size == 3
    assert federation.client(1).whole()[0][:, 0].tolist() == [3, 4, 5]
    assert dataset.read == [3, 4, 5]
    federation.client(1)
    assert dataset.read == [3, 4, 5] * 2
    assert ff.Federation.from_dataset(dataset, [[0], [1, 2]], lazy=True).common_size is None


@pytest.mark.parametrize("workers", [1, 2])
def test_a_training_is_the_same_as_on_data_in_memory(workers):
    pooled = train(ff.Federation.from_dataset(Numbers(), ROWS, test=Numbers(length=4)))
    lazy = train(
        ff.Federation.from_dataset(Numbers(), ROWS, test=Numbers(length=4), lazy=True, loaders=2), workers
    )
    assert torch.equal(lazy.server["model"], pooled.server["model"])
    assert lazy.history[-1]["test_loss"] == pooled.history[-1]["test_loss"]
    weighted = [
        train(ff.Federation.from_dataset(Numbers(), ROWS, lazy=lazy), weighting="samples")
        for lazy in (True, False)
    ]
    assert torch.equal(*(run.server["model"] for run in weighted))


def test_what_a_transform_draws_from_torch_depends_on_the_sample_alone():
    draws = [
        ff.Federation.from_dataset(Numbers(lambda: torch.rand(())), rows, lazy=True, loaders=loaders)
        for rows, loaders in ((ROWS, 1), (ROWS, 3), (ROWS[::-1], 2))
    ]
    first = draws[0].client(0).whole()[0]
    assert len(set(first[:, 1].tolist())) == 3
    assert torch.equal(draws[1].client(0).whole()[0], first) and torch.equal(
        draws[2].client(3).whole()[0], first
    )
    state = torch.get_rng_state()
    draws[1].client(2)
    assert torch.equal(torch.get_rng_state(), state)
    one, several = (train(federation) for federation in draws[:2])
    assert torch.equal(one.server["model"], several.server["model"])


def test_draws_from_elsewhere_are_refused():
    with refused("client 0 was loaded twice and its data were not the same"):
        train(ff.Federation.from_dataset(Numbers(random.random), ROWS, lazy=True))


def test_several_loaders_are_threads():
    dataset = Numbers(lambda: [threading.Event().wait(0.001), 0.0][1])
    ff.Federation.from_dataset(dataset, [list(range(12))], lazy=True, loaders=3).client(0)
    assert 1 < len(dataset.threads) <= 3 and threading.get_ident() not in dataset.threads


def test_samples_of_different_lengths_are_put_together_for_each_client():
    samples = [(torch.ones(1 + number % 3), 0) for number in range(6)]

    def pad(chosen):
        inputs = torch.zeros(len(chosen), 3)
        for row, (own, _) in enumerate(chosen):
            inputs[row, : len(own)] = own
        return inputs, torch.tensor([target for _, target in chosen])

    federation = ff.Federation.from_dataset(
        samples, [[0, 1], [2, 5]], test=samples[:2], collate=pad, lazy=True
    )
    assert federation.client(1).whole()[0].tolist() == [[1, 1, 1], [1, 1, 1]]
    assert federation.test[0].tolist() == [[1, 0, 0], [1, 1, 0]]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"indices": [[0], []]}, "indices[1]: no samples"),
        ({"indices": [[0], [12]]}, "indices[1]: no sample 12; the data have 0 … 11"),
        ({"indices": [[0], [1.7]]}, "indices: give each client's sample numbers ('float' object"),
        ({"indices": [[True, False]]}, "indices: give each client's sample numbers (True is a boolean)"),
        ({"dataset": Numbers(length=-1)}, "dataset: the length of Numbers raised ValueError"),
        ({"indices": [0, 1]}, "indices: give each client's sample numbers"),
        ({"loaders": 0}, "loaders = 0: give a number of threads"),
        ({"dataset": 3}, "dataset: it has no length"),
        ({"client_tests": [[0]]}, "client_tests: not with lazy"),
        ({"lazy": False, "loaders": 2}, "loaders = 2: only with lazy=True"),
    ],
)
def test_mistakes_are_named(changes, said):
    with refused(said):
        ff.Federation.from_dataset(**{"dataset": Numbers(), "indices": ROWS, "lazy": True, **changes})
