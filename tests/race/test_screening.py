"""Compositions that no paper has: what there is of them, and their race among themselves."""

from __future__ import annotations

from typer.testing import CliRunner

from flatfed import ALGORITHMS, cli
from flatfed.algorithms import build
from flatfed.race import preset as presets
from flatfed.race.page import race_page
from flatfed.race.preset import Preset, preset
from flatfed.race.results import read_results

SMALL = Preset.of(
    {
        "tuning_seed": 100,
        "seeds": [0],
        "configurations": 3,
        "factor": 3,
        "rungs": 2,
        "methods": [{"label": "fedavg"}],
        "tasks": [
            {
                "name": "digits",
                "title": "digits",
                "methods": ["fedavg"],
                "config": {
                    "data": {"clients": 10, "validation": 0.1},
                    "model": {"name": "logistic_regression"},
                    "training": {"rounds": 6, "participants": 3, "local_steps": 2, "batch_size": 4},
                },
            }
        ],
        "compositions": {
            "configurations": 3,
            "slots": {
                "gradient": ["none", {"part": "sharpness_aware", "radius": 0.05}],
                "correct": ["none", "control_variate", {"part": "dynamic_regulariser", "weight": 0.01}],
                "schedule": ["none", {"part": "linear_decay", "final": 0.1}],
            },
        },
    }
)


def test_at_least_sixty_compositions_none_of_which_is_a_registered_algorithm():
    entries = preset().compositions
    assert len(entries) >= 60 and len({entry.label for entry in entries}) == len(entries)
    named = [make() for make in ALGORITHMS.values()]
    for entry in entries:
        algorithm = build(entry.algorithm)
        kinds = {type(part) for part in algorithm.parts}
        assert not any(kinds == {type(part) for part in one.parts} for one in named), entry.label
    # FedAvg, SCAFFOLD, FedDyn, FedSAM, FedSWA, FedGAMMA and FedSpeed are left out of twelve.
    assert {entry.label for entry in SMALL.compositions} == {
        "control_variate × linear_decay",
        "dynamic_regulariser × linear_decay",
        "sharpness_aware × linear_decay",
        "sharpness_aware × control_variate × linear_decay",
        "sharpness_aware × dynamic_regulariser × linear_decay",
    }


def test_compositions_are_screened_once_and_can_then_be_raced_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "preset", lambda: SMALL)
    csv = tmp_path / "results.csv"
    command = ["race", "digits", "--results", str(csv), "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(cli.app, [*command, "--compositions"])
    assert done.exit_code == 0, done.output
    rows = read_results(csv)
    count = len(SMALL.compositions)
    assert len(rows) == 3 * count and {row.phase for row in rows} == {"screening"}
    assert all(row.test_accuracy is None and row.seed == 100 for row in rows)
    # One of five goes on to a whole run: the best one of all.
    most = max(row.gradients for row in rows)
    (winner,) = [row for row in rows if row.gradients > most / 2]
    assert winner.chosen
    again = CliRunner().invoke(cli.app, [*command, "--compositions"])
    best = again.stdout.rpartition("Best on the tasks so far: ")[2].strip().split(", ")
    assert len(best) == 3 and best[0] == winner.method and read_results(csv) == rows
    raced = CliRunner().invoke(cli.app, [*command, "--methods", best[0]])
    assert raced.exit_code == 0, raced.output
    final = [row for row in read_results(csv) if row.phase == "final"]
    assert [(row.method, row.seed) for row in final] == [(best[0], 0)]
    page = race_page(SMALL, read_results(csv), [], "ranks.svg")
    assert f"{count} compositions, 3 configurations" in page and "not screened" not in page


def test_unknown_labels_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(presets, "preset", lambda: SMALL)
    command = ["race", "--methods", "fedavg × fedavg", "--results", str(tmp_path / "results.csv")]
    done = CliRunner().invoke(cli.app, command)
    assert done.exit_code == 2 and "--methods = 'fedavg × fedavg': unknown" in done.stderr
