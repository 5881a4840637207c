"""The race: the csv file alone says what is missing, and what there is is not run again."""

from __future__ import annotations

import shutil

import pytest
from typer.testing import CliRunner

from flatfed import ALGORITHMS, cli
from flatfed.core.errors import FlatfedError
from flatfed.race import preset as presets
from flatfed.race.page import race_page
from flatfed.race.preset import Preset, preset
from flatfed.race.results import FLATNESS, Measured, Result, Results, read_results, read_rows
from flatfed.race.runner import TaskRace
from flatfed.race.standings import TaskStandings, rank_methods
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import total
from flatfed.training.config import Config

VALUES = {
    "tuning_seed": 100,
    "seeds": [0, 1],
    "configurations": 3,
    "factor": 3,
    "rungs": 2,
    "methods": [
        {"label": "fedavg (step size as given)", "algorithm": {"name": "fedavg"}, "tuned": False},
        {"label": "fedavg"},
        {"label": "fedsam"},
    ],
    "tasks": [
        {
            "name": name,
            "title": name,
            "methods": ["fedavg (step size as given)", "fedavg", "fedsam"],
            "config": {
                "data": {"clients": 10, "validation": 0.1},
                "model": {"name": "logistic_regression"},
                "training": {"rounds": 6, "participants": 3, "local_steps": 2, "batch_size": 4},
            },
        }
        for name in ("digits", "more digits")
    ],
}
SMALL = Preset.of(VALUES)


def unwatched(candidate, rung, rounds):
    return lambda now: None


def race(root, csv, task="digits"):
    return TaskRace(SMALL, SMALL.tasks[task], root, Results(csv))


def run(root, csv, *tasks, watch=unwatched):
    for task in tasks or ("digits",):
        one = race(root, csv, task)
        for entry in one.task.entries:
            if one.is_missing(entry):
                one.run(entry, watch)
    return read_results(csv)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("race")
    rows = run(root / "runs", root / "results.csv")
    return root, rows


def test_the_race_is_of_all_algorithms_on_tasks_that_exist():
    first = next(iter(preset().tasks.values()))
    names = {entry.algorithm.get("name") for entry in first.entries}
    assert names >= set(ALGORITHMS)
    for task in preset().tasks.values():
        for entry in task.entries:
            config = Config.checked({**task.config, "algorithm": entry.algorithm})
            assert config.data.validation, task.name
    assert preset().tuning_seed not in preset().seeds


def test_a_row_for_every_configuration_and_every_final_run(finished):
    _, rows = finished
    counted = [(row.method, row.phase, row.seed) for row in rows]
    assert counted == [
        *[("fedavg (step size as given)", "final", seed) for seed in (0, 1)],
        *[("fedavg", "tuning", 100)] * 3,
        *[("fedavg", "final", seed) for seed in (0, 1)],
        *[("fedsam", "tuning", 100)] * 3,
        *[("fedsam", "final", seed) for seed in (0, 1)],
    ]
    for method in ("fedavg", "fedsam"):
        chosen = [row for row in rows if row.method == method and row.phase == "tuning" and row.chosen]
        final = [row for row in rows if row.method == method and row.phase == "final"]
        assert len(chosen) == 1 and {row.settings for row in final} == {chosen[0].settings}


def test_tuning_sees_no_test_samples_and_final_runs_have_all_numbers(finished):
    _, rows = finished
    for row in rows:
        if row.phase == "tuning":
            assert row.test_accuracy is None and row.validation_accuracy is not None
        else:
            assert row.rounds == 6 and row.test_samples == 355
            assert None not in (row.test_accuracy, row.test_tail, row.test_at_gradients, row.train_accuracy)


def test_budgets_are_equal_and_limits_those_of_fedavg(finished):
    _, rows = finished
    fedavg = [row for row in rows if row.method == "fedavg" and row.phase == "final"]
    fedsam = [row for row in rows if row.method == "fedsam" and row.phase == "final"]
    assert [row.gradients for row in fedavg] == [6 * 3 * 2] * 2
    assert [row.gradients for row in fedsam] == [2 * 6 * 3 * 2] * 2
    # FedAvg is within all its own limits; FedSAM has half the rounds at equal gradients.
    assert all(row.test_at_gradients == row.test_at_bytes == row.test_accuracy for row in fedavg)
    tuned = {
        method: sum(row.gradients for row in rows if row.method == method and row.phase == "tuning")
        for method in ("fedavg", "fedsam")
    }
    assert tuned["fedavg"] == tuned["fedsam"] == 2 * 12 + 36


def test_numbers_are_those_of_the_run_folders(finished):
    root, rows = finished
    histories = [RunFolder(path).read_history() for path in (root / "runs" / "digits").iterdir()]
    assert len(histories) == len(rows)
    assert sum(row.gradients for row in rows) == sum(
        total(history, "gradient_evaluations") for history in histories
    )
    accuracies = {f"{history[-1]['test_accuracy']:.6g}" for history in histories if len(history) == 6}
    assert {f"{row.test_accuracy:.6g}" for row in rows if row.phase == "final"} <= accuracies


def test_another_machine_goes_on_from_the_csv_alone(finished, tmp_path):
    root, rows = finished
    shutil.copy(root / "results.csv", tmp_path / "results.csv")
    nothing = lambda *_: pytest.fail("trained again")  # noqa: E731
    assert run(tmp_path / "runs", tmp_path / "results.csv", watch=nothing) == rows
    # One final run is missing: it alone is run, with the settings of the file, to the same numbers.
    lines = (root / "results.csv").read_text().splitlines(keepends=True)
    (tmp_path / "results.csv").write_text("".join(lines[:-1]))
    again = run(tmp_path / "runs", tmp_path / "results.csv")
    assert len(list((tmp_path / "runs" / "digits").iterdir())) == 1
    assert again[:-1] == rows[:-1]
    kept = {"exclude": {"seconds", "commit"}}
    assert again[-1].model_dump(**kept) == rows[-1].model_dump(**kept)


def test_this_machine_goes_on_from_its_run_folders(finished, tmp_path):
    root, rows = finished
    shutil.copytree(root / "runs", tmp_path / "runs")
    again = run(tmp_path / "runs", tmp_path / "results.csv", watch=lambda *_: pytest.fail("trained again"))
    assert again == rows


def test_an_interrupted_race_goes_on_to_the_same_rows_wherever_its_folders_are(finished, tmp_path):
    _, rows = finished
    here, there, trained = tmp_path / "here", tmp_path / "there", []

    def interrupting(candidate, rung, rounds):
        def callback(now):
            if len(trained) == 30:
                raise KeyboardInterrupt
            trained.append(now.round)

        return callback

    with pytest.raises(KeyboardInterrupt):
        run(here / "runs", here / "results.csv", watch=interrupting)
    # Another machine gets both, in a run's middle; no finished round is trained again.
    shutil.move(here, there)
    count = []
    again = run(there / "runs", there / "results.csv", watch=lambda *_: lambda now: count.append(now.round))
    assert len(trained) + len(count) == sum(row.rounds for row in rows)
    kept = {"exclude": {"seconds", "commit"}}
    assert [row.model_dump(**kept) for row in again] == [row.model_dump(**kept) for row in rows]


def test_what_two_processes_have_run_is_in_the_file_once(finished, tmp_path):
    _, rows = finished
    first, second = Results(tmp_path / "results.csv"), Results(tmp_path / "results.csv")
    first.add(rows[:3])
    second.add(rows[2:5])
    assert read_results(tmp_path / "results.csv") == second.rows == rows[:5]


def test_rows_of_other_settings_do_not_count(finished, tmp_path):
    root, _ = finished
    other = Preset.of({**VALUES, "configurations": 4})
    known = Results(root / "results.csv")
    changed = TaskRace(other, other.tasks["digits"], tmp_path, known)
    assert all(changed.is_missing(entry) for entry in changed.task.entries)
    entry = SMALL.tasks["digits"].entries[1]
    assert not race(tmp_path, root / "results.csv").is_missing(entry)


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda text: text[:-1], "its last line is cut off"),
        (lambda text: text.replace("test_tail", "tail"), "not the columns"),
        (lambda text: text + "digits,fedavg\n", r"line 14 has 2 of \d+ columns"),
        (lambda text: text.replace(",final,,0,", ",final,,zero,", 1), "line 2: seed = 'zero'"),
    ],
)
def test_a_damaged_file_is_named_with_its_line(finished, tmp_path, damage, complaint):
    root, _ = finished
    damaged = tmp_path / "results.csv"
    damaged.write_text(damage((root / "results.csv").read_text()))
    with pytest.raises(FlatfedError, match=complaint):
        Results(damaged)


def test_standings_and_the_page(finished):
    _, rows = finished
    standings = TaskStandings.of("digits", rows)
    assert set(standings.methods) == {"fedavg (step size as given)", "fedavg", "fedsam"}
    means = [one.mean() for one in standings.standings]
    assert means == sorted(means, reverse=True)
    assert standings.methods[0] in standings.as_good_as_best()
    assert rank_methods([standings]).blocks == 1 and rank_methods([standings], by_seed=True).blocks == 2
    page = race_page(SMALL, rows, [], "ranks.svg")
    assert page.count("| **") == len(standings.as_good_as_best())
    assert "- more digits (`more digits`): nothing yet." in page
    cut = [row for row in rows if (row.method, row.phase, row.seed) != ("fedsam", "final", 1)]
    assert "not under all seeds: fedsam (tuned)" in race_page(SMALL, cut, [], "ranks.svg")


def test_the_command(finished, tmp_path, monkeypatch):
    root, _ = finished
    monkeypatch.setattr(presets, "preset", lambda: SMALL)
    shutil.copy(root / "results.csv", tmp_path / "results.csv")
    command = ["race", "--results", str(tmp_path / "results.csv"), "--runs", str(tmp_path / "runs")]
    planned = CliRunner().invoke(cli.app, [*command, "--plan"])
    assert planned.exit_code == 0, planned.output
    assert not (tmp_path / "runs").exists()
    done = CliRunner().invoke(cli.app, [*command, "more digits", "--methods", "fedavg"])
    assert done.exit_code == 0, done.output
    assert "By a timed round about" in done.stdout and "fedavg: training.lr=" in done.stdout
    assert len(read_results(tmp_path / "results.csv")) == 12 + 5
    unknown = CliRunner().invoke(cli.app, [*command, "nowhere"])
    assert unknown.exit_code == 2 and "task = 'nowhere': unknown" in unknown.stderr


def test_every_column_is_in_the_file(finished):
    root, _ = finished
    assert (root / "results.csv").read_text().splitlines()[0].split(",") == list(Result.model_fields)


def test_flatness_is_measured_once_of_the_final_models_that_are_here(finished, tmp_path, monkeypatch):
    root, _ = finished
    monkeypatch.setattr(presets, "preset", lambda: SMALL)
    shutil.copy(root / "results.csv", tmp_path / "results.csv")
    command = ["race", "digits", "--flatness", "--methods", "fedavg", "--results"]
    command += [str(tmp_path / "results.csv"), "--runs", str(root / "runs")]
    for _ in range(2):
        done = CliRunner().invoke(cli.app, command)
        assert done.exit_code == 0, done.output
        measured = read_rows(tmp_path / FLATNESS, Measured)
        assert [(row.method, row.seed) for row in measured] == [("fedavg", 0), ("fedavg", 1)]
    assert all(row.top_eigenvalue > 0 and row.sharpness > 0 for row in measured)
    # Elsewhere there is nothing to measure.
    command[-1] = str(tmp_path / "nothing")
    (tmp_path / FLATNESS).unlink()
    assert CliRunner().invoke(cli.app, command).exit_code == 0
    assert not (tmp_path / FLATNESS).exists()
