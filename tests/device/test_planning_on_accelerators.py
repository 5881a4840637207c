"""What is decided otherwise on an accelerator: paths, chunks, how workers begin, how exact products are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from accelerator import pretended
from torch import nn
from typer.testing import CliRunner

import flatfed as ff
from flatfed.cli import app
from flatfed.core.errors import FlatfedError
from flatfed.engines import chunks as chunking
from flatfed.engines import devices, planning, precision
from flatfed.engines.chunks import chunks, fitting_clients
from flatfed.engines.planning import make_plan
from flatfed.engines.processes import start_method
from flatfed.training.checks import notes


def plan_of(model: nn.Module, *shape: int, device: str = "cuda", batch: int = 4, **settings) -> planning.Plan:
    generator = torch.Generator().manual_seed(0)
    clients = [
        (torch.randn(8, *shape, generator=generator), torch.randint(3, (8,), generator=generator))
        for _ in range(3)
    ]
    if not shape:
        clients = [(targets[:, None], targets) for _, targets in clients]
    training = ff.Training(rounds=1, batch_size=batch, local_steps=2, **settings)
    data = ff.Federation.from_tensors(clients)
    return make_plan(model, data, ff.fedavg(), F.cross_entropy, {}, training, device)


def convolutional(width: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, width, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * width, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.RNN(4, 3, batch_first=True), nn.Linear(3, 3)

    def forward(self, inputs):
        return self.head(self.layer(inputs)[0][:, -1])


@pytest.mark.parametrize(
    ("model", "shape", "path", "why"),
    [
        (
            convolutional(4),
            (3, 6, 6),
            "matrix",
            "on an accelerator: the model has at most 1048576 parameters",
        ),
        (convolutional(20_000), (3, 6, 6), "client", "on an accelerator: the model has more than 1048576"),
        (nn.Sequential(nn.Embedding(3, 3), nn.Flatten()), (), "client", "recurrent or embedding layers"),
        (Recurrent(), (5, 4), "client", "recurrent or embedding layers"),
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), (4,), "client", "changes its buffers"),
    ],
    ids=["small convolutions", "large convolutions", "embedding", "recurrent", "buffers"],
)
def test_the_path_on_an_accelerator_follows_a_fixed_rule(model, shape, path, why, monkeypatch):
    with pretended(monkeypatch):
        plan = plan_of(model, *shape)
        forced = plan_of(model, *shape, path="client")
    assert plan.path == path and why in plan.path_reason
    assert (forced.path, forced.path_reason) == ("client", "asked for")


def test_the_path_on_the_cpu_is_as_it_was():
    plan = plan_of(convolutional(4), 3, 6, 6, device="cpu")
    assert (plan.path, plan.path_reason) == (
        "client",
        "the model has convolutional, recurrent or embedding layers",
    )
    assert plan_of(nn.Linear(4, 3), 4, device="cpu").path_reason.startswith("the model has at most 262144")


def test_chunks_follow_from_free_memory(monkeypatch):
    with pretended(monkeypatch):
        plan = plan_of(convolutional(4), 3, 6, 6)
    # The inputs and outputs of the convolution, those of the last layer, the probabilities of four samples.
    kept = 4 * 4 * (3 * 36 + 2 * 64 + 3)
    assert plan.client_bytes >= 16 * 4 * plan.layout.size + 3 * kept
    assert plan.client_bytes < 2 * (16 * 4 * plan.layout.size + 3 * kept)
    assert fitting_clients(plan, 1) is None  # whose free memory is not known
    assert [len(chunk) for chunk in chunks(plan, range(100))] == [50, 50]
    room = {"free": 2 * 13 * plan.client_bytes}
    monkeypatch.setattr(chunking, "free_memory", lambda device: room["free"])
    assert fitting_clients(plan, 1) == 8
    assert fitting_clients(plan, 2) == 4
    smaller = replace(plan, most_clients=8)
    assert [len(chunk) for chunk in chunks(smaller, range(20))] == [6, 7, 7]
    room["free"] = 1000
    assert fitting_clients(plan, 1) == 1
    room["free"] = 10**15
    assert [
        len(chunk) for chunk in chunks(replace(plan, most_clients=fitting_clients(plan, 1)), range(64))
    ] == [64]
    assert fitting_clients(replace(plan, path="client"), 1) is None


def test_free_memory_is_asked_of_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (123, 456))
    assert devices.free_memory(torch.device("cuda", 0)) == 123
    assert devices.free_memory(torch.device("cpu")) is None


def test_workers_beside_an_accelerator_begin_anew():
    assert start_method(torch.device("cuda")) == "spawn"
    assert start_method(torch.device("cpu")) in {"fork", None}


# -- precision ---------------------------------------------------------------------------------------------


@pytest.fixture
def products():
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    yield lambda: (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
    torch.backends.cudnn.deterministic = False


def test_products_are_rounded_to_tf32_only_where_that_is_asked_for(products):
    devices.set_products("tf32", torch.device("cuda"))
    assert products() == (True, True)
    devices.set_products("tf32", torch.device("cpu"))
    assert products() == (True, True)
    for other in ("float32", "bfloat16"):
        devices.set_products("tf32", torch.device("cuda"))
        devices.set_products(other, torch.device("cuda"))
        assert products() == (False, False) and torch.backends.cudnn.deterministic


def test_tf32_needs_cuda_and_belongs_to_a_runs_numbers():
    precision.check_precision("tf32", torch.float32, torch.device("cuda"))
    with pytest.raises(FlatfedError, match="precision = 'tf32': the device 'cpu' has none; use 'float32'"):
        plan_of(nn.Linear(4, 3), 4, device="cpu", precision="tf32")
    assert ff.Training(rounds=1, precision="tf32").model_dump()["precision"] == "tf32"
    assert not notes(ff.fedavg(), ff.Training(rounds=1, precision="tf32"), "cuda")


# -- what a user sees --------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is one")
@pytest.mark.parametrize("device", ["cuda", "cuda:1", "xpu", "mps", "meta", "gpu"])
def test_a_device_that_cannot_be_used_is_one_line(device):
    shown = CliRunner().invoke(app, ["bench", "MLP", "--rounds", "1", "--device", device])
    assert shown.exit_code == 2
    assert shown.output.count("\n") == 1 and f"device = '{device}': " in shown.output


def test_running_out_of_an_accelerators_memory_is_one_line():
    class Large(nn.Linear):
        def forward(self, inputs):
            if self.training and torch.is_grad_enabled() and len(self.seen) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB")
            self.seen.append(1)
            return super().forward(inputs)

    model = Large(4, 3)
    model.seen = []
    clients = [(torch.randn(4, 4), torch.randint(3, (4,)))] * 2
    task = ff.Task(model, ff.Federation.from_tensors(clients))
    training = ff.Training(rounds=3, path="client")
    with pytest.raises(FlatfedError, match=r"memory ran out with the data of client 0 \(CUDA out of memory"):
        ff.train(task, ff.fedavg(), training, ff.Execution(workers=1))


def test_the_bench_tables_say_where_they_were_measured(monkeypatch):
    shown = CliRunner().invoke(app, ["bench", "logistic regression", "--rounds", "1", "--device", "cpu"])
    assert shown.exit_code == 0 and "float32, cpu, ms of the best round" in shown.output
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    monkeypatch.setattr(torch.version, "cuda", "12.4")
    properties = SimpleNamespace(total_memory=80 * 2**30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert devices.described(torch.device("cuda:0")) == "cuda:0: Some GPU, 80 GiB, CUDA 12.4"


def test_workers_of_ray_share_gpus():
    pytest.importorskip("ray")
    from flatfed.engines.ray import gpu_need

    assert gpu_need(torch.device("cpu"), 0.5) == (0, "CPU")
    assert gpu_need(torch.device("cuda"), 1.0) == (1.0, "CPU with a GPU")
    assert gpu_need(torch.device("cuda"), 0.25) == (0.25, "CPU with 0.25 of a GPU")
    with pytest.raises(FlatfedError, match="gpu_share"):
        ff.Execution(gpu_share=0)
