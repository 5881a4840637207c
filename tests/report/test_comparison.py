"""Algorithms compared from Python, and runs at a glance."""

from __future__ import annotations

import json

import pytest
import torch
from problems import federation, network

import flatfed as ff

TRAINING = ff.Training(rounds=3, participants=2, local_steps=2, batch_size=4)


@pytest.fixture
def task() -> ff.Task:
    torch.manual_seed(0)
    own = federation()
    own.test = own.client(0).batch(torch.arange(4))
    return ff.Task(network(), own)


def test_every_algorithm_runs_under_every_seed_and_the_table_is_theirs(task, tmp_path):
    compared = ff.compare(task, ["fedavg", ff.fedsam(radius=0.1)], TRAINING, seeds=2, folder=tmp_path)
    assert {label: [run.training.seed for run in runs] for label, runs in compared.runs.items()} == {
        "fedavg": [0, 1],
        "fedsam": [0, 1],
    }
    frame = compared.to_dataframe()
    assert list(frame["algorithm"]) == ["fedavg", "fedavg", "fedsam", "fedsam"]
    accuracies = [run.history[-1]["test_accuracy"] for run in compared.runs["fedsam"]]
    assert compared.rows[1].accuracy.mean == pytest.approx(sum(accuracies) / 2)
    assert list(frame["test_accuracy"][2:]) == accuracies
    assert "fedsam" in repr(compared) and str(tmp_path / "report.html") in repr(compared)
    assert compared._repr_html_().count("<tr>") == 3
    assert "fedsam" in (tmp_path / "report.html").read_text()
    alone = ff.train(task, ff.fedsam(radius=0.1), TRAINING.replaced(seed=1))
    assert torch.equal(compared.runs["fedsam"][1].server["model"], alone.server["model"])


def test_what_is_complete_is_not_run_again_and_another_task_is_refused(task, tmp_path, monkeypatch):
    first = ff.compare(task, ["fedavg"], TRAINING, seeds=1, folder=tmp_path)

    def refuse(*_: object) -> None:
        raise AssertionError("trained again")

    with monkeypatch.context() as patch:
        patch.setattr("flatfed.training.loop.TrainingLoop._one_round", refuse)
        again = ff.compare(task, ["fedavg"], TRAINING, seeds=1, folder=tmp_path)
    assert again.runs["fedavg"][0].history == first.runs["fedavg"][0].history
    with torch.no_grad():
        next(task.model.parameters()).add_(1)
    with pytest.raises(ff.FlatfedError, match="not the same: first weights"):
        ff.compare(task, ["fedavg"], TRAINING, seeds=1, folder=tmp_path)


def test_labels_tell_two_of_a_kind_apart(task, tmp_path):
    with pytest.raises(ff.FlatfedError, match="two called 'fedsam'; give a dictionary with labels"):
        ff.compare(task, [ff.fedsam(), ff.fedsam(radius=1.0)], TRAINING, folder=tmp_path)
    both = {"small": ff.fedsam(radius=0.01), "large": ff.fedsam(radius=1.0)}
    compared = ff.compare(task, both, TRAINING, seeds=1, folder=tmp_path)
    assert [row.label for row in compared.rows] == ["small", "large"]
    for wrong, message in (([], "algorithms: none"), (["fedsm"], "did you mean 'fedsam'")):
        with pytest.raises(ff.FlatfedError, match=message):
            ff.compare(task, wrong, TRAINING, folder=tmp_path)
    with pytest.raises(ff.FlatfedError, match="seeds = 0: give a number of them"):
        ff.compare(task, ["fedavg"], TRAINING, folder=tmp_path, seeds=0)


def test_a_run_at_a_glance(task):
    run = ff.train(task, ff.fedavg(), TRAINING)
    last = run.history[-1]
    loss, accuracy = last["train_loss"], last["test_accuracy"]
    assert repr(run) == f"Run(fedavg: 3 rounds, train loss {loss:.4g}, test accuracy {accuracy:.4g})"
    assert run._repr_html_().count("<polyline") == 1 and "over 3 rounds" in run._repr_html_()
    assert json.loads(run.to_dataframe().to_json(orient="records"))[2]["round"] == 3
    (line,) = run.plot("train_loss").data
    assert list(line.y) == [record["train_loss"] for record in run.history] and list(line.x) == [1, 2, 3]
    assert [line.name for line in ff.plot([run, run]).data] == ["fedavg 1", "fedavg 2"]
    assert [line.name for line in ff.plot({"a": run}).data] == ["a"]
    with pytest.raises(ff.FlatfedError, match="value = 'acuracy': not recorded"):
        run.plot("acuracy")


def test_a_picture_survives_numbers_that_are_not_finite_and_runs_without_a_test(task):
    run = ff.train(ff.Task(task.model, federation()), ff.fedavg(), TRAINING)
    run.history[1]["train_loss"] = float("nan")
    assert "train loss" in run._repr_html_() and "nan" not in run._repr_html_()
    run.history.clear()
    assert repr(run) == "Run(fedavg: no round yet)" and "<svg" not in run._repr_html_()


def test_labels_may_share_an_algorithm_and_names_stay_inside_the_folder(task, tmp_path):
    odd = ff.Algorithm(name="a/../../evil/x")
    compared = ff.compare(
        task, {"a": ff.fedavg(), "b": ff.fedavg(), "c": odd}, TRAINING, seeds=1, folder=tmp_path / "cmp"
    )
    assert [row.label for row in compared.rows] == ["a", "b", "c"]
    assert [path.name for path in tmp_path.iterdir()] == ["cmp"]
    assert len(list((tmp_path / "cmp").iterdir())) == 4


def test_an_algorithm_that_diverges_is_left_out(task, tmp_path):
    both = {"wild": ff.Algorithm(correct=ff.parts.Proximal(1e38)), "tame": ff.fedavg()}
    training = TRAINING.replaced(local_steps=20)
    with pytest.warns(ff.FlatfedWarning, match="wild, seed 0, is left out: round"):
        compared = ff.compare(task, both, training, seeds=1, folder=tmp_path)
    assert list(compared.runs) == ["tame"]
    with pytest.raises(ff.DivergedError, match="no run was left"), pytest.warns(ff.FlatfedWarning):
        ff.compare(task, {"wild": both["wild"]}, training, seeds=1, folder=tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"algorithms": [ff.fedavg]}, "algorithms: .*; give labels and algorithms"),
        ({"algorithms": ff.fedavg()}, "algorithms = .*: give a list"),
        ({"algorithms": "fedavg"}, "algorithms = 'fedavg': give a list"),
        ({"algorithms": None}, "algorithms = None: give a list"),
        ({"algorithms": {1: ff.fedavg()}}, "algorithms: 1: "),
        ({"seeds": 2.5}, "seeds = 2.5: give a number"),
        ({"target": 5}, "target = 5: give an accuracy"),
        ({"training": None}, "training = None: give a flatfed.Training"),
        ({"training": TRAINING.replaced(seed=7)}, "training.seed = 7: .*use seeds"),
        ({"execution": 3}, "execution = 3: give a flatfed.Execution"),
        ({"folder": ""}, "folder = '': give a path"),
        ({"folder": None}, "folder = None: give a path"),
    ],
)
def test_mistakes_are_named_before_anything_is_trained(task, tmp_path, change, message):
    asked = {"algorithms": ["fedavg"], "training": TRAINING, "folder": tmp_path / "runs", **change}
    with pytest.raises(ff.FlatfedError, match=message):
        ff.compare(task, **asked)
    assert not list(tmp_path.iterdir())


def test_tasks_without_an_accuracy_are_refused_at_once(task, tmp_path):
    losses = ff.Task(task.model, task.federation, metrics={})
    for given, message in (
        (losses, "give it one, metrics="),
        (ff.Task(task.model, federation()), "no test samples"),
    ):
        with pytest.raises(ff.FlatfedError, match=message):
            ff.compare(given, ["fedavg"], TRAINING, folder=tmp_path)


@pytest.mark.parametrize("runs", [[], None, "runs", [None], {}])
def test_only_runs_are_plotted(runs):
    with pytest.raises(ff.FlatfedError, match="give runs, in a list"):
        ff.plot(runs)
