"""Tuning a task from Python: a grid, halving, and what came of them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatfed as ff

TRAINING = ff.Training(rounds=9, participants=3, local_steps=2, batch_size=4, lr=0.1)
QUIET = {"progress": False}


def task(validation: bool = True, **options: object) -> ff.Task:
    generator = torch.Generator().manual_seed(0)

    def samples(count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        inputs = torch.randn(count, 5, generator=generator)
        return {"input": inputs}, inputs[:, :3].argmax(1)

    federation = ff.Federation.from_tensors([samples(9) for _ in range(8)], test=samples(40))
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.fill_(0.01)
        model.bias.zero_()
    return ff.Task(model, federation.with_validation(samples(60)) if validation else federation, **options)


def test_a_grid_is_tried_and_its_best_settings_train_to_what_was_reported(tmp_path):
    algorithm = ff.fedsam(radius=0.01)
    grid = {"training.lr": [0.001, 0.3], "algorithm.radius": [0.05, 0.2]}
    result = ff.tune(task(), algorithm, TRAINING, grid=grid, folder=tmp_path, **QUIET)
    assert len(result.tried) == 4 and len(list(tmp_path.iterdir())) == 4
    accuracies = [one.accuracy for one in result.tried]
    assert accuracies == sorted(accuracies, reverse=True) and accuracies[0] > accuracies[-1]
    best = result.best.settings
    assert result.training == TRAINING.replaced(lr=best["training.lr"])
    assert result.algorithm == ff.fedsam(radius=best["algorithm.radius"])
    run = ff.train(task(), result.algorithm, result.training, **QUIET)
    assert run.history[-1]["validation_accuracy"] == accuracies[0]
    table = result.to_dataframe()
    assert list(table.columns) == [*grid, "validation_accuracy", "rounds", "state"]
    assert table["rounds"].tolist() == [9] * 4
    assert "validation accuracy %" in repr(result) and repr(result).count("complete") == 4
    assert result._repr_html_().count("<tr>") == 5


def test_what_is_there_is_not_run_again(tmp_path, monkeypatch):
    tried = {"grid": {"training.lr": [0.1, 0.2]}, "folder": tmp_path, **QUIET}
    first = ff.tune(task(), "fedavg", TRAINING, **tried)
    before = {path: path.read_text() for path in tmp_path.rglob("history.jsonl")}
    again = ff.tune(task(), ff.fedavg(), TRAINING, **tried)
    assert repr(again) == repr(first)
    assert before == {path: path.read_text() for path in tmp_path.rglob("history.jsonl")}, "with its seconds"


def test_a_run_that_diverges_comes_last(tmp_path):
    grid = {"training.lr": [3.4e38, 0.1]}
    result = ff.tune(task(), "fedavg", TRAINING, grid=grid, folder=tmp_path, **QUIET)
    assert [one.state for one in result.tried] == ["complete", "diverged"]
    assert result.training.lr == 0.1 and "–" in repr(result)
    with pytest.raises(ff.DivergedError, match=r"smaller values of training\.lr"):
        ff.tune(task(), "fedavg", TRAINING, grid={"training.lr": [3.4e38]}, folder=tmp_path, **QUIET)


def test_parts_of_a_composition_are_settings(tmp_path):
    algorithm = ff.Algorithm(gradient=ff.parts.SharpnessAware(0.1))
    grid = {"algorithm.gradient.radius": [0.2], "algorithm.optimizer": ["local_momentum"]}
    result = ff.tune(task(), algorithm, TRAINING, grid=grid, folder=tmp_path, **QUIET)
    assert result.algorithm == ff.Algorithm(
        gradient=ff.parts.SharpnessAware(0.2), optimizer=ff.parts.LocalMomentum()
    )


def test_halving_tunes_the_step_size_and_the_algorithms_own_options(tmp_path):
    pytest.importorskip("optuna", reason="needs the extra tune")
    result = ff.tune(task(), "fedsam", TRAINING, configurations=3, folder=tmp_path)
    assert [one.rounds for one in result.tried] == [9, 3, 3]
    assert [one.state for one in result.tried] == ["complete", "ended by halving", "ended by halving"]
    assert {"training.lr", "algorithm.radius"} <= result.best.settings.keys()
    assert result.training == TRAINING.replaced(lr=result.best.settings["training.lr"])
    run = ff.train(task(), result.algorithm, result.training, **QUIET)
    late = [row["validation_accuracy"] for row in run.history[-2:]]  # the last fifth of nine rounds
    assert result.best.accuracy == pytest.approx(sum(late) / 2, abs=1e-15)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"grid": {}}, "grid = {}: give values by setting"),
        ({"grid": {"lr": [1]}}, "grid: 'lr': write training.lr"),
        ({"grid": {"training.lr": 0.1}}, r"grid\['training.lr'\] = 0.1: give a list"),
        ({"grid": {"training.lrr": [0.1]}}, "lrr"),
        ({"grid": {"algorithm.radiu": [0.1]}}, "radiu: unknown"),
        ({"grid": {"algorithm.radius.x": [0.1]}}, "radius is not a table"),
        ({"gradients": 5}, "gradients = 5: only without a grid"),
        ({"algorithm": 3}, "algorithm = 3: give an algorithm, or the name of one"),
        ({"training": {}}, r"training = \{\}: give a flatfed.Training"),
        ({"folder": ""}, "folder = '': no path"),
        ({"folder": "a\0b"}, "no path; choose another name"),
        ({"task": None}, "task = None: give a flatfed.Task"),
    ],
)
def test_mistakes_are_named(changed, message, tmp_path):
    given = {"task": task(), "algorithm": "fedsam", "training": TRAINING, "folder": tmp_path / "runs"}
    with pytest.raises(ff.FlatfedError, match=message):
        ff.tune(**{**given, "grid": {"training.lr": [0.1]}, **changed})
    assert not (tmp_path / "runs").exists()


def test_a_task_must_have_samples_and_an_accuracy_to_choose_by(tmp_path):
    for given, message in (
        (task(validation=False), "validation: there are no samples to choose by"),
        (task(metrics={}), "metrics: runs are ranked by their accuracy"),
    ):
        with pytest.raises(ff.FlatfedError, match=message):
            ff.tune(given, "fedavg", TRAINING, grid={"training.lr": [0.1]}, folder=tmp_path)
