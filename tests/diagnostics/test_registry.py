"""A diagnostic is enrolled by its decorator alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import flatfed as ff
from flatfed.cli import app
from flatfed.core.types import Count
from flatfed.diagnostics import DIAGNOSTICS, diagnose, diagnostic
from flatfed.diagnostics.figures import chart, line, method_table, significant
from flatfed.diagnostics.registry import cheap_diagnostics
from flatfed.diagnostics.subject import Subject, Tick, silent
from flatfed.report import write_report
from flatfed.runs.train import run_config
from flatfed.training.config import Config

SMALL = {
    "data": {"dataset": "digits", "clients": 4},
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 1, "participants": 2, "local_steps": 1, "batch_size": 8},
    "execution": {"workers": 1},
}


def show(measured):
    methods = measured["weight_norm"]
    columns = {"norm": lambda method: significant(method.spread("norm"))}
    powers = [line(method, range(len(method.first["powers"])), method.first["powers"]) for method in methods]
    return [
        method_table("weight-norm", "How long the model is", methods, columns),
        chart("weight-powers", "Powers of its length", powers, "power", "value"),
        chart("nothing", "Without lines", [], "x", "y"),
    ]


@pytest.fixture
def weight_norm():
    """A diagnostic of the test's own, gone afterwards."""

    @diagnostic("lengths", lambda result: f"the norm is {result['norm']:.6f}", show, cheap=True)
    def weight_norm(subject: Subject, *, count: Count = 3, tick: Tick = silent) -> dict[str, Any]:
        """The length of the model.

        And more that the list does not show.
        """
        norm = float(subject.model.norm())
        tick(1.0)
        return {"norm": norm, "powers": [norm**power for power in range(count)]}

    yield weight_norm
    del DIAGNOSTICS["weight_norm"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    config = Config.checked(SMALL)
    run_config(config, tmp_path / "run")
    return tmp_path / "run"


def command(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["diagnose", *map(str, arguments)], terminal_width=200)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_registered_diagnostic_is_listed_run_summarised_and_reported(weight_norm, folder, tmp_path):
    assert ff.diagnostics.weight_norm is weight_norm
    assert "weight_norm" in cheap_diagnostics()
    listed = command()
    assert "weight_norm" in listed and "The length of the model." in listed and "count=3" in listed
    assert "the list does not show" not in listed

    printed = command(folder, "weight_norm", "--set", "count=4")
    stored = json.loads((folder / "diagnostics" / "weight_norm.json").read_text())
    assert stored["options"] == {"count": 4} and len(stored["result"]["powers"]) == 4
    assert f"the norm is {stored['result']['norm']:.6f}" in printed
    assert diagnose(folder, ["weight_norm"], {"count": 4})["weight_norm"] == stored

    assert write_report([folder], tmp_path / "report.html") == []
    page = (tmp_path / "report.html").read_text()
    assert '<section id="lengths"' in page and "<h3>Lengths</h3>" in page
    assert "How long the model is" in page and f">{stored['result']['norm']:.4g}</td>" in page
    assert "Powers of its length" in page and '"0-weight-powers"' in page
    assert "Without lines" not in page


def test_a_diagnostic_that_is_not_registered_is_unknown(folder):
    assert "weight_norm" not in DIAGNOSTICS
    with pytest.raises(AttributeError, match="weight_norm"):
        _ = ff.diagnostics.weight_norm
    with pytest.raises(ff.FlatfedError, match="weight_norm: no such diagnostic"):
        diagnose(folder, ["weight_norm"])


def test_every_diagnostic_is_a_function_of_its_own_file():
    for name, known in DIAGNOSTICS.items():
        assert getattr(ff.diagnostics, name) is known.measure
        assert known.measure.__module__ == f"flatfed.diagnostics.{name}"
        assert known.title.endswith(".")


def test_all_leaves_out_what_needs_another_run(folder, monkeypatch):
    measured: list[list[str]] = []
    monkeypatch.setattr("flatfed.diagnostics.diagnose", lambda folder, names, *rest: measured.append(names))
    command(folder, "all")
    command(folder, "all", "--set", f"other={folder}")
    assert set(DIAGNOSTICS) - set(measured[0]) == {"line"}
    assert set(measured[1]) == set(DIAGNOSTICS)
    assert measured[1][: len(cheap_diagnostics())] == cheap_diagnostics()
