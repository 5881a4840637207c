"""A user's own task on the command line: `my_task.py:make` in place of a config file."""

from __future__ import annotations

import json
import random
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import flatfed as ff
from flatfed import FlatfedError, cli
from flatfed.training import own_task
from flatfed.training.config import Config

SHORT = ["--set", "training.rounds=3"]


def flatfed(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exit_code == 0, done.output
    return done.stdout


def refusal(*arguments: object) -> str:
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    assert done.exit_code == 2, done.output
    lines = [line for line in done.stderr.splitlines() if not line.startswith("fedavg  ")]  # the bar's
    assert len(lines) == 1 and "Traceback" not in done.stderr
    return lines[0]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """An empty folder in which the command was called; nothing is remembered of other tests' files."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for remembered in (own_task._loaded, own_task._made):
        remembered.cache_clear()
    return tmp_path


@pytest.fixture
def written(folder) -> Path:
    flatfed("new", "my-task")
    return folder / "my_task.py"


def test_the_template_runs_as_it_is_and_its_options_are_settings(written):
    flatfed("run", "my_task.py:make", *SHORT, "--set", "task.width=5", "--folder", "run")
    assert load_file("run/model.safetensors")["layers.0.weight"].shape == (5, 8)
    config = json.loads(Path("run/config.json").read_text())
    assert config["task"] == {"file": str(written), "make": "make", "width": 5}
    assert not {"data", "partition", "model"} & config.keys()


def test_it_is_compared_tuned_diagnosed_and_reported(written):
    compared = flatfed(
        "compare", "fedavg", "fedsam:radius=0.05", "--config", "my_task.py:make", *SHORT, "--seeds", "2"
    )
    assert "fedsam:radius=0.05" in compared
    page = Path("runs/report.html").read_text()
    assert "my_task.py:make" in page and "Samples by class and client" in page
    tuned = flatfed(
        "tune", "my_task.py:make", "--choose-by", "test", "--grid", "training.lr=0.01,0.3", *SHORT
    )
    assert "flatfed run my_task.py:make --set training.rounds=3 --set training.lr=0.3" in tuned
    (run,) = Path("runs").glob("my_task-fedsam-seed0-*")
    assert "accuracy" in flatfed("diagnose", run, "clients")
    diagnosed = json.loads(flatfed("diagnose", "my_task.py:make", "clients", "--json"))
    assert len(diagnosed) == 6 and {"clients"} == set().union(*diagnosed.values())
    assert str(run) in diagnosed
    flatfed("report", "my_task.py:make", "-o", "task.html")
    assert "fedsam" in Path("task.html").read_text()
    shutil.copy("my_task.py", "other.py")
    assert "other.py:make: no such run of it in runs; make one with flatfed run" in refusal(
        "report", "other.py:make"
    )


def test_runs_with_some_settings_are_diagnosed_and_reported(written):
    for options in ([], ["--set", "task.width=5"], ["--set", "task.width=5", "--set", "training.lr=0.2"]):
        flatfed("run", "my_task.py:make", *SHORT, *options)

    def diagnosed(*settings: str) -> list[dict]:
        options = [part for setting in settings for part in ("--set", setting)]
        folders = json.loads(flatfed("diagnose", "my_task.py:make", "clients", "--json", *options))
        return [json.loads((Path(folder) / "config.json").read_text()) for folder in folders]

    assert len(diagnosed()) == 3
    assert [config["task"].get("width") for config in diagnosed("task.width=5")] == [5, 5]
    assert [config["task"].get("width") for config in diagnosed("task.width=32")] == [None], "the default"
    (chosen,) = diagnosed("task.width=5", "training.lr=0.2")
    assert chosen["training"]["lr"] == 0.2
    flatfed("report", "my_task.py:make", "--set", "training.lr=0.2", "-o", "task.html")
    assert "0.2" in Path("task.html").read_text()
    assert "no such run of it in runs; make one with flatfed run my_task.py:make --set task.width=6" in (
        refusal("diagnose", "my_task.py:make", "--set", "task.width=6")
    )
    assert "task.widht: unknown; did you mean 'width'?" in (
        refusal("report", "my_task.py:make", "--set", "task.widht=6")
    )
    (run, *_) = map(str, Path("runs").glob("my_task-fedavg-*"))
    assert "is one run; give settings with" in refusal("diagnose", run, "--set", "task.width=5")
    assert "only with config files or my_task.py:make" in refusal("report", run, "--set", "training.lr=1")


def test_a_run_resumes_to_the_same_bytes_from_anywhere(written, folder, monkeypatch):
    flatfed("run", "my_task.py:make", "--set", "training.rounds=5", "--folder", "straight")
    flatfed("run", "my_task.py:make", *SHORT, "--folder", "resumed")
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    flatfed("resume", "../resumed", "--rounds", "5")
    models = [(folder / name / "model.safetensors").read_bytes() for name in ("straight", "resumed")]
    assert models[0] == models[1]


def test_a_file_that_changed_is_another_task(written):
    flatfed("run", "my_task.py:make", *SHORT, "--folder", "run")
    written.write_text(written.read_text().replace("manual_seed(0)", "manual_seed(1)"))
    own_task._loaded.cache_clear()
    own_task._made.cache_clear()
    assert "not the same: data" in refusal("resume", "run", "--rounds", "5")


def test_methods_share_their_data_and_seeds_differ_in_their_first_weights(written):
    written.write_text(
        written.read_text()
        .replace("torch.Generator().manual_seed(0)", "None")
        .replace(", generator=draw", "")
    )
    state = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()
    settings = own_task.reference_settings("my_task.py:make")
    first, again, other = (
        Config.checked({**settings, "training": {**settings["training"], "seed": seed}}).make_task()
        for seed in (3, 3, 4)
    )
    assert first is again
    weights = [task.model.layers[0].weight for task in (first, other)]
    assert not torch.equal(*weights)
    own_task._made.cache_clear()
    once_more = own_task.make_task(settings["task"], 3)
    assert torch.equal(once_more.model.layers[0].weight, weights[0])
    assert torch.equal(once_more.federation.inputs, first.federation.inputs)
    assert (random.getstate(), np.random.get_state()[1].tolist()) == state[:2]
    assert torch.equal(torch.get_rng_state(), state[2]), "the program's own draws are left alone"


def test_a_task_may_ask_for_the_seed_and_import_what_is_beside_it(written, folder):
    (folder / "beside_my_task.py").write_text("def width(seed):\n    return seed + 2\n")
    text = written.read_text().replace(
        "import flatfed as ff", "import flatfed as ff\nfrom beside_my_task import width"
    )
    written.write_text(
        text.replace("width: int = 32", "seed: int = 0").replace("Model(8, width,", "Model(8, width(seed),")
    )
    flatfed("run", "my_task.py:make", *SHORT, "--set", "training.seed=5", "--folder", "run")
    assert load_file("run/model.safetensors")["layers.0.weight"].shape == (7, 8)


def test_tasks_of_files_are_tasks_in_python_too(written):
    task = ff.load_task("my_task.py:make", ["task.width=5", "data.validation=0.1"])
    assert task.model.layers[0].out_features == 5 and task.federation.validation is not None
    Path("c.toml").write_text(
        '[data]\nclients = 7\n[model]\nname = "logistic_regression"\n[training]\nrounds = 2\n'
    )
    own = ff.load_task(Path("c.toml"), ["training.seed=1"])
    assert len(own.federation) == 7 and isinstance(own, ff.Task)
    training = ff.Training(rounds=1, participants=2, local_steps=1, batch_size=4, lr=0.1)
    compared = ff.compare(own, ["fedavg"], training, seeds=1, folder="compared", progress=False)
    assert len(compared.to_dataframe()) == 1
    for arguments in ((3,), ("c.toml", "training.seed=1")):
        with pytest.raises(FlatfedError, match="give a file, and assignments in a list"):
            ff.load_task(*arguments)


def test_a_config_file_may_name_it(written):
    Path("c.toml").write_text('task = "my_task.py:make"\n[training]\nrounds = 2\n')
    flatfed("run", "c.toml", "--folder", "run")
    assert json.loads(Path("run/config.json").read_text())["training"]["participation"] is None


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [
        ("def make(:", [], "task.py, line 1: SyntaxError: "),
        ("import nothing_like_it", [], "task.py, line 1: ModuleNotFoundError: No module named"),
        ("import sys\nsys.exit(3)", [], "task.py, line 2: SystemExit: 3"),
        ("def make(x):\n    return 3", [], "task.x: missing; use --set task.x=…"),
        (
            "def make(x):\n    return 3",
            ["--set", "task.x=1"],
            "task.py:make returns 3; return a flatfed.Task",
        ),
        ("def make():\n    raise KeyError('abc')", [], "task.py:make, line 2: KeyError: 'abc'"),
        ("def mak():\n    pass", [], "task.py: it has no function 'make'; did you mean 'mak'?"),
        ("def make():\n    pass", ["--set", "task.x=1"], "task.x: unknown; make has no parameters"),
        (
            "def make(width=1):\n    pass",
            ["--set", "task.widht=1"],
            "task.widht: unknown; did you mean 'width'?",
        ),
        (
            "def make():\n    pass",
            ["--set", "data.clients=3"],
            "data: your own task has its own; give either",
        ),
        ("settings = 3\ndef make():\n    pass", [], "task.py: settings = 3; give a dictionary of tables"),
        ("settings = {'task': 3}\ndef make():\n    pass", [], "task.py: settings has a task"),
        ("def make():\n    pass", ["--set", "task.file=3"], "task.file = 3: write it as my_task.py:make"),
    ],
)
def test_mistakes_are_named_in_one_line(folder, text, command, message):
    (folder / "task.py").write_text(text)
    assert message in refusal("run", "task.py:make", *SHORT, *command)
    assert not (folder / "runs").exists()


def test_what_is_missing_is_said(folder):
    assert "none.py: no such file; flatfed new none writes one" in refusal("run", "none.py:make")
    (folder / "task.py").write_text("def make():\n    pass")
    assert "training.rounds: missing; use --set training.rounds=50" in refusal("run", "task.py")


def test_new_leaves_other_files_alone(written):
    before = written.read_text()
    assert "my_task.py: it exists already" in refusal("new", "my_task")
    assert "name = '../up': use letters" in refusal("new", "../up")
    assert written.read_text() == before and sorted(path.name for path in Path().iterdir()) == ["my_task.py"]


def test_references_and_files_are_told_apart():
    assert own_task.parse_reference("a/b.py:f") == {"file": "a/b.py", "make": "f"}
    assert own_task.parse_reference("b.py") == {"file": "b.py", "make": "make"}
    assert own_task.parse_reference("config.toml") is None
    with pytest.raises(FlatfedError, match=r"task = 'config\.toml'"):
        Config(task="config.toml", training={"rounds": 1})


TREES = """
import torch
from torch import nn
import flatfed as ff


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.layer = nn.Embedding(4, 3), nn.Linear(5, 2)

    def forward(self, kind, numbers):
        return {"logits": self.layer(torch.cat([self.table(kind), numbers], 1))}


def samples(count, draw):
    kinds, numbers = torch.randint(4, (count,), generator=draw), torch.randn(count, 2, generator=draw)
    return {"kind": kinds, "numbers": numbers}, (numbers.sum(1) > 0).long()


def make():
    draw = torch.Generator().manual_seed(0)
    own = [samples(20, draw) for _ in range(4)]
    return ff.Task(Model(), ff.Federation.from_tensors(own, samples(50, draw)))
"""


def test_inputs_may_be_dictionaries_all_the_way_to_the_report(folder):
    (folder / "trees.py").write_text(TREES)
    compared = flatfed(
        "compare", "fedavg", "--config", "trees.py:make", *SHORT, "--seeds", "1", "--set", "training.lr=0.5"
    )
    assert "With 50 test samples" in compared
    assert "Samples by class and client" in Path("runs/report.html").read_text()
    (run,) = Path("runs").glob("trees-fedavg-*")
    assert "accuracy" in flatfed("diagnose", run, "clients", "sharpness")


def edited(path: Path, *changes: tuple[str, str]) -> None:
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    for remembered in (own_task._loaded, own_task._made):
        remembered.cache_clear()


def test_a_complete_run_of_a_file_that_changed_is_not_taken_for_this_one(written):
    compare = ["compare", "fedavg", "--config", "my_task.py:make", *SHORT, "--seeds", "1"]
    flatfed(*compare)
    edited(written, ("samples(60,", "samples(90,"))
    done = CliRunner().invoke(cli.app, compare)
    assert done.exit_code == 2 and "not the same: data" in done.stderr and "accuracy %" not in done.stdout
    edited(written, ("samples(90,", "samples(60,"), ("Replace this with", "Put here"))
    assert "accuracy %" in flatfed(*compare), "a comment changes nothing"


def test_a_run_is_the_same_however_the_command_was_called(written, monkeypatch):
    flatfed("run", "my_task.py:make", *SHORT, "--folder", "run")
    for remembered in (own_task._loaded, own_task._made):
        remembered.cache_clear()
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    flatfed("resume", "run", "--rounds", "4")


def test_a_config_file_finds_the_task_beside_it_and_so_does_its_run(written, folder, monkeypatch):
    Path("c.toml").write_text('task = "my_task.py:make"\n[training]\nrounds = 2\n')
    (folder / "sub").mkdir()
    monkeypatch.chdir(folder / "sub")
    flatfed("run", "../c.toml", "--folder", "run")
    monkeypatch.chdir(folder)
    flatfed("resume", "sub/run", "--rounds", "3")


def test_a_task_without_accuracy_is_not_compared(written):
    edited(
        written,
        ("ff.Federation.from_tensors(own, test))", "ff.Federation.from_tensors(own, test), metrics={})"),
    )
    message = refusal("compare", "fedavg", "--config", "my_task.py:make", *SHORT)
    assert "runs are compared by their test accuracy" in message
    tune = ["tune", "my_task.py:make", "--grid", "training.lr=0.1", "--choose-by", "test"]
    assert "trials are ranked by their accuracy" in refusal(*tune)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "command", "message"),
    [
        ("settings = {'training': 5}\ndef make():\n    pass", [], "training"),
        ("settings = {'training': None}\ndef make():\n    pass", [], "training"),
        ("make = dict", [], "task.py"),
        ("def __getattr__(name):\n    raise RuntimeError('no')", [], "task.py, line 2: RuntimeError: no"),
        (
            "class E(Exception):\n    def __str__(self):\n        raise ValueError\ndef make():\n    raise E",
            [],
            "task.py:make, line 5: E: E",
        ),
        ("def make(a, /):\n    pass", [], "its parameter 'a' cannot be given by name"),
        ("def make(*args):\n    pass", [], "its parameter 'args' cannot be given by name"),
        ("import flatfed\ndef make():\n    raise flatfed.DivergedError('mine')", [], "task.py:make: mine"),
    ],
)
def test_odd_files_are_named_in_one_line(folder, text, command, message):
    (folder / "task.py").write_text(text)
    changes = [] if "'training'" in text else SHORT
    assert message in refusal("run", "task.py:make", *changes, *command)


def test_new_does_not_hide_a_package(folder):
    for name in ("torch", "flatfed", "class"):
        assert "choose another name" in refusal("new", name)
    (folder / "link.py").symlink_to(folder / "elsewhere.py")
    assert "link.py: it exists already" in refusal("new", "link")
    assert not (folder / "elsewhere.py").exists()


FAILING = """
import torch
import flatfed as ff


def samples(number):
    if number == LAST:
        raise KeyError("no such file")
    return torch.randn(6, 3, generator=torch.Generator().manual_seed(number)), torch.arange(6) % 2


class Images:
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return samples(LAST)


class Metric:
    def reset(self):
        raise KeyError("no state")

    def update(self, outputs, targets):
        pass

    compute = reset


def make(which):
    test = samples(9)
    if which == "dataset":
        federation = ff.Federation.from_dataset(Images(), [[0], [1, 2]])
    elif which == "metric":
        federation = ff.Federation.from_tensors([samples(0), samples(1)], test)
        return ff.Task(torch.nn.Linear(3, 2), federation, metrics={"mine": Metric()})
    else:
        federation = ff.Federation.from_function(5, samples, test)
    return ff.Task(torch.nn.Linear(3, 2), federation, name="failing", version="1")
"""


@pytest.mark.parametrize(
    ("which", "last", "message"),
    [
        ("dataset", 0, "task.py:make: dataset[0]: Images raised KeyError: 'no such file'"),
        ("function", 0, "clients[0]: samples raised KeyError: 'no such file'"),
        ("function", 4, "clients[4]: samples raised KeyError: 'no such file'"),
        ("metric", 4, "mine: it cannot be copied and reset ('no state')"),
    ],
)
def test_errors_of_data_and_metrics_are_named_in_one_line(folder, which, last, message):
    (folder / "task.py").write_text(FAILING.replace("LAST", str(last)))
    answer = refusal("run", "task.py:make", "--set", f"task.which={which}", *SHORT, "--folder", "run")
    assert message in answer


STATES = {
    "a dict in its state": (
        "    def get_extra_state(self):\n        return {}",
        "model: its state has '_extra_state', a dict, and only tensors are stored",
    ),
    "a state that raises": (
        "    def state_dict(self, *_, **__):\n        raise KeyError('lost')",
        "model: state_dict of Model raised KeyError: 'lost'",
    ),
}


@pytest.mark.parametrize("state", STATES)
def test_a_model_that_cannot_be_stored_is_refused_before_it_is_trained(written, state):
    methods, message = STATES[state]
    edited(written, ("    def forward", f"{methods}\n\n    def forward"))
    assert message in refusal("run", "my_task.py:make", *SHORT, "--folder", "run")
    assert not Path("run").exists()


def test_a_file_that_changes_the_current_folder_does_not_move_the_run(written, folder):
    (folder / "elsewhere").mkdir()
    edited(written, ("    draw = ", "    import os\n    os.chdir('elsewhere')\n    draw = "))
    flatfed("run", "my_task.py:make", *SHORT, "--folder", "run")
    assert (folder / "run" / "model.safetensors").exists()
    assert list((folder / "elsewhere").iterdir()) == []


def test_a_file_that_changes_the_current_folder_changes_no_path_of_any_command(written, folder):
    (folder / "elsewhere").mkdir()
    edited(
        written,
        ("    draw = ", "    os.chdir('elsewhere')\n    draw = "),
        ("import torch", "import os\n\nimport torch"),
    )
    written.write_text(written.read_text() + "\nos.chdir('/')\n")
    facts = json.loads(flatfed("run", "my_task.py:make", *SHORT, "--json"))
    assert (folder / facts["folder"] / "model.safetensors").is_file()
    flatfed("compare", "fedavg", "--config", "my_task.py:make", *SHORT, "--seeds", 1, "--runs", "compared")
    assert (folder / "compared" / "report.html").is_file()
    assert list((folder / "elsewhere").iterdir()) == [] and Path.cwd() == folder
