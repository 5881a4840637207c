"""Weights & Biases and MLflow get the history's numbers, and hear how a run ended."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import small_runs
from data.fake import refused

import flatfed as ff


class StandInForWandb:
    """What the callback asks of the package."""

    def __init__(self):
        self.runs = []

    def init(self, **options):
        run = SimpleNamespace(options=options, logged={}, ended=None)
        run.log = lambda numbers, step: run.logged.__setitem__(step, numbers)
        run.finish = lambda exit_code: setattr(run, "ended", exit_code)
        self.runs.append(run)
        return run


class StandInForMLflow:
    """An experiment's runs, as MlflowClient keeps them."""

    def __init__(self):
        self.experiments, self.runs = {}, []
        self.entities = SimpleNamespace(
            Metric=lambda key, value, timestamp, step: SimpleNamespace(key=key, value=value, step=step)
        )

    def MlflowClient(self, uri):
        self.uri = uri
        return self

    def get_experiment_by_name(self, name):
        return SimpleNamespace(experiment_id=self.experiments[name]) if name in self.experiments else None

    def create_experiment(self, name):
        self.experiments[name] = str(len(self.experiments))
        return self.experiments[name]

    def create_run(self, experiment, run_name):
        run = SimpleNamespace(experiment=experiment, name=run_name, metrics=[], params={}, status="RUNNING")
        self.runs.append(run)
        return SimpleNamespace(info=SimpleNamespace(run_id=str(len(self.runs) - 1)))

    def log_param(self, run, name, value):
        self.runs[int(run)].params[name] = value

    def log_batch(self, run, metrics):
        self.runs[int(run)].metrics += metrics

    def get_metric_history(self, run, key):
        return [metric for metric in self.runs[int(run)].metrics if metric.key == key]

    def set_terminated(self, run, status):
        self.runs[int(run)].status = status


@pytest.fixture
def wandb(monkeypatch):
    module = StandInForWandb()
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


@pytest.fixture
def mlflow(monkeypatch):
    module = StandInForMLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    return module


def losses(metrics):
    return [(metric.step, metric.value) for metric in metrics if metric.key == "train_loss"]


def test_wandb_gets_every_round_and_the_end(wandb):
    tracker = ff.Wandb("flat", id="mine", config={"lr": 0.1})
    assert wandb.runs == [], "nothing is sent before the first round"
    run = small_runs.train(None, 3, callbacks=[tracker])
    (sent,) = wandb.runs
    assert sent.options == {"project": "flat", "resume": "allow", "id": "mine", "config": {"lr": 0.1}}
    assert [sent.logged[step]["train_loss"] for step in (1, 2, 3)] == [
        record["train_loss"] for record in run.history
    ]
    assert sent.ended == 0 and "round" not in sent.logged[1]
    small_runs.train(None, 2, callbacks=[tracker])
    assert len(wandb.runs) == 2, "one callback may serve several runs, one after the other"
    with pytest.raises(KeyboardInterrupt):
        small_runs.train(None, 3, callbacks=[tracker, small_runs.interrupt(at=2)])
    assert wandb.runs[2].ended == 1 and 2 in wandb.runs[2].logged


def test_mlflow_gets_every_round_once_also_across_a_resumption(mlflow, tmp_path):
    tracker = ff.MLflow("flat", run_name="one", tracking_uri="file:///x", params={"lr": 0.1})
    with pytest.raises(KeyboardInterrupt):
        small_runs.train(tmp_path / "run", 5, callbacks=[tracker, small_runs.interrupt(at=4)])
    (sent,) = mlflow.runs
    assert mlflow.uri == "file:///x" and mlflow.experiments == {"flat": "0"}
    assert sent.status == "KILLED" and sent.params == {"lr": 0.1} and sent.name == "one"
    again = ff.MLflow("flat", run_id=tracker.run_id)
    run = small_runs.train(tmp_path / "run", 5, callbacks=[again])
    assert losses(sent.metrics) == [(record["round"], record["train_loss"]) for record in run.history]
    assert sent.status == "FINISHED" and len(mlflow.runs) == 1

    def fail(progress: ff.Progress) -> None:
        raise ff.FlatfedError("no more")

    with pytest.raises(ff.FlatfedError):
        small_runs.train(None, 2, callbacks=[ff.MLflow("flat"), fail])
    assert mlflow.runs[1].status == "FAILED" and mlflow.runs[1].experiment == "0"


def test_mlflow_itself_understands_what_it_is_sent(tmp_path, monkeypatch):
    pytest.importorskip("mlflow", reason="needs the extra mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    uri = (tmp_path / "store").as_uri()
    tracker = ff.MLflow("flat", tracking_uri=uri, params={"lr": 0.1})
    run = small_runs.train(None, 3, callbacks=[tracker])
    client = mlflow.MlflowClient(uri)
    assert losses(client.get_metric_history(tracker.run_id, "train_loss")) == [
        (record["round"], record["train_loss"]) for record in run.history
    ]
    assert client.get_run(tracker.run_id).info.status == "FINISHED"


def test_without_the_packages_their_extras_are_named(monkeypatch):
    for name, make in (("wandb", ff.Wandb), ("mlflow", ff.MLflow)):
        monkeypatch.setitem(sys.modules, name, None)
        with refused(f"{name}: not installed; pip install 'flatfed[{name}]'"):
            make("flat")


class Ending:
    """Is told of the end, and may fail at that."""

    def __init__(self, error=None):
        self.error, self.ended_with = error, []

    def __call__(self, progress):
        pass

    def run_ended(self, error):
        self.ended_with.append(error)
        if self.error is not None:
            raise self.error


def test_a_tracker_that_fails_at_the_end_costs_neither_the_model_nor_other_trackers(tmp_path):
    broken, other = Ending(ConnectionError("gone")), Ending()
    with pytest.raises(ConnectionError, match="gone"):
        small_runs.train(tmp_path / "run", 2, callbacks=[broken, other])
    assert other.ended_with == [None] and (tmp_path / "run" / "model.safetensors").is_file()
    small_runs.train(tmp_path / "run", 2)


def test_what_ended_a_run_is_told_to_all_and_raised_whatever_a_tracker_says():
    broken, other = Ending(ConnectionError("gone")), Ending()
    with (
        pytest.raises(KeyboardInterrupt),
        pytest.warns(ff.FlatfedWarning, match="callbacks: gone at the end of the run"),
    ):
        small_runs.train(None, 3, callbacks=[broken, other, small_runs.interrupt(at=2)])
    assert [type(error) for error in other.ended_with] == [KeyboardInterrupt]
