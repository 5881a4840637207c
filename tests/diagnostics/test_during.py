"""Diagnostics in the course of a training."""

from __future__ import annotations

import tomllib

import pytest
import small_runs

from flatfed.core.errors import FlatfedError
from flatfed.diagnostics import DuringTraining, diagnose, inspect
from flatfed.runs.train import run_config
from flatfed.training.config import Config, with_assignments

OPTIONS = {"samples": 30, "clients": 2}


def config(*assignments):
    return Config.checked(
        with_assignments(tomllib.loads(small_runs.CONFIG), ["training.rounds=4", *assignments])
    )


def measured(setting, folder, diagnostic, numbers, every=1, options=OPTIONS):
    task = setting.make_task()
    with inspect(task, setting.make_algorithm(), setting.training, setting.execution) as subject:
        return run_config(
            setting, folder, [DuringTraining(subject, diagnostic, numbers, every, options)], task
        )


def test_the_last_numbers_are_those_of_the_finished_run(tmp_path):
    run = measured(config(), tmp_path / "run", "sharpness", {"whole": "global"})
    content = diagnose(tmp_path / "run", ["sharpness"], OPTIONS)["sharpness"]
    assert run.history[-1]["whole"] == content["result"]["global"] != run.history[0]["whole"]


def test_measuring_changes_nothing_of_the_training(tmp_path):
    setting = config("algorithm=fedsam")
    plain = run_config(setting, tmp_path / "plain")
    run = measured(setting, tmp_path / "measured", "generalization", {"gap": "gap.loss"}, every=3, options={})
    assert all(run.server["model"] == plain.server["model"])
    assert [line["round"] for line in run.history if "gap" in line] == [1, 3, 4]
    known = small_runs.without_seconds(plain.history)
    assert [{key: line[key] for key in known[0]} for line in run.history] == known


def test_a_resumed_training_measures_the_same(tmp_path):
    numbers = {"own": "cosine.local", "last": "cosine.lesam", "nothing": "cosine.synthetic"}
    whole = measured(config(), tmp_path / "whole", "perturbation", numbers)
    measured(config("training.rounds=2"), tmp_path / "parts", "perturbation", numbers)
    parts = measured(config(), tmp_path / "parts", "perturbation", numbers)
    assert small_runs.without_seconds(parts.history) == small_runs.without_seconds(whole.history)
    assert all(-1 <= line["last"] <= 1 and "nothing" not in line for line in whole.history)


def test_what_only_clients_know_is_not_guessed(tmp_path):
    with pytest.raises(FlatfedError, match=r"control_variate\.\w+: kept by the clients"):
        measured(config("algorithm=scaffold"), None, "drift", {"drift": "client_drift"}, options={})
    with pytest.raises(FlatfedError, match="radius"):
        measured(config(), None, "sharpness", {"whole": "global"}, options={"radius": -1.0})
