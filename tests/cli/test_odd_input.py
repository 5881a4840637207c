"""Odd words and odd files on the command line: one clear line and exit code 2, and nothing is written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flatfed.cli import app

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.toml"
DIGITS, DEEP = "9" * 5000, "[" * 5000


def complaint(*arguments: object) -> str:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert isinstance(result.exception, SystemExit), result.exception
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_a_target_that_no_accuracy_reaches_or_misses(tmp_path):
    assert complaint("report", tmp_path, "--target", "nan").startswith("error: --target nan: give")


@pytest.mark.parametrize(
    ("assignment", "reason"),
    [
        ("int=3", "int: unknown"),
        ("x[0]=1", "x[0]: unknown"),
        ("training.lr=2020-01-01", "training.lr = 2020-01-01: a date is of no use here"),
        (f"training.rounds={DIGITS}", "training.rounds = '999"),
        (f"training.lr={DEEP}", "training.lr = '[[["),
        (f"{'x.' * 5000}y=1", "nested too deeply"),
        ("training.lr=\x1b[31m", r"\x1b"),
    ],
    ids=range(7),
)
def test_odd_assignments(assignment, reason, tmp_path):
    assert reason in complaint("run", EXAMPLE, "--set", assignment, "--folder", tmp_path / "run")
    assert reason in complaint(
        "compare", "fedavg", "--config", EXAMPLE, "--set", assignment, "--runs", tmp_path
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "method", ["fedsam:radius[0]=1", "fedsam:radius=2020-01-01", "[/b]", "fedsam:int=3", ":"]
)
def test_odd_methods(method, tmp_path):
    complaint("compare", "--runs", tmp_path, "--", method)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("grid", ["x[0]=1,2", "int=1,2", "training.lr=2020-01-01,0.1", "[/b]"])
def test_odd_grids(grid, tmp_path):
    complaint("tune", EXAMPLE, "--choose-by", "test", "--grid", grid, "--runs", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "content",
    [
        b"[training]\nrounds = 1979-05-27",
        f"[training]\nrounds = {DIGITS}".encode(),
        f"x = {DEEP}".encode(),
        b"x." * 5000 + b"y = 1",
        b"\xff\xfe\x00",
        b"\x00" * 100,
        b"",
    ],
    ids=range(7),
)
def test_odd_configs(content, tmp_path):
    config, runs = tmp_path / "config.toml", tmp_path / "runs"
    config.write_bytes(content)
    for arguments in (
        ["run", config, "--runs", runs],
        ["compare", "fedavg", "--config", config, "--runs", runs],
        ["tune", config, "--grid", "training.lr=0.1", "--runs", runs],
    ):
        complaint(*arguments)
    assert not runs.exists()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "loop", "nothing"])
def test_what_is_no_config_file_is_refused_without_waiting(kind, tmp_path):
    config = tmp_path / "config.toml"
    if kind == "pipe":
        os.mkfifo(config)
    elif kind == "folder":
        config.mkdir()
    elif kind != "nothing":
        config.symlink_to("/dev/zero" if kind == "device" else config)
    for arguments in (
        ["run", config],
        ["compare", "fedavg", "--config", config],
        ["tune", config, "--grid", "training.lr=0.1"],
        ["resume", config],
        ["diagnose", config],
        ["report", config, "--output", tmp_path / "report.html"],
    ):
        assert str(config) in complaint(*arguments)
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["list", ">&-"], (0, "", "")),
        (["show", "nothing", "2>&-"], (2, "", "")),
        (["runs", ".", "--where", "x", "<&-"], (2, "", "error: --where 'x': write it as key=value")),
        (["show", "fedsam", ">", "page"], (0, "", "")),
    ],
    ids=lambda value: value[-1] if isinstance(value, list) else "",
)
def test_streams_may_be_closed_or_lack_greek_letters(arguments, expected, tmp_path):
    command = " ".join([sys.executable, "-m", "flatfed", *arguments])
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    code, output, error = expected
    assert (done.returncode, done.stdout) == (code, output) and done.stderr.startswith(error), done.stderr
    if "page" in arguments:
        assert "\\u03c1" in (tmp_path / "page").read_text()
