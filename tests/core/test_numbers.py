"""Every number that a user can write is checked: it is refused by name, or kept as a plain finite number."""

from __future__ import annotations

import fractions
import inspect
import json
import math
from collections.abc import Callable
from dataclasses import fields
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from compositions import VARIANTS
from problems import GENERIC, Quadratics, run

import flatfed as ff
from flatfed import parts
from flatfed.core.errors import shown
from flatfed.core.part import Part, part_name
from flatfed.core.state import Dimensions, Vector, check_like
from flatfed.core.types import LARGEST

NEVER: list[Any] = [
    *(1e300, 1e308, 3.5e38, -1e300, 1e-320, 1e-45, -1e-45, math.nan, math.inf, -math.inf),
    *(10**400, -(10**400), 10**5000, 2**63, np.float64("nan"), np.float32("inf")),
    *(fractions.Fraction(1, 2), Decimal("0.5"), 1j, np.complex64(1), b"1"),
    *(torch.tensor(0.5), torch.tensor([0.5, 0.5]), np.array(0.5), np.array([1, 2]), [1], {"a": 1}, object()),
]
"""No option takes any of these, except that 2**63 is a float's."""
FLAGS = [True, False, np.bool_(True)]
WORDS = ["0.5", "yes", ""]


def attempt(make: Callable[[], Any], field: str) -> Any:
    """What was made, or None if it was refused in one line that names the field."""
    try:
        return make()
    except ff.FlatfedError as error:
        text = str(error)
        assert field in text and "\n" not in text and len(text) < 400, text
        return None


def is_plain(value: Any) -> bool:
    if type(value) is float:
        return math.isfinite(value) and abs(value) <= LARGEST and math.copysign(1, value or 1.0) in (1, -1)
    return value is None or type(value) in (int, str, bool) or isinstance(value, Part)


def is_number(default: Any) -> bool:
    return type(default) in (int, float)


def is_whole(default: Any) -> bool:
    return type(default) is int


TRAINING: dict[str, Any] = {
    "rounds": 3,
    "participation": 0.5,
    "participants": 2,
    "local_epochs": 1,
    "local_steps": 2,
    "batch_size": 4,
    "lr": 0.1,
    "lr_decay": 0.9,
    "lr_decay_every": 2,
    "lr_cosine": 4,
    "lr_warmup": 2,
    "weight_decay": 0.1,
    "clip": 1.0,
    "evaluate_every": 1,
    "fine_tuning_steps": 2,
    "patience": 3,
    "seed": 3,
}


def test_every_number_of_a_training_is_tried():
    other = {
        "sampling",
        "radius_schedule",
        "clip_stage",
        "weighting",
        "evaluate",
        "path",
        "precision",
        "best_by",
        "sharing",
    }
    assert set(ff.Training.model_fields) == {*TRAINING, *other}


@pytest.mark.parametrize("field", TRAINING)
def test_a_training_refuses_what_is_no_number_of_single_precision(field):
    for value in [*NEVER, *FLAGS, *WORDS, -1]:
        made = attempt(lambda value=value: ff.Training(**{"rounds": 3, field: value}), field)
        whole = type(TRAINING[field]) is int
        assert made is None or (value == 2**63 and not whole), f"{field} = {shown(value)}"
    for value in (np.float64(TRAINING[field]), np.float32(0.5), np.int64(1), np.uint8(1), 1):
        made = attempt(lambda value=value: ff.Training(**{"rounds": 3, field: value}), field)
        assert made is None or (is_plain(getattr(made, field)) and getattr(made, field) == value)
    assert getattr(ff.Training(**{"rounds": 1, field: np.int64(1)}), field) == 1


@pytest.mark.parametrize("part", VARIANTS, ids=repr)
def test_a_part_refuses_what_is_no_number_of_single_precision(part):
    options = {item.name: getattr(part, item.name) for item in fields(part)}
    for field, default in options.items():
        wrong = [*NEVER, *(FLAGS if is_number(default) else [])]
        wrong += WORDS if is_number(default) or isinstance(default, bool) else []
        for value in wrong:
            made = attempt(lambda field=field, value=value: type(part)(**{**options, field: value}), field)
            assert made is None or (value == 2**63 and not is_whole(default)), f"{field} = {shown(value)}"
        for value in (-0.0, np.float32(0.25), np.float64(0.25), np.int64(2)):
            made = attempt(lambda field=field, value=value: type(part)(**{**options, field: value}), field)
            if made is not None:
                kept = getattr(made, field)
                assert is_plain(kept) and kept == value and math.copysign(1, kept) == 1
        with pytest.raises(ff.FlatfedError, match=rf"{part_name(part)}\.{field}x: unknown"):
            type(part)(**{**options, f"{field}x": 1})


@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_an_algorithm_refuses_what_is_no_number_of_single_precision(name):
    make = ff.ALGORITHMS[name]
    for field, parameter in inspect.signature(make).parameters.items():
        for value in [*NEVER, *(FLAGS if is_number(parameter.default) else [])]:
            made = attempt(lambda field=field, value=value: make(**{field: value}), f"{name}.{field}")
            assert made is None or (value == 2**63 and not is_whole(parameter.default))
        if is_number(parameter.default):
            # In a composition that may lead to other numbers, which are refused by their own names.
            for value in (np.float32(0.5), np.float64(0.5), np.int64(4), -0.0):
                made = attempt(lambda field=field, value=value: make(**{field: value}), "")
                assert made is None or json.loads(json.dumps(made.describe()))[field] == value
        with pytest.raises(ff.FlatfedError, match=rf"{name}\.{field}x: unknown"):
            make(**{f"{field}x": 1})
    assert ff.build(make(**GENERIC[name]).describe()) == make(**GENERIC[name])


def test_a_minus_before_zero_makes_no_other_training():
    assert repr(ff.Training(rounds=1, weight_decay=-0.0)) == repr(ff.Training(rounds=1))
    assert repr(ff.fedsam(radius=-0.0)) == repr(ff.fedsam(radius=0.0))


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (None, "algorithm = None: give a name, or a table of parts by slot"),
        (["fedavg"], "algorithm = ['fedavg']: give a name"),
        pytest.param(10**5000, "algorithm = <int>: give a name", id="5000 digits"),
        ({"name": 1}, "algorithm = 1: unknown"),
        ({"name": 10**5000}, "algorithm = <int>: unknown"),
        ({"name": "fedsam", 3: 4}, "algorithm: 3 is not the name of an option; remove it"),
        ({"name": "fedsam", "radius": [1]}, "fedsam.radius = [1]: input should be a number"),
        ({"name": "fedsam", "normalise": True}, "fedsam.normalise: unknown"),
        ({"gradient": 0.5}, "algorithm.gradient = 0.5: give the name of a part"),
        ({"gradient": {"part": ["x"]}}, "algorithm.gradient.part = ['x']: unknown"),
        (
            {"gradient": {"part": "sharpness_aware", 1: 2}},
            "algorithm.gradient: 1 is not the name of an option",
        ),
        ({"gradient": {"part": "sharpness_aware"}}, "algorithm.gradient.sharpness_aware.radius: missing"),
        (
            {"gradient": {"part": "sharpness_aware", "radius": 1e300}},
            "algorithm.gradient.sharpness_aware.radius = 1e+300: beyond single precision",
        ),
        ({"correct": [["proximal"]]}, "algorithm.correct = ['proximal']: give the name of a part"),
        ({"name": "fedavg", "uncompressed": [1]}, "algorithm.uncompressed = [1]: give the names of uploads"),
        ({"compress": {"part": "error_feedback", "of": 3}}, "algorithm.compress.of = 3: give the name"),
        (
            {"compress": {"part": "error_feedback", "of": {"part": "quantize", "bits": 1}}},
            "algorithm.compress.of.quantize.bits = 1: input should be greater than or equal to 2",
        ),
        ({3: "x"}, "algorithm: 3 is not the name of an option"),
        (
            {"server": {"part": "adam", "rate": 1, "stability": 1e20}},
            "algorithm.server.adam.stability = 1e+20: its square is beyond single precision",
        ),
    ],
)
def test_a_description_that_is_wrong_is_refused_by_its_place(description, message):
    with pytest.raises(ff.FlatfedError) as refused:
        ff.build(description)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_step_size_that_decays_to_nothing_is_refused():
    with pytest.raises(ff.FlatfedError, match=r"lr_decay = 0.5: in round 400 single precision cannot hold"):
        ff.Training(rounds=400, lr_decay=0.5)
    assert ff.Training(rounds=100, lr_decay=0.5).rate(99) > 0


@pytest.mark.parametrize("clip_stage", ["loss", "total"])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        (ff.fedavg(), {"lr": 1e30, "weight_decay": 1e30}),
        (ff.fedprox(3e38), {"lr": 1e30}),
        (ff.Algorithm(correct=parts.HybridProximal(3e38, 3e38)), {}),
        (ff.Algorithm(correct=parts.GlobalMomentum(3e38, 1.0)), {"lr": 3e38}),
        (ff.fedavg(server_rate=3e38), {"lr": 1e30}),
        (ff.fedexp(stability=3e38), {"lr": 3e38}),
    ],
)
def test_settings_that_single_precision_cannot_multiply_diverge_by_name(algorithm, settings, clip_stage):
    model = torch.nn.Linear(4, 3)
    data = ff.Federation.from_tensors([(torch.ones(6, 4), torch.zeros(6, dtype=torch.int64))] * 3)
    with pytest.raises(ff.FlatfedError) as refused:
        run(algorithm, model=model, data=data, clip=1.0, clip_stage=clip_stage, **settings)
    assert "lr" in str(refused.value) and "overflow" not in str(refused.value)


def test_state_that_no_memory_can_hold_is_refused_by_its_name():
    enormous = ff.build({"name": "fedsynsam", "iterations": 10**13, "warm_rounds": 3})
    with pytest.raises(ff.FlatfedError, match=r"trajectory_matching\.matching_losses: 1e\+13 numbers"):
        run(enormous)
    with pytest.raises(ff.FlatfedError, match=r"scale: 2.5e\+13 numbers"):
        Dimensions(10, (5_000_000,)).length(Vector("scale", "inputs_squared"))
    assert Dimensions(10, (3, 4, 5)).length(Vector("scale", "inputs")) == 60


def test_a_stored_state_is_refused_by_the_name_of_the_vector_that_is_wrong():
    expected = {"model": torch.zeros(3), "momentum.momentum": torch.zeros(3)}
    check_like({key: torch.ones(3) for key in reversed(expected)}, expected, "run/checkpoint")
    for wrong, message in (
        ({"model": torch.zeros(3)}, "run/checkpoint: it lacks 'momentum.momentum'"),
        ({**expected, "adam.momentum": torch.zeros(3)}, "'adam.momentum' does not belong there"),
        (
            {**expected, "model": torch.zeros(4)},
            "'model' is [4] torch.float32 where [3]",
        ),
        ({**expected, "model": torch.zeros(3, 1)}, "'model' is [3, 1]"),
        ({**expected, "model": torch.zeros(3).double()}, "'model' is [3] torch.float64"),
    ):
        with pytest.raises(ff.FlatfedError) as refused:
            check_like(wrong, expected, "run/checkpoint")
        assert message in str(refused.value)


def test_the_largest_numbers_that_are_allowed_still_train_or_diverge_by_name():
    problem = Quadratics.random()
    for settings in ({"clip": 3e38}, {"clip": 2e-38}, {"lr": 2e-38}, {"lr": 3e38}, {"weight_decay": 3e38}):
        try:
            trained = problem.train(ff.fedavg(), rounds=2, **settings)
        except ff.DivergedError as error:
            assert "lr" in str(error)
            continue
        assert bool(torch.isfinite(trained.server["model"]).all())
