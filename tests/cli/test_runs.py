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


def test_long_names_of_folders_are_listed_whole(root):
    name = "digits-dirichlet_client-fedsam-seed0-0123456789-and-a-few-words-more-than-fit-into-a-line"
    (root / "a").rename(root / name)
    lines = [line.split("│")[1].strip() for line in runs(root).stdout.splitlines() if line.startswith("│")]
    assert name in "".join(lines)


def test_conditions_may_hold_anything(root):
    for value in ("[" * 10**5, "9" * 5000, "\x1b[31m", ""):
        assert listed(root, "--where", f"training.seed={value}") == {}


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


def test_a_folder_that_only_looks_like_a_run_is_neither_listed_nor_removed(root):
    """A published model, as it is downloaded, beside somebody's checkpoints."""
    mine = root / "bert"
    (mine / "checkpoint").mkdir(parents=True)
    (mine / "config.json").write_text('{"architectures": ["Bert"]}')
    (mine / "model.safetensors").write_text("weights of mine")
    assert set(listed(root)) == {"a", "b"}
    assert runs(root, "--remove", "--yes").exit_code == 0
    assert (mine / "model.safetensors").read_text() == "weights of mine" and (mine / "config.json").exists()


def test_removing_leaves_a_model_and_notes_that_have_taken_the_places_of_a_runs(root):
    model, notes = root / "a" / "model.safetensors", root / "a" / "diagnostics" / "notes.json"
    model.write_text("weights of mine")
    notes.parent.mkdir()
    notes.write_text('{"remember": "the milk"}')
    (notes.parent / "hessian.json").write_text('{"format": 1, "result": {}}')
    done = runs(root, "--where", "training.seed=0", "--remove", "--yes")
    assert done.exit_code == 0, done.output
    left = [path for path in (root / "a").rglob("*") if path.is_file()]
    assert sorted(left) == [notes, model]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"algorithm": 3, "training": {"rounds": Infinity, "seed": 0}}'),
        ("config.json", '{"algorithm": [], "training": {"rounds": 1e400, "seed": []}}'),
        ("config.json", '{"algorithm": {}, "training": {"rounds": 2, "seed": 0}, "data": {"dataset": {}}}'),
        ("config.json", "[" * 10**5),
        ("history.jsonl", '{"round": 1, "test_accuracy": "high"}'),
        ("history.jsonl", '{"round": 1, "test_accuracy": [' + "9" * 400 + "]}"),
    ],
)
def test_runs_that_hold_anything_are_listed_all_the_same(root, file, content):
    (root / "a" / file).write_text(content)
    for arguments in ([], ["--json"]):
        done = runs(root, *arguments)
        assert done.exit_code == 0, done.exception


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
    [
        (["none"], "none: no such folder"),
        ([".", "--where", "x"], "--where 'x': write it as key=value"),
    ],
)
def test_mistakes(arguments, message):
    done = runs(*arguments)
    assert done.exit_code == 2 and message in done.stderr
