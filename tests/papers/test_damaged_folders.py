"""One damaged run folder does not cost the other cells of a table their numbers."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flatfed.cli import app
from flatfed.core.errors import FlatfedWarning
from flatfed.papers.presets import PaperCell
from flatfed.papers.reproduce import chosen_cells, measured, remaining_work, seeded
from flatfed.runs.compare import run_folder
from flatfed.runs.folder import RunFolder

TABLE, METHODS = "fedsagd/table2", ["FedAvg", "FedSAGD"]
CHANGES = [
    "data.dataset=digits",
    "data.options={}",
    "model={name='mlp',hidden=[4]}",
    "partition={name='iid'}",
]


def cells() -> list[PaperCell]:
    return chosen_cells(TABLE, METHODS, "EMNIST-L", 1, "small", CHANGES)


def reproduce(root: Path) -> Result:
    words = [word for method in METHODS for word in ("--methods", method)]
    words += [word for change in CHANGES for word in ("--set", change)]
    words += ["--only", "EMNIST-L", "--rounds", "1", "--seeds", "2", "--scale", "small", "--runs", str(root)]
    return CliRunner().invoke(app, ["reproduce", TABLE, *words], terminal_width=200)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("papers") / "runs"
    done = reproduce(root)
    assert done.exit_code == 0, done.output
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "runs"))


def damage(folder: Path, name: str) -> None:
    if name == "checkpoint/server":
        (file,) = (folder / "checkpoint").glob("server-*.safetensors")
    else:
        file = folder / name
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


@pytest.mark.parametrize(
    "name",
    ["config.json", "history.jsonl", "clients.json", "model.safetensors", "checkpoint/manifest.json"],
)
def test_a_resumed_table_names_the_damaged_folder_and_shows_the_rest(root, name):
    first, second = cells()
    folder = run_folder(seeded(first, 1), root)
    damage(folder, name)
    shutil.rmtree(run_folder(seeded(second, 1), root))
    assert remaining_work(cells(), range(2), root).runs == 1
    done = reproduce(root)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    assert done.exit_code == 2 and folder.name in done.stderr
    assert "1 runs to do" in done.stdout
    assert RunFolder(run_folder(seeded(second, 1), root)).finished_rounds() == 1
    page = (root / "report-fedsagd-table2.html").read_text()
    for cell in (first, second):
        assert cell.label in done.stdout and cell.label in page


def test_a_run_that_cannot_be_measured_is_left_out_of_its_cell(root):
    cell = cells()[0]
    runs = [RunFolder(run_folder(seeded(cell, seed), root)) for seed in range(2)]
    object.__setattr__(cell, "statistics", {cell.column: "top eigenvalue"})
    (alone,) = [measured(cell, runs[:1])]
    damage(runs[1].path, "checkpoint/server")
    with pytest.warns(FlatfedWarning, match=runs[1].path.name):
        both = measured(cell, runs)
    assert alone is not None and both is not None and both.mean == alone.mean
