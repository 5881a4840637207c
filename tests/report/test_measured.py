"""Reports on what `flatfed diagnose` really writes."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatfed.core.errors import DivergedError
from flatfed.diagnostics import DIAGNOSTICS, diagnose
from flatfed.diagnostics.figures import MethodResults
from flatfed.report import write_report
from flatfed.report.group import Comparison, comparisons
from flatfed.report.read import read_run
from flatfed.report.sections import diagnosed
from flatfed.runs.train import run_config
from flatfed.training.config import Config

QUICK = {"samples": 60, "clients": 3, "points": 4, "probes": 2, "steps": 3, "replacements": 1}


def made(folder: Path, name: str, hidden: int = 4, **training: object) -> Path:
    config = Config.checked(
        {
            "data": {"dataset": "digits", "clients": 6, "client_tests": 10},
            "model": {"name": "mlp", "hidden": [hidden]},
            "algorithm": {"name": name},
            "training": {
                "rounds": 3, "participants": 3, "local_steps": 2, "batch_size": 8, **training,
            },
            "execution": {"workers": 1},
        }
    )  # fmt: skip
    run_config(config, folder)
    return folder


def compared(*folders: Path) -> list[Comparison]:
    return comparisons([read_run(folder) for folder in folders], {})


def test_everything_measured_is_shown_and_nothing_is_misunderstood(tmp_path):
    folders = [made(tmp_path / name, name) for name in ("fedavg", "fedswa")]
    # The bounds come first: what they are drawn beside is measured later.
    names = ["theory", *(name for name in DIAGNOSTICS if name != "theory")]
    for folder in folders:
        diagnose(folder, names, {**QUICK, "other": str(folders[0])})
    (comparison,) = compared(*folders)
    found, notes = diagnosed(comparison)
    assert notes == []
    for name in DIAGNOSTICS:
        results = [
            MethodResults(method.number, method.label, method.measured(name)) for method in comparison.methods
        ]
        assert any(
            getattr(item, "traces", None) or getattr(item, "rows", None)
            for item in DIAGNOSTICS[name].show({name: results})
        ), name
    content = {item.name: item for section in found for item in section.content}
    assert [trace["name"] for trace in content["theory-0"].traces] == [
        "fedavg: bound",
        "fedswa: bound",
        "fedavg",
        "fedswa",
    ]
    assert {"surface-0", "surface-test-0", "surface-cut-train", "surface-cut-test"} <= set(content)
    assert write_report(folders, tmp_path / "report.html") == []
    page = (tmp_path / "report.html").read_text()
    assert "clients-test-box" in page


def test_a_diverged_run_stands_beside_others(tmp_path):
    wild, calm = tmp_path / "wild", made(tmp_path / "calm", "fedsam", 64)
    with pytest.raises(DivergedError):
        made(wild, "fedavg", 64, lr=1e12)
    failures: list[str] = []
    names = [name for name in DIAGNOSTICS if name != "line"]
    known = {key for name in names for key in DIAGNOSTICS[name].options({})}
    given = {key: value for key, value in QUICK.items() if key in known}
    diagnose(wild, names, given, failed=lambda name, error: failures.append(name))
    measured = set(read_run(wild).diagnostics)
    assert measured and measured | set(failures) == set(names)
    notes = write_report([wild, calm], tmp_path / "report.html")
    assert any(note.startswith(f"{wild}: diverged, ") for note in notes)
    assert not any("not as expected" in note for note in notes)
