"""Sweeps: what is tried, what is stopped, what is kept, and going on after a kill."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatfed import cli
from flatfed.core.errors import FlatfedError
from flatfed.runs import tune as sweep_module
from flatfed.training.config import Config
from flatfed.runs.folder import RunFolder
from flatfed.runs.tune import Plan, parse_grid, sweep

BASE = {
    "data": {"clients": 20},
    "model": {"name": "logistic_regression"},
    "training": {"rounds": 5, "participants": 4, "local_steps": 3, "batch_size": 8, "workers": 1},
}
TOML = """
data.clients = 20
model.name = "logistic_regression"
algorithm.name = "fedavg"
[training]
rounds = 5
participants = 4
local_steps = 3
batch_size = 8
workers = 1
"""


def unwatched(assignments, ended):
    return lambda now: None


def plan_of(*grid, base=BASE, **options):
    return Plan.checked(base, parse_grid(list(grid)), **options)


def states(found):
    return {each.assignments[0].partition("=")[2]: each.state for each in found}


@pytest.fixture
def started(monkeypatch):
    """The step sizes of the runs that were started, in order."""
    seen = []
    run = Config.run

    def counted(self, *arguments, **named):
        seen.append(self.training.lr)
        return run(self, *arguments, **named)

    monkeypatch.setattr(Config, "run", counted)
    return seen


def test_values_are_split_outside_brackets_and_quotes():
    grid = parse_grid(["training.lr=0.1, 1e-2", "model.hidden=[64,32],[128]", "a.b='x,y',z"])
    assert grid == {
        "training.lr": ("0.1", "1e-2"),
        "model.hidden": ("[64,32]", "[128]"),
        "a.b": ("'x,y'", "z"),
    }


@pytest.mark.parametrize("metric", ["final", "best"])
def test_all_combinations_are_run_and_sorted(tmp_path, metric, started):
    plan = plan_of("training.lr=0.01,0.3", "algorithm.name=fedavg,fedavgm", metric=metric)
    found = sweep(plan, "all", tmp_path, None, unwatched)
    expected = {
        (f"training.lr={lr}", f"algorithm.name={name}")
        for lr in ("0.01", "0.3")
        for name in ("fedavg", "fedavgm")
    }
    assert {each.assignments for each in found} == expected and len(started) == 4
    assert [each.value for each in found] == sorted((each.value for each in found), reverse=True)
    for each in found:
        curve = [record["test_accuracy"] for record in RunFolder(each.folder).read_history()]
        assert each.state == "complete" and each.rounds == 5
        assert each.value == (curve[-1] if metric == "final" else max(curve))
        assert (each.folder / "model.safetensors").exists()


def test_a_second_sweep_runs_nothing(tmp_path, started):
    plan = plan_of("training.lr=0.01,0.1,1e38")
    first = sweep(plan, "again", tmp_path, None, unwatched)
    assert len(started) == 3
    assert sweep(plan, "again", tmp_path, None, unwatched) == first
    assert len(started) == 3
    # Not even in another sweep, whose journal knows nothing, are complete runs run again.
    sweep(plan, "other", tmp_path, None, unwatched)
    assert started[3:] == [1e38]


def test_a_half_done_sweep_reruns_nothing_that_ended(tmp_path, started):
    plan = plan_of("training.lr=0.01,0.03,0.1,0.3")
    with pytest.raises(KeyboardInterrupt):
        sweep(plan, "half", tmp_path, None, stop_in(third=3))
    assert len(started) == 3
    before = list(started)
    found = sweep(plan, "half", tmp_path, None, unwatched)
    # The interrupted one comes first, then the one that was never begun.
    assert started[3] == before[2] and len(started) == 5
    assert sorted(started[:2] + started[3:]) == [0.01, 0.03, 0.1, 0.3]
    straight = sweep(plan, "half", tmp_path / "straight", None, unwatched)
    assert [(each.assignments, each.value) for each in found] == [
        (each.assignments, each.value) for each in straight
    ]


def stop_in(third):
    """Ctrl-C in the middle of the third trial."""
    begun = []

    def watch(assignments, ended):
        begun.append(assignments)

        def update(now):
            if len(begun) == third and now.round == 3:
                raise KeyboardInterrupt

        return update

    return watch


def test_a_killed_sweep_goes_on(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(TOML.replace("rounds = 5", "rounds = 150"))
    command = ["sweep", str(config), "--grid", "training.lr=0.01,0.1", "--runs", str(tmp_path / "runs")]
    command += ["--study", "killed"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flatfed", *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )

    def histories():
        return list((tmp_path / "runs").glob("fedavg-*/history.jsonl"))

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(path.read_text().count("\n") > 20 for path in histories()):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=60)
    assert len(histories()) == 1 and not list((tmp_path / "runs").glob("*/model.safetensors"))
    # The kill may also have cut the journal's last line.
    journal = tmp_path / "runs" / "sweep-killed.journal"
    journal.write_bytes(journal.read_bytes() + b'{"op_code": 4, "wor')
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "runs").glob("*/model.safetensors"))) == 2
    assert done.stdout.count("complete") == 2


def test_trials_that_fall_behind_are_stopped_and_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_module, "TRIALS_BEFORE_PRUNING", 2)
    base = {**BASE, "training": {**BASE["training"], "rounds": 20}}
    plan = plan_of("training.lr=0.3,0.2,0.25,1e-7,1e-8,1e-9", base=base)
    found = sweep(plan, "behind", tmp_path, None, unwatched)
    stopped = [each for each in found if each.state == "stopped early"]
    assert stopped and {each.assignments[0] for each in stopped} <= {
        f"training.lr=1e-{number}" for number in (7, 8, 9)
    }
    assert found[0].state == "complete" and found[-1].state == "stopped early"
    for each in stopped:
        assert 2 <= each.rounds < 20
        assert not (each.folder / "model.safetensors").exists()
    again = sweep(plan, "behind", tmp_path, None, lambda *_: pytest.fail("ran again"))
    assert again == found
    done = CliRunner().invoke(cli.app, ["resume", str(stopped[0].folder)])
    assert done.exit_code == 0, done.output
    assert len(RunFolder(stopped[0].folder).read_history()) == 20


def test_divergence_is_a_failed_trial(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(TOML)
    command = ["sweep", str(config), "--grid", "training.lr=1e38,0.1", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "diverged: training.lr=1e38: round 1: the training loss is nan" in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout.index("0.1") < done.stdout.index("1e38")
    assert f"flatfed run {shlex.quote(str(config))} --set training.lr=0.1" in done.stdout
    command[3] = "training.lr=1e38"
    alone = CliRunner().invoke(cli.app, command)
    assert alone.exit_code == 1
    assert "no trial ran to its end" in alone.stderr


def test_the_printed_line_of_the_best_gives_its_run(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(TOML)
    runs = ["--runs", str(tmp_path / "runs")]
    changed = ["--set", "training.rounds=3", "--seed", "4"]
    done = CliRunner().invoke(
        cli.app, ["sweep", str(config), "--grid", "training.lr=0.01,0.3", *changed, *runs]
    )
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("flatfed run"))
    assert shlex.split(line)[3:] == [
        *("--set", "training.rounds=3", "--set", "training.seed=4", "--set", "training.lr=0.3")
    ]
    best = CliRunner().invoke(cli.app, [*shlex.split(line)[1:], *runs])
    assert best.exit_code == 0 and "is complete: 3 rounds" in " ".join(best.stdout.split())


def test_fewer_trials_are_distinct_and_more_may_follow(tmp_path, started):
    plan = plan_of("training.lr=0.01,0.02,0.05,0.1,0.2", "training.weight_decay=0,0.001")
    some = sweep(plan, "some", tmp_path, 6, unwatched)
    assert len(some) == len({each.assignments for each in some}) == len(started) == 6
    everything = sweep(plan, "some", tmp_path, None, unwatched)
    assert len(everything) == len(started) == 10
    assert {each.assignments for each in some} <= {each.assignments for each in everything}
    assert len(sweep(plan, "some", tmp_path, 3, unwatched)) == 10 and len(started) == 10


def test_a_study_belongs_to_one_plan(tmp_path):
    sweep(plan_of("training.lr=0.1"), "mine", tmp_path, None, unwatched)
    for other in (plan_of("training.lr=0.2"), plan_of("training.lr=0.1", metric="best")):
        with pytest.raises(FlatfedError, match="made with another config, grid, metric or seed"):
            sweep(other, "mine", tmp_path, None, unwatched)
    # What does not change results may change.
    base = {**BASE, "training": {**BASE["training"], "workers": 2}}
    sweep(plan_of("training.lr=0.1", base=base), "mine", tmp_path, None, unwatched)


def test_two_processes_do_not_share_a_sweep(tmp_path):
    plan = plan_of("training.lr=0.1")

    def second(assignments, ended):
        with pytest.raises(FlatfedError, match="another process is running this sweep"):
            sweep(plan, "mine", tmp_path, None, unwatched)
        return lambda now: None

    assert sweep(plan, "mine", tmp_path, None, second)[0].state == "complete"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--grid", "training.lr"], "--grid training.lr: write it as key=value,value"),
        (["--grid", "training.lr=0.1,"], "--grid training.lr=0.1,: write it as key=value,value"),
        (["--grid", "training.lr=0.1,0.1"], "0.1 is listed twice"),
        (["--grid", "training.lr=0.1", "--grid", "training.lr=0.2"], "training.lr is given twice"),
        (["--grid", "training.lr=0.1,-1"], "training.lr = -1"),
        (["--grid", "training.rate=1"], "training.rate: unknown"),
        (["--grid", "algorithm.radius=0.1"], "fedavg.radius: unknown"),
        (["--grid", "training.lr=0.1", "--metric", "last"], "metric = 'last': unknown"),
        (["--grid", "training.lr=0.1", "--study", "a/b"], "study = 'a/b': use letters"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, arguments, complaint):
    config = tmp_path / "config.toml"
    config.write_text(TOML)
    done = CliRunner().invoke(cli.app, ["sweep", str(config), *arguments, "--runs", str(tmp_path / "runs")])
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and complaint in lines[0]
    assert "Traceback" not in done.output
    assert not list(Path(tmp_path).glob("runs/*/config.json"))


def test_without_optuna_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FlatfedError, match=r"optuna: not installed; pip install 'flatfed\[sweep\]'"):
        sweep(plan_of("training.lr=0.1"), "mine", tmp_path, None, unwatched)
