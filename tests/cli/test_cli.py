"""The command line as a user meets it: in a process of its own, good and bad input alike."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import typer
from command import Command, flatfed
from typer.testing import CliRunner

from flatfed.cli import algorithms, app
from flatfed.cli.terminal import command_of
from flatfed.core.errors import FlatfedWarning

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.toml"
SHORT = ["--set", "training.rounds=3", "--set", "execution.workers=1"]


def test_list_names_every_algorithm():
    from flatfed import ALGORITHMS

    shown = flatfed("list")
    assert shown.returncode == 0
    for name in ALGORITHMS:
        assert re.search(rf"\b{name}\b", shown.stdout), name


def test_an_algorithm_is_shown_before_the_catalog_is_written_again(monkeypatch):
    known = algorithms.catalog()
    others = {name: known[name] for name in known if name != "fedsam"}
    monkeypatch.setattr(algorithms, "catalog", lambda: others)
    done = CliRunner().invoke(app, ["show", "FedSAM", "--json"])
    assert done.exit_code == 0 and json.loads(done.stdout) == known["fedsam"], done.output
    done = CliRunner().invoke(app, ["show", "fedsamm"])
    assert done.exit_code == 2 and "did you mean 'fedsam'" in done.stderr


def test_show_prints_equations_defaults_and_traffic():
    shown = flatfed("show", "FedLESAM-S")
    assert shown.returncode == 0
    for text in (
        "ρ u(x_old − x)",
        "radius = 0.1",
        "displacement, control_variate.control_change",
        "last_model.last_model, control_variate.control",
    ):
        assert text in shown.stdout


def test_run_writes_a_complete_folder_and_a_second_run_reuses_it(tmp_path):
    folder = tmp_path / "mine"
    first = flatfed("run", EXAMPLE, *SHORT, "--folder", folder)
    assert first.returncode == 0, first.stderr
    assert "matrix path" in first.stdout
    names = {path.name for path in folder.iterdir()}
    assert names == {
        "config.json",
        "environment.json",
        "history.jsonl",
        "clients.json",
        "checkpoint",
        "identity.json",
        "model.safetensors",
    }
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    assert [record["round"] for record in history] == [1, 2, 3]
    assert json.loads((folder / "environment.json").read_text())["versions"]["torch"]
    assert len(json.loads((folder / "clients.json").read_text())["clients"]) == 100
    before = (folder / "model.safetensors").stat().st_mtime_ns
    again = flatfed("run", EXAMPLE, *SHORT, "--folder", folder)
    assert again.returncode == 0
    assert "complete" in again.stdout
    assert (folder / "model.safetensors").stat().st_mtime_ns == before


def test_a_complete_folder_of_another_run_is_refused(tmp_path):
    folder = tmp_path / "mine"
    assert invoke("run", str(EXAMPLE), *SHORT, "--folder", str(folder))[0] == 0
    code, error = invoke("run", str(EXAMPLE), *SHORT, "--set", "training.lr=0.01", "--folder", str(folder))
    assert code == 2
    assert "training.lr = 0.3 there, 0.01 here" in error


@pytest.mark.parametrize(
    "arguments",
    [["fedavg:seed=5"], ["fedavg", "--set", "training.seed=7"], ["fedavg", "--set", "algorithm.name=fedsam"]],
)
def test_compare_refuses_what_it_would_ignore(tmp_path, arguments):
    code, error = invoke("compare", *arguments, "--runs", str(tmp_path))
    assert code == 2
    assert "--seeds" in error


def test_a_run_too_short_for_its_algorithm_is_noted_once_in_one_line(tmp_path):
    finished = flatfed("compare", "fedsynsam", *SHORT, "--seeds", "2", "--runs", tmp_path)
    assert finished.returncode == 0, finished.stderr
    notes = [line for line in finished.stderr.splitlines() if line.startswith("note:")]
    assert len(notes) == 1 and "rounds = 3: trajectory_matching acts from round 32 on" in notes[0]
    assert "Warning" not in finished.stderr


def test_only_our_own_warnings_become_notes(capsys):
    @command_of(typer.Typer(), "nothing is lost")
    def warn() -> None:
        for _ in range(2):
            warnings.warn("ours", FlatfedWarning, stacklevel=1)
        warnings.warn("theirs", UserWarning, stacklevel=1)

    with pytest.warns(UserWarning, match="theirs") as others:
        warn()
    assert len(others) == 1
    assert capsys.readouterr().err == "note: ours\n"


def test_resume_goes_on_to_more_rounds(tmp_path):
    folder, straight = tmp_path / "mine", tmp_path / "straight"
    assert flatfed("run", EXAMPLE, *SHORT, "--folder", folder).returncode == 0
    resumed = flatfed("resume", folder, "--rounds", 5)
    assert resumed.returncode == 0, resumed.stderr
    longer = flatfed("run", EXAMPLE, *SHORT, "--set", "training.rounds=5", "--folder", straight)
    assert longer.returncode == 0
    assert (folder / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()


def test_compare_prints_a_row_for_each_algorithm(tmp_path):
    done = flatfed("compare", "fedavg", "fedsam:radius=0.05,lr=0.2", "--seeds", 2, *SHORT, "--runs", tmp_path)
    assert done.returncode == 0, done.stderr
    assert re.search(r"fedavg\s.*0\.3", done.stdout)
    assert re.search(r"fedsam:radius=0\.05,lr=0\.2\s.*0\.2", done.stdout)
    assert "2 seeds" in done.stdout
    assert "355 test samples" in done.stdout
    assert len([path for path in tmp_path.iterdir() if path.is_dir()]) == 4
    assert f"Report: {tmp_path / 'report.html'}" in done.stdout
    assert (tmp_path / "report.html").is_file()


def bytes_up(folder: Path) -> set[int]:
    return {json.loads(line)["bytes_up"] for line in (folder / "history.jsonl").read_text().splitlines()}


def test_compare_with_compressed_uploads(tmp_path):
    common = ["--set", "algorithm.compress.part=quantize", "--set", "algorithm.compress.bits=8"]
    own = "scaffold:compress.part=top_k,compress.ratio=0.1,uncompressed=control_variate.control_change"
    arguments = ["compare", "fedavg", own, *common, *SHORT, "--seeds", "1", "--runs", str(tmp_path)]
    code, error = invoke(*arguments)
    assert code == 0, error
    # Digits and 64 hidden units; ten participants.
    parameters = 64 * 64 + 64 + 64 * 10 + 10
    quantized = parameters + 4 * math.ceil(parameters / 512) + 4
    kept = math.ceil(parameters / 10)
    top = math.ceil(parameters / 8) + 4 * kept + 4
    folders = {path.name.split("-")[2]: path for path in tmp_path.iterdir() if path.is_dir()}
    assert bytes_up(folders["fedavg"]) == {10 * quantized}
    assert bytes_up(folders["scaffold"]) == {10 * (top + 4 * parameters)}


def test_run_with_error_feedback_resumes_from_its_own_config(tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(
        """
        [algorithm]
        name = "fedavg"
        compress = { part = "error_feedback", of = { part = "top_k", ratio = 0.05 } }

        [training]
        rounds = 4
        participation = 0.1

        [execution]
        workers = 1
        """
    )
    straight, stopped = str(tmp_path / "straight"), str(tmp_path / "stopped")
    assert invoke("run", str(config), "--folder", straight)[0] == 0
    assert invoke("run", str(config), "--set", "training.rounds=2", "--folder", stopped)[0] == 0
    assert invoke("resume", stopped, "--rounds", "4")[0] == 0
    first, second = (Path(folder, "model.safetensors").read_bytes() for folder in (straight, stopped))
    assert first == second
    # A change on the command line reaches inside.
    changed = ["--set", "algorithm.compress.of.ratio=0.5", "--set", "training.rounds=1"]
    assert invoke("run", str(config), *changed, "--folder", str(tmp_path / "changed"))[0] == 0
    assert min(bytes_up(tmp_path / "changed")) > max(bytes_up(tmp_path / "straight"))


def test_demo_in_short(tmp_path):
    done = flatfed("demo", "--rounds", 2, "--seeds", 1, "--runs", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in ("fedavg", "fedsam", "mofedsam", "fedswa", "fedmoswa", "fednsam", "fedsagd"):
        assert re.search(rf"\b{name}\b", done.stdout), name


@pytest.mark.parametrize(
    ("assignment", "complaint"),
    [
        ("training.participation=0", "training.participation = 0"),
        ("training={rounds=1,participants=101}", "participants = 101: there are only 100 clients"),
        ("training.lr=-0.1", "training.lr = -0.1"),
        ("training.lr=nan", "training.lr = nan"),
        ("training.lr=fast", "training.lr = 'fast'"),
        ("training.rounds=0", "training.rounds = 0"),
        ("training.learning_rate=1", "training.learning_rate: unknown"),
        ("training.local_epoch=1", "training.local_epoch: unknown; did you mean 'local_epochs'?"),
        ("training.workers=2", "training.workers: unknown; write execution.workers"),
        ("execution.worker=2", "execution.worker: unknown; did you mean 'workers'?"),
        ("execution.workers=0", "execution.workers = 0"),
        ("training.clip=nothing", "training.clip = 'nothing'"),
        ("data.dataset=digit", "data.dataset: 'digit' is unknown; did you mean 'digits'?"),
        ("data.clients=5000", "partition.dirichlet_client: clients=5000"),
        ("partition.name=dirichlet", "partition.name = 'dirichlet': unknown"),
        ("partition.concentration=0", "partition.dirichlet_client.concentration = 0"),
        ("partition.alpha=1", "partition.dirichlet_client.alpha: unknown"),
        ("model.name=mpl", "model.name = 'mpl': unknown; did you mean 'mlp'?"),
        ("model.width=3", "model.mlp.width: unknown"),
        ("algorithm.name=fedmoswaa", "algorithm = 'fedmoswaa': unknown; did you mean 'fedmoswa'?"),
        ("algorithm.server_rat=1", "fedmoswa.server_rat: unknown; did you mean 'server_rate'?"),
        ("algorithm.server_rate=-1", "fedmoswa.server_rate = -1"),
        ("algorithm={gradient={part='along_momentum',radius=0.1}}", "needs the server vector 'momentum'"),
        ("algorithm={server={part='momentum',decay=0.5,rat=1}}", "algorithm.server.momentum.rat: unknown"),
        ("algorithm.compress=topk", "algorithm.compress.part = 'topk': unknown; did you mean 'top_k'?"),
        ("algorithm.compress={part='quantize',bits=9}", "algorithm.compress.quantize.bits = 9"),
        ("algorithm.uncompressed=model", "uncompressed: there is no upload 'model'"),
        ("surprise=1", "surprise: unknown"),
        ("training", "--set training: write it as key=value"),
    ],
)
def test_bad_input_is_one_clear_line(tmp_path, assignment, complaint):
    # A process for each would take minutes; the command line is the same code in this one.
    code, error = invoke("run", str(EXAMPLE), "--set", assignment, "--folder", str(tmp_path / "run"))
    assert code == 2, error
    assert complaint in error
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert len(error.strip().splitlines()) == 1
    assert not (tmp_path / "run" / "model.safetensors").exists()


def invoke(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from flatfed import cli

    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.stderr


def test_bad_files_and_folders(tmp_path):
    broken = tmp_path / "broken.toml"
    broken.write_text("[training\nrounds=1")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(bytes(range(256)))
    (tmp_path / "empty").mkdir()
    for arguments, complaint in [
        (["run", tmp_path / "missing.toml"], "cannot be read (No such file or directory)"),
        (["run", broken], "not valid TOML"),
        (["run", binary], "not a text file"),
        (["run", tmp_path], "cannot be read"),
        (["resume", tmp_path / "nowhere"], "no such run folder"),
        (["resume", tmp_path / "empty"], "not a run folder"),
    ]:
        code, error = invoke(*map(str, arguments))
        assert code == 2, error
        assert complaint in error
        assert len(error.strip().splitlines()) == 1


def test_a_traceback_never_shows_for_a_wrong_command():
    done = flatfed("compare", "fedavgg", "--seeds", 1)
    assert done.returncode == 2
    assert "did you mean 'fedavg'?" in done.stderr
    assert "Traceback" not in done.stderr


def test_divergence_is_reported_and_keeps_the_run(tmp_path):
    done = flatfed("run", EXAMPLE, *SHORT, "--set", "training.lr=1e30", "--folder", tmp_path / "run")
    assert done.returncode == 1
    assert "lower lr (now 1e+30)" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model.safetensors").exists()


# So many that the run is still going on when this process gets to look, however busy the machine is.
LONG = ["--set", "training.rounds=400", "--set", "execution.checkpoint_every=7"]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    folder = tmp_path_factory.mktemp("straight") / "run"
    assert flatfed("run", EXAMPLE, *LONG, "--folder", folder).returncode == 0
    return folder


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_an_interrupted_run_resumes_to_the_same_bytes(tmp_path, how, straight):
    broken = tmp_path / "broken"
    process = Command("run", EXAMPLE, *LONG, "--folder", broken)
    history = broken / "history.jsonl"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not (history.exists() and history.read_text().count("\n") >= 10):
        time.sleep(0.005)
    os.kill(process.pid, how)
    ended = process.finished(timeout=60)
    assert ended.returncode == (-signal.SIGKILL if how == signal.SIGKILL else 130)
    assert "Traceback" not in ended.stderr
    assert not (broken / "model.safetensors").exists(), "the run was over before it could be interrupted"
    resumed = flatfed("resume", broken)
    assert resumed.returncode == 0, resumed.stderr
    assert (broken / "model.safetensors").read_bytes() == (straight / "model.safetensors").read_bytes()
    rounds = [json.loads(line)["round"] for line in history.read_text().splitlines()]
    assert rounds == list(range(1, 401))


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["list"], ["show", "fedsam"]])
def test_what_only_prints_does_not_wait_for_torch(arguments):
    code = "import sys; from flatfed.cli import app; app(sys.argv[1:], standalone_mode=False); "
    code += "sys.exit('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout
