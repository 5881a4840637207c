"""Tuning by resuming: nothing is trained twice, budgets are equal, and test samples decide nothing."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from problems import generic
from torch import nn
from typer.testing import CliRunner

import flatfed as ff
from flatfed import cli
from flatfed.algorithms.registry import TUNED_OPTIONS, tuned_options
from flatfed.core.errors import FlatfedError
from flatfed.core.types import Range
from flatfed.runs.budget import gradients_by_round
from flatfed.runs.folder import RunFolder
from flatfed.runs.halving import Halving, Method, Tuning
from flatfed.runs.setting import Setting
from flatfed.runs.statistics import by_round

TRAINING = {"rounds": 9, "participants": 3, "local_steps": 2, "batch_size": 4, "lr": 0.1}
CONFIG = """
[data]
clients = 10
validation = 0.1
[model]
name = "logistic_regression"
[algorithm]
name = "fedsam"
[training]
rounds = 9
participants = 3
local_steps = 2
batch_size = 4
[execution]
workers = 1
"""


def unwatched(candidate, rung, rounds):
    return lambda now: None


def samples(count, generator):
    inputs = torch.randn(count, 5, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def task(test_labels=None):
    generator = torch.Generator().manual_seed(0)
    clients = [samples(6 + 5 * (number % 3), generator) for number in range(8)]
    inputs, targets = samples(40, generator)
    test = inputs, targets if test_labels is None else torch.full_like(targets, test_labels)
    federation = ff.Federation.from_tensors(clients, test).with_validation(samples(60, generator))
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.fill_(0.01)
        model.bias.zero_()
    return ff.Task(model, federation)


def setting(root, own=None, **training):
    execution = ff.Execution(workers=1, checkpoint_every=4)
    return Setting.of_task(own or task(), ff.Training(**{**TRAINING, **training}), execution, root)


def tuning(root, *names, configurations=9, gradients=None, **training):
    where = setting(root, **training)
    descriptions = [{"name": name} if isinstance(name, str) else name for name in names]
    methods = [Method.of(str(name), name, where) for name in descriptions]
    return Tuning.checked(methods, Halving(configurations), gradients)


def outcome(results):
    return [
        [(one.values, one.accuracies, one.state, one.rounds, one.gradients) for one in tuned.candidates]
        for tuned in results
    ]


@pytest.mark.parametrize("kind", [Range(0.01, 10.0), Range(0.2, 0.8, "linear"), Range(0.5, 0.98, "decay")])
def test_ranges_are_covered_in_order_and_values_found_again(kind):
    shares = [number / 20 for number in range(21)]
    values = [kind.value(share) for share in shares]
    assert values[0] == kind.low and values[-1] == kind.high
    assert all(one < next_one for one, next_one in itertools.pairwise(values))
    assert [kind.share(value) for value in values] == pytest.approx(shares, abs=0.01)
    assert kind.share(kind.low / 2) == 0 and kind.share(1.01 * kind.high) == 1


def test_a_decay_is_spread_by_what_it_forgets():
    kind = Range(0.0, 0.99, "decay")
    assert kind.value(0.5) == pytest.approx(0.9)


@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_every_algorithm_declares_what_matters_and_defaults_lie_inside(name):
    algorithm = ff.ALGORITHMS[name]()
    options = tuned_options(algorithm)
    assert 1 <= len(options) <= TUNED_OPTIONS
    for (option,), kind in options.items():
        assert kind.low <= algorithm.options[option] <= kind.high
        for value in (kind.low, kind.high):
            changed = ff.build({"name": name, option: value})
            assert changed.chosen != algorithm.chosen or value == algorithm.options[option]


def test_compositions_are_tuned_in_the_options_of_their_parts(tmp_path):
    composed = {"correct": ["control_variate", {"part": "proximal", "weight": 0.1}], "server": "average"}
    method = Method.of("composed", composed, setting(tmp_path))
    names = [".".join(map(str, place)) for place in method.space]
    assert names == ["training.lr", "algorithm.correct.1.weight", "algorithm.server.rate"]
    run = method.planned((0.2, 0.5, 2.0))
    assert run.training.lr == 0.2
    assert run.algorithm == ff.build(
        {
            "correct": ["control_variate", {"part": "proximal", "weight": 0.5}],
            "server": {"part": "average", "rate": 2.0},
        }
    )


def test_steps_of_an_optimizer_have_its_own_range(tmp_path):
    where = setting(tmp_path, lr=0.5)
    assert Method.of("plain", {"name": "fedavg"}, where, own=False).first_values[0] == 0.5
    adaptive = Method.of("adamw", {"name": "fedavg", "optimizer": "adamw"}, where, own=False)
    highest = ff.parts.AdamW.step_sizes.high
    assert adaptive.first_values[0] == highest < 0.5
    own = Method.of("own", {"name": "fedavg", "optimizer": "adamw"}, where)
    assert own.first_values[0] == 0.5


def test_rungs():
    assert Halving(9).counts == [9, 3, 1] and Halving(9).limits(900) == [100, 300, 900]
    assert Halving(8).counts == [8, 2] and Halving(1).counts == [1] and Halving(1).limits(7) == [7]
    assert Halving(9).total(900) == 9 * 100 + 3 * 200 + 600
    short = Halving(9, rungs=2)
    assert (
        short.counts == [9, 3] and short.limits(900) == [300, 900] and short.total(900) == 9 * 300 + 3 * 600
    )
    assert Halving(9, rungs=7).counts == [9, 3, 1] and Halving(9, rungs=1).limits(900) == [900]
    with pytest.raises(FlatfedError, match="configurations = 0"):
        Halving(0)
    with pytest.raises(FlatfedError, match="rungs = 0"):
        Halving(rungs=0)


COUNTED = {
    "fedavg": {},
    "fedsam": {},
    "scaffold": {"option": "I"},
    "mimelite": {},
    "fedlesam": {},
    "fedmoswa": {"option": "I"},
}


@pytest.mark.parametrize(
    "work",
    [{}, {"local_steps": None, "local_epochs": 2}, {"sampling": "bernoulli", "batch_size": "full"}],
    ids=["steps", "epochs", "full"],
)
@pytest.mark.parametrize("name", COUNTED)
def test_gradients_are_counted_as_histories_count_them(name, work):
    own, algorithm = task(), ff.ALGORITHMS[name](**COUNTED[name])
    training = ff.Training(**{**TRAINING, "rounds": 3, **work})
    history = ff.train(own, algorithm, training, ff.Execution(workers=1)).history
    counted = itertools.islice(gradients_by_round(own.federation, algorithm, training), 3)
    assert [line["gradient_evaluations"] for line in history] == list(counted)


def test_every_method_gets_the_same_configurations_and_gradients(tmp_path):
    names = ["fedavg", "fedsam", {"name": "scaffold", "option": "I"}]
    race = tuning(tmp_path, *names, rounds=36)
    results = race.run(unwatched)
    assert race.gradients == 36 * 3 * 2  # of the cheapest method's whole run
    spent = []
    for tuned in results:
        assert len(tuned.candidates) == 9
        histories = [RunFolder(one.run.folder).read_history() for one in tuned.candidates]
        spent.append(sum(line["gradient_evaluations"] for history in histories for line in history))
        assert spent[-1] == tuned.gradients
        most = max(line["gradient_evaluations"] for history in histories for line in history)
        # At the end of a rung less than a round is missing.
        budget = race.halving.total(race.gradients)
        assert budget - 9 * most < spent[-1] <= budget
    assert results[0].rounds == [4, 12, 36] and results[1].rounds == [2, 6, 18]
    assert spent[0] == spent[1]


@pytest.fixture
def trained(monkeypatch):
    """The rounds that were trained, by folder and in order."""
    from flatfed.training.loop import TrainingLoop

    rounds, one_round = [], TrainingLoop._one_round

    def counted(loop):
        one_round(loop)
        rounds.append((loop.recorder.path.name, loop.state.round))

    monkeypatch.setattr(TrainingLoop, "_one_round", counted)
    return rounds


def test_a_rung_resumes_and_repeats_nothing(tmp_path, trained):
    race = tuning(tmp_path, "fedmoswa")
    (tuned,) = race.run(unwatched)
    assert len(trained) == len(set(trained)) == 9 * 1 + 3 * 2 + 1 * 6
    assert sorted(one.rounds for one in tuned.candidates) == [1] * 6 + [3] * 2 + [9]
    assert tuned.best.rounds == 9
    again = race.run(lambda *_: pytest.fail("trained again"))
    assert outcome(again) == outcome([tuned])


@pytest.mark.parametrize("schedule", [{}, {"lr_cosine": 9}, {"lr_decay": 0.9, "lr_warmup": 5}])
def test_the_model_of_a_rung_is_that_of_an_uninterrupted_run(tmp_path, schedule):
    (tuned,) = tuning(tmp_path / "rungs", "fedmoswa", configurations=3, **schedule).run(unwatched)
    assert sorted(one.rounds for one in tuned.candidates) == [3, 3, 9]
    for number, one in enumerate(tuned.candidates):
        whole = tmp_path / f"whole{number}"
        run = one.run
        ff.train(task(), run.algorithm, run.training.replaced(rounds=one.rounds), folder=whole)
        assert (run.folder / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.mark.parametrize("stop", [3, 20, 31])
def test_interrupted_tuning_goes_on_to_the_same_result(tmp_path, stop, trained):
    expected = outcome(tuning(tmp_path / "whole", "fedavg", "fedsam", rounds=18).run(unwatched))
    del trained[:]
    count = itertools.count(1)

    def interrupting(candidate, rung, rounds):
        def callback(now):
            if next(count) == stop:
                raise KeyboardInterrupt

        return callback

    with pytest.raises(KeyboardInterrupt):
        tuning(tmp_path / "cut", "fedavg", "fedsam", rounds=18).run(interrupting)
    assert outcome(tuning(tmp_path / "cut", "fedavg", "fedsam", rounds=18).run(unwatched)) == expected
    assert len(trained) == len(set(trained))


def test_diverged_runs_count_as_tried(tmp_path):
    race = tuning(tmp_path, "fedavg", configurations=3, lr=1e38)
    (tuned,) = race.run(unwatched)
    first = tuned.candidates[0]
    assert first.values[0] == 1e38 and first.state == "diverged" and first.accuracies == [None]
    assert len(tuned.candidates) == 3 and tuned.best is not first
    again = race.run(lambda *_: pytest.fail("trained again"))
    assert outcome(again) == outcome([tuned])


def test_a_run_that_diverges_in_a_later_rung_is_not_the_best(tmp_path, monkeypatch):
    race = tuning(tmp_path, "fedavg", configurations=3)
    (tuned,) = race.run(unwatched)
    best = tuned.best
    best.run.folder.joinpath("model.safetensors").unlink()
    RunFolder(best.run.folder).note_divergence("round 5: made up")
    # Its last rung is no longer complete: what was tried in the first remains.
    (tuned,) = race.run(unwatched)
    diverged = next(one for one in tuned.candidates if one.values == best.values)
    assert diverged.state == "diverged" and diverged.accuracies[-1] is None
    assert tuned.best is not diverged


def test_test_samples_decide_nothing(tmp_path):
    outcomes = []
    for label in (None, 0):
        where = Setting.of_task(
            task(label), ff.Training(**TRAINING), ff.Execution(workers=1), tmp_path / str(label)
        )
        race = Tuning.checked([Method.of("fedsam", {"name": "fedsam"}, where)], Halving(9))
        outcomes.append(outcome(race.run(unwatched)))
    assert outcomes[0] == outcomes[1]


def test_without_validation_samples_or_rounds_nothing_is_tuned(tmp_path):
    own = task()
    federation = ff.Federation.from_tensors([tuple(own.federation.client(0).whole())])
    where = setting(tmp_path, ff.Task(own.model, federation), participants=1)
    with pytest.raises(FlatfedError, match="validation: there are no samples to choose by"):
        Tuning.checked([Method.of("fedavg", {"name": "fedavg"}, where)], Halving())
    with pytest.raises(
        FlatfedError, match="a rung of 0 is less than the first round of fedavg, which takes 6"
    ):
        tuning(tmp_path, "fedavg", gradients=5)
    assert not list(tmp_path.iterdir())


def test_another_task_in_the_folder_is_refused(tmp_path):
    tuning(tmp_path, "fedavg", configurations=1).run(unwatched)
    other = setting(tmp_path, task(test_labels=1))
    race = Tuning.checked([Method.of("fedavg", {"name": "fedavg"}, other)], Halving(1))
    (tuned,) = race.run(unwatched)
    assert tuned.candidates[0].state == "left out" and "not the same: data" in tuned.candidates[0].note


def test_the_command(tmp_path):
    config, runs = tmp_path / "config.toml", tmp_path / "runs"
    config.write_text(CONFIG)
    command = ["tune", str(config), "--halving", "--trials", "3", "--runs", str(runs)]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "3 configurations of one method, in rungs of 3, 1" in done.stdout and "about" in done.stdout
    line = next(line for line in done.stdout.splitlines() if line.startswith("flatfed run"))
    before = sorted(path.name for path in runs.iterdir())
    assert len(before) == 3
    # What it prints is the run that is there already.
    rerun = CliRunner().invoke(cli.app, [*line.split()[1:], "--runs", str(runs)])
    assert rerun.exit_code == 0 and "is complete: 9 rounds" in rerun.stdout, rerun.output
    again = CliRunner().invoke(cli.app, command)
    assert again.exit_code == 0 and sorted(path.name for path in runs.iterdir()) == before


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--halving", "--grid", "training.lr=1"], "--grid: not with --halving"),
        (["--halving", "--choose-by", "test"], "--choose-by: not with --halving"),
        (["--halving", "--metric", "best"], "--metric best"),
        (["--gradients", "5", "--grid", "training.lr=1"], "--gradients 5: only with --halving"),
        ([], "--grid: missing"),
        (["--halving", "--gradients", "1"], "gradients: a rung of 0 is less than the first round of fedsam"),
    ],
)
def test_mistakes_are_one_line(tmp_path, options, complaint):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    done = CliRunner().invoke(cli.app, ["tune", str(config), *options, "--runs", str(tmp_path / "runs")])
    assert done.exit_code == 2 and complaint in done.stderr, done.output
    assert not (tmp_path / "runs").exists()


def test_a_generic_composition_can_be_tuned(tmp_path):
    described = generic("fedgloss").describe()
    (tuned,) = tuning(tmp_path, described, configurations=1, rounds=1).run(unwatched)
    assert tuned.best is not None and math.isfinite(tuned.best.accuracies[0])


def test_the_mean_of_a_rungs_last_fifth_decides(tmp_path):
    (tuned,) = tuning(tmp_path, "fedavg", configurations=3, rounds=30, lr=1.0).run(unwatched)
    assert tuned.rounds == [10, 30]
    differs = False
    for candidate in tuned.candidates:
        curve = [row["validation_accuracy"] for row in candidate.run.finished_rounds()]
        for rounds, value in zip(tuned.rounds, candidate.accuracies, strict=False):
            late = curve[rounds - rounds // 5 : rounds]
            assert value == pytest.approx(sum(late) / len(late), abs=1e-15)
            differs |= value != late[-1]
    assert differs


def test_a_run_that_was_seldom_evaluated_counts_by_its_last_evaluation_before_a_rungs_end(tmp_path):
    sparse = {"configurations": 3, "rounds": 30, "evaluate_every": 8}
    search = tuning(tmp_path, "fedavg", **sparse)
    first = search.methods[0].planned(search.methods[0].first_values)
    first.train(task(), 30, [], complete=True)
    (tuned,) = search.run(unwatched)
    (candidate,) = [one for one in tuned.candidates if one.run.folder == first.folder]
    curve = by_round(first.finished_rounds(), "validation_accuracy")
    assert tuned.rounds == [10, 30] and sorted(curve) == [8, 16, 24, 30]
    assert candidate.accuracies[0] == curve[8]
