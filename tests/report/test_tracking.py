"""TensorBoard gets the history's numbers, also across a resumption and from the command line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from problems import train
from typer.testing import CliRunner

import flatfed as ff
from flatfed import cli
from flatfed.core.state import Dimensions
from flatfed.runs.folder import RunFolder

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits.toml"


def curves(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder)).Reload()
    return {tag: {each.step: each.value for each in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def progress(number: int, value: float) -> ff.Progress:
    line = {"round": number, "test_accuracy": value, "update_norm": 1.0}
    return ff.Progress(number, {}, {}, line, [0], Dimensions(1, (1,)))


def test_every_number_of_the_history_is_written(tmp_path):
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(8, 4, generator=generator), torch.randint(0, 2, (8,), generator=generator))
        for _ in range(3)
    ]
    federation = ff.Federation.from_tensors(clients, test=clients[0])
    run = train(
        torch.nn.Linear(4, 2),
        federation,
        ff.fedavg(),
        rounds=4,
        evaluate_every=2,
        callbacks=[lambda now: {"twice": 2.0 * now.round}, ff.TensorBoard(tmp_path / "curves")],
    )
    found = curves(tmp_path / "curves")
    for tag, key in (
        ("test/accuracy", "test_accuracy"),
        ("train/loss", "train_loss"),
        ("bytes/up", "bytes_up"),
        ("seconds", "seconds"),
        ("twice", "twice"),
    ):
        expected = {line["round"]: line[key] for line in run.history if key in line}
        assert found[tag] == pytest.approx(expected), tag
    assert "round" not in found
    assert list(found["test/accuracy"]) == [2, 4]


def test_rounds_that_are_run_again_replace_what_was_written(tmp_path):
    before = ff.TensorBoard(tmp_path)
    for number in range(1, 6):
        before(progress(number, 0.25))
    # Killed in round 6, with a checkpoint after round 3.
    after = ff.TensorBoard(tmp_path)
    for number in range(4, 8):
        after(progress(number, 0.5))
    assert curves(tmp_path)["test/accuracy"] == dict.fromkeys(range(1, 4), 0.25) | dict.fromkeys(
        range(4, 8), 0.5
    )


def test_nothing_is_written_before_the_first_round(tmp_path):
    ff.TensorBoard(tmp_path / "curves")
    assert not (tmp_path / "curves").exists()


def test_a_missing_package_is_said_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ff.FlatfedError, match=r"pip install 'flatfed\[tensorboard\]'"):
        ff.TensorBoard(tmp_path)


def test_run_and_resume_write_curves_under_the_run_folders_name(tmp_path):
    folder, tracked = tmp_path / "mine", tmp_path / "curves"
    short = ["--set", "training.rounds=2", "--set", "execution.workers=1", "--folder", str(folder)]
    assert (
        CliRunner().invoke(cli.app, ["run", str(EXAMPLE), *short, "--tensorboard", str(tracked)]).exit_code
        == 0
    )
    more = ["--rounds", "3", "--tensorboard", str(tracked)]
    assert CliRunner().invoke(cli.app, ["resume", str(folder), *more]).exit_code == 0
    expected = {line["round"]: line["test_accuracy"] for line in RunFolder(folder).read_history()}
    assert len(expected) == 3
    assert curves(tracked / "mine")["test/accuracy"] == pytest.approx(expected)


def test_compare_writes_curves_and_a_report(tmp_path):
    arguments = [
        "fedavg",
        "fedsam",
        "--seeds",
        "1",
        "--set",
        "training.rounds=2",
        "--runs",
        str(tmp_path / "runs"),
    ]
    done = CliRunner().invoke(cli.app, ["compare", *arguments, "--tensorboard", str(tmp_path / "curves")])
    assert done.exit_code == 0, done.output
    page = (tmp_path / "runs" / "report.html").read_text()
    assert "2 methods compared" in page and "rounds to 95" in page
    runs = {path.name for path in (tmp_path / "runs").iterdir() if path.is_dir()}
    assert {path.name for path in (tmp_path / "curves").iterdir()} == runs
