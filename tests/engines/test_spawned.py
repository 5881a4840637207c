"""Workers that begin anew, as they must beside an accelerator: here on the CPU, and with the same bits."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import problems
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.errors import FlatfedError
from flatfed.engines import local
from flatfed.engines.memory import GrowingMemory
from flatfed.engines.processes import Portable, _read, _written, can_fork
from flatfed.training.config import Config

pytestmark = pytest.mark.skipif(not can_fork(), reason="needs Linux without an accelerator")


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Dropout(0.2), nn.Linear(12, 3)
    )


def federation() -> ff.Federation:
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(6, 2, 4, 4, generator=generator), torch.randint(3, (6,), generator=generator))
        for _ in range(6)
    ]
    return ff.Federation.from_tensors(clients, test=clients[0])


def train(workers: int, loss=F.cross_entropy) -> ff.Run:
    algorithm = ff.build(
        {"name": "scaffold", "aggregate": {"part": "trimmed_mean", "share": 0.2}}
        | {"compress": {"part": "error_feedback", "of": {"part": "top_k", "ratio": 0.3}}}
    )
    settings = {"rounds": 3, "participants": 4, "local_steps": 2, "batch_size": 3, "lr": 0.1}
    return problems.train(model(), federation(), algorithm, loss=loss, workers=workers, **settings)


def test_workers_that_begin_anew_give_the_same_bits(monkeypatch):
    alone = train(1)
    monkeypatch.setattr(local, "start_method", lambda device: "spawn")
    together = train(2)
    assert multiprocessing.active_children() == []
    for key, value in alone.server.items():
        assert torch.equal(together.server[key], value), key
    for key, value in alone.model.state_dict().items():
        assert torch.equal(together.model.state_dict()[key], value), key
    assert alone.clients.clients() == together.clients.clients()
    for client in alone.clients.clients():
        assert torch.equal(alone.clients.row(client), together.clients.row(client))
    for left, right in zip(alone.history, together.history, strict=True):
        assert {**left, "seconds": 0} == {**right, "seconds": 0}


def test_a_task_of_a_file_is_made_again_by_the_workers(tmp_path, monkeypatch):
    file = tmp_path / "task_in_spawned.py"
    file.write_text((Path(ff.__file__).parent / "cli" / "template" / "my_task.py").read_text())
    config = Config.read(file, ["training.rounds=2", "training.path=client", "task.clients=6"])
    alone = ff.train(config.make_task(), ff.scaffold(), config.training, ff.Execution(workers=1))
    monkeypatch.setattr(local, "start_method", lambda device: "spawn")
    together = ff.train(config.make_task(), ff.scaffold(), config.training, ff.Execution(workers=2))
    assert torch.equal(alone.server["model"], together.server["model"])


def test_what_cannot_be_sent_is_refused_before_training(monkeypatch):
    monkeypatch.setattr(local, "start_method", lambda device: "spawn")
    with pytest.raises(FlatfedError, match=r"workers: beside an accelerator they begin anew.*workers = 1"):
        train(2, loss=lambda outputs, targets: 2 * F.cross_entropy(outputs, targets))
    assert multiprocessing.active_children() == []


class Doubled:
    """Work that only this process can make again."""

    def __call__(self, job: Tensor) -> Tensor:
        return 2 * job


def test_work_is_the_same_on_the_other_side():
    kept = {
        "network": model(),
        "images": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    }
    work = Portable(Holding(kept))
    again = work.unpacked().kept
    assert isinstance(again["network"][0].weight, nn.Parameter)
    for key, value in kept["network"].state_dict().items():
        assert torch.equal(again["network"].state_dict()[key], value)
    assert torch.equal(again["images"], kept["images"])
    assert again["images"].stride() == kept["images"].stride()
    # Nothing is held twice: whoever unpacks it sees the same memory.
    with torch.no_grad():
        again["network"][0].weight.add_(1)
    assert torch.equal(work.unpacked().kept["network"][0].weight, again["network"][0].weight)


class Holding:
    def __init__(self, kept) -> None:
        self.kept = kept

    def __call__(self, job):
        return job


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1),
        torch.arange(6.0)[::2],
        torch.ones(3, 1).expand(3, 4),
        torch.arange(12).view(3, 4).t(),
    ],
    ids=["permuted", "strided", "expanded", "transposed"],
)
def test_tensors_that_lie_otherwise_in_memory_arrive(tensor):
    memory = GrowingMemory()
    first, second = _read(bytes(_written([tensor, tensor], memory)), memory)
    assert torch.equal(first, tensor) and torch.equal(second, tensor)


def test_work_that_cannot_be_made_again_says_so():
    work = Portable(Doubled())
    assert work.unpacked()(torch.ones(1)) == 2
    work._content = work._content.replace(b"Doubled", b"Trebled")
    with pytest.raises(FlatfedError, match=r"cannot be made again there \(.*Trebled.*workers = 1"):
        work.unpacked()
