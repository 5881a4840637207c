"""`flatfed runs`: what is below a folder, and removing runs without touching anything else."""

from __future__ import annotations

import json

import pytest
from problems import federation, network
from typer.testing import CliRunner

import flatfed as ff
from flatfed import cli
from flatfed.runs.lock import Lock

TRAINING = ff.Training(rounds=2, participants=2, local_steps=1, batch_size=4)


@pytest.fixture
def root(tmp_path):
    """Two runs, one of which is below another folder, and files of the user's."""
    task = ff.Task(network(), federation())
    ff.train(task, ff.fedavg(), TRAINING, folder=tmp_path / "a")
    ff.train(task, ff.scaffold(), TRAINING.replaced(seed=3), folder=tmp_path / "deep" / "b")
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "deep" / "config.json").write_text("{}")
    return tmp_path


def runs(*arguments):
    return CliRunner().invoke(cli.app, ["runs", *map(str, arguments)])


def listed(*arguments):
    done = runs(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return {run["folder"].rpartition("/")[2]: run for run in json.loads(done.stdout)}


def test_every_run_is_listed_with_how_it_ended(root):
    every = listed(root)
    assert {
        name: (run["method"], run["seed"], run["rounds"], run["state"]) for name, run in every.items()
    } == {
        "a": ("fedavg:server_rate=1.0", 0, 2, "complete"),
        "b": (every["b"]["method"], 3, 2, "complete"),
    }
    (root / "a" / "model.safetensors").unlink()
    (root / "deep" / "b" / "config.json").write_text("[]")
    assert {name: run["state"] for name, run in listed(root).items()} == {"a": "incomplete", "b": "damaged"}
    shown = runs(root)
    assert shown.exit_code == 0 and "2 of 2 runs" in shown.stdout and "damaged" in shown.stdout


def test_conditions_choose_by_setting_and_state(root):
    assert list(listed(root, "--where", "algorithm.name=scaffold")) == ["b"]
    assert list(listed(root, "--where", "training.seed=0", "--where", "state=complete")) == ["a"]
    assert listed(root, "--where", "training.nothing.like=it") == {}


def test_removing_leaves_everything_that_no_run_has_written(root):
    (root / "a" / "notes.txt").write_text("mine")
    (root / "a" / "checkpoint" / "weights.safetensors").write_text("mine")
    done = runs(root, "--remove", "--yes")
    assert done.exit_code == 0, done.output
    left = {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}
    assert left == {"notes.txt", "deep/config.json", "a/notes.txt", "a/checkpoint/weights.safetensors"}
    assert done.stderr.count("not a file of a run") == 2


def test_removing_asks_first_and_only_takes_what_is_listed(root):
    done = CliRunner().invoke(cli.app, ["runs", str(root), "--remove"], input="n\n")
    assert done.exit_code == 1 and len(listed(root)) == 2
    done = CliRunner().invoke(
        cli.app, ["runs", str(root), "--where", "training.seed=3", "--remove"], input="y\n"
    )
    assert done.exit_code == 0 and list(listed(root)) == ["a"]


def test_a_run_that_is_running_is_not_removed(root):
    lock = Lock(root / "a" / "checkpoint" / ".lock")
    lock.acquire(root / "a")
    try:
        done = runs(root, "--remove", "--yes")
    finally:
        lock.release()
    assert done.exit_code == 2 and "state = running" in done.stderr
    assert len(listed(root)) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["none"], "none: no such folder"), ([".", "--where", "x"], "--where 'x': write it as key=value")],
)
def test_mistakes(arguments, message):
    done = runs(*arguments)
    assert done.exit_code == 2 and message in done.stderr
