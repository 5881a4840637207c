"""Run folders in any state give a report, a note or a one-line error, and its numbers are right."""

from __future__ import annotations

import fcntl
import json
import statistics

import pytest

from flatfed.core.errors import FlatfedError
from flatfed.diagnostics.figures import axes, log_axis
from flatfed.report import write_report
from flatfed.report.group import comparisons
from flatfed.report.page import config_file
from flatfed.report.read import find_runs, read_run
from flatfed.report.sections import clients, diagnosed, summary, to_targets, usual_targets
from flatfed.runs.statistics import ACCURACY
from flatfed.training.config import Config
from flatfed.training.evaluation import client_spreads
from report.example import config, write_diagnostics, write_run


def methods_of(*folders, labels=None):
    (comparison,) = comparisons([read_run(folder) for folder in folders], labels or {})
    return comparison


# -- states of a folder -----------------------------------------------------------------------------------


def test_a_folder_of_runs_stands_for_its_runs_once(tmp_path):
    runs = [write_run(tmp_path / f"run{seed}", seed=seed) for seed in range(3)]
    (tmp_path / "report.html").write_text("not a run")
    (tmp_path / "empty").mkdir()
    assert find_runs([tmp_path, runs[1]]) == runs


@pytest.mark.parametrize("made", ["nothing", "file", "empty folder", "a name that is too long"])
def test_what_is_not_a_run_is_refused_in_one_line(tmp_path, made):
    path = tmp_path / "here"
    if made == "file":
        path.write_text("x")
    elif made == "empty folder":
        path.mkdir()
    elif made == "a name that is too long":
        path = tmp_path / (2000 * "x")
    with pytest.raises(FlatfedError, match=r"run folder|too long") as caught:
        write_report([path], tmp_path / "report.html")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "not valid JSON"),
        ("[]", "no table 'algorithm'"),
        ('{"algorithm": {}}', "no table 'training'"),
        ('{"algorithm": "x", "training": {}}', "no table 'algorithm'"),
    ],
)
def test_a_config_of_something_else_is_refused_in_one_line(tmp_path, content, complaint):
    folder = write_run(tmp_path / "run")
    (folder / "config.json").write_text(content)
    with pytest.raises(FlatfedError, match=complaint) as caught:
        write_report([folder], tmp_path / "report.html")
    assert "\n" not in str(caught.value)


def test_a_killed_run_is_unfinished_with_what_there_is(tmp_path):
    folder = write_run(tmp_path / "run", rounds=12, finished=5)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 6, "train_lo')
    record = read_run(folder)
    assert (record.state, len(record.history)) == ("unfinished", 5)
    notes = write_report([folder], tmp_path / "report.html")
    assert f"{folder}: unfinished, 5 of 12 rounds" in notes
    assert "unfinished, 5 of 12 rounds" in (tmp_path / "report.html").read_text()


def test_a_run_that_another_process_holds_is_running(tmp_path):
    folder = write_run(tmp_path / "run", rounds=12, finished=5)
    (folder / "checkpoint").mkdir()
    with (folder / "checkpoint" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read_run(folder).state == "running"
        assert any("still running" in note for note in write_report([folder], tmp_path / "report.html"))
    assert read_run(folder).state == "unfinished"


def test_a_run_without_a_round_has_no_report_but_may_stand_beside_others(tmp_path):
    begun, done = write_run(tmp_path / "begun", rounds=12, finished=0), write_run(tmp_path / "done", "fedsam")
    with pytest.raises(FlatfedError, match="no round is finished yet"):
        write_report([begun], tmp_path / "report.html")
    notes = write_report([begun, done], tmp_path / "report.html")
    assert f"{begun}: unfinished, 0 of 12 rounds" in notes


def test_damaged_and_missing_extras_are_noted_or_left_out(tmp_path):
    folder = write_run(tmp_path / "run")
    (folder / "environment.json").unlink()
    (folder / "clients.json").write_text("[{")
    (folder / "diagnostics").mkdir()
    (folder / "diagnostics" / "hessian.json").write_text('{"format": 2, "result": {}}')
    (folder / "diagnostics" / "drift.json").write_text('{"format": 1, "result": {"steps": 3}}')
    (folder / "diagnostics" / "surface.json").write_text("gone")
    (folder / "diagnostics" / "plane.json").write_text('{"format": 1}')
    (folder / "diagnostics" / "unheard_of.json").write_text('{"format": 1, "result": {}}')
    notes = " / ".join(write_report([folder], tmp_path / "report.html"))
    for text in (
        "clients.json",
        "its format is 2",
        "drift.json: not as expected",
        "surface.json",
        "no result",
    ):
        assert text in notes
    assert "environment" not in notes and "unheard_of" not in notes


def test_numbers_that_are_none_are_left_out(tmp_path):
    folder = write_run(tmp_path / "run", rounds=3)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    lines[1]["test_accuracy"], lines[1]["test_loss"] = float("nan"), "high"
    lines[0]["test_accuracy"], lines[2]["test_accuracy"] = 0.25, 0.5
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    method = methods_of(folder).methods[0]
    assert method.curve("test_accuracy").rounds == [1, 3]
    assert method.curve("test_accuracy").mean == [0.25, 0.5]
    assert method.curve("test_loss").rounds == [1, 3]
    write_report([folder], tmp_path / "report.html")


def test_a_run_from_python_is_reported_without_split_and_file(tmp_path):
    folder = write_run(tmp_path / "run")
    described = {
        "algorithm": {"gradient": {"part": "sharpness_aware", "radius": 0.1}},
        "training": {"rounds": 12},
    }
    (folder / "config.json").write_text(json.dumps(described))
    notes = write_report([folder], tmp_path / "report.html")
    assert any("made from Python" in note for note in notes)
    page = (tmp_path / "report.html").read_text()
    assert "<h1>sharpness_aware</h1>" in page and "<pre>" not in page


def test_a_config_that_this_version_does_not_know_costs_only_the_split(tmp_path):
    folder = write_run(tmp_path / "run")
    values = config("fedfuture", 0, 12, invented=3)
    values["training"]["warp"] = True
    values["format"], values["later"] = 2, None
    (folder / "config.json").write_text(json.dumps(values))
    (note,) = write_report([folder], tmp_path / "report.html")
    assert note.startswith("the split is not shown") and "\n" not in note
    assert "<h1>fedfuture</h1>" in (tmp_path / "report.html").read_text()


# -- grouping and numbers ---------------------------------------------------------------------------------


def test_seeds_are_one_method_and_options_tell_methods_apart(tmp_path):
    folders = [write_run(tmp_path / f"a{seed}", "fedsam", seed, radius=0.1) for seed in (10, 9, 2)]
    folders += [write_run(tmp_path / "b", "fedsam", 2, radius=0.2), write_run(tmp_path / "c", "fedavg", 2)]
    found = methods_of(*folders)
    assert [method.label for method in found.methods] == [
        "fedsam (radius 0.1)",
        "fedsam (radius 0.2)",
        "fedavg",
    ]
    assert [run.seed for run in found.methods[0].runs] == [2, 9, 10]
    named = methods_of(*folders, labels={folders[3]: "wide"})
    assert [method.label for method in named.methods] == ["fedsam", "wide", "fedavg"]


def test_workers_and_checkpoints_do_not_make_another_method(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", seed=1)
    values = json.loads((other / "config.json").read_text())
    values["execution"] |= {"workers": 7, "checkpoint_every": 3}
    (other / "config.json").write_text(json.dumps(values))
    assert len(methods_of(one, other).methods) == 1


def test_another_model_is_another_comparison(tmp_path):
    one, other = write_run(tmp_path / "one"), write_run(tmp_path / "other", "fedsam")
    values = json.loads((other / "config.json").read_text())
    values["model"]["hidden"] = [32]
    (other / "config.json").write_text(json.dumps(values))
    found = comparisons([read_run(one), read_run(other)], {})
    assert [len(each.methods) for each in found] == [1, 1]
    write_report([one, other], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert 'id="part-0"' in page and 'id="part-1"' in page


def test_means_deviations_and_costs_are_those_of_the_histories(tmp_path):
    folders = [write_run(tmp_path / f"run{seed}", seed=seed, rounds=6) for seed in range(3)]
    lines = [
        [json.loads(line) for line in (each / "history.jsonl").read_text().splitlines()] for each in folders
    ]
    method = methods_of(*folders).methods[0]
    curve = method.curve(ACCURACY)
    for place in range(6):
        values = [each[place][ACCURACY] for each in lines]
        assert curve.mean[place] == pytest.approx(sum(values) / 3)
        assert curve.deviation[place] == pytest.approx(statistics.stdev(values))
    traffic = method.running_total("bytes_up", "bytes_down").mean
    assert traffic == pytest.approx([(place + 1) * (500 + (1000 + 2000 + 3000) / 3) for place in range(6)])


def test_unfinished_runs_do_not_count_beside_complete_ones(tmp_path):
    complete, killed = write_run(tmp_path / "a", seed=0), write_run(tmp_path / "b", seed=1, finished=4)
    method = methods_of(complete, killed).methods[0]
    assert [run.seed for run in method.counted] == [0]
    assert method.curve(ACCURACY).deviation is None
    alone = methods_of(killed).methods[0]
    assert alone.curve(ACCURACY).rounds == [1, 2, 3, 4]


def test_rounds_to_a_target_count_the_first_and_say_how_many_reach_it(tmp_path):
    folders = [write_run(tmp_path / f"run{seed}", seed=seed, rounds=4) for seed in range(2)]
    for folder, values in zip(folders, ([0.1, 0.6, 0.4, 0.7], [0.1, 0.2, 0.3, 0.55]), strict=True):
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        for line, value in zip(lines, values, strict=True):
            line[ACCURACY] = value
        (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    comparison = methods_of(*folders)
    method = comparison.methods[0]
    assert method.rounds_to(0.5) == [2, 4]
    assert method.rounds_to(0.6) == [2]
    rounds, megabytes, _ = to_targets(comparison, [0.5, 0.6, 0.9]).content
    assert [cell.text for cell in rounds.rows[0][1:]] == ["3 ± 1", "2 (1 of 2)", "not reached"]
    assert megabytes.rows[0][2].value == pytest.approx(2 * (500 + (1000 + 2000) / 2) / 1e6)
    # The mean final accuracy is 0.625.
    assert usual_targets(comparison) == [0.31, 0.46, 0.56, 0.6]


def test_the_summary_has_a_line_for_each_method(tmp_path):
    folders = [
        write_run(tmp_path / f"{name}{seed}", name, seed) for name in ("fedavg", "fedsam") for seed in (0, 1)
    ]
    comparison = methods_of(*folders)
    (table,) = summary(comparison, [0.5], 400).content
    assert [row[0].text for row in table.rows] == ["fedavg", "fedsam"]
    finals = [
        json.loads(each.read_text().splitlines()[-1])[ACCURACY]
        for each in tmp_path.glob("fedavg*/history.jsonl")
    ]
    accuracy = table.rows[0][table.columns.index("accuracy %")]
    assert accuracy.value == pytest.approx(100 * statistics.fmean(finals))
    mean = statistics.fmean(finals)
    assert f"±{100 * (mean * (1 - mean) / 400) ** 0.5:.2g} points" in table.note


@pytest.mark.parametrize("validated", [0, 2, 3])
def test_the_summary_says_which_samples_chose_among_settings(tmp_path, validated):
    speeds = {"0.1": 2.0, "0.2": 4.0, "0.3": 3.0}
    folders = [write_run(tmp_path / "sam", "fedsam")]
    for number, (radius, speed) in enumerate(speeds.items()):
        folder = write_run(tmp_path / radius, "fedasam", speed=speed, radius=float(radius))
        folders.append(folder)
        lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        for line in lines if number < validated else ():
            # The smallest radius is the best on the validation samples, and the fifth round is its best.
            line["validation_accuracy"] = 0.9 - 0.1 * number - 0.01 * abs(line["round"] - 5)
        (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (table,) = summary(methods_of(*folders), [], None).content
    chosen = [row[table.columns.index("chosen by")].text for row in table.rows]
    by_validation, by_test = "validation samples, of 3", "test samples, of 3"
    assert chosen == (["–", by_validation, "–", "–"] if validated == 3 else ["–", "–", by_test, "–"])
    assert "the test samples have chosen is too high" in table.note
    assert ("at best validation %" in table.columns) == (validated > 0)
    if validated:
        fifth = json.loads((folders[1] / "history.jsonl").read_text().splitlines()[4])[ACCURACY]
        assert table.rows[1][table.columns.index("at best validation %")].value == pytest.approx(100 * fifth)
        assert table.rows[1][table.columns.index("validation %")].value == pytest.approx(83)
        assert table.rows[0][table.columns.index("validation %")].text == "–"


def test_every_diagnostic_has_its_place(tmp_path):
    folder = write_run(tmp_path / "run")
    write_diagnostics(folder)
    found, notes = diagnosed(methods_of(folder))
    assert notes == []
    names = {content.name for section in found for content in section.content}
    assert names >= {
        "hessian",
        "eigenvalues",
        "density",
        "client-eigenvalues",
        "sharpness",
        "surface-0",
        "surface-test-0",
        "surface-cut-train",
        "surface-cut-test",
    }
    assert names >= {"line-train_loss", "line-test_accuracy", "plane-0", "drift", "local_stability"}
    assert names >= {
        "global_stability",
        "perturbation-0",
        "generalization",
        "fairness",
        "constants",
        "theory-0",
    }


def named(found, name):
    (content,) = [each for section in found for each in section.content if each.name == name]
    return content


def test_bounds_stand_beside_what_was_measured(tmp_path):
    folder = write_run(tmp_path / "run")
    write_diagnostics(folder)
    figure = named(diagnosed(methods_of(folder))[0], "theory-0")
    assert [trace["name"] for trace in figure.traces] == ["fedavg: bound", "fedavg"]
    measured = json.loads((folder / "diagnostics" / "global_stability.json").read_text())["result"]
    assert figure.traces[1]["x"] == measured["rounds"]
    assert figure.traces[1]["y"] == pytest.approx(measured["discrepancy"], rel=1e-5)


def test_what_was_measured_of_an_earlier_round_is_left_out_and_noted(tmp_path):
    folder = write_run(tmp_path / "run")
    write_diagnostics(folder)
    path = folder / "diagnostics" / "drift.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "round": 2}))
    record = read_run(folder)
    assert "drift" not in record.diagnostics and "hessian" in record.diagnostics
    assert any("drift.json: measured after round 2, but the run is at 12" in note for note in record.notes)


def test_surfaces_without_finite_heights_or_a_second_direction_are_no_pictures(tmp_path):
    folders = [write_run(tmp_path / name, name) for name in ("fedavg", "fedsam", "fedmoswa")]
    for folder in folders:
        write_diagnostics(folder)
    changes = ({"train": [[None] * 21] * 21, "test": None}, {"b": [0.0], "train": [[0.5]] * 21, "test": None})
    for folder, change in zip(folders, changes, strict=False):
        path = folder / "diagnostics" / "surface.json"
        content = json.loads(path.read_text())
        content["result"] |= change
        path.write_text(json.dumps(content))
    found, notes = diagnosed(methods_of(*folders))
    assert notes == []
    (section,) = [each for each in found if each.name == "surfaces"]
    assert [figure.name for figure in section.content] == [
        "surface-2",
        "surface-test-2",
        "surface-cut-train",
        "surface-cut-test",
    ]
    assert [trace["name"] for trace in section.content[2].traces] == ["fedsam", "fedmoswa"]


def test_unseen_clients_and_clients_tests_have_their_numbers(tmp_path):
    folder = write_run(tmp_path / "run")
    write_diagnostics(folder)
    comparison = methods_of(folder)
    table = named(diagnosed(comparison)[0], "generalization")
    row = dict(zip(table.columns, table.rows[0], strict=True))
    assert row["gap to unseen clients: loss"].value == 0.3
    assert row["gap to unseen clients: accuracy %"].value == pytest.approx(8)
    (table, *figures) = clients(comparison).content
    assert [figure.name for figure in figures] == [
        "clients-box",
        "clients-share",
        "clients-test-box",
        "clients-test-share",
    ]
    row = dict(zip(table.columns, table.rows[0], strict=True))
    listed = json.loads((folder / "clients.json").read_text())["clients"]
    spread = client_spreads(listed)["test"]
    for what in ("mean", "deviation"):
        assert row[f"test: {what} %"].value == pytest.approx(100 * getattr(spread, what))
    assert row["test: by chance %"].value == pytest.approx(100 * spread.chance)
    (table,) = summary(comparison, [], None).content
    chance = table.rows[0][table.columns.index("by chance %")]
    assert chance.value == pytest.approx(100 * client_spreads(listed)["train"].chance)


def test_clients_own_models_have_columns_where_there_are_some(tmp_path):
    folder = write_run(tmp_path / "run")
    path = folder / "clients.json"
    plain = clients(methods_of(folder)).content[0]
    assert not any("personal" in column for column in plain.columns)
    listed = json.loads(path.read_text())
    for number, client in enumerate(listed["clients"]):
        client["test_personal_accuracy"] = 0.5 + 0.01 * number
    path.write_text(json.dumps(listed))
    table = clients(methods_of(folder)).content[0]
    added = [column for column in table.columns if column not in plain.columns]
    assert [column.partition(":")[0] for column in added] == ["personal model, test"] * 3
    mean = table.rows[0][list(table.columns).index(added[0])]
    assert mean.value == pytest.approx(100 * sum(0.5 + 0.01 * number for number in range(20)) / 20)


def test_sharpness_over_different_radii_is_noted(tmp_path):
    folders = [write_run(tmp_path / name, name) for name in ("fedavg", "fedsam")]
    for folder in folders:
        write_diagnostics(folder)
    assert "radii differ" not in named(diagnosed(methods_of(*folders))[0], "sharpness").note
    path = folders[0] / "diagnostics" / "sharpness.json"
    content = json.loads(path.read_text())
    content["result"]["radius"] = 0.05
    path.write_text(json.dumps(content))
    assert "radii differ" in named(diagnosed(methods_of(*folders))[0], "sharpness").note


def test_the_heights_of_a_plane_belong_to_its_axes(tmp_path):
    folder = write_run(tmp_path / "run")
    write_diagnostics(folder)
    path = folder / "diagnostics" / "plane.json"
    content = json.loads(path.read_text())
    # The loss at x[i], y[j] is loss[i][j].
    content["result"] |= {"x": [0, 1], "y": [0, 1, 2], "loss": [[0, 1, 2], [10, 11, 12]]}
    path.write_text(json.dumps(content))
    contour = named(diagnosed(methods_of(folder))[0], "plane-0").traces[0]
    heights = {
        (x, y): z
        for y, row in zip(contour["y"], contour["z"], strict=True)
        for x, z in zip(contour["x"], row, strict=True)
    }
    assert heights == {(x, y): 10 * x + y for x in (0, 1) for y in (0, 1, 2)}


def test_a_method_without_estimates_has_no_picture_of_them(tmp_path):
    folder = write_run(tmp_path / "run")
    write_diagnostics(folder)
    path = folder / "diagnostics" / "perturbation.json"
    content = json.loads(path.read_text())
    content["result"]["cosine"] = {}
    path.write_text(json.dumps(content))
    found, _ = diagnosed(methods_of(folder))
    assert not any(each.name == "perturbation-0" for section in found for each in section.content)


@pytest.mark.parametrize(
    ("values", "kind"), [([0.5, 0.9], None), ([0.05, 0.9], "log"), ([1e-6, 0.9], "log"), ([0.0], None)]
)
def test_logarithmic_axes_are_for_more_than_a_decade(values, kind):
    layout = log_axis(axes("x", "y"), [{"y": values}])
    assert layout["yaxis"].get("type") == kind


def test_copies_of_a_seed_count_once(tmp_path):
    folders = [write_run(tmp_path / f"run{number}", seed=0) for number in range(2)]
    folders.append(write_run(tmp_path / "other", seed=1))
    method = methods_of(*folders).methods[0]
    assert [run.seed for run in method.counted] == [0, 1]
    notes = write_report(folders, tmp_path / "report.html")
    assert any("same seed" in note for note in notes)
    assert methods_of(*folders[:2]).methods[0].curve(ACCURACY).deviation is None


def test_a_last_value_that_is_no_number_is_not_replaced_by_an_earlier_one(tmp_path):
    folder = write_run(tmp_path / "run", rounds=3)
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    lines[2]["test_accuracy"] = float("nan")
    (folder / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert methods_of(folder).methods[0].last() is None
    notes = write_report([folder], tmp_path / "report.html")
    assert f"{folder}: at the last round test_accuracy is not a finite number" in notes


def test_a_diverged_run_is_called_so(tmp_path):
    folder = write_run(tmp_path / "run", finished=2)
    (folder / "diverged.json").write_text(json.dumps({"error": "round 3: the training loss is nan"}))
    assert f"{folder}: diverged, 2 of 12 rounds" in write_report([folder], tmp_path / "report.html")
    (folder / "history.jsonl").write_text("")
    with pytest.raises(FlatfedError, match="diverged in the first one"):
        write_report([folder], tmp_path / "report.html")


def test_the_config_file_gives_the_same_config(tmp_path):
    values = config("fedsam", 3, 12, radius=0.25)
    values["training"] |= {"batch_size": None, "clip": None}
    values["execution"] |= {"device": 'c"p\\u\n'}
    values["data"]["options"] = {}
    path = tmp_path / "config.toml"
    path.write_text(config_file(values))
    assert Config.read(path) == Config.checked(values)
    composed = {
        **values,
        "algorithm": {
            "gradient": {"part": "sharpness_aware", "radius": 1e-5},
            "correct": [{"part": "proximal", "weight": 0.1}],
        },
    }
    path.write_text(config_file(composed))
    assert Config.read(path) == Config.checked(composed)
