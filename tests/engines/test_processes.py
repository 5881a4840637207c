"""Workers in processes of their own: the same bits, and nobody left behind whatever happens."""

from __future__ import annotations

import copy
import multiprocessing
import os
import pickle
import platform
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
from problems import Shared
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.errors import DivergedError
from flatfed.engines.memory import GrowingMemory
from flatfed.engines.messages import Packed
from flatfed.engines.processes import Channel, WorkerPool, can_fork
from flatfed.engines.sums import CohortSums, Piece

pytestmark = pytest.mark.skipif(
    not can_fork(), reason="processes are forked, which needs Linux without an accelerator"
)


def federation(clients: int = 9, features: int = 4) -> ff.Federation:
    generator = torch.Generator().manual_seed(0)
    return ff.Federation.from_tensors(
        [
            (torch.randn(6, features, generator=generator), torch.randint(3, (6,), generator=generator))
            for _ in range(clients)
        ]
    )


def train(algorithm: ff.Algorithm, **changed: Any) -> ff.Run:
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 3))
    return problems.train(
        model,
        federation(),
        algorithm,
        rounds=3,
        participants=7,
        local_steps=2,
        batch_size=3,
        lr=0.1,
        **changed,
    )


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedsmoo", "fedmoswa", "fednsam"])
def test_processes_threads_and_one_worker_give_the_same_bits(name, monkeypatch):
    alone = train(ff.build(name), workers=1)
    processes = train(ff.build(name), workers=3)
    monkeypatch.setattr("flatfed.engines.processes.can_fork", lambda: False)
    threads = train(ff.build(name), workers=3)
    for other in (processes, threads):
        assert other.server.keys() == alone.server.keys()
        for key, value in alone.server.items():
            assert torch.equal(other.server[key], value), key
        for key, value in alone.model.state_dict().items():
            assert torch.equal(other.model.state_dict()[key], value), key
        assert [line["train_loss"] for line in other.history] == [
            line["train_loss"] for line in alone.history
        ]


def test_training_really_happens_in_other_processes():
    seen = Shared()

    class Spy(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            seen.append(os.getpid())
            return super().forward(inputs)

    problems.train(
        Spy(4, 3), federation(), ff.fedavg(), rounds=2, local_steps=1, batch_size=3, path="client", workers=2
    )
    others = set(seen) - {os.getpid()}
    assert len(others) == 2
    assert not any(map(alive, others))


def test_the_callers_autocast_stays_with_the_caller():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        alone, together = (train(ff.fedavg(), workers=workers) for workers in (1, 3))
    assert torch.equal(alone.server["model"], together.server["model"])


def alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


# -- the pool ----------------------------------------------------------------------------------------------


@pytest.fixture
def pool() -> Iterator[Any]:
    pools: list[WorkerPool] = []

    def make(work: Any, size: int = 2) -> WorkerPool:
        pools.append(WorkerPool(work, copy.deepcopy, size))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def test_answers_come_in_the_order_of_the_jobs(pool):
    def work(job: int) -> int:
        time.sleep(0.02 if job % 3 == 0 else 0.0)
        return 10 * job

    together = pool(work, 3)
    assert list(together.in_order(range(20))) == [10 * job for job in range(20)]
    assert list(together.in_order([])) == []
    assert list(together.in_order([7])) == [70]


def test_tensors_of_every_kind_and_size_arrive_as_they_were(pool):
    jobs = [
        {"a": torch.randn(count, 3), "empty": torch.empty(0, 2), "scalar": torch.tensor(1.5)}
        | {"turned": torch.arange(6).view(2, 3).t(), "flag": torch.tensor([True, False])}
        | {"half": torch.ones(3, dtype=torch.bfloat16), "same": [torch.ones(2)] * 2}
        for count in (1, 5, 100_000, 2, 400_000)
    ]
    for job, answer in zip(jobs, pool(lambda job: (job, os.getpid())).in_order(jobs), strict=True):
        received, process = answer
        assert process != os.getpid()
        assert received.keys() == job.keys()
        for name in set(job) - {"same"}:
            assert received[name].dtype == job[name].dtype
            assert torch.equal(received[name], job[name]), name
        assert torch.equal(received["same"][1], torch.ones(2))


def test_what_is_taken_of_an_answer_is_not_overwritten_by_the_next(pool):
    answers = list(pool(lambda job: torch.full((1000,), float(job)), 1).in_order(range(5)))
    assert [set(answer.tolist()) for answer in answers] == [{float(job)} for job in range(5)]


def test_memory_grows_and_is_seen_from_both_ends():
    sizes = (3, 50_000, 1_000_000)
    one, other = multiprocessing.Pipe()
    memories = GrowingMemory(), GrowingMemory()
    near, far = Channel(one, *memories), Channel(other, *reversed(memories))
    try:
        near.send([torch.full((size,), float(size)) for size in sizes])
        tensors = far.receive()
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors)
        for tensor, size in zip(tensors, sizes, strict=True):
            assert torch.equal(tensor, torch.full((size,), float(size)))
    finally:
        near.close()
        other.close()


def test_a_packed_message_is_the_message():
    """As Ray hands it on: with arrays that must not be written to."""
    message = {
        "model": torch.randn(5, 3).t(),
        "half": torch.ones(3, dtype=torch.bfloat16),
        "none": torch.empty(0, 2),
        "one": torch.tensor(1.5, dtype=torch.float64),
        "piece": (Piece(3, 2, CohortSums(uploads={"a": torch.arange(4)})), "text", None),
    }
    packed = pickle.loads(pickle.dumps(Packed.of(message)))
    for array in packed.arrays:
        array.flags.writeable = False
    received = packed.message()
    for name in ("model", "half", "none", "one"):
        assert received[name].dtype == message[name].dtype and torch.equal(received[name], message[name])
        received[name].zero_()
    piece, *rest = received["piece"]
    assert (piece.start, piece.length, rest) == (3, 2, ["text", None])
    assert piece.sums.uploads["a"].tolist() == [0, 1, 2, 3]
    assert torch.equal(packed.message()["model"], message["model"])


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries manage memory otherwise")
def test_workers_do_not_ask_for_the_same_memory_again(pool):
    def work(job: int) -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        # More than a heap of glibc's holds in all, and given back before the next job.
        blocks = [torch.ones(2**22) for _ in range(6)]
        assert all(float(block[-1]) == 1 for block in blocks)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    pages = 6 * 2**22 * 4 // resource.getpagesize()
    faults = list(pool(work, 1).in_order(range(12)))
    # Blocks need not come to lie where others have been at once, but soon enough.
    assert pages <= faults[0] <= sum(faults) < 3 * pages


def test_an_error_is_raised_here_with_an_account_of_there(pool):
    def work(job: int) -> int:
        if job == 3:
            raise DivergedError("round 3: the loss is not finite")
        return job

    together, answers = pool(work), []
    with pytest.raises(DivergedError, match="the loss is not finite") as raised:
        answers.extend(together.in_order(range(10)))
    assert "in work" in str(raised.value.__cause__)
    assert answers == list(range(len(answers)))
    assert multiprocessing.active_children() == []
    # It can be used again.
    assert list(together.in_order([1, 2])) == [1, 2]


def test_of_several_errors_the_first_in_order_is_raised_whoever_was_faster(pool):
    def work(job: int) -> int:
        time.sleep(0.3 if job == 1 else 0.0)
        if job > 0:
            raise ValueError(f"job {job}")
        return job

    answers: list[int] = []
    with pytest.raises(ValueError, match="job 1"):
        answers.extend(pool(work, 3).in_order(range(9)))
    assert answers == [0]


def test_an_error_that_cannot_travel_is_described(pool):
    class Odd(Exception):
        def __reduce__(self) -> Any:
            raise TypeError("never")

    def work(job: int) -> int:
        raise Odd("strange")

    with pytest.raises(RuntimeError, match="Odd: strange"):
        list(pool(work).in_order([1]))


def test_an_exit_in_the_work_is_an_exit_here(pool):
    def work(job: int) -> int:
        raise SystemExit(3)

    with pytest.raises(SystemExit) as raised:
        list(pool(work).in_order([1]))
    assert raised.value.code == 3


def test_nothing_is_left_open_after_an_error(pool):
    def work(job: int) -> Any:
        if job == 5:
            raise ValueError("five")
        return torch.ones(10)

    def failed() -> int:
        with pytest.raises(ValueError, match="five"):
            list(pool(work).in_order(range(8)))
        return len(list(Path("/proc/self/fd").iterdir()))

    assert failed() == failed() == failed()


def test_a_process_that_is_killed_ends_the_round_in_one_line(pool):
    def work(job: int) -> int:
        if job == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return job

    with pytest.raises(ff.FlatfedError, match=r"workers: .*SIGKILL.*fewer") as raised:
        list(pool(work).in_order(range(10)))
    assert "\n" not in str(raised.value)
    assert multiprocessing.active_children() == []


def test_a_process_that_was_killed_while_idle_is_noticed(pool):
    together = pool(lambda job: job)
    assert list(together.in_order(range(4))) == [0, 1, 2, 3]
    for child in multiprocessing.active_children():
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    with pytest.raises(ff.FlatfedError, match="SIGKILL"):
        list(together.in_order(range(4)))


def test_nobody_works_on_when_the_answers_are_left(pool):
    answers = pool(lambda job: time.sleep(60 * job)).in_order(range(3))
    assert next(answers) is None
    began = time.monotonic()
    answers.close()
    assert multiprocessing.active_children() == []
    assert time.monotonic() - began < 30


ORPHANS = """
import copy, os, sys, time
from flatfed.engines.processes import WorkerPool

def work(job):
    os.write(1, b"%d\\n" % os.getpid())  # in one piece, whatever the buffering
    time.sleep(600)

list(WorkerPool(work, copy.deepcopy, 2).in_order([1, 2]))
"""


def test_processes_do_not_outlive_the_one_that_trains():
    training = subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True)
    children = [int(training.stdout.readline()) for _ in range(2)]
    training.kill()
    training.wait()
    deadline = time.monotonic() + 20
    while any(map(alive, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(alive, children))


def test_a_keyboard_interrupt_ends_everything_at_once():
    training = subprocess.Popen(
        [sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    children = [int(training.stdout.readline()) for _ in range(2)]
    os.killpg(training.pid, signal.SIGINT)
    _, complaints = training.communicate(timeout=30)
    assert complaints.rstrip().endswith("KeyboardInterrupt")
    assert not any(map(alive, children))


PRINTS = """
import torch, flatfed as ff
import torch.nn.functional as F

def loss(outputs, targets):
    print("loss")
    return F.cross_entropy(outputs, targets)

data = ff.Federation.from_tensors([(torch.ones(2, 3), torch.zeros(2, dtype=torch.int64))] * 2)
print("before", end="")
task = ff.Task(torch.nn.Linear(3, 2), data, loss=loss)
training = ff.Training(rounds=2, local_steps=1, batch_size=2, lr=0.1, path="client")
ff.train(task, ff.fedavg(), training, ff.Execution(workers=2))
"""


def test_what_is_printed_in_training_appears_once():
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS], capture_output=True, text=True, check=True, env=environment
    )
    assert done.stdout.count("before") == 1
    # Three times when the model is tried, and in two rounds of two clients.
    assert done.stdout.count("loss") == 3 + 2 * 2


def test_beside_an_accelerator_threads_train(monkeypatch):
    """There torch cannot differentiate in a fork."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    assert not can_fork()
    assert torch.isfinite(train(ff.fedavg(), workers=2).server["model"]).all()


def test_a_daemon_trains_in_threads(monkeypatch):
    monkeypatch.setattr(multiprocessing.process.current_process(), "_config", {"daemon": True})
    assert not can_fork()
    assert torch.isfinite(train(ff.fedavg(), workers=2).server["model"]).all()
