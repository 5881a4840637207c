"""A report on run folders that hold anything is written, with notes on what is left out, or refused."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pytest

from flatfed.core.errors import FlatfedError
from flatfed.diagnostics.plain import DEEPEST, MOST_FIELDS, MOST_VALUES
from flatfed.report import write_report
from flatfed.report.read import read_run
from flatfed.report.sections import MOST_CURVES
from report.example import write_diagnostics, write_run

PARTS = {
    "nothing": b"",
    "binary": b"\x00\xff\xfe\x80",
    "no object": b"[1, 2]",
    "null": b"null",
    "5000 digits": b'{"round": ' + b"1" * 5000 + b"}",
    "deep": b'{"round": ' + b"[" * 900 + b"]" * 900 + b"}",
    "very deep": b"[" * 200_000,
}
KINDS = [*PARTS, "folder", "pipe", "link to itself", "link to nowhere"]
FILES = ["config.json", "environment.json", "history.jsonl", "clients.json", "checkpoint/manifest.json"]
FILES += ["checkpoint/.lock", "diverged.json", "model.safetensors", "diagnostics", "diagnostics/hessian.json"]


def brief(value: object) -> str:
    return ascii(value)[:9]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "run")
    write_diagnostics(run)
    (run / "checkpoint").mkdir()
    (run / "checkpoint" / "manifest.json").write_text('{"round": 12}')
    return run


def put(path: Path, kind: str) -> None:
    """Something of another kind in a file's place."""
    if path.is_dir():
        path.rename(path.with_name("moved"))
    path.unlink(missing_ok=True)
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind.startswith("link"):
        path.symlink_to(path.name if kind == "link to itself" else "nowhere")
    else:
        path.write_bytes(PARTS[kind])


def change_line(folder: Path, number: int, **values: object) -> None:
    path = folder / "history.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[number - 1] |= values
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def change_json(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("kind", KINDS)
def test_anything_in_place_of_a_file_is_noted_and_costs_no_other_run(folder, tmp_path, name, kind):
    put(folder / name, kind)
    whole = write_run(tmp_path / "whole", "fedsam")
    notes = write_report([folder, whole], tmp_path / "report.html")
    if name in {"config.json", "history.jsonl"}:
        assert any(str(folder) in note for note in notes), notes
    if name == "config.json":
        assert f"{folder / name}: " in notes[0] and notes[0].endswith("; the run is left out")
        with pytest.raises(FlatfedError) as caught:
            write_report([folder], tmp_path / "alone.html")
        assert str(folder / name) in str(caught.value) and "\n" not in str(caught.value)
    assert "fedsam" in (tmp_path / "report.html").read_text()


def test_a_folder_that_is_no_run_is_noted_beside_others(folder, tmp_path):
    (folder / "config.json").unlink()
    notes = write_report([folder, write_run(tmp_path / "whole")], tmp_path / "report.html")
    assert notes[0].startswith(f"{folder}: not a run folder") and notes[0].endswith("the run is left out")


@pytest.mark.parametrize("name", ["environment.json", "clients.json", "diagnostics/hessian.json"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "null"])
def test_an_unreadable_extra_is_noted_by_its_name(folder, tmp_path, name, kind):
    put(folder / name, kind)
    notes = write_report([folder], tmp_path / "report.html")
    assert any(str(folder / name) in note for note in notes), notes


@pytest.mark.parametrize("value", [10**400, -1e308, 1e101], ids=brief)
@pytest.mark.parametrize("key", ["test_accuracy", "test_loss", "train_loss", "bytes_up", "seconds", "mine"])
def test_a_number_that_is_too_large_is_named_and_left_out(folder, tmp_path, key, value):
    change_line(folder, 2, **{key: value})
    notes = write_report([folder], tmp_path / "report.html")
    assert any(f"{folder / 'history.jsonl'}, line 2: {key} = " in note for note in notes)


@pytest.mark.parametrize(
    "value",
    [-1, -1e99, 1e99, 7, 1e-320, float("nan"), float("inf"), "0.5", "[/b]", "\ud800", None, True, [1], {}],
    ids=brief,
)
def test_strange_values_in_a_history_are_shown_or_left_out(folder, tmp_path, value):
    for number in range(1, 13):
        values = dict.fromkeys(("test_accuracy", "test_loss", "bytes_down", "seconds", "lr"), value)
        change_line(folder, number, **values)
    write_report([folder, write_run(tmp_path / "whole", "fedsam")], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert len(page) < 2**23 and 20 * "0" not in page.partition("<script")[0]


@pytest.mark.parametrize("samples", [0, 0.5, -3, 1e99, 10**400, "many", None], ids=brief)
def test_strange_clients_are_shown_or_left_out(folder, tmp_path, samples):
    clients = [{"accuracy": 0.5, "samples": samples}, 3, None, []]
    change_json(folder / "clients.json", clients=clients)
    write_report([folder], tmp_path / "report.html")
    clients += [
        {"accuracy": accuracy, "samples": samples} for accuracy in (-1, 7, 1e99, 10**400, "high", None)
    ]
    change_json(folder / "clients.json", clients=clients)
    write_report([folder], tmp_path / "report.html")


def test_a_history_that_breaks_off_in_the_middle_is_shown_up_to_there(folder, tmp_path):
    path = folder / "history.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:2], lines[2][:30], *lines[3:], ""]))
    notes = write_report([folder], tmp_path / "report.html")
    assert any(f"{path}, line 3: " in note and "only the 2 rounds before" in note for note in notes)
    assert len(read_run(folder).history) == 2


def test_no_history_at_all_is_refused_with_the_reason(folder, tmp_path):
    path = folder / "history.jsonl"
    path.write_bytes(b"\xff\n" + path.read_bytes())
    with pytest.raises(FlatfedError, match=r"no round is finished yet; .*history\.jsonl, line 1: ") as caught:
        write_report([folder], tmp_path / "report.html")
    assert "\n" not in str(caught.value)


def test_what_is_nested_or_divided_beyond_measure_is_noted(folder, tmp_path):
    value: object = 1
    for _ in range(DEEPEST):
        value = [value]
    change_json(folder / "clients.json", more=value)
    change_json(folder / "environment.json", more=dict.fromkeys(map(str, range(MOST_FIELDS + 1))))
    notes = " / ".join(write_report([folder], tmp_path / "report.html"))
    assert "clients.json: more: nested too deeply" in notes
    assert f"environment.json: more: {MOST_FIELDS + 1:,} fields" in notes


@pytest.mark.parametrize("name", ["history.jsonl", "clients.json"])
def test_a_file_of_endless_values_is_not_taken_into_memory(folder, name):
    piece = b"\n" if name == "history.jsonl" else b"{},"
    (folder / name).write_bytes(b"[" + piece * (MOST_VALUES + 1) + b"{}]")
    tracemalloc.start()
    try:
        notes = read_run(folder).notes
        assert tracemalloc.get_traced_memory()[1] < 2**27
    finally:
        tracemalloc.stop()
    assert any(f"{folder / name}: more than {MOST_VALUES:,} values" in note for note in notes)


def test_of_endless_quantities_the_first_are_shown(folder, tmp_path):
    for number in range(1, 13):
        change_line(folder, number, **{f"mine {number} {index}": index for index in range(100)})
    notes = write_report([folder], tmp_path / "report.html")
    assert any(f"the first {MOST_CURVES} are shown" in note for note in notes)
    page = (tmp_path / "report.html").read_text()
    assert "Mine 1 99" in page and "Mine 3 99" not in page


def test_long_texts_are_not_repeated_in_every_line_of_a_figure(folder, tmp_path):
    text = "x" * 2**20
    config = json.loads((folder / "config.json").read_text())
    config["algorithm"]["name"], config["algorithm"][text] = text, text
    (folder / "config.json").write_text(json.dumps(config))
    change_json(folder / "environment.json", command=["flatfed", text], commit=text, versions={text: text})
    notes = write_report([folder, write_run(tmp_path / "whole")], tmp_path / "report.html")
    assert max(map(len, notes)) <= 500
    assert (tmp_path / "report.html").stat().st_size < 2**24


def test_control_characters_in_notes_are_shown_as_escapes(folder, tmp_path):
    change_line(folder, 1, **{"\x1b[31m\n": 10**400})
    notes = write_report([folder], tmp_path / "report.html")
    assert any("\\x1b[31m\\n = " in note for note in notes)
    assert all(note.isprintable() for note in notes)


@pytest.mark.parametrize("value", [10**400, 1e308, "x", None, [], {}, [[1e308]]], ids=brief)
def test_one_damaged_result_costs_no_other_run_its_own(folder, tmp_path, value):
    other = write_run(tmp_path / "other", "fedsam")
    write_diagnostics(other)
    path = folder / "diagnostics" / "hessian.json"
    content = json.loads(path.read_text())
    content["result"]["global"] = value
    path.write_text(json.dumps(content))
    notes = write_report([folder, other], tmp_path / "report.html")
    assert any(str(path) in note for note in notes)
    assert "Curvature of the training loss" in (tmp_path / "report.html").read_text()
