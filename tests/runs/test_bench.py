"""`flatfed bench`: the engine and the loop do the same work, and a difference is not hidden."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from click.testing import Result
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


TASK = """
import torch
from torch import nn
import flatfed as ff

settings = {"algorithm": {"name": "scaffold"}, "training": {"rounds": 9, "participants": 3, "batch_size": 4}}


class Named(nn.Module):
    def __init__(self, width, dropout):
        super().__init__()
        self.body = nn.Linear(3, width)
        self.rest = nn.Sequential(nn.BatchNorm1d(width), nn.Dropout(dropout), nn.Linear(width, 2))

    def forward(self, numbers):
        return {"logits": self.rest(self.body(numbers))}


def make(width=4, dropout=0.0):
    draw = torch.Generator().manual_seed(0)
    clients = [
        ({"numbers": torch.randn(6 + n, 3, generator=draw)}, torch.randint(2, (6 + n,), generator=draw))
        for n in (0, 1, 2, 4, 5)
    ]
    return ff.Task(Named(width, dropout), ff.Federation.from_tensors(clients))
"""


def bench(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["bench", *arguments, "--rounds", "2"])


def test_a_task_of_ones_own_is_measured_beside_a_loop_with_the_same_loss(tmp_path):
    file = tmp_path / "task_to_bench.py"
    file.write_text(TASK)
    shown = bench(f"{file}:make", "--set", "task.width=8", "--json")
    assert shown.exit_code == 0, shown.output
    (result,) = json.loads(shown.stdout).values()
    assert result["parameters"] == 4 * 8 + 2 * 8 + 2 * 9
    assert result["loss"] == pytest.approx(result["loop_loss"], abs=1e-6)
    assert "FedAvg, 3 of 5 clients, float32" in shown.stderr and "note:" not in shown.stderr
    drawn = bench(f"{file}:make", "--set", "task.dropout=0.5", "--set", "training.lr=1.0")
    assert drawn.exit_code == 0 and "as where a model or augmentation draws" in drawn.stderr
    less = bench(f"{file}:make", "--precision", "bfloat16")
    assert less.exit_code == 0 and "bfloat16" in less.stdout, less.output


def test_a_config_file_is_measured_and_what_cannot_be_is_named(tmp_path):
    config = tmp_path / "c.toml"
    config.write_text("[training]\nrounds = 3\nparticipation = 0.05\nlocal_steps = 2\nbatch_size = 5\n")
    shown = bench(str(config))
    assert shown.exit_code == 0 and "FedAvg, 5 of 100 clients" in shown.stdout, shown.output
    for arguments, message in (
        ([str(config), "MLP"], "give one task, or models by their names"),
        (["MLP", "--set", "task.width=3"], "--set task.width=3: give it with a task"),
        ([str(config), "--set", "execution.engine=ray"], "bench measures this machine"),
        ([str(config), "--device", "cuda:99"], "device = 'cuda:99': cannot be used here"),
    ):
        refused = bench(*arguments)
        assert refused.exit_code == 2 and message in refused.stderr, refused.output


def test_different_work_is_an_error(monkeypatch):
    def wrong(*arguments):
        found = measure(*arguments)
        return replace(found, loop_loss=found.loss + 0.01)

    monkeypatch.setattr("flatfed.runs.bench.measure", wrong)
    shown = CliRunner().invoke(app, ["bench", "logistic regression", "--rounds", "1"])
    assert shown.exit_code == 2
    assert "they should agree" in shown.output
