"""A training of milliseconds, with state on the server and on clients, and ways to compare its runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
from torch import Tensor, nn

import flatfed as ff

CLIENTS, FEATURES, CLASSES = 6, 5, 3
CONFIG = """
[data]
clients = 10
[model]
name = "mlp"
hidden = [4]
[training]
rounds = 2
participants = 2
local_steps = 1
batch_size = 4
[execution]
workers = 1
checkpoint_every = 1
"""


def federation() -> ff.Federation:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(8, FEATURES, generator=generator) for _ in range(CLIENTS)]
    targets = [torch.randint(0, CLASSES, (8,), generator=generator) for _ in range(CLIENTS)]
    return ff.Federation.from_tensors(list(zip(inputs, targets, strict=True)))


def plain() -> nn.Module:
    model = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        model.weight.fill_(0.1)
        model.bias.zero_()
    return model


def train(folder: Path | str | None, rounds: int, model: nn.Module | None = None, **changed: Any) -> ff.Run:
    model = plain() if model is None else model
    settings = {
        "algorithm": ff.fedmoswa(),
        "participants": 2,
        "local_steps": 2,
        "batch_size": 4,
        "workers": 1,
        "checkpoint_every": 2,
        **changed,
    }
    return problems.train(
        model, federation(), settings.pop("algorithm"), rounds=rounds, folder=folder, **settings
    )


def state(run: ff.Run) -> dict[str, Tensor]:
    """Everything that a run remembers."""
    rows = {f"client {client}": run.clients.row(client) for client in run.clients.clients()}
    return {**run.server, **rows, **run.model.state_dict()}


def without_seconds(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in history]


def assert_same(left: ff.Run, right: ff.Run) -> None:
    ours, theirs = state(left), state(right)
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert without_seconds(left.history) == without_seconds(right.history)


def refusal(call: Callable[[], object], kind: type[Exception] = ff.FlatfedError) -> str:
    """The one line with which a call is refused; the exception itself, and what it holds, is not kept."""
    try:
        call()
    except kind as error:
        message = str(error)
    else:
        pytest.fail("it was not refused")
    assert "\n" not in message
    return message


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, without the lock and what differs from machine to machine."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in {".lock", "environment.json"}
    }


def manifest(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "checkpoint" / "manifest.json").read_text())


def wait_for_checkpoint(folder: Path, round_number: int) -> None:
    """Waits until the checkpoint of a round, which is written beside the training, is complete."""
    deadline = time.monotonic() + 30
    while True:
        written = manifest(folder)
        if written["round"] == round_number:
            stored = ([written["server"]] if written["server"] else []) + written["clients"]
            if {path.name for path in (folder / "checkpoint").glob("*.safetensors")} == {
                entry["name"] for entry in stored
            }:
                return
        assert time.monotonic() < deadline, f"no checkpoint of round {round_number}"
        time.sleep(0.001)


def interrupt(at: int) -> Callable[[ff.Progress], None]:
    def callback(progress: ff.Progress) -> None:
        if progress.round == at:
            raise KeyboardInterrupt

    return callback
