"""Workers that are killed, stopped or short of memory: the same bits afterwards, or one line to say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from problems import Shared, train
from torch import Tensor, nn

import flatfed as ff
from flatfed.engines import processes
from flatfed.engines.processes import WorkerPool, can_fork

pytestmark = pytest.mark.skipif(not can_fork(), reason="processes are forked, which needs Linux")

WORK = {"rounds": 4, "local_steps": 1, "batch_size": 3, "path": "client", "workers": 2, "checkpoint_every": 1}


def clients() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(6, 4, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(6)
    ]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 3)


def federation(act: Callable[[int], object] = lambda client: None) -> ff.Federation:
    """`act` is what happens when a worker process loads a client's data."""
    data, main = clients(), os.getpid()

    def load(client: int) -> tuple[Tensor, Tensor]:
        if os.getpid() != main:
            act(client)
        return data[client]

    return ff.Federation.from_function(6, load)


def faulty(fault: Callable[[], object], folder: Path, after: int) -> Callable[[int], object]:
    """The fault happens once, in whatever worker loads data for the `after`-th time or soon after that."""
    loads = Shared()

    def act(client: int) -> None:
        loads.append(client)
        if len(loads) >= after:
            try:
                (folder / "happened").touch(exist_ok=False)
            except FileExistsError:
                return
            fault()

    return act


def task(act: Callable[[int], object] = lambda client: None) -> dict[str, Any]:
    return {"model": model(), "federation": federation(act), "name": "faults", "version": "1"}


def trained(folder: Path | None = None, **options: Any) -> ff.Run:
    given = task(**options)
    return train(given.pop("model"), given.pop("federation"), ff.scaffold(), folder=folder, **given, **WORK)


def same(one: ff.Run, other: ff.Run) -> bool:
    names = one.server.keys() | other.server.keys()
    states = [(one.clients.row(client), other.clients.row(client)) for client in other.clients.clients()]
    return all(torch.equal(one.server[name], other.server[name]) for name in names) and all(
        torch.equal(*rows) for rows in states
    )


@pytest.mark.parametrize(
    ("number", "after"),
    [
        (signal.SIGKILL, 1),
        (signal.SIGKILL, 9),
        (signal.SIGKILL, 14),
        (signal.SIGTERM, 9),
        (signal.SIGSEGV, 9),
    ],
)
def test_a_killed_worker_is_named_and_the_run_goes_on_with_the_same_bits(tmp_path, number, after):
    fault = faulty(lambda: os.kill(os.getpid(), number), tmp_path, after)
    with pytest.raises(ff.FlatfedError, match=f"workers: one of their processes .*{number.name}") as caught:
        trained(tmp_path / "run", act=fault)
    assert "\n" not in str(caught.value)
    assert torch.get_num_threads() == 1
    assert same(trained(tmp_path / "run"), trained())


def test_a_worker_that_ends_by_itself_is_named(tmp_path):
    with pytest.raises(ff.FlatfedError, match="ended with exit code 7"):
        trained(tmp_path / "run", act=faulty(lambda: os._exit(7), tmp_path, 8))
    assert same(trained(tmp_path / "run"), trained())


def test_a_worker_killed_between_rounds_is_named():
    pool = WorkerPool(lambda job: os.getpid(), int, 1)
    try:
        (process,) = pool.in_order([None])
        os.kill(process, signal.SIGKILL)
        with pytest.raises(ff.FlatfedError, match="SIGKILL"):
            list(pool.in_order([None, None]))
        (again,) = pool.in_order([None])
        assert again != process
    finally:
        pool.close()


def test_a_stopped_worker_does_not_hang_the_run_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.05)
    with pytest.raises(ff.FlatfedError, match="has been stopped"):
        trained(tmp_path / "run", act=faulty(lambda: os.kill(os.getpid(), signal.SIGSTOP), tmp_path, 9))
    assert same(trained(tmp_path / "run"), trained())


def test_a_worker_that_is_stopped_for_a_while_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "LOOK_SECONDS", 0.2)
    pids = Shared()

    def stop() -> None:
        pids.append(os.getpid())
        os.kill(os.getpid(), signal.SIGSTOP)

    def go_on() -> None:
        while not len(pids) or not stopped(pids[0]):
            time.sleep(0.01)
        os.kill(pids[0], signal.SIGCONT)

    thread = threading.Thread(target=go_on)
    thread.start()
    run = trained(act=faulty(stop, tmp_path, 9))
    thread.join()
    assert same(run, trained())


def stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.parametrize(
    "allocate", [lambda: torch.empty(2**60), lambda: np.empty(2**55)], ids=["torch", "numpy"]
)
@pytest.mark.parametrize("workers", [1, 2])
def test_a_worker_without_memory_says_so(allocate, workers):
    def load(client: int) -> tuple[Tensor, Tensor]:
        # Not in the trial of client 0, which comes first.
        if client == 3:
            allocate()
        return clients()[client]

    with pytest.raises(ff.FlatfedError, match="memory ran out with the data of client 3") as caught:
        train(model(), ff.Federation.from_function(6, load), ff.scaffold(), **{**WORK, "workers": workers})
    assert "\n" not in str(caught.value)


IGNORED = """
import torch
import flatfed as ff
torch.set_num_threads(2)
torch.manual_seed(0)
data = [(torch.randn(6, 4), torch.randint(0, 3, (6,))) for _ in range(6)]
task = ff.Task(torch.nn.Linear(4, 3), ff.Federation.from_tensors(data))
training, execution = ff.Training(rounds=2, path="client"), ff.Execution(workers=2)
run = ff.train(task, ff.fedavg(), training, execution)
print(len(run.history), torch.get_num_threads())
"""


def test_a_parent_that_ignores_the_end_of_children_is_no_trouble():
    done = subprocess.run(
        [sys.executable, "-c", IGNORED],
        preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(ff.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["2", "2"]
