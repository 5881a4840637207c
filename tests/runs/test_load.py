"""Runs from their folders, and models from their flat vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from command import flatfed
from problems import federation, network
from torch import nn
from torch.nn.utils import vector_to_parameters

import flatfed as ff

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.toml"
TRAINING = ff.Training(rounds=4, participants=2, local_steps=2, batch_size=4)


@pytest.fixture
def task() -> ff.Task:
    return ff.Task(network(), federation())


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize("algorithm", [ff.fedavg(), ff.scaffold()], ids=lambda algorithm: algorithm.name)
def test_a_loaded_run_is_the_one_that_was_trained_and_nothing_is_written(task, tmp_path, algorithm):
    trained = ff.train(task, algorithm, TRAINING, folder=tmp_path / "run", evaluate_on_clients=True)
    before = contents(tmp_path)
    loaded = ff.load_run(tmp_path / "run", task)
    assert contents(tmp_path) == before
    assert loaded.history == trained.history and loaded.per_client == trained.per_client
    assert loaded.algorithm == trained.algorithm and loaded.training == trained.training
    assert loaded.server.keys() == trained.server.keys()
    assert all(torch.equal(loaded.server[key], value) for key, value in trained.server.items())
    assert loaded.clients.clients() == trained.clients.clients()
    for name, value in trained.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)


def test_it_goes_on_to_the_bits_of_one_that_never_stopped(task, tmp_path):
    straight = ff.train(task, ff.scaffold(), TRAINING.replaced(rounds=7))
    trained = ff.train(task, ff.scaffold(), TRAINING, folder=tmp_path / "run")
    for more in (trained.resume(6), ff.load_run(tmp_path / "run", task).resume(7)):
        last = more
    assert len(last.history) == 7
    assert torch.equal(last.server["model"], straight.server["model"])


def test_a_run_of_the_command_line_knows_its_task(tmp_path):
    done = flatfed("run", EXAMPLE, "--set", "training.rounds=2", "--folder", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    run = ff.load_run(tmp_path / "run")
    assert len(run.history) == 2 and len(run.resume(3).history) == 3
    done = flatfed("resume", tmp_path / "run", "--rounds", "4")
    assert done.returncode == 0, done.stderr


def test_what_cannot_be_loaded_is_refused(task, tmp_path):
    ff.train(task, ff.fedavg(), TRAINING, folder=tmp_path / "run")
    with pytest.raises(ff.FlatfedError, match="give the task, too"):
        ff.load_run(tmp_path / "run")
    other = ff.Task(network(), federation(unequal=True))
    with pytest.raises(ff.FlatfedError, match="made with another model, data, loss or settings"):
        ff.load_run(tmp_path / "run", other)
    with pytest.raises(ff.FlatfedError, match="no such run folder"):
        ff.load_run(tmp_path / "none", task)
    with pytest.raises(ff.FlatfedError, match="the run has none to go on in"):
        ff.train(task, ff.fedavg(), TRAINING).resume(9)


def test_vectors_and_models():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2))
    copy, wrong = (nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 2)) for _ in range(2))
    vector, inputs = ff.model_to_vector(model), torch.randn(2, 3, 8, 8)
    ff.vector_to_model(vector, copy)
    assert torch.equal(copy(inputs), model(inputs))
    vector_to_parameters(vector, wrong.parameters())
    assert not torch.allclose(wrong(inputs), model(inputs)), "torch's own function would have done"
    with pytest.raises(ff.FlatfedError, match="give the model's 146 trainable numbers"):
        ff.vector_to_model(vector[1:], copy)
