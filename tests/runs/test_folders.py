"""Run folders: nobody's files are lost, no damage goes unnoticed, and a finished run stays finished."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import CONFIG, assert_same, contents, interrupt, manifest, refusal, train
from typer.testing import CliRunner

import flatfed as ff
from flatfed.cli import app
from flatfed.engines.threads import single_threaded
from flatfed.runs import environment
from flatfed.runs.compare import named_folder, run_folder
from flatfed.training.config import Config


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(environment, "source_commit", lambda: None)
    with single_threaded():
        yield


def flatfed(*arguments: object) -> tuple[int, str, str]:
    """The exit code, what was printed and the complaint, which is never a traceback."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.fixture
def config(tmp_path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text(CONFIG)
    return path


# -- other people's files ---------------------------------------------------------------------------------

OTHER_FILES: dict[str, dict[str, str]] = {
    "a model": {"model.safetensors": "weights of mine"},
    "checkpoints": {"checkpoint/epoch-3.pt": "weights of mine", "checkpoint/manifest.json": "{}"},
    "a model and its config": {"config.json": '{"architectures": ["Bert"]}', "model.safetensors": "weights"},
    "a config that is no table": {"config.json": "[]", "model.safetensors": "weights"},
    "a config that is no text": {"config.json": "\udcff\udcfe", "model.safetensors": "weights"},
    "notes": {"notes.txt": "remember the milk"},
    "a hidden file": {".env": "A=1"},
    "a history": {"history.jsonl": '{"round": 1}\n'},
    "an empty folder in it": {"data/": ""},
    "a link": {"link@": "config.toml"},
    "another lock": {"checkpoint/.lock": "", "checkpoint/best.ckpt": "weights"},
}


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = folder / name.rstrip("/@")
        path.parent.mkdir(parents=True, exist_ok=True)
        if name.endswith("/"):
            path.mkdir()
        elif name.endswith("@"):
            path.symlink_to(content)
        else:
            path.write_bytes(content.encode(errors="surrogateescape"))


def listing(folder: Path) -> dict[str, bytes | None]:
    """Everything in a folder, down to the last file."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


@pytest.mark.parametrize("files", OTHER_FILES)
def test_a_folder_of_other_files_is_refused_and_left_as_it_is(files, tmp_path, config):
    folder = tmp_path / "mine"
    write_files(folder, OTHER_FILES[files])
    before = listing(folder)
    assert str(folder) in refusal(lambda: train(folder, 2))
    code, _, error = flatfed("run", config, "--folder", folder)
    assert code == 2
    assert f"error: {folder}" in error
    for command in ("resume", "diagnose"):
        code, _, error = flatfed(command, folder)
        assert code == 2
        assert f"error: {folder}" in error
    assert listing(folder) == before


def test_no_name_for_a_folder_does_not_mean_the_current_one(tmp_path, config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.safetensors").write_text("weights of mine")
    before = listing(tmp_path)
    assert flatfed("run", config, "--folder", "")[0] == 2
    assert "folder = ''" in refusal(lambda: train("", 2))
    assert listing(tmp_path) == before


def test_names_say_data_set_split_and_method(tmp_path):
    base = {"training": {"rounds": 1, "seed": 3}}
    named = run_folder(Config.checked({**base, "algorithm": "fedsam", "partition": "iid"}), tmp_path)
    assert re.fullmatch(r"digits-iid-fedsam-seed3-[0-9a-f]{10}", named.name)
    (tmp_path / "my task.py").write_text("def make(): ...\ndef other(): ...\n")
    for make, words in (("make", "my_task"), ("other", "my_task-other")):
        task = f"{tmp_path / 'my task.py'}:{make}"
        named = run_folder(Config.checked({**base, "task": task}), tmp_path)
        assert re.fullmatch(rf"{words}-fedavg-seed3-[0-9a-f]{{10}}", named.name)
    named = named_folder(tmp_path, ["../a b"], ff.fedavg(), 0, "0" * 64)
    assert named.parent == tmp_path and named.name == "_a_b-fedavg-seed0-0000000000"


def test_runs_of_folders_that_were_named_by_the_method_alone_go_on_there(tmp_path, config):
    checked, runs = Config.read(config, []), tmp_path / "runs"
    straight = run_folder(checked, runs)
    assert flatfed("run", config, "--runs", runs)[0] == 0
    method = f"{checked.make_algorithm().name}-"
    before = runs / (method + straight.name.partition(method)[2])
    straight.rename(before)
    assert run_folder(checked, runs) == before
    code, output, _ = flatfed("run", config, "--runs", runs)
    assert code == 0 and "is complete" in output and not straight.exists()


@pytest.mark.parametrize("command", ["compare", "tune"])
def test_a_folder_of_other_files_among_the_runs_is_left_out_and_left_as_it_is(command, tmp_path, config):
    runs = tmp_path / "runs"
    first = run_folder(Config.read(config, ["training.lr=0.1", "training.seed=0"]), runs)
    write_files(first, OTHER_FILES["checkpoints"])
    before = listing(first)
    if command == "tune":
        arguments = ["tune", config, "--choose-by", "test", "--grid", "training.lr=0.1,0.2"]
    else:
        arguments = [
            "compare",
            "fedavg",
            "fedsam",
            "--seeds",
            1,
            "--config",
            config,
            "--set",
            "training.lr=0.1",
        ]
    code, output, error = flatfed(*arguments, "--runs", runs)
    assert code == 2
    assert str(first) in error
    assert ("fedsam" if command == "compare" else "0.2") in output
    assert listing(first) == before


def test_an_empty_folder_and_what_a_kill_may_leave_in_it_is_free(tmp_path):
    whole = train(None, 3)
    write_files(tmp_path / "killed", {"checkpoint/.lock": "", ".config.json.17.140": "{"})
    (tmp_path / "empty").mkdir()
    for name in ("killed", "empty", "new/below"):
        assert_same(train(tmp_path / name, 3), whole)
        assert [path.name for path in (tmp_path / name).iterdir() if path.name.startswith(".")] == []


def test_files_that_somebody_puts_into_a_run_stay(tmp_path):
    train(tmp_path, 2)
    write_files(tmp_path, {"checkpoint/notes.txt": "mine", "checkpoint/mine/a": "a", "report.html": "mine"})
    train(tmp_path, 6)
    kept = contents(tmp_path)
    assert kept["checkpoint/notes.txt"] == kept["report.html"] == b"mine"
    assert kept["checkpoint/mine/a"] == b"a"


def test_links_leave_what_they_link_to(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("mine")
    folder = tmp_path / "run"
    train(folder, 2)
    (folder / "checkpoint" / ".lock").unlink()
    (folder / "checkpoint" / ".lock").symlink_to(precious)
    (folder / "history.jsonl").rename(tmp_path / "history")
    (folder / "history.jsonl").symlink_to(tmp_path / "history")
    before = (tmp_path / "history").read_bytes()
    assert ".lock" in refusal(lambda: train(folder, 4))
    (folder / "checkpoint" / ".lock").unlink()
    assert_same(train(folder, 4), train(None, 4))
    assert precious.read_text() == "mine"
    assert (tmp_path / "history").read_bytes() == before


def test_a_report_replaces_a_report_and_nothing_else(tmp_path, config):
    assert flatfed("run", config, "--folder", tmp_path / "run")[0] == 0
    page = tmp_path / "thesis.html"
    page.write_text("<html>my thesis</html>")
    code, _, error = flatfed("report", tmp_path / "run", "--output", page)
    assert code == 2
    assert str(page) in error
    assert page.read_text() == "<html>my thesis</html>"
    for _ in range(2):
        assert flatfed("report", tmp_path / "run", "--output", tmp_path / "new.html")[0] == 0


def test_a_comparison_asks_for_its_report_before_it_trains(tmp_path, config):
    runs = tmp_path / "runs"
    write_files(runs, {"report.html": "<html>my thesis</html>"})
    code, _, error = flatfed("compare", "fedavg", "--seeds", 1, "--config", config, "--runs", runs)
    assert code == 2
    assert "report.html" in error
    assert listing(runs) == {"report.html": b"<html>my thesis</html>"}


@pytest.mark.parametrize("name", ["split.svg", "split.html"])
def test_a_picture_replaces_a_picture_of_flatfed_and_nothing_else(name, tmp_path):
    path = tmp_path / name
    path.write_text("<svg>drawn for hours</svg>")
    code, _, error = flatfed("split", "--clients", 5, "--output", path)
    assert code == 2
    assert str(path) in error
    assert path.read_text() == "<svg>drawn for hours</svg>"
    path.unlink()
    for _ in range(2):
        assert flatfed("split", "--clients", 5, "--output", path)[0] == 0


# -- the final model --------------------------------------------------------------------------------------


def test_the_final_model_stays_until_the_next_one_replaces_it(tmp_path):
    model = tmp_path / "model.safetensors"
    train(tmp_path, 2)
    before, seen = model.read_bytes(), []
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 6, callbacks=[lambda _: seen.append(model.read_bytes()), interrupt(5)])
    assert seen == [before] * 3
    assert model.read_bytes() == before
    train(tmp_path, 6)
    whole = train(None, 6)
    assert torch.equal(load_file(model)["weight"], whole.model.state_dict()["weight"])


@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "another"])
def test_a_damaged_final_model_is_no_complete_run(damage, tmp_path, config):
    folder = tmp_path / "run"
    assert flatfed("run", config, "--folder", folder)[0] == 0
    model = folder / "model.safetensors"
    good = model.read_bytes()
    bad = {
        "truncated": good[:-4],
        "flipped": good[:-1] + bytes([good[-1] ^ 1]),
        "empty": b"",
        "another": b"weights of mine",
    }[damage]
    model.write_bytes(bad)
    for arguments in (
        ["run", config, "--folder", folder],
        ["resume", folder],
        ["resume", folder, "--rounds", 4],
    ):
        code, output, error = flatfed(*arguments)
        assert code == 2
        assert f"error: {model}" in error
        assert "complete" not in output
        assert model.read_bytes() == bad
    model.unlink()
    assert flatfed("run", config, "--folder", folder)[0] == 0
    assert model.read_bytes() == good


def test_a_model_that_somebody_put_into_an_unfinished_run_is_not_overwritten(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 6, callbacks=[interrupt(4)])
    model = tmp_path / "model.safetensors"
    model.write_bytes(b"weights of mine")
    assert str(model) in refusal(lambda: train(tmp_path, 6))
    assert model.read_bytes() == b"weights of mine"
    model.unlink()
    assert_same(train(tmp_path, 6), train(None, 6))


# -- damage -----------------------------------------------------------------------------------------------


def edited(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_a_manifest_that_was_edited_is_refused(tmp_path):
    train(tmp_path, 4)
    path, before = tmp_path / "checkpoint" / "manifest.json", contents(tmp_path)
    entries = manifest(tmp_path)
    assert len(entries["clients"]) > 1
    for fields in (
        {"round": 2},
        {"round": 3},
        {"clients": entries["clients"][:-1]},
        {"clients": entries["clients"][::-1]},
        {"clients": []},
        {"identity": ""},
        {"server": {**entries["server"], "rows": 1}},
    ):
        edited(path, **fields)
        assert str(path) in refusal(lambda: train(tmp_path, 6))
        path.write_bytes(before["checkpoint/manifest.json"])
    assert contents(tmp_path) == before
    assert_same(train(tmp_path, 6), train(None, 6))


def test_a_history_that_was_edited_is_refused(tmp_path):
    train(tmp_path, 4)
    path = tmp_path / "history.jsonl"
    good = path.read_text()
    for bad in (
        good.replace('"train_loss": 1', '"train_loss": 2', 1),
        good.replace('"round": 1,', '"round":  1,', 1),
        good[: len(good) // 2],
        "\n" + good,
        "",
    ):
        assert bad != good
        path.write_text(bad)
        assert str(path) in refusal(lambda: train(tmp_path, 6))
        assert path.read_text() == bad
    path.unlink()
    assert str(path) in refusal(lambda: train(tmp_path, 6))
    path.write_text(good)
    assert_same(train(tmp_path, 6), train(None, 6))


@pytest.mark.parametrize("name", ["config.json", "identity.json", "history.jsonl", "model.safetensors"])
@pytest.mark.parametrize("place", [0.1, 0.5, 0.9])
def test_a_flipped_bit_is_noticed_and_its_file_named(name, place, tmp_path, config):
    folder = tmp_path / "run"
    assert flatfed("run", config, "--folder", folder)[0] == 0
    path = folder / name
    content = bytearray(path.read_bytes())
    content[int(place * len(content))] ^= 4
    path.write_bytes(content)
    code, _, error = flatfed("resume", folder, "--rounds", 3)
    assert code == 2
    assert f"error: {path}" in error
    assert path.read_bytes() == content


def test_more_rounds_in_the_config_file_are_asked_for_by_an_option_only(tmp_path, config):
    folder = tmp_path / "run"
    assert flatfed("run", config, "--folder", folder)[0] == 0
    values = json.loads((folder / "config.json").read_text())
    values["training"]["rounds"] = 3
    (folder / "config.json").write_text(json.dumps(values))
    code, _, error = flatfed("resume", folder)
    assert code == 2
    assert str(folder / "config.json") in error


def test_checkpoint_files_without_their_manifest_do_not_start_again(tmp_path):
    train(tmp_path, 3)
    whole = tmp_path / "checkpoint" / "manifest.json"
    good = whole.read_bytes()
    whole.unlink()
    before = contents(tmp_path)
    assert str(whole) in refusal(lambda: train(tmp_path, 5))
    assert contents(tmp_path) == before
    for path in (tmp_path / "checkpoint").glob("*.safetensors"):
        path.rename(tmp_path.parent / f"{tmp_path.name}-{path.name}")
    assert str(whole) in refusal(lambda: train(tmp_path, 5))  # there is a history
    (tmp_path / "history.jsonl").unlink()
    assert str(whole) in refusal(lambda: train(tmp_path, 5))  # there is a model
    assert good != b""


def resealed(folder: Path, **fields: Any) -> None:
    """A manifest that says something else and has the right checksum."""
    from flatfed.runs.files import write_sealed

    content = {**manifest(folder), **fields}
    del content["sha256"]
    write_sealed(folder / "checkpoint" / "manifest.json", content)


@pytest.mark.parametrize("kind", ["server", "clients"])
@pytest.mark.parametrize("damage", ["unknown", "missing", "shape", "type", "nothing", "count"])
def test_tensors_of_other_names_and_shapes_are_refused(kind, damage, tmp_path):
    import hashlib

    train(tmp_path, 2)
    entries = manifest(tmp_path)
    entry = entries["server"] if kind == "server" else entries["clients"][0]
    path = tmp_path / "checkpoint" / entry["name"]
    tensors = load_file(path)
    name = next(iter(sorted(tensors)))
    if damage == "unknown":
        tensors["surprise"] = torch.zeros(1)
    elif damage == "missing":
        del tensors[name]
    elif damage == "shape":
        tensors[name] = tensors[name][..., :1].clone()
    elif damage == "type":
        tensors[name] = tensors[name].double()
    elif damage == "count":
        tensors[name] = torch.cat([tensors[name], tensors[name]])
    else:
        tensors = {}
    save_file(tensors, path)
    changed = {**entry, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    resealed(tmp_path, **({"server": changed} if kind == "server" else {"clients": [changed]}))
    assert str(path) in refusal(lambda: train(tmp_path, 4))


# -- several runs, one of them damaged --------------------------------------------------------------------

COMPARISON = ["compare", "fedavg", "fedsam", "--seeds", "2", "--config"]


def damage_history(folder: Path) -> None:
    path = folder / "history.jsonl"
    path.write_bytes(path.read_bytes()[:-20])


def remove_history(folder: Path) -> None:
    (folder / "history.jsonl").unlink()


def damage_manifest(folder: Path) -> None:
    edited(folder / "checkpoint" / "manifest.json", round=1)


def damage_model(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def damage_clients(folder: Path) -> None:
    path = folder / "clients.json"
    path.write_text(path.read_text().replace("0.", "1.", 1))


DAMAGES = [damage_history, remove_history, damage_manifest, damage_model, damage_clients]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_comparison_names_a_damaged_run_and_goes_on_with_the_rest(damage, tmp_path, config):
    runs = tmp_path / "runs"
    assert flatfed(*COMPARISON, config, "--runs", runs)[0] == 0
    bad = sorted(path for path in runs.iterdir() if "-fedsam-" in path.name)[0]
    damage(bad)
    before = listing(bad)
    code, output, error = flatfed(*COMPARISON, config, "--runs", runs)
    assert code == 2
    assert f"left out: fedsam, seed 0: {bad}" in error
    assert len([line for line in error.splitlines() if line.startswith("error:")]) == 1
    assert "fedsam (1 of 2 seeds)" in output
    assert listing(bad) == before


@pytest.mark.parametrize("damage", [damage_history, damage_manifest], ids=lambda damage: damage.__name__)
def test_tuning_names_a_damaged_trial_and_goes_on_with_the_rest(damage, tmp_path, config):
    runs, arguments = tmp_path / "runs", ["tune", config, "--choose-by", "test", "--grid"]
    assert flatfed(*arguments, "training.lr=0.1,0.2", "--runs", runs)[0] == 0
    bad = run_folder(Config.read(config, ["training.lr=0.1"]), runs)
    damage(bad)
    code, output, error = flatfed(*arguments, "training.lr=0.1,0.2,0.3", "--runs", runs)
    assert code == 2
    assert f"left out: training.lr=0.1: {bad}" in error
    assert len([line for line in error.splitlines() if line.startswith("error:")]) == 1
    for text in ("0.2", "0.3", "left out", "best:"):
        assert text in output


# -- odd files and names ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "identity.json", "history.jsonl", "model.safetensors", "clients.json"),
        *("checkpoint/manifest.json", "checkpoint/.lock", "checkpoint/server", "checkpoint/clients"),
    ],
)
@pytest.mark.parametrize("kind", ["fifo", "folder", "device", "loop"])
def test_what_is_no_file_is_refused_without_waiting(name, kind, tmp_path, config):
    folder = tmp_path / "run"
    assert flatfed("run", config, "--set", "algorithm.name=scaffold", "--folder", folder)[0] == 0
    if name in {"checkpoint/server", "checkpoint/clients"}:
        (path, *_) = sorted((folder / "checkpoint").glob(f"{Path(name).name}-*"))
    else:
        path = folder / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else path)
    more = [] if name in {"model.safetensors", "clients.json"} else ["--rounds", 3]
    code, _, error = flatfed("resume", folder, *more)
    assert code in {1, 2}
    assert str(path) in error


ODD_NAMES = [
    "a[/b]",
    "[red]a",
    "a b",
    "ünï ☃ 😀",
    ":smile:",
    "a\nb",
    "a\tb\x1b[31m",
    "-a",
    "%s{0}",
    "a" * 200,
]


@pytest.mark.parametrize("name", [*ODD_NAMES, os.fsdecode(b"\xff\xfe")], ids=range(11))
def test_folders_may_have_any_name(name, tmp_path, config, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / name / name
    code, output, error = flatfed("run", config, "--folder", folder)
    assert code == 0, error
    assert "\x1b" not in output
    assert "run folder: " in output.splitlines()[-1]
    code, output, error = flatfed("resume", "--rounds=3", "--", Path(name) / name)
    assert code == 0, error
    code, output, error = flatfed("compare", "fedavg", "--config", config, "--seeds=1", f"--runs={name}")
    assert code == 0, error
    code, output, error = flatfed(
        "tune", config, "--choose-by=test", "--grid=training.lr=0.1,0.2", f"--runs={name}"
    )
    assert code == 0, error
    code, _, error = flatfed("run", "--", Path(name) / "missing.toml")
    assert code == 2
    assert len(error.splitlines()) == 1


def test_a_name_that_is_too_long_is_one_line(tmp_path, config):
    for name in ("a" * 300, "/".join(["a" * 200] * 30)):
        code, _, error = flatfed("run", config, "--folder", tmp_path / name)
        assert code in {1, 2}
        assert "File name too long" in error
        assert len(error.splitlines()) == 1
