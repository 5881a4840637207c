"""Tuning: what is tried, what is stopped, what is kept, and continuing after a kill."""

from __future__ import annotations

import json
import os
import random
import shlex
import signal
import sys
import time
from pathlib import Path

import pytest
from command import Command
from typer.testing import CliRunner

from flatfed import cli
from flatfed.core.errors import FlatfedError
from flatfed.runs import lock
from flatfed.runs import train as train_module
from flatfed.runs import tune as tune_module
from flatfed.runs.compare import run_folder
from flatfed.runs.folder import RunFolder
from flatfed.runs.train import run_config
from flatfed.runs.tune import Search, parse_grid, tune

BASE = {
    "data": {"clients": 20},
    "model": {"name": "logistic_regression"},
    "training": {"rounds": 5, "participants": 4, "local_steps": 3, "batch_size": 8},
    "execution": {"workers": 1},
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
[execution]
workers = 1
"""
BY_TEST = ["--choose-by", "test"]


def unwatched(assignments, ended):
    return lambda now: None


def search_of(*grid, base=BASE, choose_by="test", **options):
    return Search.checked(base, parse_grid(list(grid)), choose_by=choose_by, **options)


def base_with(**training):
    return {**BASE, "training": {**BASE["training"], **training}}


@pytest.fixture
def started(monkeypatch):
    """The step sizes of the runs that were started, in order."""
    seen = []

    def counted(config, *arguments):
        seen.append(config.training.lr)
        return run_config(config, *arguments)

    for module in (tune_module, train_module):
        monkeypatch.setattr(module, "run_config", counted)
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
    search = search_of("training.lr=0.01,0.3", "algorithm.name=fedavg,fedavgm", metric=metric)
    trials = tune(search, tmp_path, None, unwatched)
    expected = {
        (f"training.lr={lr}", f"algorithm.name={name}")
        for lr in ("0.01", "0.3")
        for name in ("fedavg", "fedavgm")
    }
    assert {trial.assignments for trial in trials} == expected
    assert started == [0.01, 0.01, 0.3, 0.3]
    assert [trial.value for trial in trials] == sorted((trial.value for trial in trials), reverse=True)
    for trial in trials:
        curve = [record["test_accuracy"] for record in RunFolder(trial.folder).read_history()]
        assert trial.state == "complete" and trial.rounds == 5
        assert list(trial.curve.values()) == curve
        assert trial.value == (curve[-1] if metric == "final" else max(curve))
        assert (trial.folder / "model.safetensors").exists()


def test_a_finished_grid_started_again_runs_nothing(tmp_path, started):
    search = search_of("training.lr=0.01,0.1,1e38")
    first = tune(search, tmp_path, None, unwatched)
    assert len(started) == 3 and [trial.state for trial in first] == ["complete", "complete", "diverged"]
    assert tune(search, tmp_path, None, lambda *_: pytest.fail("ran again")) == first
    # Nor do other metrics, other grids with the same values, or settings that do not change the numbers.
    best = tune(search_of("training.lr=0.01,0.1,1e38", metric="best"), tmp_path, None, unwatched)
    assert [trial.folder for trial in best[2:]] == [trial.folder for trial in first[2:]]
    tune(
        search_of("training.lr=0.1,1e38", base={**BASE, "execution": {"workers": 2}}),
        tmp_path,
        None,
        unwatched,
    )
    assert len(started) == 3
    tune(search_of("training.lr=0.1,0.2"), tmp_path, None, unwatched)
    assert started[3:] == [0.2]


def test_a_run_made_by_another_command_is_a_finished_trial(tmp_path, started):
    config, runs = tmp_path / "config.toml", tmp_path / "runs"
    config.write_text(TOML)
    for rate in ("0.1", "1e38"):
        CliRunner().invoke(cli.app, ["run", str(config), "--set", f"training.lr={rate}", "--runs", str(runs)])
    assert started == [0.1, 1e38]
    command = ["tune", str(config), *BY_TEST, "--grid", "training.lr=1e38,0.1,0.3", "--runs", str(runs)]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert started == [0.1, 1e38, 0.3]
    assert done.stdout.count("complete") == 2 and done.stdout.count("diverged") == 1


def test_two_spellings_of_a_value_are_one_run(tmp_path, started):
    trials = tune(search_of("training.lr=0.1,0.10"), tmp_path, None, unwatched)
    assert started == [0.1]
    assert len(trials) == 2 and trials[0].folder == trials[1].folder


def test_a_run_that_was_taken_further_remains_a_finished_trial(tmp_path, started):
    search = search_of("training.lr=0.1,0.3")
    first = tune(search, tmp_path, None, unwatched)
    done = CliRunner().invoke(cli.app, ["resume", str(first[0].folder), "--rounds", "7"])
    assert done.exit_code == 0 and len(RunFolder(first[0].folder).read_history()) == 7
    assert tune(search, tmp_path, None, lambda *_: pytest.fail("ran again")) == first


@pytest.mark.parametrize("trials", [None, 4])
def test_interrupted_tuning_repeats_nothing_that_ended(tmp_path, started, trials):
    values = "0.01,0.03,0.1,0.3" if trials is None else "0.01,0.02,0.03,0.05,0.1,0.2,0.3,0.5"
    search = search_of(f"training.lr={values}")
    with pytest.raises(KeyboardInterrupt):
        tune(search, tmp_path, trials, interrupt_in(trial=3))
    assert len(started) == 3
    before = list(started)
    resumed = tune(search, tmp_path, trials, unwatched)
    # The interrupted one comes first, then the one that was never begun.
    assert started[3] == before[2] and len(started) == 5
    del started[3]
    straight = tune(search, tmp_path / "straight", trials, unwatched)
    assert started[4:] == started[:4] and len(set(started)) == 4
    assert [(trial.assignments, trial.curve) for trial in resumed] == [
        (trial.assignments, trial.curve) for trial in straight
    ]


def interrupt_in(trial):
    """Ctrl-C in the middle of a trial."""
    begun = []

    def watch(assignments, ended):
        begun.append(assignments)

        def update(now):
            if len(begun) == trial and now.round == 3:
                raise KeyboardInterrupt

        return update

    return watch


def test_all_interrupted_runs_are_continued_first_in_grid_order(tmp_path, started):
    search = search_of("training.lr=0.01,0.03,0.1,0.3,0.5")
    for rate in ("0.3", "0.03"):
        with pytest.raises(KeyboardInterrupt):
            tune(search_of(f"training.lr={rate}"), tmp_path, None, interrupt_in(trial=1))
    tune(search, tmp_path, None, unwatched)
    assert started[2:] == [0.03, 0.3, 0.01, 0.1, 0.5]
    assert len(RunFolder(run_folder(search.configs["training.lr=0.3",], tmp_path)).read_history()) == 5


def test_killed_tuning_continues(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(TOML.replace("rounds = 5", "rounds = 150"))
    command = [
        "tune",
        str(config),
        *BY_TEST,
        "--grid",
        "training.lr=0.01,0.1",
        "--runs",
        str(tmp_path / "runs"),
    ]
    process = Command(*command)

    def histories():
        return list((tmp_path / "runs").glob("*-fedavg-*/history.jsonl"))

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not any(path.read_text().count("\n") > 20 for path in histories()):
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.finished(timeout=60).returncode == -signal.SIGKILL
    assert len(histories()) == 1 and not list((tmp_path / "runs").glob("*/model.safetensors"))
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert len(list((tmp_path / "runs").glob("*/model.safetensors"))) == 2
    assert done.stdout.count("complete") == 2
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {path.parent.name for path in histories()}


def test_trials_that_fall_behind_are_stopped_and_can_be_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_module, "TRIALS_BEFORE_STOPPING", 3)
    search = search_of("training.lr=0.3,0.2,0.25,1e-7,1e-8,1e-9", base=base_with(rounds=20))
    trials = tune(search, tmp_path, None, unwatched)
    stopped = [trial for trial in trials if trial.state == "stopped early"]
    assert {trial.assignments[0] for trial in stopped} == {f"training.lr=1e-{number}" for number in (7, 8, 9)}
    assert trials[0].state == "complete" and trials[-1].state == "stopped early"
    for trial in stopped:
        assert 2 <= trial.rounds < 20
        assert not (trial.folder / "model.safetensors").exists()
        note = json.loads((trial.folder / "stopped.json").read_text())
        assert note["round"] == trial.rounds and note["reason"] == trial.note
        assert trial.note == f"round {trial.rounds}: below the median of the other trials"
        assert trial.value == trial.curve[trial.rounds] == note["test_accuracy"]
    again = tune(search, tmp_path, None, lambda *_: pytest.fail("ran again"))
    assert again == trials
    done = CliRunner().invoke(cli.app, ["resume", str(stopped[0].folder)])
    assert done.exit_code == 0, done.output
    assert len(RunFolder(stopped[0].folder).read_history()) == 20
    assert not (stopped[0].folder / "stopped.json").exists()
    # The round that decided is the one that follows in the history.
    resumed = next(
        trial for trial in tune(search, tmp_path, None, unwatched) if trial.folder == stopped[0].folder
    )
    assert resumed.state == "complete" and stopped[0].curve.items() <= resumed.curve.items()


def test_a_damaged_note_of_a_stop_is_one_clear_line(tmp_path):
    search = search_of("training.lr=0.1")
    path = run_folder(search.configs["training.lr=0.1",], tmp_path) / "stopped.json"
    run_config(search.configs["training.lr=0.1",], path.parent)
    (path.parent / "model.safetensors").unlink()
    path.write_text('{"reason": "because"}')
    (trial,) = tune(search, tmp_path, None, unwatched)
    assert trial.state == "left out"
    assert f"{path}: damaged or edited" in trial.note


def test_the_median_rule_is_that_of_optuna():
    import optuna

    search = search_of("training.lr=0.1", base=base_with(rounds=30))
    pruner = optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=3)
    decisions = set()
    for case in range(30):
        draw = random.Random(case)
        complete = [
            {number: draw.random() for number in range(1, 31) if draw.random() < 0.8}
            for _ in range(draw.randint(2, 7))
        ]
        study = optuna.create_study(direction="maximize", pruner=pruner)
        for other in complete:
            study.add_trial(optuna.trial.create_trial(value=0.0, intermediate_values=other))
        # A trial that was stopped early is no yardstick.
        study.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState.PRUNED, intermediate_values=dict.fromkeys(range(31), 1.0)
            )
        )
        trial, curve = study.ask(), {}
        for number in range(1, 31, draw.choice([1, 2])):
            curve[number] = draw.random() * draw.random()
            trial.report(curve[number], number)
            behind = search.falls_behind(curve, number, complete)
            assert behind == trial.should_prune(), (case, number)
            decisions.add((len(complete) >= 4, number >= 3, behind))
    # Both answers are given, but only with four trials and after a tenth of the rounds.
    assert {(True, True, True), (True, True, False)} <= decisions
    assert not {(False, True, True), (True, False, True), (False, False, True)} & decisions


def test_divergence_is_a_failed_trial(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(TOML)
    command = [
        "tune",
        str(config),
        *BY_TEST,
        "--grid",
        "training.lr=1e38,0.1",
        "--runs",
        str(tmp_path / "runs"),
    ]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "diverged: training.lr=1e38: round 1: the training loss is nan" in done.stderr
    assert "Traceback" not in done.output
    assert done.stdout.index("0.1") < done.stdout.index("1e38")
    assert f"flatfed run {shlex.quote(str(config))} --set training.lr=0.1" in done.stdout
    command[command.index("--grid") + 1] = "training.lr=1e38"
    alone = CliRunner().invoke(cli.app, command)
    assert alone.exit_code == 1
    assert "no trial ran to its end" in alone.stderr


def test_the_printed_line_of_the_best_gives_its_run(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(TOML)
    runs = ["--runs", str(tmp_path / "runs")]
    changed = ["--set", "training.rounds=3", "--seed", "4"]
    done = CliRunner().invoke(
        cli.app, ["tune", str(config), *BY_TEST, "--grid", "training.lr=0.01,0.3", *changed, *runs]
    )
    assert done.exit_code == 0, done.output
    line = next(line for line in done.stdout.splitlines() if line.startswith("flatfed run"))
    assert shlex.split(line)[3:] == [
        *("--set", "training.rounds=3", "--set", "training.seed=4", "--set", "training.lr=0.3")
    ]
    best = CliRunner().invoke(cli.app, [*shlex.split(line)[1:], *runs])
    assert best.exit_code == 0 and "is complete: 3 rounds" in " ".join(best.stdout.split())


def test_fewer_trials_are_distinct_and_more_may_follow(tmp_path, started):
    search = search_of("training.lr=0.01,0.02,0.05,0.1,0.2", "training.weight_decay=0,0.001")
    some = tune(search, tmp_path, 6, unwatched)
    assert len(some) == len({trial.assignments for trial in some}) == len(started) == 6
    everything = tune(search, tmp_path, None, unwatched)
    assert len(everything) == len(started) == 10
    assert {trial.assignments for trial in some} <= {trial.assignments for trial in everything}
    assert len(tune(search, tmp_path, 3, unwatched)) == 10 and len(started) == 10


def test_another_seed_chooses_other_combinations(tmp_path, started):
    grid = "training.lr=" + ",".join(f"0.{number}" for number in range(10, 90))
    chosen = []
    for seed in (0, 0, 1):
        search = search_of(grid, base=base_with(rounds=1), seed=seed)
        tune(search, tmp_path / str(len(chosen)), 5, unwatched)
        chosen.append(started[-5:])
    assert chosen[0] == chosen[1] != chosen[2]


def test_tpe_learns_from_ended_trials(tmp_path):
    decays = tuple(f"1e-{number}" for number in range(1, 9))
    grid = ["training.lr=0.1,0.2,0.3,0.4", f"training.weight_decay={','.join(decays)}"]

    def ended(combination, best):
        rate = combination[0].partition("=")[2]
        state = {best: "complete", "0.4": "diverged"}.get(rate, "stopped early")
        accuracy = {"complete": 0.9, "stopped early": 0.1, "diverged": None}[state]
        return tune_module.Trial(combination, state, accuracy, 1, tmp_path, {1: accuracy or 0.0})

    for best in ("0.1", "0.2"):
        proposed = []
        for seed in range(20):
            search = search_of(*grid, seed=seed)
            tried = {key: ended(key, best) for key in search.configs if key[1].endswith(decays[:4])}
            assert len(tried) == 16
            combination = tune_module._propose(search, tried, 30)
            assert combination in search.configs and combination not in tried
            proposed.append(combination[0])
        assert proposed.count(f"training.lr={best}") >= 15


@pytest.mark.parametrize("proposals", [10, 0])
def test_the_last_combination_is_proposed_when_all_others_were_tried(tmp_path, monkeypatch, proposals):
    monkeypatch.setattr(tune_module, "PROPOSALS", proposals)
    search = search_of("training.lr=0.1,0.2,0.3,0.4", "training.weight_decay=0,1e-3")
    for missing in search.configs:
        tried = {
            key: tune_module.Trial(key, "complete", 0.5, 1, tmp_path, {1: 0.5})
            for key in search.configs
            if key != missing
        }
        assert tune_module._propose(search, tried, 8) == missing


def test_a_trial_that_another_process_runs_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    search = search_of("training.lr=0.1,0.2")
    refused = []

    def watch(assignments, ended):
        def update(now):
            if now.round == 2:
                with pytest.raises(FlatfedError, match="another process is running it") as caught:
                    tune(search, tmp_path, None, unwatched)
                refused.append(str(caught.value))

        return update

    trials = tune(search, tmp_path, None, watch)
    assert [trial.state for trial in trials] == ["complete"] * 2
    folders = [run_folder(config, tmp_path) for config in search.configs.values()]
    assert [line.partition(": ")[0] for line in refused] == [str(folder) for folder in folders]


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
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, arguments, complaint):
    config = tmp_path / "config.toml"
    config.write_text(TOML)
    done = CliRunner().invoke(
        cli.app, ["tune", str(config), *BY_TEST, *arguments, "--runs", str(tmp_path / "runs")]
    )
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(lines) == 1 and complaint in lines[0]
    assert "Traceback" not in done.output
    assert not list(Path(tmp_path).glob("runs/*/config.json"))


def test_without_optuna_all_combinations_are_run_and_trials_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    search = search_of("training.lr=0.1,0.2")
    with pytest.raises(FlatfedError, match=r"trials = 1: needs optuna; pip install 'flatfed\[tune\]'"):
        tune(search, tmp_path, 1, lambda *_: pytest.fail("ran"))
    assert len(tune(search, tmp_path, None, unwatched)) == 2


# -- what is chosen by ------------------------------------------------------------------------------------

OPPOSITE = """
import torch
from torch import nn

import flatfed as ff

settings = {"training": {"rounds": 4, "local_epochs": 2, "batch_size": 8}, "execution": {"workers": 1}}


def make(validation: float = 0.0):
    \"\"\"The labels of the test samples are wrong: whatever learns is bad there.\"\"\"
    draw = torch.Generator().manual_seed(0)
    inputs = torch.randn(240, 4, generator=draw)
    targets = (inputs[:, 0] > 0).long()
    clients = list(zip(inputs[:200].split(25), targets[:200].split(25)))
    federation = ff.Federation.from_tensors(clients, (inputs[200:], 1 - targets[200:]))
    return ff.Task(nn.Linear(4, 2), federation.with_validation(validation) if validation else federation)
"""


@pytest.fixture
def opposite(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "opposite.py").write_text(OPPOSITE)
    return ["tune", "opposite.py:make", "--grid", "training.lr=1e-6,0.3"]


@pytest.mark.parametrize("held_out", ["data.validation=0.2", "task.validation=0.2"])
def test_the_validation_samples_choose_and_the_test_samples_only_on_request(opposite, held_out):
    chosen = {}
    for choose_by in ("validation", "test"):
        words = ["--choose-by", "test"] if choose_by == "test" else []
        done = CliRunner().invoke(cli.app, [*opposite, "--set", held_out, *words])
        assert done.exit_code == 0, done.output
        assert f"chosen by final {choose_by} accuracy, best:" in done.stdout
        assert ("chosen by the test samples, on which it looks better" in done.stderr) == bool(words)
        (chosen[choose_by],) = (line for line in done.stdout.splitlines() if line.startswith("flatfed run "))
    assert chosen["validation"].endswith("training.lr=0.3") and chosen["test"].endswith("training.lr=1e-6")
    assert held_out in chosen["validation"]
    again = CliRunner().invoke(cli.app, shlex.split(chosen["validation"])[1:])
    assert again.exit_code == 0 and "is complete: 4 rounds" in " ".join(again.stdout.split())


@pytest.mark.parametrize("subject", ["config.toml", "opposite.py:make", "fedsagd/table2"])
def test_without_validation_samples_or_a_word_tuning_is_refused_before_anything_runs(opposite, subject):
    Path("config.toml").write_text(TOML)
    done = CliRunner().invoke(cli.app, ["tune", subject, *opposite[2:]])
    assert done.exit_code == 2
    assert done.stderr.splitlines() == [
        "error: validation: there are no samples to choose by; hold some out with --set data.validation=0.1, "
        "or choose by the test samples with --choose-by test"
    ]
    assert not Path("runs").exists()


def test_own_and_held_out_validation_samples_are_too_many(opposite):
    both = ["--set", "task.validation=0.2", "--set", "data.validation=0.2"]
    done = CliRunner().invoke(cli.app, [*opposite, *both])
    assert done.exit_code == 2
    assert "validation = 0.2: there are validation samples already" in done.stderr
    assert "Traceback" not in done.output


def test_data_beside_a_task_may_say_nothing_but_validation(opposite):
    done = CliRunner().invoke(cli.app, [*opposite, "--set", "data.validation=0.2", "--set", "data.clients=5"])
    assert done.exit_code == 2
    assert "data: your own task has its own" in done.stderr


@pytest.mark.parametrize("metric", ["final", "best"])
def test_trials_are_ranked_by_validation_accuracy(tmp_path, metric):
    base = {**BASE, "data": {"clients": 20, "validation": 0.2}}
    search = search_of("training.lr=0.01,0.1,0.3", base=base, metric=metric, choose_by="validation")
    trials = tune(search, tmp_path, None, unwatched)
    for trial in trials:
        history = RunFolder(trial.folder).read_history()
        curve = [record["validation_accuracy"] for record in history]
        assert list(trial.curve.values()) == curve != [record["test_accuracy"] for record in history]
        assert trial.value == (curve[-1] if metric == "final" else max(curve))
    assert [trial.value for trial in trials] == sorted((trial.value for trial in trials), reverse=True)


def test_trials_are_stopped_by_validation_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(tune_module, "TRIALS_BEFORE_STOPPING", 2)
    base = {**base_with(rounds=10), "data": {"clients": 20, "validation": 0.2}}
    search = search_of("training.lr=0.3,0.2,1e-8", base=base, choose_by="validation")
    *complete, stopped = tune(search, tmp_path, None, unwatched)
    assert [trial.state for trial in complete] == ["complete"] * 2 and stopped.state == "stopped early"
    note = json.loads((stopped.folder / "stopped.json").read_text())
    assert stopped.value == stopped.curve[stopped.rounds] == note["validation_accuracy"]
    # Both are noted, so that the same folders can be ranked by either.
    by_test = search_of("training.lr=0.3,0.2,1e-8", base=base, choose_by="test")
    trial = tune(by_test, tmp_path, None, lambda *_: pytest.fail("ran again"))[-1]
    assert trial.curve[trial.rounds] == note["test_accuracy"] and trial.rounds == stopped.rounds


def test_what_to_choose_by_is_one_of_two():
    with pytest.raises(FlatfedError, match="choose_by = 'training': unknown"):
        search_of("training.lr=0.1", choose_by="training")
