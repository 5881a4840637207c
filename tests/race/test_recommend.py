"""Recommendations: budgets, what is dropped and resumed, and what they leave behind."""

from __future__ import annotations

import itertools
import json
import shutil
import tomllib
from dataclasses import replace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import flatfed as ff
from flatfed import cli
from flatfed.core.errors import FlatfedError
from flatfed.race import recommender as recommenders
from flatfed.race.effort import Effort, affordable, efforts, seconds_of
from flatfed.race.portfolio import Portfolio, portfolio, portfolio_of
from flatfed.race.preset import preset
from flatfed.race.recommend import beside_others, cheapest_alike
from flatfed.race.recommender import Recommender
from flatfed.race.results import Result
from flatfed.runs.budget import Pace
from flatfed.runs.folder import RunFolder
from flatfed.runs.setting import Setting
from flatfed.runs.statistics import total

TRAINING = ff.Training(rounds=9, participants=3, local_steps=2, batch_size=4, lr=0.1, seed=5)
EXECUTION = ff.Execution(workers=1, checkpoint_every=4)
KNOWN = Portfolio.of(
    {
        "tasks": ["an earlier task"],
        "methods": [
            {"label": "fedavg", "algorithm": {"name": "fedavg"}, "settings": {"training.lr": 0.3}},
            {"label": "fedsam", "algorithm": {"name": "fedsam"}, "settings": {"training.lr": 99.0}},
            {"label": "scaffold", "algorithm": {"name": "scaffold"}, "settings": {}},
        ],
    }
)
SMALL = Effort(methods=3, configurations=3, finalists=2, seeds=2)


def unwatched(candidate, rung, rounds):
    return lambda now: None


def samples(count, generator):
    inputs = torch.randn(count, 5, generator=generator)
    return inputs, inputs[:, :3].argmax(1)


def task(test=True, labels=None):
    generator = torch.Generator().manual_seed(0)
    clients = [samples(20, generator) for _ in range(8)]
    inputs, targets = samples(40, generator)
    tested = (inputs, targets if labels is None else torch.full_like(targets, labels)) if test else None
    model = nn.Linear(5, 3)
    with torch.no_grad():
        model.weight.fill_(0.01)
        model.bias.zero_()
    return ff.Task(model, ff.Federation.from_tensors(clients, tested))


def make_small(monkeypatch):
    monkeypatch.setattr(recommenders, "affordable", lambda *_: SMALL)
    monkeypatch.setattr(recommenders, "portfolio", lambda: KNOWN)
    monkeypatch.setattr(Pace, "measured", lambda *_: Pace(0.0, 1e-6))


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A recommendation that was not interrupted."""
    with pytest.MonkeyPatch.context() as patches:
        make_small(patches)
        return recommender(tmp_path_factory.mktemp("whole")).run(unwatched)


def recommender(root, own=None, **options):
    return Recommender(Setting.of_task(own or task(), TRAINING, EXECUTION, root), 2, **options)


def outcome(result):
    return [(one.label, one.values, one.validation, one.test, one.gradients) for one in result.ranking]


def test_the_winner_is_chosen_on_validation_samples_under_seeds_of_its_own(small, whole, tmp_path):
    result = whole
    means = [sum(one.validation) / 2 for one in result.ranking]
    assert means == sorted(means, reverse=True)
    assert {one.label for one in result.ranking} >= {"fedavg", "as configured: fedavg"}
    for one in result.ranking:
        assert [run.training.seed for run in one.runs] == [5, 6] and len(one.test) == 2
        assert result.interval(one).low <= sum(one.test) / 2 <= result.interval(one).high
    seeds = {
        run.method.planned(run.values).training.seed for tuned in result.tuned for run in tuned.candidates
    }
    assert seeds == {105}
    assert result.samples == 40 and result.judged_on == "test"
    other = recommender(tmp_path / "other", task(labels=0)).run(unwatched)
    # Other labels of the test samples change no choice.
    assert [row[:3] for row in outcome(other)] == [row[:3] for row in outcome(result)]


def test_first_settings_come_from_the_race_within_their_ranges(whole):
    firsts = {tuned.method.label: tuned.candidates[0].values[0] for tuned in whole.tuned}
    assert firsts == {"fedavg": 0.3, "fedsam": 1.0, "scaffold": 0.1}
    assert whole.warm_start == ["an earlier task"]


def test_losers_are_dropped(whole):
    result = whole
    assert SMALL.survivors == [3, 2]
    reached = sorted(max(len(one.accuracies) for one in tuned.candidates) for tuned in result.tuned)
    assert reached == [1, 2, 2]
    first = {tuned.method.label: max(one.accuracies[0] for one in tuned.candidates) for tuned in result.tuned}
    dropped = next(
        tuned.method.label
        for tuned in result.tuned
        if max(len(one.accuracies) for one in tuned.candidates) == 1
    )
    assert first[dropped] == min(first.values())


@pytest.mark.parametrize("stop", [5, 60])
def test_it_goes_on_where_it_was_killed(small, whole, tmp_path, stop):
    expected, count = outcome(whole), itertools.count(1)

    def interrupting(candidate, rung, rounds):
        def callback(now):
            if next(count) == stop:
                raise KeyboardInterrupt

        return callback

    with pytest.raises(KeyboardInterrupt):
        recommender(tmp_path / "cut").run(interrupting)
    assert outcome(recommender(tmp_path / "cut").run(unwatched)) == expected
    nothing = lambda *_: pytest.fail("trained again")  # noqa: E731
    assert outcome(recommender(tmp_path / "cut").run(nothing)) == expected


def test_the_effort_is_fixed_when_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(Pace, "measured", lambda *_: Pace(0.0, 1e-6))
    begun = recommender(tmp_path, seconds=600.0).effort
    # A slower machine, or a busier one.
    monkeypatch.setattr(Pace, "measured", lambda *_: Pace(10.0, 0.1))
    assert recommender(tmp_path, seconds=600.0).effort == begun
    assert recommender(tmp_path, seconds=601.0).effort != begun


def test_budgets_are_kept():
    quick, slow = Pace(0.1, 1e-4), Pace(0.1, 1e-1)
    for pace, seconds in itertools.product((quick, slow), (60.0, 600.0, 6000.0)):
        try:
            effort = affordable(1000, 2, pace, 3, seconds=seconds)
        except FlatfedError as error:
            assert "too few to compare" in str(error)
            continue
        assert effort.seconds(1000, 2, pace) <= seconds
    for number in (200_000, 50_000, 20_000):
        assert affordable(1000, 2, quick, 3, gradients=number).gradients(1000, 2) <= number
    with pytest.raises(FlatfedError, match="gradients = 100: too few"):
        affordable(1000, 2, quick, 3, gradients=100)
    sizes = [effort.gradients(1000, 2) for effort in efforts(3)]
    assert sizes == sorted(sizes, reverse=True)


def test_gradients_stay_within_what_was_planned(whole):
    result = whole
    folders = [path for path in whole.folder.iterdir() if path.is_dir()]
    spent = sum(line["gradient_evaluations"] for path in folders for line in RunFolder(path).read_history())
    assert 0 < spent <= SMALL.gradients(9 * 3 * 2, 2)
    assert result.best.gradients in {9 * 3 * 2, 2 * 9 * 3 * 2}


def test_a_budget_of_gradients_holds_whatever_is_dear(monkeypatch, tmp_path):
    # MimeLite's clients also pass over all their data: 5 gradients of 4 samples beside 2 steps.
    dear = {"label": "mimelite", "algorithm": {"name": "mimelite"}, "settings": {}}
    plain = {"label": "fedavg", "algorithm": {"name": "fedavg"}, "settings": {}}
    known = Portfolio.of({"tasks": [], "methods": [plain, dear]})
    limit = 5300
    monkeypatch.setattr(Pace, "measured", lambda *_: Pace(0.0, 1e-6))
    setting = Setting.of_task(task(), TRAINING.replaced(rounds=27), EXECUTION, tmp_path)
    limited = Recommender(setting, 2, gradients=limit, known=known)
    assert limited.dearest == pytest.approx((2 + 5) / 2)
    result = limited.run(unwatched)
    assert "mimelite" in {one.label for one in result.ranking}
    folders = [path for path in result.folder.iterdir() if path.is_dir()]
    assert sum(total(RunFolder(path).read_history(), "gradient_evaluations") for path in folders) <= limit


def test_a_method_of_which_no_round_fits_into_a_rung_is_left_out(monkeypatch, tmp_path):
    # A ninth of nine rounds is one, and half a round of FedSAM.
    monkeypatch.setattr(Pace, "measured", lambda *_: Pace(0.0, 1e-6))
    setting = Setting.of_task(task(), TRAINING, EXECUTION, tmp_path)
    entrants, left_out = Recommender(setting, 2, known=KNOWN).entrants
    assert set(entrants) == {"fedavg", "scaffold"}
    assert "less than the first round of fedsam" in left_out["fedsam"]


def test_the_quicker_number_of_workers_is_taken_unless_one_is_given(monkeypatch, tmp_path):
    def measured(task, algorithm, training, execution):
        return Pace(0.1, 1e-3) if execution.workers == 1 else Pace(0.3, 1e-3)

    monkeypatch.setattr(Pace, "measured", measured)
    free = Recommender(Setting.of_task(task(), TRAINING, ff.Execution(), tmp_path), 2, known=KNOWN)
    for setting in (free.base, free.for_tuning):
        run = setting.planned({"name": "fedavg"})
        assert run.execution.workers == 1 and run.config["execution"]["workers"] is None
    assert free.pace == Pace(0.1, 1e-3)
    given = Setting.of_task(task(), TRAINING, ff.Execution(workers=2), tmp_path)
    assert Recommender(given, 2, known=KNOWN).base.planned({"name": "fedavg"}).execution.workers == 2


def test_methods_that_send_too_much_are_left_out(small, tmp_path):
    # FedAvg sends 18 numbers of four bytes both ways, SCAFFOLD twice as many.
    result = recommender(tmp_path, bytes_per_round=2 * 4 * 18).run(unwatched)
    assert {tuned.method.label for tuned in result.tuned} == {"fedavg", "fedsam"}
    assert "288 bytes" in result.left_out["scaffold"]
    # Nor is what the config says, if it sends too much.
    own = Setting.of_task(task(), TRAINING, EXECUTION, tmp_path / "own")
    own = Setting({**own.tables, "algorithm": {"name": "scaffold"}}, own.root, own.task)
    result = Recommender(own, 2, bytes_per_round=2 * 4 * 18).run(unwatched)
    assert "as configured: scaffold" in result.left_out
    assert {one.label for one in result.ranking} == {"fedavg", "fedsam"}
    with pytest.raises(FlatfedError, match=r"no method is left to try \(fedavg: 144 bytes"):
        recommender(tmp_path / "less", bytes_per_round=100).run(unwatched)


def test_without_test_samples_validation_has_the_last_word(small, tmp_path):
    result = recommender(tmp_path, task(test=False)).run(unwatched)
    assert result.judged_on == "validation" and result.samples == 16
    assert not result.best.test and result.interval(result.best) is not None


def test_from_python(small, whole, tmp_path):
    shutil.copytree(whole.folder, tmp_path / "runs")
    result = ff.recommend(task(), TRAINING, EXECUTION, seeds=2, folder=tmp_path / "runs")
    assert outcome(result) == outcome(whole)
    assert result.training.lr > 0 and result.algorithm.name
    page = (tmp_path / "runs" / "report.html").read_text()
    assert f"Recommended: {result.best.label}" in page and "Cost against gain" in page
    assert "the mean accuracy on validation samples, which choose" in page
    assert "come from the race of all algorithms on other tasks: an earlier task." in page
    assert cheapest_alike(result) is None or cheapest_alike(result).gradients <= result.best.gradients
    with pytest.raises(FlatfedError, match="Task and a Training"):
        ff.recommend(task(), None)


CONFIG = """
[data]
clients = 10
[model]
name = "logistic_regression"
[training]
rounds = 9
participants = 3
local_steps = 2
batch_size = 4
[execution]
workers = 1
"""


def test_what_is_said_of_the_best_is_what_the_test_samples_say(whole):
    best, other, *_ = whole.ranking

    def said(own, others):
        ranking = [replace(best, test=own, diverged=0), replace(other, test=others, diverged=0)]
        return beside_others(replace(whole, ranking=ranking, samples=1000, judged_on="test"))

    assert (
        said([0.8, 0.81], [0.5, 0.51])
        == f"{best.label} is better than all others here, each compared by itself."
    )
    assert said([0.8, 0.81], [0.8, 0.82]) == f"Cannot be told apart from {best.label}: {other.label}."
    # Validation samples chose it all the same.
    assert (
        said([0.5, 0.51], [0.8, 0.81]) == f"Better on the test samples, which do not choose: {other.label}."
    )
    alone = replace(whole, ranking=[replace(best, runs=best.runs[:1], test=best.test[:1], diverged=0)])
    assert beside_others(alone).startswith("There is one seed, so intervals are over samples alone.")


def test_the_command_leaves_a_config_that_runs(small, tmp_path):
    config, runs = tmp_path / "config.toml", tmp_path / "runs"
    config.write_text(CONFIG)
    command = ["recommend", str(config), "--seeds", "2", "--runs", str(runs)]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    assert "a tenth of the clients' samples is held out" in done.stderr
    assert "Recommended: " in done.stdout and "an earlier task" in done.stdout
    (folder,) = runs.iterdir()
    written = folder / "recommended.toml"
    assert tomllib.loads(written.read_text())["data"]["validation"] == 0.1
    printed = CliRunner().invoke(cli.app, [*command, "--json"])
    assert printed.exit_code == 0, printed.output
    facts = json.loads(printed.stdout)
    assert facts["recommended"] == facts["ranking"][0]["method"] and facts["folder"] == str(folder)
    assert facts["costs"][0]["gradients"] > 0 and facts["config"]["training"]["rounds"] == 9
    # It is the winner's first final run, which is there already.
    again = CliRunner().invoke(cli.app, ["run", str(written), "--runs", str(folder)])
    assert again.exit_code == 0 and "is complete: 9 rounds" in again.stdout, again.output


OWN = """
import torch
import flatfed as ff

settings = {"training": {"rounds": 9, "participants": 3, "local_steps": 2, "batch_size": 4},
            "execution": {"workers": 1}}

def make():
    draw = torch.Generator().manual_seed(0)
    def samples(count):
        inputs = torch.randn(count, 5, generator=draw)
        return inputs, inputs[:, :3].argmax(1)
    federation = ff.Federation.from_tensors([samples(20) for _ in range(8)], samples(40))
    return ff.Task(torch.nn.Linear(5, 3), federation)
"""


def test_on_a_task_of_ones_own(small, tmp_path):
    own = tmp_path / "my_own_task.py"
    own.write_text(OWN)
    command = ["recommend", f"{own}:make", "--seeds", "2", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 0, done.output
    (folder,) = (tmp_path / "runs").iterdir()
    again = CliRunner().invoke(cli.app, ["run", str(folder / "recommended.toml"), "--runs", str(folder)])
    assert again.exit_code == 0 and "is complete: 9 rounds" in again.stdout, again.output


def test_a_folder_that_was_damaged_in_tuning_is_named_and_ends_with_2(small, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(CONFIG)
    command = ["recommend", str(config), "--seeds", "2", "--runs", str(tmp_path / "runs")]
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    (history, *_) = sorted((tmp_path / "runs").glob("*/*fedavg-seed100-*/history.jsonl"))
    history.write_text(history.read_text().replace('"validation_accuracy": 0.', '"validation_accuracy": 1.'))
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2 and "Recommended: " in done.stdout
    assert f"left out: {history}: damaged or edited" in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: 1 run folder is damaged and left out")


def test_a_file_of_ones_own_is_not_replaced(small, tmp_path):
    (tmp_path / "recommended.toml").write_text("mine")
    with pytest.raises(FlatfedError, match="not flatfed's"):
        ff.recommend(task(), TRAINING, EXECUTION, folder=tmp_path)
    assert (tmp_path / "recommended.toml").read_text() == "mine"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"budget": "0m"}, "budget = '0m': write it as 90s, 30m or 1.5h"),
        ({"budget": "ten minutes"}, "budget = 'ten minutes': write it as"),
        ({"budget": 5}, "budget = 5: write it as"),
        ({"budget": "5m", "gradients": 10}, "budget and gradients: give only one"),
        ({"gradients": 0}, "gradients = 0: give a whole number"),
        ({"seeds": 0}, "seeds = 0: give a whole number"),
        ({"bytes_per_round": 0.5}, "bytes_per_round = 0.5: give a whole number"),
    ],
)
def test_limits_that_are_none(options, complaint, tmp_path):
    with pytest.raises(FlatfedError, match=complaint):
        ff.recommend(task(), TRAINING, EXECUTION, folder=tmp_path, **options)
    assert not list(tmp_path.iterdir())
    assert seconds_of("1.5h") == 5400


def test_a_task_without_accuracy_is_refused_before_anything_is_trained(tmp_path):
    own = task()
    targets = ff.Task(own.model, own.federation, loss=nn.MultiMarginLoss())
    with pytest.raises(FlatfedError, match="metrics: runs are ranked by their accuracy"):
        ff.recommend(targets, TRAINING, EXECUTION, folder=tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_is_shipped_can_be_tried(tmp_path):
    shipped = portfolio()
    assert shipped.proposals[0].label == "fedavg"
    setting = Setting({"training": {"rounds": 4, "local_steps": 1}, "data": {"clients": 5}}, tmp_path)
    for proposal in shipped.proposals:
        assert len(proposal.method(setting).first_values) >= 2


def setting_of(name, method):
    raced = preset().tasks[name]
    return preset().digest(raced, next(entry for entry in raced.entries if entry.label == method))


def made_up(name, method, accuracy, lr):
    return [
        Result(
            task=name, method=method, phase="final", seed=seed, settings=f"training.lr={lr}", chosen=True,
            state="complete", rounds=1, gradients=1, bytes_up=1, bytes_down=1, test_accuracy=accuracy,
            test_samples=100, seconds=1.0, commit="", setting=setting_of(name, method),
        )
        for seed in (0, 1)
    ]  # fmt: skip


def test_the_portfolio_is_sorted_by_place_and_leaves_a_task_out():
    first, second = list(preset().tasks)[:2]
    rows = [
        *made_up(first, "fedavg", 0.6, 0.1),
        *made_up(first, "fedcm", 0.8, 0.2),
        *made_up(first, "fedsam", 0.7, 0.3),
        *made_up(second, "fedavg", 0.8, 0.3),
        *made_up(second, "fedsam", 0.7, 0.5),
        *made_up(second, "fedcm", 0.6, 0.4),
        *made_up(second, "fedsynsam", 0.9, 0.4),
    ]
    labels = {"fedavg", "fedcm", "fedsam", "fedsynsam"}
    small = replace(
        preset(),
        tasks={
            name: replace(one, entries=[entry for entry in one.entries if entry.label in labels])
            for name, one in preset().tasks.items()
        },
    )
    chosen = Portfolio.of(portfolio_of(small, rows))
    # FedAvg first, whatever its place; no method whose server works for as long as all clients.
    assert [one.label for one in chosen.proposals] == ["fedavg", "fedcm", "fedsam"]
    assert chosen.proposals[2].settings == {"training.lr": 0.4} and len(chosen.tasks) == 2
    without = Portfolio.of(portfolio_of(small, rows, without=first))
    assert [one.label for one in without.proposals] == ["fedavg", "fedsam", "fedcm"]
    assert portfolio_of(small, []) == {"tasks": [], "methods": []}
