"""`flatfed report` as a user meets it, and the reports that other commands end with."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from flatfed import cli
from report.example import write_run


def invoke(*arguments: object):
    return CliRunner().invoke(cli.app, [str(each) for each in arguments])


def test_a_report_says_where_it_is_and_what_is_missing(tmp_path):
    write_run(tmp_path / "done")
    write_run(tmp_path / "killed", seed=1, finished=3)
    output = tmp_path / "deep" / "er" / "page.html"
    done = invoke("report", tmp_path, "-o", output, "--target", 0.8, "--target", 0.5)
    assert done.exit_code == 0, done.output
    assert f"Report: {output}" in done.stdout
    assert f"note: {tmp_path / 'killed'}: unfinished, 3 of 12 rounds" in done.stderr
    page = output.read_text()
    assert page.index(">50\u00a0%</button>") < page.index(">80\u00a0%</button>")


@pytest.mark.parametrize("what", ["nothing", "empty", "damaged", "no rounds", "folder as output", "run file"])
def test_bad_input_is_one_line(tmp_path, what):
    run, output = tmp_path / "run", tmp_path / "report.html"
    if what == "empty":
        run.mkdir()
    elif what != "nothing":
        write_run(run, finished=0 if what == "no rounds" else None)
    if what == "damaged":
        (run / "config.json").write_text("{")
    if what == "folder as output":
        output.mkdir()
    if what == "run file":
        output = run / "config.json"
        before = output.read_bytes()
    done = invoke("report", run, "-o", output)
    assert done.exit_code in {1, 2}
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert len([line for line in done.stderr.splitlines() if line.strip()]) == 1
    if what == "run file":
        assert output.read_bytes() == before
        return
    assert not output.is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        path.name for path in (run, output) if path.exists()
    )


def test_an_earlier_report_is_replaced(tmp_path):
    write_run(tmp_path / "run")
    output = tmp_path / "report.html"
    for _ in range(2):
        assert invoke("report", tmp_path / "run", "-o", output).exit_code == 0
    assert output.read_text().startswith("<!DOCTYPE html>")
    output.write_text("of the user's")
    assert invoke("report", tmp_path / "run", "-o", output).exit_code == 2
    assert output.read_text() == "of the user's"


def test_reproduce_ends_with_a_report_that_has_the_papers_numbers(tmp_path):
    options = ["--methods", "FedAvg", "--rounds", 1, "--seeds", 1, "--scale", "small", "--runs", tmp_path]
    table = [
        "fedsagd/table2",
        "--only",
        "EMNIST-L",
        "--set",
        "data.dataset=digits",
        "--set",
        "data.options={}",
    ]
    model = ["--set", "model={name='mlp',hidden=[8]}", "--set", "partition={name='iid'}"]
    done = invoke("reproduce", *table, *model, *options)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "report-fedsagd-table2.html").read_text()
    assert "paper %".replace(" ", "\u00a0") in page and "FedAvg" in page
    (config,) = tmp_path.glob("*/config.json")
    assert json.loads(config.read_text())["data"]["dataset"] == "digits"
