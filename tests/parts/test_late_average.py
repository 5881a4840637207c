"""The mean of late models on the server (SWA), by itself and beside other rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from problems import Recorder, named, run, trajectory

import flatfed as ff
from flatfed.algorithms import build
from flatfed.parts import Adam, Average, FineTune, LateAverage, Momentum, Unaveraged
from flatfed.theory.stability import stability_bound


def averaged(plain: ff.Algorithm, first: int, every: int = 1) -> ff.Algorithm:
    return replace(plain, start=Unaveraged(), server=LateAverage(first, every, of=plain.server))


@pytest.mark.parametrize(
    "plain", [ff.fedavg(1.3), ff.fedasam(0.3), ff.fedavgm(0.6), ff.fedadam(0.05), ff.feddyn(0.2)]
)
@pytest.mark.parametrize(("first", "every"), [(1, 1), (3, 1), (2, 2), (3, 3)])
def test_the_model_is_the_mean_of_what_the_same_training_made(plain, first, every):
    recorder = Recorder()
    run(averaged(plain, first, every), recorder=recorder, rounds=7)
    models = trajectory(plain, rounds=7)
    # The training itself is the same, bit for bit.
    assert torch.equal(torch.stack([server["unaveraged"] for server in recorder.servers]), models)
    for number in range(1, 8):
        chosen = [models[at - 1] for at in range(first, number + 1, every)] or [models[number - 1]]
        naive = sum(chosen[1:], chosen[0]) / len(chosen)
        assert torch.allclose(recorder.models[number - 1], naive, atol=1e-14)


def test_before_its_first_round_it_is_the_rule_that_it_is_around():
    assert torch.equal(
        trajectory(averaged(ff.fedasam(0.3), 6), rounds=5), trajectory(ff.fedasam(0.3), rounds=5)
    )
    # Averaging once changes nothing either.
    assert torch.equal(trajectory(averaged(ff.fedavg(), 5), rounds=5), trajectory(ff.fedavg(), rounds=5))


def test_without_the_start_every_round_begins_at_the_average():
    algorithm = replace(ff.fedavg(), server=LateAverage(2, of=Average()))
    recorder = Recorder()
    run(algorithm, recorder=recorder, rounds=4)
    with_start = trajectory(averaged(ff.fedavg(), 2), rounds=4)
    # The first mean is of one model.
    assert torch.equal(recorder.models[:3], with_start[:3])
    assert not torch.equal(recorder.models[3], with_start[3])


def test_it_is_made_from_a_config_and_goes_on_to_the_same_bits(tmp_path):
    description = {
        "start": "unaveraged",
        "server": {"part": "late_average", "first": 2, "of": {"part": "momentum", "decay": 0.5}},
    }
    algorithm = build(description)
    assert algorithm == replace(algorithm, start=Unaveraged(), server=LateAverage(2, of=Momentum(0.5)))
    assert build(algorithm.describe()) == algorithm
    run(algorithm, rounds=3, folder=tmp_path / "run")
    resumed, whole = run(algorithm, rounds=5, folder=tmp_path / "run"), run(algorithm, rounds=5)
    for key, vector in named(whole.server).items():
        assert torch.equal(named(resumed.server)[key], vector)


def test_what_does_not_go_together_is_refused():
    with pytest.raises(ff.FlatfedError, match=r"late_average\.of: FineTune works on the model"):
        LateAverage(2, of=FineTune())
    with pytest.raises(ff.FlatfedError, match="LateAverage works on the model"):
        LateAverage(2, of=LateAverage(2))
    with pytest.raises(ff.FlatfedError, match="set server to late_average"):
        ff.Algorithm(start=Unaveraged())
    # Its rounds are not alike, so no bound can be read off one of them.
    training = ff.Training(rounds=5)
    assert stability_bound(averaged(ff.fedavg(), 3), training, 2, 1.0, 5) is None
    assert LateAverage(2, of=Adam(0.1)).server_vectors[-1].name == "unaveraged"
