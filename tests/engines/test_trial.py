"""Before a training: nothing that it is given is changed, and what it would not honour is refused."""

from __future__ import annotations

import copy
import errno
import math
import os
import random as python_random
import shutil
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import train
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.errors import FlatfedWarning
from flatfed.data.transform import Transform
from flatfed.engines.memory import GrowingMemory
from flatfed.training.config import make_model

WORK = {"rounds": 2, "local_steps": 2, "batch_size": None, "workers": 1}
Pairs = list[tuple[Tensor, Tensor]]


def pairs(clients: int = 4, size: int = 6) -> Pairs:
    generator = torch.Generator().manual_seed(3)
    return [
        (torch.randn(size, 4, generator=generator), torch.randint(0, 3, (size,), generator=generator))
        for _ in range(clients)
    ]


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


class Editing(nn.Module):
    """Edits what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(4, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.linear(inputs.sub_(0.5))


def refusal(model: nn.Module, federation: ff.Federation | None = None, **options: Any) -> str:
    with pytest.raises(ff.FlatfedError) as caught:
        made = ff.Federation.from_tensors(pairs()) if federation is None else federation
        train(model, made, ff.fedavg(), **{**WORK, **options})
    assert "\n" not in str(caught.value)
    return str(caught.value)


# -- data stay as they are ---------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["client", "matrix"])
@pytest.mark.parametrize("one_pair", [True, False], ids=["one client", "several"])
def test_a_model_that_edits_its_inputs_leaves_the_users_tensors_alone(path, one_pair):
    given, test = pairs(1 if one_pair else 4), pairs()[0]
    originals = copy.deepcopy([*given, test])
    from_tensors = ff.Federation.from_tensors(given, test=test, client_tests=[test] * len(given))
    from_function = ff.Federation.from_function(
        len(given), lambda client: given[client], test, lambda _: test
    )
    losses = []
    work = {**WORK, "batch_size": None if path == "client" else 4}
    for federation in (from_tensors, from_function):
        run = train(Editing(), federation, ff.fedsam(), path=path, evaluate_on_clients=True, **work)
        losses.append([record["test_loss"] for record in run.history])
        for pair, original in zip([*given, test], originals, strict=True):
            assert all(torch.equal(mine, other) for mine, other in zip(pair, original, strict=True))
    assert losses[0] == losses[1]


def test_a_metric_that_edits_leaves_the_test_data_alone():
    def edits(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.argmax(1) == targets.fill_(0)).float().mean()

    test = pairs()[0]
    original = test[1].clone()
    federation = ff.Federation.from_tensors(pairs(), test=test)
    train(net(), federation, ff.fedavg(), metrics={"share": edits}, **WORK)
    assert torch.equal(test[1], original) and torch.equal(federation.test[1], original)


def test_diagnostics_see_the_same_samples_every_time():
    federation = ff.Federation.from_tensors(pairs(), test=pairs()[0])
    run = train(Editing(), federation, ff.fedavg(), **WORK)
    samples = federation.client(0).batch(torch.arange(6))
    with ff.diagnostics.inspect(ff.Task(Editing(), federation), run=run) as subject:
        first = subject.gradient(subject.model, samples)
        assert torch.equal(subject.gradient(subject.model, samples), first)


class InPlace(Transform):
    def evaluate(self, inputs: Tensor) -> Tensor:
        return inputs.mul_(2)


def test_a_transform_that_edits_in_place_is_refused():
    federation = ff.Federation.from_tensors(pairs())
    federation.transform = InPlace()
    before = federation.inputs.clone()
    assert "transform: it edits the stored inputs" in refusal(net(), federation)
    assert torch.equal(federation.inputs, before)


def test_a_loss_that_edits_the_targets_is_refused():
    assert "edits the targets" in refusal(
        net(), loss=lambda outputs, targets: F.cross_entropy(outputs, targets.fill_(0))
    )


# -- embeddings --------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    def __init__(self, functional: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Parameter(torch.randn(50, 4)) if functional else nn.Embedding(50, 4)
        self.head = nn.Linear(20, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        rows = F.embedding(inputs, self.table) if isinstance(self.table, Tensor) else self.table(inputs)
        return self.head(rows.flatten(1))


@pytest.mark.parametrize("functional", [True, False], ids=["functional", "module"])
@pytest.mark.parametrize("loaded", [True, False], ids=["from_function", "from_tensors"])
@pytest.mark.parametrize("path", ["auto", "matrix"])
def test_an_index_out_of_range_reads_nobody_elses_embedding(functional, loaded, path):
    generator = torch.Generator().manual_seed(1)
    clients = [
        (torch.randint(0, 50, (6, 5), generator=generator), torch.randint(0, 3, (6,), generator=generator))
        for _ in range(4)
    ]
    clients[2][0][:] = 60
    federation = (
        ff.Federation.from_function(4, lambda client: clients[client])
        if loaded
        else ff.Federation.from_tensors(clients)
    )
    message = refusal(Lookup(functional), federation, path=path, batch_size=3)
    assert "index out of range" in message or "path = 'matrix': the model looks up embeddings" in message


# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["loss", "samples", "", "a\nb", 3])
def test_metrics_do_not_take_the_names_of_other_numbers(name):
    with pytest.raises(ff.FlatfedError, match="metrics"):
        ff.Task(net(), ff.Federation.from_tensors(pairs()), metrics={name: F.mse_loss})


@pytest.mark.parametrize("metrics", [{"share": 3}, [F.mse_loss]])
def test_metrics_are_named_functions(metrics):
    with pytest.raises(ff.FlatfedError, match="metrics"):
        ff.Task(net(), ff.Federation.from_tensors(pairs()), metrics=metrics)


def test_a_metric_of_several_numbers_is_refused_by_name():
    federation = ff.Federation.from_tensors(pairs(), test=pairs()[0])
    message = refusal(net(), federation, metrics={"all": lambda outputs, targets: outputs})
    assert "all: it must return one number" in message


@pytest.mark.parametrize("workers", [1, 2])
def test_what_a_metric_raises_is_one_line_with_its_name(workers):
    def share(outputs: Tensor, targets: Tensor) -> float:
        return 1 / 0

    federation = ff.Federation.from_tensors(pairs(), test=pairs()[0])
    message = refusal(net(), federation, metrics={"share": share}, workers=workers)
    assert message == "share: it cannot be evaluated on 6 samples (division by zero)"


def test_a_federated_spec_checks_its_metrics_too():
    spec = pytest.importorskip("flatfed.deployment.spec")
    settings = spec.FederationSettings(clients=1)
    with pytest.raises(ff.FlatfedError, match="'loss'"):
        spec.FederationSpec(net, ff.fedavg(), ff.Training(rounds=1), settings, metrics={"loss": F.mse_loss})


# -- settings of torch -------------------------------------------------------------------------------------


def trained(path: str = "auto") -> tuple[str, Tensor]:
    federation = ff.Federation.from_tensors(pairs(), test=pairs()[0])
    run = train(net(), federation, ff.fedsam(), path=path, **WORK)
    return run.path, run.server["model"]


@pytest.mark.parametrize(
    "setting",
    [
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.device("meta"),
    ],
    ids=["autocast", "no_grad", "inference_mode", "device"],
)
@pytest.mark.parametrize("path", ["auto", "client"])
def test_settings_of_the_calling_thread_change_nothing(setting, path):
    expected = trained(path)
    model, federation = net(), ff.Federation.from_tensors(pairs(), test=pairs()[0])
    with setting():
        run = train(model, federation, ff.fedsam(), path=path, **WORK)
    assert run.path == expected[0]
    assert torch.equal(run.server["model"], expected[1])


def test_autocast_is_switched_off_and_that_is_said():
    with torch.autocast("cpu", dtype=torch.bfloat16), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trained()
    assert any(
        issubclass(warning.category, FlatfedWarning) and "autocast" in str(warning.message)
        for warning in caught
    )


def test_another_default_dtype_is_refused():
    torch.set_default_dtype(torch.float64)
    try:
        assert "set_default_dtype" in refusal(net())
    finally:
        torch.set_default_dtype(torch.float32)


# -- random streams ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model", [net(), nn.Sequential(nn.Linear(4, 3), nn.Dropout())], ids=["plain", "drawing"]
)
def test_other_threads_may_draw_meanwhile(model):
    federation = ff.Federation.from_tensors(pairs())
    expected = train(model, federation, ff.fedavg(), **WORK).server["model"]
    stopped = threading.Event()

    def draw() -> None:
        while not stopped.is_set():
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    try:
        results = [train(model, federation, ff.fedavg(), **WORK).server["model"] for _ in range(5)]
        models = [make_model({"name": "mlp"}, (4,), 3, 0) for _ in range(5)]
    finally:
        stopped.set()
        thread.join()
    assert all(torch.equal(result, expected) for result in results)
    weights = [nn.utils.parameters_to_vector(model.parameters()) for model in models]
    assert all(torch.equal(weight, weights[0]) for weight in weights)


def test_trainings_in_several_threads_leave_the_global_stream_alone():
    federation = ff.Federation.from_tensors(pairs(), test=pairs()[0])
    model = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    expected = train(model, federation, ff.fedavg(), **WORK).server["model"]
    before, results = torch.get_rng_state(), []

    def several() -> None:
        for _ in range(4):
            results.append(train(model, federation, ff.fedavg(), **WORK).server["model"])

    threads = [threading.Thread(target=several) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 16
    assert all(torch.equal(result, expected) for result in results)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("draw", [np.random.rand, python_random.random], ids=["numpy", "random"])
def test_a_loss_that_draws_from_another_stream_is_refused(draw):
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets) * (1 + draw())

    assert "draws from the global stream of" in refusal(net(), loss=loss)


def test_data_that_are_others_every_time_are_refused():
    def load(client: int) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(np.random.rand(6, 4)).float(), torch.zeros(6, dtype=torch.long)

    assert "client 0 was loaded twice" in refusal(net(), ff.Federation.from_function(3, load))


class Noisy(Transform):
    def evaluate(self, inputs: Tensor) -> Tensor:
        return inputs + np.random.rand()


def test_a_transform_that_draws_in_evaluation_is_refused():
    federation = ff.Federation.from_tensors(pairs())
    federation.transform = Noisy()
    assert "transform: its `evaluate` draws" in refusal(net(), federation)


# -- sizes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"device": "meta"}, "device = 'meta'"),
        ({"workers": 10**9}, "workers = 1000000000"),
        ({"batch_size": 10**12}, "batch_size = 1000000000000"),
        ({"batch_size": 10**12, "path": "client"}, "batch_size = 1000000000000"),
        ({"local_steps": 10**9}, "local_steps = 1000000000"),
        ({"local_steps": 10**9, "batch_size": 1}, "local_steps = 1000000000"),
        ({"local_steps": None, "local_epochs": 10**9}, "local_epochs = 1000000000"),
        ({"local_steps": 10**6, "batch_size": 10**3}, "batch_size = 1000"),
    ],
)
def test_what_would_never_end_is_refused_at_once(options, complaint):
    assert complaint in refusal(net(), **options)


def test_a_batch_larger_than_a_client_costs_nothing_in_epochs():
    options = {**WORK, "local_steps": None, "local_epochs": 1}
    whole, huge = (
        train(net(), ff.Federation.from_tensors(pairs()), ff.fedavg(), **{**options, "batch_size": size})
        for size in (6, 10**12)
    )
    assert torch.equal(whole.server["model"], huge.server["model"])


# -- what is not finite ------------------------------------------------------------------------------------


class Scaled(Transform):
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def evaluate(self, inputs: Tensor) -> Tensor:
        return inputs * self.scale


def with_one(client: int, change: Callable[[Tensor, Tensor], object]) -> ff.Federation:
    clients = pairs()
    change(*clients[client])
    return ff.Federation.from_tensors(clients)


@pytest.mark.parametrize("path", ["client", "matrix"])
@pytest.mark.parametrize("client", [0, 2])
def test_labels_that_are_all_left_out_are_no_matter_of_the_learning_rate(path, client):
    federation = with_one(client, lambda _, targets: targets[1:].fill_(-100))
    # Two batches of different samples, of which only one has a label.
    message = refusal(net(), federation, path=path, batch_size=2)
    assert f"a batch of client {client} has only the label -100" in message
    loss = nn.CrossEntropyLoss(ignore_index=1)
    message = refusal(net(), with_one(client, lambda _, targets: targets.fill_(1)), path=path, loss=loss)
    assert f"a batch of client {client} has only the label 1" in message


@pytest.mark.parametrize("path", ["client", "matrix"])
@pytest.mark.parametrize(("client", "scale"), [(0, math.nan), (0, math.inf), (2, 1e30)])
def test_inputs_that_a_transform_makes_infinite_are_no_matter_of_the_learning_rate(path, client, scale):
    federation = with_one(client, lambda inputs, _: inputs.mul_(1e10))
    federation.transform = Scaled(scale)
    message = refusal(net(), federation, path=path)
    assert f"the inputs of client {client} contain NaN or infinity" in message


@pytest.mark.parametrize("path", ["client", "matrix"])
def test_an_underflow_is_no_matter_of_the_learning_rate(path):
    class Normalised(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            tiny = inputs * 1e-30
            return super().forward(tiny / tiny.square().sum(1, keepdim=True))

    message = refusal(Normalised(4, 3), path=path)
    assert "before any training" in message
    assert "lower lr" not in message


@pytest.mark.parametrize("path", ["client", "matrix"])
def test_a_divergence_is_a_matter_of_the_learning_rate(path):
    with pytest.raises(ff.DivergedError, match="lower lr"):
        train(
            nn.Linear(4, 3),
            ff.Federation.from_tensors(pairs()),
            ff.fedavg(),
            loss=lambda outputs, targets: outputs.square().mean(),
            **{**WORK, "rounds": 90, "lr": 1e6, "path": path},
        )


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("memory", [0.0, 64.0])
def test_an_empty_buffer_under_a_rule_that_needs_all_uploads(memory):
    class WithBuffers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.linear = nn.Linear(4, 3)
            self.register_buffer("nothing", torch.empty(0, 3))
            self.register_buffer("count", torch.zeros(()))

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.count += 1
            return self.linear(inputs)

    algorithm = ff.Algorithm(name="trimmed", aggregate=ff.parts.TrimmedMean(0.25))
    run = train(WithBuffers(), ff.Federation.from_tensors(pairs()), algorithm, client_memory=memory, **WORK)
    assert run.model.nothing.shape == (0, 3)
    assert float(run.model.count) == 4


def test_a_full_disk_is_an_error_in_one_line(monkeypatch, tmp_path):
    def full(file: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    federation = ff.Federation.from_tensors(pairs())
    with pytest.raises(ff.FlatfedError, match=r"client_memory: .*No space left"):
        train(net(), federation, ff.scaffold(), client_memory=0, folder=tmp_path / "run", **WORK)
    memory = GrowingMemory()
    memory.view(0, torch.float32, 10**6).fill_(1)  # not on the disk
    memory.close()


FULL_DISK = """
import sys
import torch
import flatfed as ff
data = [(torch.randn(4, 4000), torch.randint(0, 3, (4,))) for _ in range(40)]
task = ff.Task(torch.nn.Linear(4000, 3), ff.Federation.from_tensors(data))
training, execution = ff.Training(rounds=3, local_steps=1), ff.Execution(client_memory=0, workers=2)
try:
    ff.train(task, ff.scaffold(), training, execution, folder=sys.argv[1])
except ff.FlatfedError as error:
    print(error)
"""


@pytest.mark.skipif(
    shutil.which("unshare") is None
    or subprocess.run(["unshare", "-rm", "true"], check=False, capture_output=True).returncode != 0,
    reason="needs a file system of its own",
)
def test_a_disk_that_is_really_full_does_not_end_the_process(tmp_path):
    script = f'mount -t tmpfs -o size=1m none "{tmp_path}" && "{sys.executable}" - "{tmp_path}/run"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        input=FULL_DISK,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(ff.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    assert "client_memory" in done.stdout
