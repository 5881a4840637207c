"""The global model evaluated on clients' own data while it is trained, on request."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from problems import federation, flat, network

import flatfed as ff
from flatfed.data.pooling import pooled_samples
from flatfed.training.config import Config

SETTINGS = ff.Training(rounds=3, participants=2, local_steps=2, batch_size=5, evaluate_every=2)


def trained(**execution) -> ff.Run:
    task = ff.Task(network(), federation(unequal=True))
    return ff.train(task, ff.fedavg(), SETTINGS, ff.Execution(workers=1, **execution))


def test_training_accuracy_is_that_of_all_clients_data():
    run = trained(training_samples=1000)
    data = federation(unequal=True)
    samples = [data.client(number).whole() for number in range(len(data))]
    inputs, targets = torch.cat([own for own, _ in samples]), torch.cat([own for _, own in samples])
    outputs = run.model(inputs)
    assert run.history[-1]["training_accuracy"] == pytest.approx(
        float((outputs.argmax(1) == targets).double().mean())
    )
    assert run.history[-1]["training_loss"] == pytest.approx(F.cross_entropy(outputs, targets).item())
    # As often as on test data, and without any effect on the training.
    assert ["training_loss" in line for line in run.history] == [False, True, True]
    plain = trained()
    assert torch.equal(flat(run.model), flat(plain.model))
    assert not any("training_loss" in line for line in plain.history)
    assert [line["train_loss"] for line in run.history] == [line["train_loss"] for line in plain.history]


def test_fewer_samples_are_the_same_ones_every_time():
    data = federation(unequal=True)
    some = [pooled_samples(data, 7, seed) for seed in (0, 0, 1)]
    assert len(some[0][0]) == 7 and torch.equal(some[0][0], some[1][0])
    assert not torch.equal(some[0][0], some[2][0])
    assert (
        len(pooled_samples(data, 7, 0, clients=[1])[0])
        == 7
        < len(pooled_samples(data, None, 0, clients=[1])[0])
    )


def test_it_is_a_setting_of_execution():
    config = {
        "data": {"dataset": "digits", "clients": 2},
        "model": {"name": "mlp"},
        "training": {"rounds": 1},
    }
    config |= {"algorithm": {"name": "fedavg"}, "execution": {"training_samples": 50}}
    assert Config.checked(config).execution.training_samples == 50
    with pytest.raises(ff.FlatfedError, match="training_samples = 0"):
        ff.Execution(training_samples=0)
