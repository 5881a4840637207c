"""Run folders whose files are damaged, missing, no files at all or somebody else's, through every command."""

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import tomli_w
from damage import Damage, anything
from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, command, scratch, unchanged
from test_config_files import BASE

from flatfed.runs.compare import run_folder
from flatfed.training.config import Config

CONFIG = {**BASE, "algorithm": {"name": "scaffold"}, "training": {**BASE["training"], "rounds": 2, "lr": 0.1}}
FILES = [
    *(
        "config.json",
        "identity.json",
        "environment.json",
        "history.jsonl",
        "clients.json",
        "model.safetensors",
    ),
    *("diverged.json", "stopped.json", "checkpoint", "checkpoint/.lock", "checkpoint/manifest.json"),
    *("checkpoint/server", "checkpoint/clients"),
]


@functools.cache
def finished() -> Path:
    """Two runs of the config, with different step sizes, as `flatfed tune` leaves them."""
    folder = Path(tempfile.mkdtemp(prefix="flatfed-fuzz-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    (folder / "config.toml").write_text(tomli_w.dumps(CONFIG))
    grid = ["--choose-by", "test", "--grid", "training.lr=0.1,0.2"]
    assert command("tune", folder / "config.toml", *grid, "--runs", folder / "runs").code == 0
    for rounds, name in ((2, "runs"), (3, "longer")):
        config = Config.read(folder / "config.toml", [f"training.rounds={rounds}"])
        run = run_folder(config, folder / name)
        arguments = ["--set", f"training.rounds={rounds}", "--folder", run]
        assert command("run", folder / "config.toml", *arguments).code == 0
        (run / "model.safetensors").rename(folder / f"model-{rounds}")
        shutil.copy(folder / f"model-{rounds}", run / "model.safetensors")
    return folder


def spoil(run: Path, damages: list[tuple[str, Damage]]) -> None:
    for name, damage in damages:
        stem = Path(name).name
        kind = sorted((run / "checkpoint").glob(f"{stem}-*")) if stem in {"server", "clients"} else []
        path = kind[0] if kind else run / name
        if path.parent.is_dir():
            damage(path)


damages = st.lists(st.tuples(st.sampled_from(FILES), anything), min_size=1, max_size=2)


@SOME
@given(damages, st.sampled_from(["resume", "more", "run", "compare", "tune", "report", "diagnose"]))
def test_damaged_run_folders(damages, what):
    with scratch() as folder:
        shutil.copytree(finished(), folder, dirs_exist_ok=True, symlinks=True)
        config, runs = folder / "config.toml", folder / "runs"
        run = run_folder(Config.read(config), runs)
        spoil(run, damages)
        arguments = {
            "resume": ["resume", run],
            "more": ["resume", run, "--rounds", 3],
            "run": ["run", config, "--runs", runs],
            "compare": ["compare", "scaffold", "--config", config, "--seeds", 1, "--runs", runs],
            "tune": ["tune", config, "--choose-by", "test", "--grid", "training.lr=0.1,0.2", "--runs", runs],
            "report": ["report", run, "--output", folder / "report.html"],
            "diagnose": ["diagnose", run, "clients"],
        }[what]
        other = next(path for path in runs.iterdir() if path.is_dir() and path != run)
        with unchanged(other), unchanged(folder / "longer"):
            answer = command(*arguments)
        if answer.code == 0 and what not in {"report", "diagnose"}:
            expected = (folder / f"model-{3 if what == 'more' else 2}").read_bytes()
            assert (run / "model.safetensors").read_bytes() == expected


names = st.sampled_from([*FILES, "notes.txt", ".hidden", "data/x", "checkpoint/best.pt", "synthetic.png"])


@SOME
@given(st.dictionaries(names, st.binary(min_size=1, max_size=20), min_size=1, max_size=4))
def test_folders_of_other_files(files):
    with scratch() as folder:
        config, run = folder / "config.toml", folder / "mine"
        config.write_text(tomli_w.dumps(CONFIG))
        for name, content in files.items():
            path = run / name
            if any(parent.is_file() for parent in path.parents) or path.is_dir():
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        with unchanged(run):
            for arguments in (["run", config, "--folder", run], ["resume", run], ["diagnose", run]):
                assert command(*arguments).code == 2
