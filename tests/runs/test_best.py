"""The best model by the validation samples, and ending a training that no longer gets better on them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import CLASSES, CLIENTS, FEATURES, assert_same, interrupt, refusal
from torch import nn
from typer.testing import CliRunner

import flatfed as ff
from flatfed import cli
from flatfed.runs.compare import is_complete
from flatfed.runs.overview import summary
from flatfed.training.best import best_record, ended_early
from flatfed.training.config import Config

SETTINGS = {"participants": 2, "local_steps": 2, "batch_size": 4, "lr": 2.0}


def task(validation=0.3, metrics=None):
    generator = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(8, FEATURES, generator=generator), torch.randint(0, CLASSES, (8,), generator=generator))
        for _ in range(CLIENTS)
    ]
    federation = ff.Federation.from_tensors(clients, clients[0])
    federation = federation.with_validation(validation) if validation else federation
    model = nn.Sequential(nn.Linear(FEATURES, CLASSES), nn.BatchNorm1d(CLASSES))
    torch.manual_seed(0)
    with torch.no_grad():
        model[0].weight.copy_(torch.randn(CLASSES, FEATURES, generator=generator))
    return ff.Task(model, federation, metrics=metrics)


def train(folder=None, rounds=30, given=None, callbacks=(), **training):
    return ff.train(
        given or task(),
        ff.scaffold(),
        ff.Training(rounds=rounds, **{**SETTINGS, **training}),
        ff.Execution(workers=1, checkpoint_every=3),
        folder=folder,
        callbacks=callbacks,
    )


def values(run, name="validation_accuracy"):
    return [record[name] for record in run.history]


def test_the_best_model_is_that_of_the_first_round_with_the_highest_value():
    models = {}

    def keep(progress: ff.Progress) -> None:
        models[progress.round] = progress.server["model"].clone(), dict(progress.buffers)

    run = train(callbacks=[keep])
    accuracies = values(run)
    expected = 1 + max(range(len(accuracies)), key=lambda number: accuracies[number])
    assert run.best.round == expected < 30, "else the test shows nothing"
    vector, buffers = models[expected]
    assert torch.equal(ff.model_to_vector(run.best.model), vector)
    assert torch.equal(run.best.model[1].running_mean, buffers["1.running_mean"])
    assert not torch.equal(ff.model_to_vector(run.model), vector)
    assert run.best.record["validation_accuracy"] == max(accuracies)


def test_a_training_ends_after_its_patience_and_goes_by_what_it_is_told():
    whole = train()
    for best_by, name, sign in ((None, "validation_accuracy", 1), ("loss", "validation_loss", -1)):
        run = train(patience=4, best_by=best_by)
        series = [sign * value for value in values(whole, name)]
        expected = next(
            number
            for number in range(1, 31)
            if number - (1 + max(range(number), key=lambda place: (series[place], -place))) >= 4
        )
        assert len(run.history) == expected < 30 and run.best.round == expected - 4
    assert values(run) == values(whole)[: len(run.history)], "it changes no number"


def test_rounds_without_evaluation_are_waited_for():
    history = [{"round": number} for number in range(1, 10)]
    for number, value in ((2, 0.5), (4, 0.4), (6, 0.6), (8, float("nan"))):
        history[number - 1]["validation_accuracy"] = value
    assert best_record(history, None)["round"] == 6
    assert [ended_early(history[:number], 2, None) for number in range(1, 10)] == (
        [False, False, False, True, False, False, False, True, False]
    )
    assert not ended_early(history, 3, None) and not ended_early(history, None, None)
    assert best_record(history, "loss") is None and not ended_early([], 1, None)


def test_an_interrupted_training_ends_in_the_same_round_with_the_same_best_model(tmp_path):
    straight = train(tmp_path / "straight", patience=4)
    best = straight.best.round
    for stop in (best - 1, best, best + 2):
        folder = tmp_path / str(stop)
        with pytest.raises(KeyboardInterrupt):
            train(folder, patience=4, callbacks=[interrupt(at=stop + 1)])
        resumed = train(folder, patience=4)
        assert_same(straight, resumed)
        assert resumed.best.round == best
        for name in ("best", "model"):
            paths = [root / f"{name}.safetensors" for root in (tmp_path / "straight", folder)]
            assert paths[0].read_bytes() == paths[1].read_bytes()
    loaded = ff.load_run(tmp_path / "straight", task())
    assert torch.equal(ff.model_to_vector(loaded.best.model), ff.model_to_vector(straight.best.model))
    state = load_file(tmp_path / "straight" / "best.safetensors")
    assert all(torch.equal(value, straight.best.model.state_dict()[name]) for name, value in state.items())


def test_more_patience_goes_on_in_the_same_folder(tmp_path):
    short = train(tmp_path / "run", patience=4)
    longer = train(tmp_path / "run", patience=30)
    assert len(longer.history) == 30 > len(short.history)
    assert_same(longer, train())


def test_without_validation_samples_nothing_can_be_chosen(tmp_path):
    for setting in ({"patience": 3}, {"best_by": "loss"}):
        message = refusal(
            lambda setting=setting: train(tmp_path / "run", given=task(validation=None), **setting)
        )
        assert "there are no validation samples to choose by; hold some out with" in message
    assert not (tmp_path / "run").exists()
    run = train(given=task(validation=None), rounds=2)
    assert "best: the run had no validation samples to choose by" in refusal(lambda: run.best)
    assert "best_by = 'acuracy': not measured; did you mean 'accuracy'?" in refusal(
        lambda: train(best_by="acuracy")
    )


def test_test_samples_choose_nothing():
    """The same training, whose test samples are others, ends in the same round with the same best model."""
    given = task()
    flipped = (given.federation.test[0], (given.federation.test[1] + 1) % CLASSES)
    other = task()
    other.federation.test = flipped
    runs = [train(given=one, patience=4) for one in (given, other)]
    assert values(runs[0], "test_accuracy") != values(runs[1], "test_accuracy")
    assert runs[0].best.round == runs[1].best.round and len(runs[0].history) == len(runs[1].history)


CONFIG = """
[data]
clients = 10
validation = 0.2
[model]
name = "mlp"
hidden = [4]
[training]
rounds = 40
patience = 2
participants = 2
local_steps = 1
batch_size = 4
lr = 1.0
[execution]
workers = 1
"""


def test_a_run_that_ended_early_is_complete_on_the_command_line(tmp_path):
    path = tmp_path / "c.toml"
    path.write_text(CONFIG)
    arguments = ["run", str(path), "--folder", str(tmp_path / "run")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    config = Config.read(path)
    history = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    best = best_record(history, None)
    assert len(history) < 40 and f"best by validation accuracy: round {best['round']}" in done.output
    assert is_complete(config, tmp_path / "run") and summary(tmp_path / "run").state == "complete"
    before = (tmp_path / "run" / "environment.json").stat().st_mtime_ns
    again = CliRunner().invoke(cli.app, arguments)
    assert "is complete" in again.output
    assert (tmp_path / "run" / "environment.json").stat().st_mtime_ns == before
    (tmp_path / "run" / "best.safetensors").write_bytes(b"damaged")
    damaged = CliRunner().invoke(cli.app, arguments)
    assert damaged.exit_code == 2 and "best.safetensors: damaged, or not of this run" in damaged.output
    (tmp_path / "run" / "best.safetensors").unlink()
    assert CliRunner().invoke(cli.app, arguments).exit_code == 0
    assert (tmp_path / "run" / "best.safetensors").exists()


def test_a_report_counts_it_as_complete(tmp_path):
    from flatfed.report.read import read_run

    train(tmp_path / "run", patience=4)
    assert read_run(tmp_path / "run").state == "complete"
    lines = (tmp_path / "run" / "history.jsonl").read_text().splitlines()
    assert len(lines) < 30


def test_halving_wants_no_patience(tmp_path):
    path = Path(tmp_path / "c.toml")
    path.write_text(CONFIG)
    done = CliRunner().invoke(cli.app, ["tune", str(path), "--halving", "--runs", str(tmp_path / "runs")])
    assert done.exit_code == 2 and "patience = 2: halving ends runs by itself; leave it out" in done.output


def test_settings_that_are_not_used_leave_no_trace():
    dumped = ff.Training(rounds=1).model_dump()
    assert not {"patience", "best_by"} & dumped.keys()
    assert ff.Training(**dumped) == ff.Training(rounds=1)
    assert ff.Training(rounds=1, patience=3).replaced(rounds=2).patience == 3
