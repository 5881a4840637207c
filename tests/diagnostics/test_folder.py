"""`flatfed diagnose`: what it writes, what it keeps, and what it says of folders that it cannot examine."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from problems import federation, network, train
from safetensors.torch import save as save_tensors
from torch import Tensor
from typer.testing import CliRunner

import flatfed as ff
from flatfed.cli import app
from flatfed.core.errors import FlatfedError
from flatfed.diagnostics import DIAGNOSTICS, diagnose
from flatfed.diagnostics.plain import plain
from flatfed.diagnostics.registry import cheap_diagnostics
from flatfed.report.read import read_run
from flatfed.runs.files import read_sealed, sha256, write_sealed
from flatfed.runs.identity import digest_of
from flatfed.runs.train import run_config
from flatfed.training.config import Config

SMALL = {
    "data": {"dataset": "digits", "clients": 6},
    "model": {"name": "mlp", "hidden": [4]},
    "algorithm": {"name": "fedavg"},
    "training": {"rounds": 2, "participants": 3, "local_steps": 2, "batch_size": 8},
    "execution": {"workers": 1},
}
QUICK = {"samples": 60, "clients": 3, "points": 3, "probes": 2, "steps": 3, "replacements": 1}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    config = Config.checked(SMALL)
    run_config(config, folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "run")
    return tmp_path / "run"


def command(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["diagnose", *map(str, arguments)], terminal_width=200)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def test_every_diagnostic_writes_its_file_in_the_agreed_shape(folder, made):
    known = {key for name in DIAGNOSTICS for key in DIAGNOSTICS[name].options({})}
    options = {**{key: value for key, value in QUICK.items() if key in known}, "other": str(made)}
    contents = diagnose(folder, list(DIAGNOSTICS), options)
    identity = json.loads((folder / "checkpoint" / "manifest.json").read_text())["identity"]
    results = {}
    for name in DIAGNOSTICS:
        content = json.loads((folder / "diagnostics" / f"{name}.json").read_text())
        assert content == contents[name]
        assert (content["format"], content["name"], content["round"]) == (1, name, 2)
        assert content["identity"] == identity and content["seconds"] >= 0
        assert content["options"] == DIAGNOSTICS[name].options(options)
        results[name] = content["result"]
    shapes = {
        "hessian": {"global", "clients"},
        "surface": {"a", "b", "train", "test", "seed"},
        "line": {"other", "position", "train_loss", "test_loss", "test_accuracy"},
        "plane": {"x", "y", "loss", "points"},
        "sharpness": {"radius", "global", "clients"},
        "drift": {"flatness_distance", "client_drift", "steps", "drift_by_step", "distance_by_step"},
        "local_stability": {"steps", "discrepancy", "bound"},
        "global_stability": {"rounds", "discrepancy", "replacements", "replaced", "bound"},
        "generalization": {"train", "test", "unseen_clients", "gap"},
        "clients": {"accuracy", "mean", "deviation", "binomial_floor", "samples"},
        "perturbation": {"clients", "cosine"},
        "theory": {"constants", "bounds", "statements"},
        "control_lag": {"lag", "relative", "clients"},
        "margin": {
            *("radius", "margins", "loss", "unperturbed", "layers", "excluded", "largest_input"),
            *("complexity", "squared_complexity", "log10_bound"),
        },
        "perturbation_difference": {"radius", "steps", "from_first", "from_global"},
        "sample_gradients": {"norms", "deviation"},
        "sample_stability": {"rounds", "discrepancy", "replacements", "replaced"},
    }
    assert {name: set(result) for name, result in results.items()} == shapes
    # Both ends of the line are the same model.
    assert results["line"]["train_loss"] == pytest.approx([results["line"]["train_loss"][0]] * 3)
    # Both take the same bound, and only one of them measures.
    assert results["theory"]["bounds"]["stability"]["y"] == results["global_stability"]["bound"]
    per_client = json.loads((folder / "clients.json").read_text())
    assert results["clients"]["accuracy"] == pytest.approx(
        [client["accuracy"] for client in per_client["clients"]]
    )


def test_a_result_is_kept_until_options_or_checkpoint_differ(folder):
    path = folder / "diagnostics" / "drift.json"

    def marked(**changes) -> bool:
        """Whether a mark in the file survives."""
        content = {**json.loads(path.read_text()), "mark": True}
        path.write_text(json.dumps(content))
        return "mark" in diagnose(folder, ["drift"], **changes)["drift"]

    diagnose(folder, ["drift"])
    assert marked()
    assert not marked(options={"clients": 2})
    assert not marked()
    assert not marked(again=True)
    config = Config.checked({**SMALL, "training": {**SMALL["training"], "rounds": 3}})
    run_config(config, folder)
    assert not marked()
    path.write_text("{")
    assert diagnose(folder, ["drift"])["drift"]["round"] == 3


def test_the_command_measures_the_cheap_ones_and_prints_them(folder):
    code, output = command(folder)
    assert code == 0, output
    assert {path.stem for path in (folder / "diagnostics").iterdir()} == set(cheap_diagnostics())
    assert "flatness distance" in output and "by chance" in output


def test_the_command_lists_diagnostics_and_options():
    code, output = command()
    assert code == 0
    for name in DIAGNOSTICS:
        assert name in output


def test_an_interrupted_run_is_examined_at_its_checkpoint(folder):
    (folder / "model.safetensors").unlink()
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 3, "tr')
    assert diagnose(folder, ["sharpness"])["sharpness"]["round"] == 2


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (shutil.rmtree, "no such run folder"),
        (lambda folder: (folder / "config.json").unlink(), "not a run folder, it has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "config.json").write_text("[]"), "made from Python"),
        (lambda folder: shutil.rmtree(folder / "checkpoint"), "manifest.json: missing"),
        (lambda folder: _server_file(folder).write_bytes(b"x"), "damaged"),
        (lambda folder: _server_file(folder).unlink(), "missing from the checkpoint"),
        (lambda folder: _set(folder / "checkpoint" / "manifest.json", format=0), "its format is 0"),
        (lambda folder: _edit_identity(folder, data="1"), "another version"),
        (lambda folder: _set(folder / "config.json", colour="red"), "damaged or edited"),
        (lambda folder: _edit_config(folder, colour="red"), "colour: unknown"),
        (lambda folder: _edit_config(folder, algorithm={"name": 10**400}), "algorithm.name = 1000"),
        (lambda folder: _edit_config(folder, model=_nested(60)), "model: nested too deeply"),
        (lambda folder: _edit_config(folder, training="x" * 10**6), "training = 'xxx"),
        (lambda folder: _edit_server(folder, {"server/mine": torch.zeros(3)}), "not the server's state"),
        (
            lambda folder: _edit_server(
                folder, {"server/model": torch.zeros(3), "buffers/mine": torch.zeros(2)}
            ),
            "of another model",
        ),
        (lambda folder: _put(folder / "checkpoint" / "manifest.json", os.mkfifo), "not a regular file"),
        (lambda folder: _put(folder / "history.jsonl", os.mkfifo), "not a regular file"),
        (lambda folder: _put(folder / "config.json", os.mkfifo), "config.json"),
        (lambda folder: _put(folder / "config.json", Path.mkdir), "config.json"),
        (lambda folder: _put(folder / "diagnostics", Path.touch), "diagnostics: not a folder"),
        (lambda folder: _put(folder / "diagnostics", _link_to_itself), "diagnostics: not a folder"),
    ],
)
def test_a_folder_that_cannot_be_examined_gets_one_clear_line(folder, damage, says):
    damage(folder)
    code, output = command(folder)
    assert code == 2
    assert says in output
    assert output.startswith("error: ") and output.count("\n") == 1


def _server_file(folder: Path) -> Path:
    (path,) = (folder / "checkpoint").glob("server-*.safetensors")
    return path


def _set(path: Path, **values: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _seal(folder: Path, **values: object) -> None:
    """Changes the manifest, and its checksum with it."""
    path = folder / "checkpoint" / "manifest.json"
    write_sealed(path, {**read_sealed(path), **values})


def _edit_config(folder: Path, **values: object) -> None:
    _set(folder / "config.json", **values)
    _seal(folder, config=[sha256((folder / "config.json").read_bytes())])


def _edit_identity(folder: Path, **values: object) -> None:
    _set(folder / "identity.json", **values)
    _seal(folder, identity=digest_of(json.loads((folder / "identity.json").read_text())))


def _edit_server(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = _server_file(folder)
    path.write_bytes(save_tensors(tensors))
    _seal(folder, server={"name": path.name, "sha256": sha256(path.read_bytes()), "rows": 0})


def _put(path: Path, make: Callable[[Path], object]) -> None:
    path.unlink(missing_ok=True)
    make(path)


def _link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def _nested(depth: int) -> object:
    return [_nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\x00", b"null", b"[]", b"{", b"1" * 5000, b"[" * 100_000),
        *({"global": 10**400}, {"global": "x"}, {"clients": 3}, {"clients": [{}]}, {"clients": [None]}),
    ],
    ids=lambda content: str(content)[:12],
)
def test_a_damaged_result_is_measured_again(folder, content):
    options = {"samples": 20, "clients": 2}
    before = diagnose(folder, ["sharpness"], options)["sharpness"]["result"]
    path = folder / "diagnostics" / "sharpness.json"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        _set(path, result={**before, **content})
    assert diagnose(folder, ["sharpness"], options)["sharpness"]["result"] == before
    assert json.loads(path.read_text())["result"] == before
    code, output = command(folder, "sharpness", "--set", "samples=20", "--set", "clients=2")
    assert code == 0, output


@pytest.mark.parametrize("make", [os.mkfifo, _link_to_itself])
def test_what_is_no_file_is_replaced_by_the_result(folder, make):
    (folder / "diagnostics").mkdir()
    path = folder / "diagnostics" / "clients.json"
    make(path)
    assert diagnose(folder, ["clients"])["clients"] == json.loads(path.read_text())


def test_a_folder_in_place_of_a_result_costs_no_other_result(folder):
    (folder / "diagnostics" / "clients.json").mkdir(parents=True)
    code, output = command(folder, "clients", "drift")
    assert code == 2 and "clients.json: a folder" in output
    assert (folder / "diagnostics" / "drift.json").is_file()


def test_a_run_from_python_is_sent_to_the_python_functions(tmp_path):
    folder = tmp_path / "mine"
    train(network(), federation(), ff.fedavg(), rounds=1, metrics={}, folder=folder)
    code, output = command(folder)
    assert code == 2
    assert "flatfed.diagnostics.inspect(task, run=run)" in output
    assert f"flatfed.diagnostics.diagnose({str(folder)!r}, subject=subject)" in output


def test_a_run_from_python_is_examined_into_its_folder(tmp_path):
    folder = tmp_path / "mine"

    def trained(rounds: int) -> ff.Run:
        return train(network(), federation(), ff.fedavg(), rounds=rounds, folder=folder)

    run = trained(1)
    with ff.diagnostics.inspect(ff.Task(network(), federation()), run=run) as subject:
        diagnose(str(folder), ["drift"], {"clients": 2}, subject=subject)
        direct = ff.diagnostics.drift(subject, clients=2)
    record = read_run(folder)
    assert record.diagnostics["drift"]["result"] == direct and record.notes == ()
    run = trained(2)
    with ff.diagnostics.inspect(ff.Task(network(), federation()), run=run) as subject:
        assert diagnose(folder, ["drift"], subject=subject)["drift"]["round"] == 2
    # Neither another state nor another run gets into the folder.
    trained(3)
    for data in (federation(), federation(5)):
        with (
            ff.diagnostics.inspect(ff.Task(network(), data), run=run) as subject,
            pytest.raises(FlatfedError, match="another run or state"),
        ):
            diagnose(folder, ["drift"], subject=subject)


def made_run(folder: Path, **training: object) -> Path:
    clients, hidden = training.pop("clients", 6), training.pop("hidden", 4)
    config = Config.checked(
        {
            **SMALL,
            "data": {**SMALL["data"], "clients": clients},
            "model": {"name": "mlp", "hidden": [hidden]},
            "training": {**SMALL["training"], "participants": 1, **training},
        }
    )
    run_config(config, folder)
    return folder


def test_what_fails_does_not_keep_the_rest_from_being_measured(tmp_path):
    folder = made_run(tmp_path / "one", clients=1)
    code, output = command(folder, "plane", "global_stability", "drift")
    assert code == 2
    assert "error: plane: it takes at least two clients" in output
    assert "error: global_stability: it takes at least two clients" in output
    assert "flatness distance" in output and (folder / "diagnostics" / "drift.json").exists()


def test_a_diverged_run_is_examined_without_tracebacks(tmp_path):
    folder = tmp_path / "wild"
    with pytest.raises(ff.DivergedError):
        made_run(folder, lr=1e12, hidden=64)
    assert read_run(folder).state == "diverged"
    options = [f"{key}={value}" for key, value in QUICK.items()]
    code, output = command(folder, "all", *(word for option in options for word in ("--set", option)))
    assert code in {0, 2} and "Traceback" not in output
    assert {"sharpness", "surface", "drift"} <= {path.stem for path in (folder / "diagnostics").iterdir()}
    begun = tmp_path / "begun"
    with pytest.raises(ff.DivergedError):
        made_run(begun, lr=1e12, hidden=64, local_steps=5)
    code, output = command(begun)
    assert code == 2 and "round 1: " in output and "lower lr" in output and "resume" not in output


def test_a_run_of_a_cluster_is_examined_on_this_machine(folder, monkeypatch):
    execution = {"workers": 1, "engine": "ray", "ray_address": "ray://nowhere:10001"}
    _edit_config(folder, execution=execution)
    monkeypatch.setitem(sys.modules, "ray", None)
    with ff.diagnostics.inspect_folder(folder) as subject:
        assert (subject.execution.engine, subject.execution.workers) == ("local", 1)
        assert ff.diagnostics.drift(subject, clients=2)["client_drift"] > 0


def test_summaries_say_when_nothing_is_finite():
    nothing = {"train": [[None]], "loss": [[None]], "train_loss": [None], "global": None, "cosine": {}}
    nothing["clients"] = [{"sharpness": None}]
    for name in ("surface", "plane", "line", "sharpness"):
        assert "–" in DIAGNOSTICS[name].summary(nothing)
    assert DIAGNOSTICS["perturbation"].summary(nothing) == "no estimate"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["hesian"], "hesian: no such diagnostic; did you mean 'hessian'?"),
        (["drift", "--set", "client=3"], "client: drift has no such option; did you mean 'clients'?"),
        (["drift", "--set", "clients=0"], "clients = 0: input should be greater than or equal to 1"),
        (
            ["surface", "--set", "points=1000000"],
            "points = 1000000: input should be less than or equal to 1001",
        ),
        (["drift", "--set", "clients=true"], "clients = True: input should be a valid integer"),
        (["surface", "--set", "extent=-1"], "extent = -1: input should be greater than 0"),
        (["surface", "--set", "dimensions=3"], "dimensions = 3: input should be 1 or 2"),
        (["surface", "--set", "points=all"], "points = None: input should be a valid integer"),
        (["line"], "line: needs the other run's folder"),
        (["line", "--set", "other=nowhere"], "line: "),
    ],
)
def test_bad_names_and_options_get_one_clear_line(folder, arguments, says):
    code, output = command(folder, *arguments)
    assert code == 2
    assert f"error: {says}" in output


def test_lines_join_only_equal_models(folder, tmp_path):
    config = Config.checked({**SMALL, "model": {"name": "mlp", "hidden": [5]}})
    run_config(config, tmp_path / "other")
    with pytest.raises(FlatfedError, match="only equal models can be joined"):
        diagnose(folder, ["line"], {"other": str(tmp_path / "other")})


def test_a_line_is_measured_again_when_its_other_end_has_moved(folder, tmp_path, monkeypatch):
    other = made_run(tmp_path / "other")
    monkeypatch.chdir(tmp_path)
    first = diagnose(
        folder, ["line"], {"other": "other", **{key: QUICK[key] for key in ("points", "samples")}}
    )
    same = {"other": str(other), **{key: QUICK[key] for key in ("points", "samples")}}
    monkeypatch.chdir(folder)
    assert diagnose(folder, ["line"], same) == first
    made_run(other, rounds=5)
    again = diagnose(folder, ["line"], same)
    assert again["line"]["other"]["round"] == 5
    assert again["line"]["result"]["train_loss"][-1] != first["line"]["result"]["train_loss"][-1]


def test_numbers_that_are_not_finite_become_null():
    found = plain({"a": [1.0, float("nan")], "b": (float("inf"), None, "x")})
    assert found == {"a": [1.0, None], "b": [None, None, "x"]}


def test_convolutions_and_normalisation_are_examined_client_by_client(tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 2, 3),
        torch.nn.BatchNorm2d(2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.Linear(72, 10),
    )
    config = Config.checked(SMALL)
    data = config.make_federation()
    pairs = [data.client(number).batch(torch.arange(20)) for number in range(6)]
    pictures = [(inputs.view(-1, 1, 8, 8), targets) for inputs, targets in pairs]
    small = ff.Federation.from_tensors(pictures, test=pictures[0])
    run = train(model, small, ff.fedsam(), rounds=2, local_steps=2, batch_size=8)
    assert run.path == "client"
    with ff.diagnostics.inspect(ff.Task(model, small), run=run) as subject:
        assert ff.diagnostics.hessian(subject, probes=2, steps=5)["global"]["eigenvalues"][0] > 0
        found = ff.diagnostics.plane(subject, points=3)
        assert ff.diagnostics.local_stability(subject)["discrepancy"][0] == 0
    last = run.history[-1]["test_loss"]
    assert min(min(row) for row in found["loss"]) < 5 * last
