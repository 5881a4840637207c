"""What commands print for other programs: JSON on stdout, and nothing else there."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command import flatfed
from small_runs import CONFIG
from typer.testing import CliRunner

from flatfed import cli
from flatfed.cli.terminal import console


def results(*arguments: object) -> dict:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    assert not console.stderr or "--json" in map(str, arguments)
    return json.loads(done.stdout, parse_constant=pytest.fail)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("json")
    (folder / "c.toml").write_text(CONFIG)
    return folder


def test_a_run_says_where_it_is_and_how_it_ended(folder):
    config, runs = folder / "c.toml", folder / "runs"
    held = ["--set", "data.validation=0.2"]
    for expected in (2, 2):  # trained, and complete already
        run = results("run", config, "--runs", runs, "--json", *held)
        assert run["rounds"] == run["last"]["round"] == expected and run["best"]["round"] in {1, 2}
        assert run["config"]["data"]["validation"] == 0.2 and "deviation" in run["clients"]["train"]
    more = results("resume", run["folder"], "--rounds", 3, "--json")
    assert more["rounds"] == 3 and more["folder"] == run["folder"]
    diagnosed = results("diagnose", run["folder"], "clients", "--json")
    assert "accuracy" in diagnosed[run["folder"]]["clients"]["result"]


def test_comparisons_and_trials(folder):
    config, runs = folder / "c.toml", folder / "runs"
    compared = results(
        "compare", "fedavg", "scaffold", "--config", config, "--runs", runs, "--seeds", 1, "--json"
    )
    rows = {row["label"]: row for row in compared["algorithms"]}
    assert rows.keys() == {"fedavg", "scaffold"} and 0 <= rows["scaffold"]["accuracy"]["mean"] <= 1
    assert rows["fedavg"]["accuracy"]["deviation"] is None, "one seed has no deviation, and JSON no NaN"
    tuned = results(
        *("tune", config, "--runs", runs, "--grid", "training.lr=0.1,0.2", "--json"),
        *("--set", "data.validation=0.2"),
    )
    (trials,) = tuned.values()
    assert {trial["assignments"][0] for trial in trials} == {"training.lr=0.1", "training.lr=0.2"}
    assert all(Path(trial["folder"]).is_dir() for trial in trials)
    assert {trial["chosen_by"] for trial in trials} == {"validation"}
    (trials,) = results(
        *("tune", config, "--runs", runs, "--grid", "training.lr=0.1", "--json", "--choose-by", "test"),
    ).values()
    assert {trial["chosen_by"] for trial in trials} == {"test"}
    (trials,) = results(
        *("tune", config, "--runs", runs, "--halving", "--trials", 1, "--json"),
        *("--set", "data.validation=0.2"),
    ).values()
    assert {trial["chosen_by"] for trial in trials} == {"validation"}


def test_what_there_is():
    assert "title" in results("data", "list", "--json")["digits"]
    assert "options" in results("diagnose", "--json")["hessian"]
    assert any(name.startswith("fedsagd/") for name in results("reproduce", "--json"))
    assert "fedavg" in results("list", "--json")
    planned = results("race", "--plan", "--json")
    assert all(set(one["missing"]) <= set(one["methods"]) and one["title"] for one in planned.values())
    (explained, *_) = results("reproduce", "fedsagd/table2", "--explain", "--json")
    assert explained["rows"] and explained["title"]


def test_a_split(folder):
    split = results("split", "--clients", 10, "--json")
    assert len(split["samples_by_client_and_class"]) == 10 and split["summary"]


TALKATIVE = """
import os, sys, torch
import flatfed as ff

print("imported")
settings = {"training": {"rounds": 1, "local_steps": 1, "path": "client"}, "execution": {"workers": 2}}


class Model(torch.nn.Linear):
    def forward(self, inputs):
        print("forward")
        return super().forward(inputs)


def make():
    print("made")
    os.write(1, b"written to the descriptor")
    clients = [(torch.randn(4, 3), torch.arange(4) % 2)] * 2
    return ff.Task(Model(3, 2), ff.Federation.from_tensors(clients))
"""


def test_what_a_task_prints_itself_is_not_among_the_results(tmp_path):
    (tmp_path / "talkative.py").write_text(TALKATIVE)
    done = flatfed("run", "talkative.py:make", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rounds"] == 1
    for text in ("imported", "made", "forward", "written to the descriptor"):
        assert text in done.stderr
