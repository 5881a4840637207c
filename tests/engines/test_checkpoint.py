"""Run folders: whatever interrupts a run, it goes on to the same bits, and damage is noticed."""

from __future__ import annotations

import errno
import itertools
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import problems
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from small_runs import (
    CLASSES,
    CLIENTS,
    FEATURES,
    assert_same,
    contents,
    federation,
    interrupt,
    manifest,
    plain,
    refusal,
    train,
    wait_for_checkpoint,
    without_seconds,
)
from torch import Tensor, nn

import flatfed as ff
from flatfed.engines.threads import single_threaded
from flatfed.runs import environment, files
from flatfed.runs.checkpoint import Checkpoints, PendingCheckpoint
from flatfed.runs.history import WrittenHistory
from flatfed.training import loop as run

VERSION = {"name": "test", "version": "1"}
"""For runs that are continued though their loss is a function inside a test."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Problems as small as these only wait for torch's own threads."""
    with single_threaded():
        yield


@pytest.fixture(autouse=True)
def no_git(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "source_commit", lambda: None)


def busy() -> nn.Module:
    """Random numbers in every step, and buffers of two kinds."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(FEATURES), nn.Dropout(), nn.Linear(FEATURES, CLASSES))


def fail_after(monkeypatch: pytest.MonkeyPatch, calls: int) -> list[int]:
    """From now on the disk is full at one of the times that something is written through to it."""
    left = [calls]

    def fsync(handle: int) -> None:
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        os.fdatasync(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    return left


# -- going on ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, busy], ids=lambda make: make.__name__)
@pytest.mark.parametrize("stops", [[2], [3], [1, 2, 3, 4]], ids=str)
def test_more_rounds_go_on_from_the_last(make, stops, tmp_path):
    for rounds in stops:
        train(tmp_path, rounds, make())
    resumed, whole = train(tmp_path, 5, make()), train(None, 5, make())
    assert_same(resumed, whole)
    saved = load_file(tmp_path / "model.safetensors")
    assert saved.keys() == whole.model.state_dict().keys()
    assert all(torch.equal(saved[name], value) for name, value in whole.model.state_dict().items())
    recorded = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert recorded == resumed.history


def test_a_finished_run_is_not_trained_again(tmp_path):
    first = train(tmp_path, 3)
    before = contents(tmp_path)
    trained: list[int] = []
    again = train(tmp_path, 3, callbacks=[lambda progress: trained.append(progress.round)])
    assert trained == []
    assert_same(first, again)
    assert contents(tmp_path) == before


def test_what_does_not_change_numbers_may_change(tmp_path):
    train(tmp_path, 2)
    resumed = train(tmp_path, 5, workers=3, client_memory=0.0, checkpoint_every=1)
    assert_same(resumed, train(None, 5))


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"lr": 0.3}, "lr"),
        ({"seed": 7}, "seed"),
        ({"batch_size": 3}, "batch_size"),
        ({"weighting": "samples"}, "weighting"),
        ({"algorithm": ff.scaffold()}, "algorithm.name"),
        ({"algorithm": ff.fedmoswa(momentum_rate=0.5)}, "algorithm.momentum_rate"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_another_configuration_is_refused_by_field(changed, field, tmp_path):
    train(tmp_path, 2)
    before = contents(tmp_path)
    message = refusal(lambda: train(tmp_path, 4, **changed))
    assert f"{field} = " in message
    assert str(tmp_path) in message
    assert contents(tmp_path) == before


@pytest.mark.parametrize("memory", [0.0, 1024.0])
@pytest.mark.parametrize(
    "other",
    [nn.Linear(FEATURES, CLASSES + 1), nn.Linear(FEATURES, CLASSES, bias=False)],
    ids=["wider", "smaller"],
)
def test_another_model_is_refused(other, memory, tmp_path):
    train(tmp_path, 2)
    message = refusal(lambda: train(tmp_path, 4, other, client_memory=memory))
    assert str(tmp_path) in message
    assert "model" in message


def test_another_precision_is_refused(tmp_path):
    train(tmp_path, 2)
    clients = [data for number in range(CLIENTS) if (data := federation().client(number))]
    double = ff.Federation.from_tensors(
        [(data.inputs[data.rows].double(), data.targets[data.rows]) for data in clients]
    )
    message = refusal(
        lambda: problems.train(
            plain().double(),
            double,
            ff.fedmoswa(),
            rounds=4,
            participants=2,
            local_steps=2,
            batch_size=4,
            folder=tmp_path,
        )
    )
    assert str(tmp_path) in message


def test_fewer_rounds_are_refused_and_nothing_is_lost(tmp_path):
    finished = train(tmp_path, 4)
    before = contents(tmp_path)
    assert "rounds = 2" in refusal(lambda: train(tmp_path, 2))
    assert contents(tmp_path) == before
    assert_same(train(tmp_path, 4), finished)


def test_one_folder_is_for_one_run_at_a_time(tmp_path):
    messages = []
    train(tmp_path, 2, callbacks=[lambda _: messages.append(refusal(lambda: train(tmp_path, 2)))])
    assert len(messages) == 2
    assert all(str(tmp_path) in message and "running" in message for message in messages)


def test_a_refused_run_gives_its_folder_back(tmp_path):
    train(tmp_path, 2)
    # As in a notebook, the last exception stays alive with all its frames.
    with pytest.raises(ff.FlatfedError, match="lr") as kept:
        train(tmp_path, 4, lr=0.3)
    assert_same(train(tmp_path, 4), train(None, 4))
    assert kept.value is not None


# -- interruptions -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [plain, busy], ids=lambda make: make.__name__)
def test_an_interrupted_run_is_saved(make, tmp_path):
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 6, make(), callbacks=[interrupt(4)], checkpoint_every=100)
    assert manifest(tmp_path)["round"] == 3
    assert len((tmp_path / "history.jsonl").read_text().splitlines()) == 3
    assert not (tmp_path / "model.safetensors").exists()
    assert_same(train(tmp_path, 6, make()), train(None, 6, make()))


def test_an_interrupt_in_the_middle_of_a_round_leaves_no_half_of_it(tmp_path):
    rounds, calls = [0], [0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls[0] += rounds[0] == 3
        # Two participants with two steps each: the first has finished and has been staged.
        if calls[0] == 4:
            raise KeyboardInterrupt
        return F.cross_entropy(outputs, targets)

    def count(progress: ff.Progress) -> None:
        rounds[0] = progress.round

    options: dict[str, Any] = {"path": "client", "loss": loss, **VERSION, "checkpoint_every": 100}
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, 5, callbacks=[count], **options)
    assert manifest(tmp_path)["round"] == 3
    rounds[0] = calls[0] = 0
    assert_same(train(tmp_path, 5, **options), train(None, 5, path="client", loss=loss))


def nan(loss: Tensor) -> Tensor:
    return loss * float("nan")


def only_the_loss_is_nan(loss: Tensor) -> Tensor:
    """The gradient, and with it the model, stays finite."""
    return loss + float("nan")


def infinite_slope(loss: Tensor) -> Tensor:
    """A finite loss whose gradient is not."""
    return loss + (loss - loss.detach()).abs().sqrt()


@pytest.mark.parametrize(
    "break_loss", [nan, only_the_loss_is_nan, infinite_slope], ids=lambda break_loss: break_loss.__name__
)
@pytest.mark.parametrize("path", ["matrix", "client"])
def test_divergence_keeps_the_last_good_state(break_loss, path, tmp_path):
    rounds = [0]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        return break_loss(value) if rounds[0] == 3 else value

    def count(progress: ff.Progress) -> None:
        rounds[0] = progress.round

    options: dict[str, Any] = {"path": path, "loss": loss, **VERSION, "checkpoint_every": 100}
    message = refusal(lambda: train(tmp_path, 5, callbacks=[count], **options), ff.DivergedError)
    assert message.startswith("round 4: ")
    assert "lr" in message
    assert str(tmp_path) in message
    assert manifest(tmp_path)["round"] == 3
    rounds[0] = 0
    assert_same(train(tmp_path, 5, **options), train(None, 5, path=path, loss=loss))


def test_an_upload_that_is_not_finite_is_noticed_before_the_model_is():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        value = F.cross_entropy(outputs, targets)
        # A pass over all eight samples of a client, beside the local steps.
        return infinite_slope(value) if len(targets) == 8 else value

    message = refusal(lambda: train(None, 3, algorithm=ff.mimelite(), loss=loss), ff.DivergedError)
    assert message.startswith("round 1: ")
    assert "full_gradient" in message


def test_long_rounds_are_saved_by_the_clock(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "CHECKPOINT_SECONDS", 0.0)
    saved, really_save = [], Checkpoints.save

    def save(self: Checkpoints, pending: PendingCheckpoint, history: WrittenHistory) -> None:
        really_save(self, pending, history)
        saved.append(manifest(tmp_path)["round"])

    monkeypatch.setattr(Checkpoints, "save", save)
    train(tmp_path, 3, checkpoint_every=100)
    assert saved == [1, 2, 3]


# -- full disks --------------------------------------------------------------------------------------------


def test_every_write_may_fail(tmp_path, monkeypatch):
    begun, whole = tmp_path / "begun", train(None, 3)
    train(begun, 1, checkpoint_every=1)
    failures = 0
    while True:
        folder = tmp_path / str(failures)
        shutil.copytree(begun, folder)
        with monkeypatch.context() as patch:
            fail_after(patch, failures + 1)
            try:
                train(folder, 3, checkpoint_every=1)
            except OSError as error:
                assert error.errno == errno.ENOSPC
            else:
                break
        failures += 1
        assert_same(train(folder, 3), whole)
        assert sorted(path.name for path in folder.iterdir()) == [
            "checkpoint",
            "clients.json",
            "config.json",
            "environment.json",
            "history.jsonl",
            "identity.json",
            "model.safetensors",
        ]
        checkpoint = manifest(folder)
        named = {checkpoint["server"]["name"], *(entry["name"] for entry in checkpoint["clients"])}
        on_disk = {path.name for path in (folder / "checkpoint").iterdir()}
        assert named < on_disk
        assert {name for name in on_disk if name.startswith(".")} <= {".lock"}
    # Config, identity, environment, history, two checkpoints of three files, the clients' metrics, the model.
    assert failures >= 4 + 2 * 3 + 2


def test_a_file_that_cannot_grow_leaves_the_old_checkpoint(tmp_path):
    """A real limit of the system: writing stops in the middle of the server's file."""
    wide = nn.Linear(FEATURES, 300)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def limit(progress: ff.Progress) -> None:
        if progress.round == 3:
            wait_for_checkpoint(tmp_path, 2)
            resource.setrlimit(resource.RLIMIT_FSIZE, (6000, hard))

    try:
        with pytest.raises(OSError, match="large"):
            train(tmp_path, 6, wide, callbacks=[limit])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert manifest(tmp_path)["round"] == 2
    assert [path.name for path in tmp_path.rglob(".*") if path.name != ".lock"] == []
    assert_same(train(tmp_path, 6, wide), train(None, 6, wide))


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "file"
    files.write_atomically(path, b"old")
    with monkeypatch.context() as patch:
        fail_after(patch, 1)
        with pytest.raises(OSError, match="No space"):
            files.write_atomically(path, b"new")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"old"}
    files.write_atomically(path, b"new")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"file": b"new"}


# -- damage ------------------------------------------------------------------------------------------------


def flipped(content: bytes) -> bytes:
    middle = len(content) * 3 // 4
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


DAMAGES: dict[str, Callable[[bytes], bytes | None]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "one byte short": lambda content: content[:-1],
    "one bit flipped": flipped,
    "garbage": lambda content: b"\x80\x04\x95" + content[3:],
    "missing": lambda content: None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("prefix", ["server-", "clients-"])
def test_damaged_tensors_are_refused(prefix, damage, tmp_path):
    train(tmp_path, 2)
    (path, *_) = sorted((tmp_path / "checkpoint").glob(f"{prefix}*"))
    good = path.read_bytes()
    bad = DAMAGES[damage](good)
    if bad is None:
        path.unlink()
    else:
        path.write_bytes(bad)
    assert str(path) in refusal(lambda: train(tmp_path, 4))
    # Nothing else was touched, so that a copy of the file mends the run.
    path.write_bytes(good)
    assert_same(train(tmp_path, 4), train(None, 4))


def changed(**fields: Any) -> Callable[[bytes], bytes]:
    return lambda content: json.dumps({**json.loads(content), **fields}).encode()


MANIFESTS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "truncated": lambda content: content[: len(content) // 2],
    "not text": lambda content: b"\xff\xfe" + content,
    "a list": lambda content: b"[]",
    "nothing": lambda content: b"null",
    "only a format": lambda content: b'{"format": 3}',
    "an older format": changed(format=2),
    "another format": changed(format=4),
    "no round": changed(round=None),
    "round in words": changed(round="two"),
    "no server": changed(server=None),
    "no digest": changed(server={"name": "server-2.safetensors"}),
    "no clients": changed(clients=None),
}


@pytest.mark.parametrize("damage", MANIFESTS)
def test_a_damaged_manifest_is_refused(damage, tmp_path):
    train(tmp_path, 2)
    path = tmp_path / "checkpoint" / "manifest.json"
    good = path.read_bytes()
    path.write_bytes(MANIFESTS[damage](good))
    assert str(path) in refusal(lambda: train(tmp_path, 4))
    path.write_bytes(good)
    assert_same(train(tmp_path, 4), train(None, 4))


@pytest.mark.parametrize("damage", ["empty", "truncated", "not text"])
def test_a_damaged_configuration_is_refused(damage, tmp_path):
    train(tmp_path, 2)
    path = tmp_path / "config.json"
    path.write_bytes(MANIFESTS[damage](path.read_bytes()))
    assert str(path) in refusal(lambda: train(tmp_path, 4))


def test_a_manifest_cannot_name_files_elsewhere(tmp_path):
    folder = tmp_path / "run"
    train(folder, 2)
    path = folder / "checkpoint" / manifest(folder)["server"]["name"]
    path.rename(tmp_path / path.name)
    entry = {**manifest(folder)["server"], "name": f"../../{path.name}"}
    content = {**manifest(folder), "server": entry}
    del content["sha256"]
    files.write_sealed(folder / "checkpoint" / "manifest.json", content)
    assert "missing" in refusal(lambda: train(folder, 4))


ENDINGS: dict[str, Callable[[str], bytes]] = {
    "cut off": lambda line: line[: len(line) // 2].encode(),
    "without its end": lambda line: line.rstrip("\n}").encode(),
    "zeros": lambda line: b"\0" * len(line),
    "not text": lambda line: b"\xff\xfe\xfd",
    "a later round": lambda line: line.replace('"round": 1,', '"round": 5,').encode(),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_last_line_that_no_checkpoint_knows_is_dropped(ending, tmp_path):
    train(tmp_path, 2)
    path = tmp_path / "history.jsonl"
    with path.open("ab") as file:
        file.write(ENDINGS[ending](path.read_text().splitlines(keepends=True)[0]))
    resumed = train(tmp_path, 4)
    assert_same(resumed, train(None, 4))
    assert [json.loads(line) for line in path.read_text().splitlines()] == resumed.history


# -- client files ------------------------------------------------------------------------------------------


def test_client_files_do_not_pile_up(tmp_path):
    counts = []

    def look(progress: ff.Progress) -> None:
        if progress.round > 1:
            entries = manifest(tmp_path)["clients"]
            on_disk = {path.name for path in (tmp_path / "checkpoint").glob("clients-*")}
            assert on_disk == {entry["name"] for entry in entries}
            counts.append((len(entries), sum(entry["rows"] for entry in entries)))

    train(tmp_path, 30, callbacks=[look], checkpoint_every=1)
    files, rows = zip(*counts, strict=True)
    assert max(rows) <= 2 * CLIENTS
    assert max(files) <= CLIENTS
    assert any(after < before for before, after in itertools.pairwise(rows)), "never rewritten"
    assert len(list((tmp_path / "checkpoint").glob("server-*"))) == 1


def test_runs_go_on_from_every_state_of_the_log(tmp_path):
    """Some checkpoints have one file of client rows, some have several with old rows among them."""
    whole, seen = train(None, 12), set()
    for rounds in range(1, 13):
        resumed = train(tmp_path, rounds)
        seen.add(len(manifest(tmp_path)["clients"]))
    assert_same(resumed, whole)
    assert {1, 2, 3} <= seen


def test_only_changed_rows_are_written(tmp_path):
    sizes: dict[str, int] = {}

    def look(progress: ff.Progress) -> None:
        if progress.round > 1:
            entries = manifest(tmp_path)["clients"]
            sizes.update((entry["name"].rpartition("-")[0], entry["rows"]) for entry in entries)

    train(tmp_path, 4, callbacks=[look], checkpoint_every=1)
    assert sizes["clients-1"] == 2
    assert sizes["clients-2"] == 2


# -- killed processes --------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
import torch
import torch.nn.functional as F
import flatfed as ff

def train(folder, kill_in_round=None, kill_at_write=None):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Dropout(), torch.nn.Linear(5, 3))
    generator = torch.Generator().manual_seed(1)
    data = ff.Federation.from_tensors([
        (torch.randn(8, 5, generator=generator), torch.randint(0, 3, (8,), generator=generator))
        for _ in range(6)
    ])
    calls, writes, training = [0], [0], os.getpid()
    round_number = torch.zeros(1, dtype=torch.int64).share_memory_()

    def count(progress):
        round_number[0] = progress.round

    def loss(outputs, targets):
        calls[0] += round_number[0] == kill_in_round
        if calls[0] == 2:
            # In one of the workers' processes, which must not outlive the one that trains.
            os.kill(training, signal.SIGKILL)
        return F.cross_entropy(outputs, targets)

    fsync = os.fsync

    def write(handle):
        # Files are written beside the training, which may be a round further by then.
        writes[0] += round_number[0] >= 6
        if writes[0] == kill_at_write:
            os.kill(os.getpid(), signal.SIGKILL)
        fsync(handle)

    os.fsync = write
    ff.train(
        ff.Task(model, data, loss=loss, name="test", version="1"),
        ff.fedmoswa(),
        ff.Training(rounds=8, participants=3, local_steps=2, batch_size=4),
        ff.Execution(workers=2, checkpoint_every=2),
        folder=folder,
        callbacks=[count],
    )

def in_a_process(*arguments):
    child = os.fork()
    if child == 0:
        try:
            train(*arguments)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]

folder, whole = Path(sys.argv[1]), Path(sys.argv[2])
# In the middle of rounds after odd and even numbers of rounds, and in the middle of a checkpoint's files.
for arguments in ((3, None), (4, None), (None, 2), (None, 4), (None, 6), (7, None)):
    assert in_a_process(folder, *arguments) == signal.SIGKILL, arguments
    assert not (folder / "model.safetensors").exists()
assert in_a_process(folder) == 0
assert in_a_process(whole) == 0
"""


def test_killed_processes_lose_nothing(tmp_path):
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    subprocess.run(
        [sys.executable, "-c", KILLED, str(killed), str(whole)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert (killed / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    histories = [
        without_seconds([json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()])
        for folder in (killed, whole)
    ]
    assert histories[0] == histories[1]
    assert len(histories[0]) == 8
    servers = [list((folder / "checkpoint").glob("server-8-*")) for folder in (killed, whole)]
    assert [path.read_bytes() for path in servers[0]] == [path.read_bytes() for path in servers[1]]
    assert len(servers[0]) == 1


# -- pickles -----------------------------------------------------------------------------------------------


def test_nothing_is_ever_unpickled(tmp_path, monkeypatch):
    train(tmp_path, 3, busy())
    expected = train(None, 5, busy())

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("something was unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "load", refuse)
    assert_same(train(tmp_path, 5, busy()), expected)
    files: Mapping[str, bytes] = contents(tmp_path)
    assert {Path(name).suffix for name in files} == {".json", ".jsonl", ".safetensors"}
