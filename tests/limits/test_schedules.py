"""Step sizes and radii over rounds: torch's schedules, and what the rounds make of them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from problems import GENERIC, Recorder, distance, federation, generic, named, run, spied, trajectory
from reference import naive
from test_reference import Replay, assert_same
from torch.optim import lr_scheduler

import flatfed as ff

ROUNDS = 12
SCHEDULES: dict[str, tuple[dict[str, Any], Any]] = {
    "exponential": ({"lr_decay": 0.9}, lambda sgd: lr_scheduler.ExponentialLR(sgd, 0.9)),
    "steps": (
        {"lr_decay": 0.5, "lr_decay_every": 5},
        lambda sgd: lr_scheduler.StepLR(sgd, step_size=5, gamma=0.5),
    ),
    "cosine": ({"lr_cosine": ROUNDS}, lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, ROUNDS)),
    "longer cosine": ({"lr_cosine": 20}, lambda sgd: lr_scheduler.CosineAnnealingLR(sgd, 20)),
    "warm-up": ({"lr_warmup": 4}, lambda sgd: lr_scheduler.LinearLR(sgd, 0.25, total_iters=3)),
    "all": (
        {"lr_decay": 0.8, "lr_decay_every": 3, "lr_cosine": 15, "lr_warmup": 4},
        lambda sgd: lr_scheduler.LambdaLR(
            sgd,
            lambda t: (
                0.8 ** (t // 3) * 0.5 * (1 + torch.tensor(torch.pi * t / 15).cos()) * min(1, (t + 1) / 4)
            ),
        ),
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_step_sizes_are_those_of_torchs_schedules(schedule: str) -> None:
    settings, make = SCHEDULES[schedule]
    sgd = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.3)
    scheduler, expected = make(sgd), []
    for _ in range(ROUNDS):
        expected.append(float(scheduler.get_last_lr()[0]))
        sgd.step()
        scheduler.step()
    training = ff.Training(rounds=ROUNDS, lr=0.3, **settings)
    assert [training.rate(t) for t in range(ROUNDS)] == pytest.approx(expected, rel=1e-6)
    assert len(set(expected)) > 1


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedsagd", "fedmoswa"])
def test_training_follows_the_schedule(name: str, schedule: str) -> None:
    """Also where displacements are divided by the step sizes of their round."""
    settings = {"lr_decay": 1.0, **SCHEDULES[schedule][0]}
    data, recorder = federation(), Recorder()
    result = run(generic(name), data=data, recorder=recorder, rounds=6, **settings)
    problem = Replay(data, result.training)
    trace = getattr(naive, name)(problem, **GENERIC[name])
    for t, server in enumerate(recorder.servers):
        assert_same(server["model"], trace.models[t + 1], f"the model after round {t + 1}")
    assert [line["lr"] for line in result.history] == [result.training.rate(t) for t in range(6)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr_cosine": 9}, "lr_cosine = 9: the step size is 0 from round 10 on; use at least rounds = 12"),
        ({"lr_cosine": 0}, "lr_cosine = 0"),
        ({"lr_warmup": 0}, "lr_warmup = 0"),
        ({"lr_warmup": 10**6, "lr": 1e-36}, "lr_warmup = 1000000: in round 1 single precision cannot hold"),
        ({"lr_decay": 1e-30, "lr_decay_every": 5}, "lr_decay = 1e-30: in round 12 single precision cannot"),
        ({"lr_cosine": ROUNDS, "lr": 5e-37}, "lr_cosine = 12: in round 12 single precision cannot hold"),
        ({"lr_cosine": 20, "lr": 2e-38, "lr_decay": 0.5}, "lr_decay = 0.5: in round 12 single precision"),
        ({"lr_decay_every": 1.5}, "lr_decay_every = 1.5"),
        ({"radius_schedule": "cosine"}, "radius_schedule = 'cosine'"),
    ],
)
def test_an_impossible_schedule_is_refused_in_one_line(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ff.FlatfedError) as raised:
        ff.Training(rounds=ROUNDS, **settings)
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_a_cosine_may_go_on_later(tmp_path: Any) -> None:
    settings = {"lr_decay": 1.0, "lr_cosine": 6, "folder": tmp_path / "run"}
    run(ff.fedavg(), rounds=3, **settings)
    resumed = run(ff.fedavg(), rounds=6, **settings)
    straight = run(ff.fedavg(), rounds=6, lr_decay=1.0, lr_cosine=6)
    assert torch.equal(resumed.server["model"], straight.server["model"])
    with pytest.raises(ff.FlatfedError, match="training"):
        run(ff.fedavg(), rounds=6, **{**settings, "lr_cosine": 7})
    with pytest.raises(ff.FlatfedError, match=r"^rounds = 7: the run's step size falls .* lr_cosine = 6"):
        resumed.resume(7)


# -- radii -------------------------------------------------------------------------------------------------

PERTURBED = sorted(
    name for name in ff.ALGORITHMS if "radius" in inspect.signature(ff.ALGORITHMS[name]).parameters
)


@pytest.mark.parametrize("name", PERTURBED)
def test_a_radius_in_proportion_is_a_smaller_radius_at_a_smaller_step(name: str) -> None:
    settings = {"rounds": 1, "lr_decay": 1.0}
    warm = {**settings, "lr_warmup": 2, "lr": 0.2, "radius_schedule": "lr"}
    half = GENERIC[name]["radius"] / 2
    expected = trajectory(generic(name, radius=half), **settings, lr=0.1)
    assert distance(trajectory(generic(name), **warm), expected) < 1e-12


@pytest.mark.parametrize("schedule", ["constant", "lr", "sqrt"])
@pytest.mark.parametrize("name", sorted(set(PERTURBED) - {"fedasam"}))
def test_every_radius_follows_its_schedule(name: str, schedule: str) -> None:
    plain = {
        "lookahead": 0.0,
        "local_weight": 1.0,
    }  # nothing beside the radius moves where gradients are taken
    options = {option: value for option, value in plain.items() if option in GENERIC[name]}
    algorithm, log = spied(generic(name, **options))
    settings = {"rounds": 4, "lr_decay": 0.8, "weight_decay": 0.0, "participants": 8, "path": "matrix"}
    result = run(algorithm, radius_schedule=schedule, **settings)
    radius, training = GENERIC[name]["radius"], result.training
    for t in range(1, 4):
        factor = {"constant": 1.0, "lr": 0.8**t, "sqrt": (t + 1) ** -0.5}[schedule]
        assert training.radius_factor(t) == pytest.approx(factor)
        for step in log.of_round(t):
            lengths = (step.evaluated[-1] - step.point).norm(dim=-1)
            torch.testing.assert_close(lengths, torch.full_like(lengths, radius * factor))
    if "perturbation" in (kept := named(result.server)):
        assert float(kept["perturbation"].norm()) == pytest.approx(radius * factor)


def test_adaptive_radius_follows_its_schedule() -> None:
    halved = trajectory(generic("fedasam"), rounds=3, radius_schedule="sqrt")
    constant = trajectory(generic("fedasam"), rounds=3)
    assert torch.equal(halved[0], constant[0])
    assert distance(halved[1:], constant[1:]) > 1e-5
