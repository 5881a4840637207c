"""`flatfed flower new` writes an app that works as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from problems import train
from typer.testing import CliRunner

import flatfed as ff
from flatfed.cli import app as command_line
from flatfed.training.config import Config

RUNNER = CliRunner()


def made(tmp_path, name="hospital-net"):
    done = RUNNER.invoke(command_line, ["flower", "new", str(tmp_path / name)])
    assert done.exit_code == 0, done.output
    return tmp_path / name


def test_an_app_is_written(tmp_path):
    folder = made(tmp_path)
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    inner = {"__init__.py", "app.py", "data.py", "federation.toml"}
    assert files == {"pyproject.toml", "README.md", *(f"hospital_net/{name}" for name in inner)}
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    assert project["project"]["name"] == "hospital-net" and project["project"]["dependencies"] == []
    assert project["tool"]["flwr"]["app"]["components"] == {
        "serverapp": "hospital_net.app:server",
        "clientapp": "hospital_net.app:client",
    }
    assert not [path for path in folder.rglob("*") if path.is_file() and "my-fed" in path.read_text()]


def test_nothing_is_overwritten(tmp_path):
    folder = made(tmp_path)
    (folder / "hospital_net" / "data.py").write_text("mine")
    done = RUNNER.invoke(command_line, ["flower", "new", str(folder)])
    assert done.exit_code == 2 and "it exists already" in done.output
    assert (folder / "hospital_net" / "data.py").read_text() == "mine"


@pytest.mark.parametrize("name", ["Hospital", "1st", "a b", "class"])
def test_a_name_that_cannot_be_a_package_is_refused(name, tmp_path):
    done = RUNNER.invoke(command_line, ["flower", "new", str(tmp_path / name)])
    assert done.exit_code == 2 and "use small letters" in done.output
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["flatfed", "torch", "email"])
def test_a_name_that_would_hide_a_package_is_refused(name, tmp_path):
    done = RUNNER.invoke(command_line, ["flower", "new", str(tmp_path / name)])
    assert done.exit_code == 2 and f"there is a Python package {name}" in done.output
    assert not (tmp_path / name).exists()


def test_the_app_runs_as_written(tmp_path, monkeypatch):
    pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")
    from fake_grid import FakeGrid
    from flwr.app import Context, RecordDict

    folder = made(tmp_path, "works")
    monkeypatch.syspath_prepend(str(folder))
    from works import app, data

    names = [f"site-{number}" for number in (3, 1, 4, 2)]
    grid = FakeGrid(app.client, {name: {"name": name, "state": str(tmp_path / name)} for name in names})
    app.server(grid, Context(1, 1, {}, RecordDict(), {"folder": str(tmp_path / "run")}))
    monkeypatch.delitem(sys.modules, "works")

    loaded = [data.load(Context(1, 1, {"name": name}, RecordDict(), {})) for name in sorted(names)]
    values = tomllib.loads((folder / "works" / "federation.toml").read_text())
    del values["federation"]
    config = Config.checked(values)
    federation = ff.Federation.from_tensors(loaded, data.test())
    federation.classes = 10
    settings = {**config.training.model_dump(), "path": "client"}
    expected = train(config.make_model(federation), federation, config.make_algorithm(), **settings)
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(weights[name], value) for name, value in expected.model.state_dict().items())
    assert expected.history[-1]["test_accuracy"] > 0.8

    done = RUNNER.invoke(
        command_line, ["report", str(tmp_path / "run"), "--output", str(tmp_path / "report.html")]
    )
    assert done.exit_code == 0 and "fedmoswa" in (tmp_path / "report.html").read_text()
    done = RUNNER.invoke(command_line, ["resume", str(tmp_path / "run")])
    assert done.exit_code == 2 and "start its Flower app again" in done.output


@pytest.mark.parametrize(
    "before", [None, '[superlink]\ndefault = "mine"\n\n[superlink.mine]\naddress = "x:1"']
)
def test_its_readme_adds_to_flowers_settings(before, tmp_path):
    blocks = re.findall(
        r"^```sh\n(.*?)^```", (made(tmp_path) / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )
    (settings_block,) = [block for block in blocks if "config.toml" in block]
    path = tmp_path / ".flwr" / "config.toml"
    if before is not None:
        path.parent.mkdir()
        path.write_text(before)
    for _ in range(2):
        subprocess.run(["sh", "-ec", settings_block], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    expected = tomllib.loads(before or "")
    expected.setdefault("superlink", {})["here"] = {"address": "127.0.0.1:8000", "insecure": True}
    assert tomllib.loads(path.read_text()) == expected
    # What is pasted at once must not need a server that is still starting.
    assert not [block for block in blocks if "flower-superlink" in block and "flwr run" in block]


def test_a_config_without_a_federation_is_refused(tmp_path):
    pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")
    from flatfed.deployment import FederationSpec

    path = tmp_path / "federation.toml"
    path.write_text("[training]\nrounds = 1\n")
    with pytest.raises(ff.FlatfedError, match="federation: missing; add a table"):
        FederationSpec.read(path)
    path.write_text("[training]\nrounds = 1\n[federation]\ninput_shape = [4]\nclasses = 3\nclient = 4\n")
    with pytest.raises(ff.FlatfedError, match=r"^federation\.clients: missing"):
        FederationSpec.read(path)
    path.write_text("[training]\nrounds = 1\n[federation]\ninput_shape = [4]\nclasses = 3\nclients = []\n")
    with pytest.raises(ff.FlatfedError, match=r"^federation\.clients: \(\) names no site"):
        FederationSpec.read(path)
    path.write_text("[training]\nrounds = 1\n[federation]\ninput_shape = 4\nclasses = 3\nclients = 4\n")
    with pytest.raises(ff.FlatfedError, match=r"^federation\.input_shape = 4: "):
        FederationSpec.read(path)


def test_run_hands_its_settings_to_flower(tmp_path, monkeypatch):
    folder, commands = made(tmp_path), []

    def run(command, check):
        commands.append([str(word) for word in command[1:]])
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.setattr("flatfed.cli.flower.shutil.which", lambda *_, **__: "/bin/flwr")
    monkeypatch.setattr("flatfed.cli.flower.subprocess.run", run)
    done = RUNNER.invoke(command_line, ["flower", "run", str(folder)])
    options = ["there", "--from-round", "4", "--folder", "runs/a b"]
    also = RUNNER.invoke(command_line, ["flower", "run", str(folder), *options])
    assert (done.exit_code, also.exit_code) == (3, 3)
    given = ["-c", 'folder="runs/a b"', "-c", "from-round=4"]
    assert commands == [["run", str(folder), "--stream"], ["run", str(folder), "there", "--stream", *given]]
    config = tomllib.loads((folder / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"]
    assert config == {"folder": "runs/hospital-net", "from-round": 0}


def test_run_says_what_is_missing(tmp_path, monkeypatch):
    done = RUNNER.invoke(command_line, ["flower", "run", str(tmp_path)])
    assert (
        done.exit_code == 2 and "it has no pyproject.toml; make an app with flatfed flower new" in done.output
    )
    assert RUNNER.invoke(command_line, ["flower", "run", str(tmp_path), "--from-round", "0"]).exit_code == 2
    monkeypatch.setattr("flatfed.cli.flower.shutil.which", lambda *_, **__: None)
    done = RUNNER.invoke(command_line, ["flower", "run", str(tmp_path)])
    assert done.exit_code == 2 and "flwr: not found; pip install 'flatfed[flower]'" in done.output
