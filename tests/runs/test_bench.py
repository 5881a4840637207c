"""`flatfed bench`: the engine and the loop do the same work, and a difference is not hidden."""

from __future__ import annotations

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from flatfed.cli import app
from flatfed.runs.bench import WORKLOADS, measure


@pytest.mark.parametrize("name", ["logistic regression", "LeNet-5"])
def test_engine_and_loop_end_with_the_same_loss(name):
    ticks: list[None] = []
    found = measure(WORKLOADS[name], 1, lambda: ticks.append(None))
    assert len(ticks) == 3
    assert found.loss == pytest.approx(found.loop_loss, abs=1e-5)
    assert found.seconds > 0 and found.loop_seconds > 0
    assert found.path == ("matrix" if name == "logistic regression" else "client")


def test_the_table_says_what_was_chosen_and_why():
    shown = CliRunner().invoke(app, ["bench", "logistic regression", "--rounds", "1"])
    assert shown.exit_code == 0, shown.output
    assert "7,850" in shown.output and "matrix: the model has at most" in shown.output
    assert "MLP" not in shown.output


def test_it_measures_in_less_precision_and_refuses_unknown_ones():
    found = measure(WORKLOADS["LeNet-5"], 1, lambda: None, "bfloat16")
    exact = measure(WORKLOADS["LeNet-5"], 1, lambda: None)
    assert found.loss == pytest.approx(found.loop_loss, abs=1e-5)
    assert found.loss != pytest.approx(exact.loss, abs=1e-6)
    shown = CliRunner().invoke(app, ["bench", "MLP", "--rounds", "1", "--precision", "bfloat16"])
    assert shown.exit_code == 0 and "bfloat16" in shown.output, shown.output
    refused = CliRunner().invoke(app, ["bench", "MLP", "--precision", "half"])
    assert refused.exit_code == 2 and "precision = 'half'" in refused.output


def test_an_unknown_model_is_one_line():
    shown = CliRunner().invoke(app, ["bench", "perceptron"])
    assert shown.exit_code == 2
    assert "unknown model 'perceptron'; choose from logistic regression, MLP" in shown.output


def test_different_work_is_an_error(monkeypatch):
    def wrong(*arguments):
        found = measure(*arguments)
        return replace(found, loop_loss=found.loss + 0.01)

    monkeypatch.setattr("flatfed.runs.bench.measure", wrong)
    shown = CliRunner().invoke(app, ["bench", "logistic regression", "--rounds", "1"])
    assert shown.exit_code == 2
    assert "they should agree" in shown.output
