"""Client state: staged and committed rows, memory budgets, and populations far larger than memory."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from problems import Shared, train
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.state import Dimensions, Vector
from flatfed.engines.client_store import ClientStore
from flatfed.engines.processes import can_fork
from flatfed.engines.threads import single_threaded

VECTORS = (Vector("control"), Vector("last", initial="model"), Vector("scale", "inputs", 1.0))
DIMENSIONS = Dimensions(parameters=3, input_shape=(2,))
ROW = 3 + 3 + 2
BUDGETS = {"nothing": 0, "three rows": 3 * ROW * 8, "plenty": 10**6}

every_budget = pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS.keys())


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Problems as small as these only wait for torch's own threads."""
    with single_threaded():
        yield


def store(budget: int, folder: Path | None = None, dtype: torch.dtype = torch.float64) -> ClientStore:
    return ClientStore(VECTORS, DIMENSIONS, dtype, budget, folder)


def row(number: float) -> Tensor:
    return number + torch.arange(ROW).double() / 100


def put(target: ClientStore, rows: dict[int, float]) -> None:
    for client, number in rows.items():
        target.stage_row(client, row(number))
    target.commit()


# -- rows --------------------------------------------------------------------------------------------------


def test_a_client_starts_with_its_initial_vectors():
    received = torch.tensor([5.0, 6.0, 7.0]).double()
    vectors = store(0).read(4, received)
    assert {name: value.tolist() for name, value in vectors.items()} == {
        "control": [0, 0, 0],
        "last": [5, 6, 7],
        "scale": [1, 1],
    }
    assert {value.dtype for value in vectors.values()} == {torch.float64}


@every_budget
def test_vectors_come_back_as_they_were_staged(budget):
    kept = store(budget)
    state = {name: torch.rand(size).double() for name, size in (("scale", 2), ("control", 3), ("last", 3))}
    expected = {name: value.clone() for name, value in state.items()}
    kept.stage(7, state)
    kept.commit()
    for value in state.values():
        value.zero_()
    vectors = kept.read(7, torch.zeros(3).double())
    assert vectors.keys() == expected.keys()
    assert all(torch.equal(vectors[name], expected[name]) for name in expected)


@every_budget
def test_staged_rows_become_visible_together(budget):
    kept = store(budget)
    put(kept, {1: 10, 2: 20})
    kept.stage_row(2, row(21))
    kept.stage_row(3, row(30))
    assert kept.clients() == [1, 2]
    assert torch.equal(kept.row(2), row(20))
    assert kept.row(3) is None
    kept.commit()
    assert kept.clients() == [1, 2, 3]
    assert len(kept) == 3
    assert [float(kept.row(client)[0]) for client in (1, 2, 3)] == [10, 21, 30]


@every_budget
def test_discarded_rows_leave_no_trace(budget):
    kept = store(budget)
    put(kept, {1: 10})
    kept.changed.clear()
    kept.stage_row(1, row(11))
    kept.stage_row(2, row(20))
    kept.discard()
    assert kept.clients() == [1]
    assert torch.equal(kept.row(1), row(10))
    assert kept.changed == set()
    kept.commit()
    assert kept.clients() == [1]
    put(kept, {2: 22, 1: 12})
    assert [float(kept.row(client)[0]) for client in (1, 2)] == [12, 22]


@every_budget
def test_a_row_in_use_does_not_change_during_its_round(budget):
    kept = store(budget)
    put(kept, {1: 10})
    for number in range(1, 8):
        in_use = kept.row(1)
        put(kept, {1: 10 + number, 2: number})
        assert torch.equal(in_use, row(9 + number))


@every_budget
def test_changed_clients_are_those_since_the_last_checkpoint(budget):
    kept = store(budget)
    put(kept, {1: 1, 2: 2})
    put(kept, {2: 3})
    assert kept.changed == {1, 2}
    kept.changed.clear()
    put(kept, {2: 4, 5: 5})
    assert kept.changed == {2, 5}


@every_budget
def test_slots_are_used_again(budget):
    kept = store(budget)
    for number in range(60):
        put(kept, dict.fromkeys(range(5), number))
        kept.stage_row(0, row(-1))
        kept.discard()
    assert kept._slots <= 2 * 5
    assert all(torch.equal(kept.row(client), row(59)) for client in range(5))


@every_budget
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_file_grows_with_the_clients(budget, dtype, tmp_path):
    kept = store(budget, tmp_path, dtype)
    for start in range(0, 1000, 50):
        for client in range(start, start + 50):
            kept.stage_row(client, row(client).to(dtype))
        kept.commit()
    assert len(kept) == 1000
    assert all(torch.equal(kept.row(client), row(client).to(dtype)) for client in range(1000))
    assert kept.row(0).dtype == dtype
    # The file has no name: whatever ends the process also removes it.
    assert list(tmp_path.iterdir()) == []
    row_bytes = ROW * dtype.itemsize
    in_memory = min(1000, budget // row_bytes)
    rows = {"memory": in_memory, "scratch": 1000 - in_memory}
    assert kept.files.keys() == {kind for kind, count in rows.items() if count}
    for kind, file in kept.files.items():
        assert rows[kind] <= file.size / row_bytes <= max(2000, 2**16 / row_bytes)


@every_budget
def test_workers_stage_at_the_same_time(budget):
    kept = store(budget)
    put(kept, {client: client for client in range(400)})
    wrong: list[int] = []

    def work(first: int) -> None:
        for client in range(first, 400, 4):
            if not torch.equal(kept.row(client), row(client)):
                wrong.append(client)
            kept.stage_row(client, row(1000 + client))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.commit()
    assert wrong == []
    assert all(torch.equal(kept.row(client), row(1000 + client)) for client in range(400))


def large_store(budget: int) -> ClientStore:
    """With rows that do not fit into what a file has at first."""
    return ClientStore([Vector("control")], Dimensions(20_000, (2,)), torch.float32, budget)


@pytest.mark.parametrize("budget", [0, 2**30])
def test_threads_and_forks_keep_large_rows_at_the_same_time(budget):
    for trial in range(20):
        kept = large_store(budget)
        places = [kept.reserve(client).new for client in range(12)]

        def work(slots: list[int], kept: ClientStore = kept, trial: int = trial) -> None:
            for slot in slots:
                kept.write(slot, {"control": torch.full((20_000,), float(trial + slot))})

        child = os.fork() if can_fork() else None
        if child == 0:
            work(places[:4])
            os._exit(0)
        threads = [threading.Thread(target=work, args=(own,)) for own in (places[4:8], places[8:])]
        if child is None:
            work(places[:4])
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert child is None or os.waitpid(child, 0)[1] == 0
        kept.commit()
        for client, slot in enumerate(places):
            assert torch.equal(kept.row(client), torch.full((20_000,), float(trial + slot)))


# -- training ----------------------------------------------------------------------------------------------


def own_samples(client: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(client)
    inputs = torch.randn(6, 5, generator=generator)
    return inputs, torch.randint(0, 3, (6,), generator=generator)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_the_memory_budget_does_not_change_a_bit(path):
    torch.manual_seed(0)
    model = nn.Linear(5, 3)
    data = ff.Federation.from_function(9, own_samples)
    one_row = 2 * 18 * 4 / 2**20
    runs = [
        train(
            model,
            data,
            ff.fedlesam_s(),
            rounds=4,
            participants=5,
            local_steps=2,
            batch_size=3,
            path=path,
            workers=3 if path == "client" else 1,
            client_memory=budget,
        )
        # Five take part: with room for seven, the file is only made in the second round.
        for budget in (0.0, 2.5 * one_row, 7.5 * one_row, 1024.0)
    ]
    both = {"memory", "scratch"}
    assert [set(run.clients.files) for run in runs] == [{"scratch"}, both, both, {"memory"}]
    *others, last = runs
    assert len(last.clients) > 5
    for run in others:
        assert all(torch.equal(value, last.server[name]) for name, value in run.server.items())
        assert run.clients.clients() == last.clients.clients()
        for client in run.clients.clients():
            assert torch.equal(run.clients.row(client), last.clients.row(client))


@pytest.mark.parametrize("workers", [1, 2])
def test_client_state_goes_with_its_run(workers):
    data = ff.Federation.from_function(9, own_samples)
    run = train(nn.Linear(5, 3), data, ff.scaffold(), rounds=1, local_steps=1, batch_size=3, workers=workers)
    files = [weakref.ref(file) for file in run.clients.files.values()]
    assert files
    del run
    assert [file() for file in files] == [None]


def test_a_million_clients():
    cohorts: list[int] = []
    loaded = Shared()

    def load(client: int) -> tuple[Tensor, Tensor]:
        loaded.append(client)
        return own_samples(client)

    run = train(
        nn.Linear(5, 3),
        ff.Federation.from_function(1_000_000, load),
        ff.scaffold(),
        rounds=5,
        participants=10,
        local_steps=2,
        batch_size=3,
        callbacks=[lambda progress: cohorts.extend(progress.cohort)],
    )
    assert len(cohorts) == 50
    assert max(cohorts) > 500_000
    assert run.clients.clients() == sorted(set(cohorts))
    # Client 0 is loaded twice more, when the model is first tried: its data must be the same each time.
    assert sorted(loaded) == sorted([0, 0, *cohorts])


GROWTH = """
import re, resource, sys
from pathlib import Path
import torch
import flatfed as ff

def load(client):
    generator = torch.Generator().manual_seed(client)
    return torch.randn(6, 5, generator=generator), torch.randint(0, 3, (6,), generator=generator)

def peak(population):
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if forget.exists():
        forget.write_text("5")
    task = ff.Task(torch.nn.Linear(5, 3), ff.Federation.from_function(population, load))
    training = ff.Training(rounds=4, participants=10, local_steps=2, batch_size=3)
    ff.train(task, ff.scaffold(), training, ff.Execution(workers=1))
    if status.exists():
        return int(re.search(r"VmHWM:\\s+(\\d+) kB", status.read_text())[1])
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)

peak(1_000)
few = peak(1_000)
print(peak(1_000_000) - few)
"""
"""Kilobytes by which the peak grows; Linux's getrusage would count the parent's memory before the exec."""


def test_memory_does_not_depend_on_the_population():
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True, timeout=120
    )
    # One number for each of a million clients would be 8,000 kB.
    assert int(done.stdout) < 3_000
