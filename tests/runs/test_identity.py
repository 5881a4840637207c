"""Is this the same run? What decides its numbers is noticed when a folder is continued, and nothing else."""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import threading
import time
import warnings
import weakref
from collections import namedtuple
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import problems
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.part import Gradient
from flatfed.engines.planning import make_plan
from flatfed.engines.threads import single_threaded
from flatfed.runs import content, environment
from flatfed.runs.content import ContentHasher, data_digest, tensor_digest
from flatfed.runs.folder import RunFolder
from flatfed.runs.identity import Identity, federation_identity, run_identity

CLIENTS, FEATURES, CLASSES = 4, 5, 3
VERSION = {"name": "test", "version": "1"}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Problems as small as these only wait for torch's own threads, and for git."""
    monkeypatch.setattr(environment, "source_commit", lambda: None)
    with single_threaded():
        yield


def samples(seed: int, size: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(size, FEATURES, generator=generator)
    return inputs, torch.randint(CLASSES, (size,), generator=generator)


def federation(seed: int = 0, test: int = 100, client_tests: int = 200) -> ff.Federation:
    return ff.Federation.from_tensors(
        [samples(seed + client) for client in range(CLIENTS)],
        test=samples(test),
        client_tests=[samples(client_tests + client) for client in range(CLIENTS)],
    )


class Scaled(nn.Module):
    """A frozen layer, a trained one, and an attribute that is neither parameter nor buffer."""

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(FEATURES, 4), nn.Linear(4, CLASSES)
        self.scale = scale
        self.body.requires_grad_(False)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.scale * self.body(inputs)))


def options(**changed: Any) -> dict[str, Any]:
    return {
        "model": Scaled(),
        "federation": federation(),
        "algorithm": ff.scaffold(),
        "rounds": 2,
        "participants": 2,
        "local_steps": 2,
        "batch_size": 4,
        "lr": 0.1,
        "workers": 1,
        **changed,
    }


def train(folder: Path | None, **changed: Any) -> ff.Run:
    return problems.train(folder=folder, **options(**changed))


def refusal(folder: Path, **changed: Any) -> str:
    """The one line with which a folder's run is not continued; its files stay as they were, to the byte."""
    before = contents(folder)
    with pytest.raises(ff.FlatfedError) as caught:
        train(folder, rounds=3, **changed)
    assert contents(folder) == before
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(str(folder))
    return message


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def another(component: str) -> str:
    return f"it holds another run (not the same: {component})"


def with_tensors_changed(change: Callable[[nn.Module], None]) -> nn.Module:
    model = Scaled()
    with torch.no_grad():
        change(model)
    return model


def share(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean()


def missed(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) != targets).double().mean()


@dataclass(frozen=True)
class Rescaled:
    """A transform."""

    factor: float
    draws = False

    def train(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        return self.evaluate(inputs)

    def evaluate(self, inputs: Tensor) -> Tensor:
        return self.factor * inputs


def transformed(factor: float) -> ff.Federation:
    data = federation()
    data.transform = Rescaled(factor)
    return data


# -- what is noticed ---------------------------------------------------------------------------------------

Change = tuple[dict[str, Any], dict[str, Any], str]
WEIGHTED = [torch.tensor([1.0, 1.0, weight]) for weight in (1.0, 2.0)]
CHANGES: dict[str, Change] = {
    "frozen weights": (
        {},
        {"model": with_tensors_changed(lambda model: model.body.weight[0, 0].add_(1e-6))},
        another("frozen weights"),
    ),
    "first weights": (
        {},
        {"model": with_tensors_changed(lambda model: model.head.bias.add_(1e-6))},
        another("first weights"),
    ),
    "what is frozen": (
        {},
        {"model": with_tensors_changed(lambda model: model.body.bias.requires_grad_())},
        another("model"),
    ),
    "attribute of the model": ({}, {"model": Scaled(2.0)}, another("model")),
    "label smoothing": (
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.1)},
        {"loss": nn.CrossEntropyLoss(label_smoothing=0.2)},
        another("loss"),
    ),
    "class weights": (
        {"loss": nn.CrossEntropyLoss(weight=WEIGHTED[0])},
        {"loss": nn.CrossEntropyLoss(weight=WEIGHTED[1])},
        another("loss"),
    ),
    "option of a function": (
        {"loss": functools.partial(F.cross_entropy, label_smoothing=0.1)},
        {"loss": functools.partial(F.cross_entropy, label_smoothing=0.2)},
        another("loss"),
    ),
    "metrics": ({"metrics": {"share": share}}, {"metrics": {"share": missed}}, another("metrics")),
    "names of metrics": ({"metrics": {"share": share}}, {"metrics": {"other": share}}, another("metrics")),
    "data": ({}, {"federation": federation(1)}, another("data")),
    "test data": ({}, {"federation": federation(test=101)}, another("data")),
    "client test data": ({}, {"federation": federation(client_tests=201)}, another("data")),
    "transform": ({"federation": transformed(1.0)}, {"federation": transformed(2.0)}, another("data")),
    "seed": ({}, {"seed": 1}, "it holds another run (training.seed = 0 there, 1 here)"),
    "lr": ({}, {"lr": 0.2}, "it holds another run (training.lr = 0.1 there, 0.2 here)"),
    "option of the algorithm": (
        {},
        {"algorithm": ff.scaffold(server_rate=0.5)},
        "it holds another run (algorithm.server_rate = 1.0 there, 0.5 here)",
    ),
    "version": ({**VERSION}, {**VERSION, "version": "2"}, another("version")),
    "name": ({**VERSION}, {**VERSION, "name": "other"}, another("version")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_decides_numbers_is_noticed(change, tmp_path):
    before, after, reason = CHANGES[change]
    if change in {"label smoothing", "class weights"}:
        assert repr(before["loss"]) == repr(after["loss"])
    train(tmp_path, **copy.deepcopy(before))
    assert f"{reason}; choose another folder or remove it" in refusal(tmp_path, **(before | after))
    # With everything as it was, in objects of its own, it goes on.
    assert len(train(tmp_path, rounds=3, **copy.deepcopy(before)).history) == 3


@pytest.mark.parametrize(
    "changed",
    [
        {"workers": 3},
        {"workers": None},
        {"client_memory": 0.0},
        {"checkpoint_every": 1},
        {"evaluate_on_clients": True},
        {"callbacks": [lambda progress: None]},
    ],
    ids="-".join,
)
def test_what_decides_no_number_may_change(changed, tmp_path):
    train(tmp_path)
    resumed, whole = train(tmp_path, rounds=4, **changed), train(None, rounds=4)
    assert len(resumed.history) == 4
    assert torch.equal(resumed.server["model"], whole.server["model"])


def test_another_engine_may_go_on(tmp_path):
    """Its kind is part of the execution, which neither the config nor the identity counts."""
    train(tmp_path)
    task = ff.Task(Scaled(), federation())
    training = ff.Training(rounds=3, participants=2, local_steps=2, batch_size=4, lr=0.1)
    executions = [
        ff.Execution(workers=1),
        ff.Execution(engine="ray", ray_address="10.0.0.1:6379", workers=7, client_memory=1.0),
    ]
    plan = make_plan(
        task.model, task.federation, ff.scaffold(), task.loss, task.used_metrics, training, "cpu"
    )
    for execution in executions:
        folder = RunFolder(tmp_path)
        try:
            config = {
                "algorithm": ff.scaffold().describe(),
                "training": training.model_dump(),
                "execution": execution.model_dump(),
            }
            folder.open(config, run_identity(task, plan))
        finally:
            folder.lock.release()


@pytest.mark.parametrize("rounds", [2, 3])
def test_a_complete_folder_stays_as_it_is(rounds, tmp_path):
    """Neither its final model nor anything else is lost to a run that is not its own."""
    finished = train(tmp_path)
    before = contents(tmp_path)
    other = with_tensors_changed(lambda model: model.body.weight.add_(1))
    with pytest.raises(ff.FlatfedError, match="frozen weights"):
        train(tmp_path, rounds=rounds, model=other)
    assert contents(tmp_path) == before
    assert str(tmp_path / "model.safetensors") in before
    assert torch.equal(train(tmp_path).server["model"], finished.server["model"])


# -- what cannot be compared -------------------------------------------------------------------------------


def smooth(amount: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: F.cross_entropy(outputs, targets, label_smoothing=amount)


def from_function(seed: int = 0, same_first: bool = False, **more: Any) -> ff.Federation:
    def load(client: int) -> tuple[Tensor, Tensor]:
        return samples(client if client == 0 and same_first else seed + client)

    return ff.Federation.from_function(CLIENTS, load, **more)


UNCOVERED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "lambda": (
        {"loss": smooth(0.1)},
        {"loss": smooth(0.2)},
        "loss: smooth.<locals>.<lambda> is a function without a name of its own",
    ),
    "metric": (
        {"metrics": {"smooth": smooth(0.1)}},
        {"metrics": {"smooth": smooth(0.2)}},
        "metrics: smooth.<locals>.<lambda> is a function without a name of its own",
    ),
    "data": (
        {"federation": from_function()},
        {"federation": from_function(7, same_first=True)},
        "data: clients' data that come from a function",
    ),
}


@pytest.mark.parametrize("case", UNCOVERED)
def test_what_cannot_be_compared_is_not_continued(case, tmp_path):
    before, after, reason = UNCOVERED[case]
    with pytest.warns(ff.FlatfedWarning, match="cannot be continued") as noted:
        finished = train(tmp_path, **before)
    (warning,) = noted
    assert reason in str(warning.message)
    assert str(tmp_path) in str(warning.message)
    assert "name and version" in str(warning.message)
    assert Path(warning.filename).name == "problems.py", "it points at the call of train"
    # The run itself is like any other.
    assert len(finished.history) == 2
    assert (tmp_path / "model.safetensors").exists()
    for options in (after, before):
        message = refusal(tmp_path, **options)
        assert "it cannot be continued safely" in message
        assert reason in message
        assert "give the task a name and version" in message


@pytest.mark.parametrize("case", UNCOVERED)
def test_a_name_and_a_version_stand_for_it(case, tmp_path):
    before, after, _ = UNCOVERED[case]
    with warnings.catch_warnings():
        warnings.simplefilter("error", ff.FlatfedWarning)
        train(tmp_path, **before, **VERSION)
        assert another("version") in refusal(tmp_path, **before, name="test", version="2")
        assert another("version") in refusal(tmp_path, **before)
        assert len(train(tmp_path, rounds=3, **before, **VERSION).history) == 3
        # It is the user's word that this is the same.
        assert len(train(tmp_path, rounds=4, **after, **VERSION).history) == 4


def test_a_version_hides_nothing_that_can_be_compared(tmp_path):
    versioned = {"loss": smooth(0.1), **VERSION}
    train(tmp_path, **versioned)
    assert another("model") in refusal(tmp_path, model=Scaled(2.0), **versioned)
    assert another("data") in refusal(tmp_path, federation=federation(1), **versioned)
    other = with_tensors_changed(lambda model: model.body.weight.add_(1))
    assert another("frozen weights") in refusal(tmp_path, model=other, **versioned)
    assert another("loss") in refusal(tmp_path, **{**versioned, "loss": F.cross_entropy})


def test_data_from_a_function_are_compared_as_far_as_they_are_loaded(tmp_path):
    train(tmp_path, federation=from_function(test=samples(9)), **VERSION)
    for other in (from_function(7, test=samples(9)), from_function(test=samples(8))):
        assert another("data") in refusal(tmp_path, federation=other, **VERSION)
    tests = from_function(test=samples(9), client_tests=samples)
    assert another("data") in refusal(tmp_path, federation=tests, **VERSION)


def test_what_is_nested_too_deeply_needs_a_version_too():
    model = Scaled()
    model.chain = None
    for _ in range(10_000):
        model.chain = [model.chain]
    task = ff.Task(nn.Linear(FEATURES, CLASSES), federation())
    training = ff.Training(rounds=1)
    plan = make_plan(task.model, task.federation, ff.fedavg(), task.loss, task.used_metrics, training, "cpu")
    assert run_identity(replace(task, model=model), plan).uncovered == (
        "model: it is nested too deeply to be compared",
    )
    assert run_identity(replace(task, model=model, **VERSION), plan).uncovered == ()


def test_what_cannot_be_looked_at_needs_a_version_too():
    class Closed:
        def __call__(self, outputs, targets):
            return F.cross_entropy(outputs, targets)

        @property
        def __dict__(self):
            raise KeyError("mine")

    task = ff.Task(nn.Linear(FEATURES, CLASSES), federation())
    training = ff.Training(rounds=1)
    plan = make_plan(task.model, task.federation, ff.fedavg(), task.loss, task.used_metrics, training, "cpu")
    (uncovered,) = run_identity(replace(task, loss=Closed()), plan).uncovered
    assert uncovered == "loss: it cannot be looked at (KeyError: 'mine')"
    assert run_identity(replace(task, loss=Closed(), **VERSION), plan).uncovered == ()


@pytest.mark.parametrize("changed", [{}, {"loss": F.cross_entropy}], ids=["uncovered", "covered"])
def test_a_run_is_not_continued_without_its_identity(changed, tmp_path):
    options = {"loss": smooth(0.1), **changed}
    train(tmp_path, **options)
    (tmp_path / "identity.json").unlink()
    assert "identity.json: cannot be read (No such file or directory)" in refusal(tmp_path, **options)


def test_an_uncovered_run_that_has_no_checkpoint_yet_may_begin_again(tmp_path):
    def stop(progress: ff.Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(tmp_path, loss=smooth(0.1), callbacks=[stop])
    assert len(train(tmp_path, loss=smooth(0.1)).history) == 2


def test_there_is_no_warning_where_there_is_no_folder_or_nothing_to_warn_of(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", ff.FlatfedWarning)
        train(None, loss=smooth(0.1))
        train(tmp_path)


def test_the_folder_has_a_digest_of_each_component(tmp_path):
    train(tmp_path)
    stored = json.loads((tmp_path / "identity.json").read_text())
    assert list(stored) == [
        "version", "algorithm", "training", "model", "first weights", "frozen weights", "loss", "metrics",
        "data", "execution path",
    ]  # fmt: skip
    manifest = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())
    assert manifest["identity"] == Identity(stored).digest


# -- speed -------------------------------------------------------------------------------------------------


def large() -> Tensor:
    return torch.randn(1000, 1500)


@pytest.mark.parametrize("shares_memory", [False, True], ids=["tensor", "array"])
def test_data_are_read_in_full_once_and_again_when_they_have_changed(shares_memory, monkeypatch):
    calls: list[int] = []

    def counted(tensor: Tensor) -> str:
        calls.append(tensor.nbytes)
        return tensor_digest(tensor)

    monkeypatch.setattr(content, "tensor_digest", counted)
    data = torch.from_numpy(large().numpy()) if shares_memory else large()
    first = data_digest(data)
    assert first == tensor_digest(data)
    assert data_digest(data) == first
    assert calls == [data.nbytes]
    changes: dict[str, Callable[[], Any]] = {
        "in place": lambda: data[17, 3].add_(1),
        "two numbers swapped": lambda: data[0, :2].copy_(data[0, :2].flip(0)),
        "behind torch's back": lambda: data.data[900].mul_(2),
        "the last byte": lambda: data.data.view(-1)[-1].add_(1),
        "by the array": lambda: np.copyto(data.numpy()[5], 3.0),
        "rows shuffled": lambda: np.random.default_rng(0).shuffle(data.numpy()),
        "other memory": lambda: setattr(data, "data", torch.zeros_like(data)),
    }
    seen = {first}
    for name, change in changes.items():
        change()
        digest = data_digest(data)
        assert digest == tensor_digest(data), name
        assert digest not in seen, name
        seen.add(digest)
        assert data_digest(data) == digest
    assert len(calls) == 1 + len(changes)


def test_small_and_strange_data_are_always_read():
    with torch.inference_mode():
        strange = large()
    for data in (torch.ones(3), torch.empty(0, 4), strange, large().to_sparse(), large().to(torch.bool)):
        assert data_digest(data) == data_digest(data) == tensor_digest(data)


def test_digests_go_with_their_tensors():
    data = large()
    data_digest(data)
    gone = weakref.ref(data)
    del data
    assert gone() is None


def test_an_identity_of_large_data_takes_no_noticeable_time_again():
    inputs = torch.randint(256, (4 * 2000, 3, 32, 32), dtype=torch.uint8)
    targets = torch.zeros(len(inputs), dtype=torch.int64)
    indices = [list(range(client, len(inputs), CLIENTS)) for client in range(CLIENTS)]
    data = ff.Federation.from_dataset(torch.utils.data.TensorDataset(inputs, targets), indices)
    assert data.tensors() is not None
    times = []
    for _ in range(5):
        began = time.perf_counter()
        hasher = ContentHasher()
        for tensor in data.tensors() or []:
            hasher.add_data(tensor)
        times.append(time.perf_counter() - began)
    assert min(times[1:]) < 0.5 * times[0]


@pytest.mark.parametrize("seen", ["inputs", "test", "client test"])
def test_a_change_of_the_data_in_place_is_noticed(seen, tmp_path):
    clients = [(torch.randn(100, 4000), torch.zeros(100, dtype=torch.int64)) for _ in range(CLIENTS)]
    tests = [(torch.randn(100, 4000), torch.zeros(100, dtype=torch.int64)) for _ in range(CLIENTS)]
    data = ff.Federation.from_tensors(clients, test=tests[0], client_tests=tests)
    pooled = data.tensors()
    assert data.test is not None
    assert pooled is not None
    changed = {"inputs": data.inputs, "test": data.test[0], "client test": pooled[4]}[seen]
    assert changed.nbytes > 2**20
    options = {"model": nn.Linear(4000, CLASSES), "federation": data}
    train(tmp_path, **options)
    before = changed[7].clone()
    changed[7, 9] += 1
    assert another("data") in refusal(tmp_path, **options)
    changed[7] = before
    assert len(train(tmp_path, rounds=3, **options).history) == 3


# -- content -----------------------------------------------------------------------------------------------


def digest(value: Any, versioned: bool = False) -> str:
    hasher = ContentHasher(versioned)
    hasher.add(value)
    assert hasher.unseen == []
    return hasher.digest.hexdigest()


def unseen(value: Any) -> list[str]:
    hasher = ContentHasher()
    hasher.add(value)
    return hasher.unseen


def structure(module: nn.Module) -> str:
    hasher = ContentHasher()
    hasher.add_structure(module)
    assert hasher.unseen == []
    return hasher.digest.hexdigest()


Pair = namedtuple("Pair", "left right")


class Slotted:
    __slots__ = ("left",)

    def __init__(self, left: Any) -> None:
        self.left = left


@dataclass
class Lazy:
    left: Any
    options: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def right(self) -> object:
        return object()


DIFFERENT: dict[str, tuple[Any, ...]] = {
    "numbers": (1, 1.0, True, "1", b"1", 1 + 0j, None),
    "floats": (0.1, 0.1 + 2**-56, -0.0, 0.0),
    "nesting": ([1, [2, 3]], [[1, 2], 3], [1, 2, 3], [1, 2, [3]]),
    "texts": (["ab", "c"], ["a", "bc"], ["abc"]),
    "mappings": ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, {("a",): 1, "b": 2}),
    "sets": ({1, 2}, {1, 3}, {(1, 2)}),
    "tensors": (torch.ones(2), torch.zeros(2), torch.ones(2, 1), torch.ones(2).double(), torch.ones(0)),
    "arrays": (np.ones(2000), np.concatenate([np.ones(1000), np.zeros(1), np.ones(999)]), np.ones((2, 1000))),
    "odd arrays": (
        np.array(["a", "b"] * 1000),
        np.array(["a", "b"] * 999 + ["b", "b"]),
        np.array([1j] * 2000),
        np.array([None, {}], dtype=object),
        np.array([None, {"a": 1}], dtype=object),
    ),
    "objects": (Slotted(1), Slotted(2), Lazy(1), Lazy(2), Lazy(1, {"a": 1}), Pair(1, 2), Pair(1, 3)),
    "methods": (Slotted(1).__init__, Slotted(2).__init__),
    "others": (re.compile("a"), re.compile("b"), range(3), range(4), timedelta(1), Fraction(1, 3)),
    "functions": (F.relu, torch.relu, share, missed, len, functools.partial(share), torch.Tensor.sum),
    "modules": (nn.ReLU(), nn.Tanh(), nn.Dropout(0.1), nn.Dropout(0.2), nn.Linear(2, 2), nn.Linear(2, 2)),
}


@pytest.mark.parametrize("values", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_different_values_have_different_digests(values):
    assert len({digest(value) for value in values}) == len(values)
    for value in values:
        assert digest(value) == digest(copy.deepcopy(value))


def test_what_an_object_has_worked_out_does_not_count():
    value = Lazy(1)
    before = digest(value)
    assert value.right is value.right
    assert digest(value) == before


class Wrapping:
    """A metric that wraps its methods, as those of torchmetrics do, and makes them anew in a copy."""

    def __init__(self, classes: int) -> None:
        self.classes = classes
        self.compute = lambda: 2 * classes

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "compute"}

    def compute(self) -> int:
        return self.classes


def test_what_an_object_leaves_out_of_its_copies_does_not_count():
    assert digest(Wrapping(1)) == digest(Wrapping(1)) != digest(Wrapping(2))
    assert not unseen(Wrapping(1))


def test_sharing_and_circles_are_no_obstacle():
    tower: list[Any] = [1]
    for _ in range(100):
        tower = [tower, tower]
    assert digest(tower) == digest(tower)
    circle: list[Any] = [1]
    circle.append(circle)
    assert digest(circle) != digest([1])
    same = [2, 3]
    assert digest([same, same]) == digest([[2, 3], [2, 3]])


def test_what_has_no_content_is_noted():
    class Odd:
        def __reduce_ex__(self, protocol: Any) -> Any:
            raise RuntimeError("never")

    for value in ((number for number in range(3)), Odd(), [threading.Lock()], lambda: 1):
        assert len(unseen(value)) == 1
    assert digest(lambda: 1, versioned=True) == digest(lambda: 2, versioned=True)


def test_tensors_that_a_module_keeps_besides_registering_them_are_no_structure():
    """An LSTM keeps its weights in a list, too, and weak references to them."""

    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.LSTM(2, 3), nn.Linear(3, 2)
            self.stages = [self.first, self.second]
            self.constant = torch.ones(2)

    first, second = Listed(), Listed()
    assert not torch.equal(first.second.weight, second.second.weight)
    assert structure(first) == structure(second)
    assert digest(first) != digest(second)
    second.constant[0] = 2
    assert structure(first) != structure(second)


def test_a_recurrent_run_goes_on(tmp_path):
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent, self.head = nn.LSTM(1, 3, batch_first=True), nn.Linear(3, CLASSES)

        def forward(self, inputs: Tensor) -> Tensor:
            return self.head(self.recurrent(inputs.unsqueeze(2))[0][:, -1])

    torch.manual_seed(0)
    model = Recurrent()
    train(tmp_path, model=model)
    assert len(train(tmp_path, model=copy.deepcopy(model), rounds=3).history) == 3
    assert another("first weights") in refusal(tmp_path, model=Recurrent())


def test_hooks_are_told_apart_but_not_by_their_numbers():
    plain, hooked, later, other = (nn.Linear(2, 2) for _ in range(4))
    hooked.register_forward_hook(hook)
    nn.Linear(2, 2).register_forward_hook(hook)
    later.register_forward_hook(hook)
    other.register_forward_hook(other_hook)
    assert structure(hooked) == structure(later)
    assert len({structure(module) for module in (plain, hooked, other)}) == 3


def hook(module: nn.Module, inputs: Any, output: Any) -> None:
    pass


def other_hook(module: nn.Module, inputs: Any, output: Any) -> Any:
    return 2 * output


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (nn.ReLU(), nn.LeakyReLU()),
        (nn.Linear(3, 3), nn.Linear(3, 3, bias=False)),
        (nn.Linear(3, 3), nn.Linear(3, 3).double()),
        (nn.BatchNorm1d(3), nn.BatchNorm1d(3, momentum=0.2)),
        (nn.Sequential(nn.ReLU(), nn.Tanh()), nn.Sequential(nn.Tanh(), nn.ReLU())),
        (nn.Conv2d(3, 3, 3), nn.Conv2d(3, 3, 3, padding=1)),
    ],
    ids=str,
)
def test_structures_are_told_apart(before, after):
    assert structure(before) != structure(after)
    assert structure(before) == structure(copy.deepcopy(before).eval())


def test_the_sites_of_a_federation_have_first_weights_of_their_own():
    def identity(model: nn.Module, transform: Any = Rescaled(1.0), version: str = "") -> str:  # noqa: B008
        training = ff.Training(rounds=2)
        made = federation_identity(
            ff.fedavg(), training, model, F.cross_entropy, {"share": share}, transform, version
        )
        assert made.uncovered == ()
        return made.digest

    assert identity(nn.LSTM(2, 3)) == identity(nn.LSTM(2, 3))
    first, second = Scaled(), with_tensors_changed(lambda model: model.head.weight.zero_())
    assert identity(first) == identity(second)
    frozen = with_tensors_changed(lambda model: model.body.weight.zero_())
    others = (Scaled(2.0), frozen)
    digests = {identity(first), *map(identity, others), identity(first, Rescaled(2.0))}
    assert len(digests | {identity(first, version="a 1"), identity(first, version="a 2")}) == 6


# -- code --------------------------------------------------------------------------------------------------

SMOOTHING = 0.1


def helper(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, label_smoothing=SMOOTHING)


def through_a_helper(outputs: Tensor, targets: Tensor) -> Tensor:
    return helper(outputs, targets)


@torch.no_grad()
def decorated(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs.argmax(1) == targets).double().mean() + SMOOTHING


class Base(nn.Module):
    scale = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return self.scale * inputs * SMOOTHING


class Derived(Base):
    pass


@pytest.mark.parametrize(
    "value",
    [helper, through_a_helper, decorated, Base(), Derived()],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_constants_that_code_uses_are_noticed(value, monkeypatch):
    before, versioned = digest(value), digest(value, versioned=True)
    monkeypatch.setattr(sys.modules[__name__], "SMOOTHING", 0.2)
    assert digest(value) != before
    # There, a name and a version stand for what the source does not show.
    assert digest(value, versioned=True) == versioned
    monkeypatch.undo()
    assert digest(value) == before


def test_constants_of_a_class_are_noticed(monkeypatch):
    before = digest(Derived())
    monkeypatch.setattr(Base, "scale", 2.0)
    assert digest(Derived()) != before


def test_what_a_local_class_takes_from_around_it_is_noticed():
    def made(scale: Any) -> nn.Module:
        class Local(nn.Linear):
            def forward(self, inputs: Tensor) -> Tensor:
                return super().forward(scale * inputs)

        torch.manual_seed(0)
        return Local(2, 2)

    assert digest(made(1.0)) == digest(made(1.0))
    assert digest(made(1.0)) != digest(made(2.0))
    (reason,) = unseen(made(object()))
    assert "'scale'" in reason


LOSS = """
import torch.nn.functional as F

def loss(outputs, targets):
    return {factor} * F.cross_entropy(outputs, targets)
"""


def test_another_source_of_the_same_name_is_noticed(tmp_path, monkeypatch):
    digests = []
    for number, factor in enumerate(("1.0", "2.0", "1.0")):
        path = tmp_path / f"{number}.py"
        path.write_text(LOSS.format(factor=factor))
        spec = importlib.util.spec_from_file_location("losses_of_a_test", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "losses_of_a_test", module)
        spec.loader.exec_module(module)
        digests.append(digest(module.loss))
    assert digests[0] == digests[2] != digests[1]


class OwnGradient(Gradient):
    """A part that no description can build."""

    factor = 1.0


def test_the_code_of_a_part_is_part_of_the_algorithm(monkeypatch):
    task, training = ff.Task(Scaled(), federation()), ff.Training(rounds=1)
    algorithm = ff.Algorithm(gradient=OwnGradient())
    plan = make_plan(task.model, task.federation, algorithm, task.loss, task.used_metrics, training, "cpu")
    before = run_identity(task, plan)
    monkeypatch.setattr(OwnGradient, "factor", 2.0)
    assert run_identity(task, plan).difference(before.components) == "algorithm"


ELSEWHERE = """
import re, sys
import torch
import torch.nn.functional as F
import flatfed as ff
from torch import nn
from flatfed.engines.planning import make_plan
from flatfed.runs.identity import run_identity

FACTORS = {"a": 1.0, "b": 2.0}

class Net(nn.Module):
    kinds = {"x", "y", "z"}

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.names, self.pattern, self.kind = {"one", "two", "three", "four"}, re.compile("a|b"), nn.ReLU
        self.table = {nn.ReLU: 1, nn.Tanh: 2, ("a", 1): 3}
        if len(sys.argv) > 1:
            nn.Linear(1, 1).register_forward_hook(print)
        self.head.register_forward_hook(look)

    def forward(self, inputs):
        return FACTORS["b" if "x" in {"p", "q", "r"} else "a"] * self.head(inputs)

def look(module, inputs, output):
    return None

def loss(outputs, targets):
    return F.cross_entropy(outputs, targets) * (1 if "x" in {"k", "l", "m", "x"} else 2)

torch.manual_seed(0)
generator = torch.Generator().manual_seed(1)
inputs, targets = torch.randn(8, 5, generator=generator), torch.randint(3, (8,), generator=generator)
task = ff.Task(Net(), ff.Federation.from_tensors([(inputs, targets)] * 3), loss=loss)
training = ff.Training(rounds=1)
plan = make_plan(task.model, task.federation, ff.scaffold(), task.loss, task.used_metrics, training, "cpu")
identity = run_identity(task, plan)
print(identity.uncovered, sorted(identity.components.items()))
"""


@pytest.mark.parametrize("typed", [True, False], ids=["typed in", "in a file"])
def test_another_process_gives_the_same_digests(typed, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ELSEWHERE)
    command = ["-c", ELSEWHERE] if typed else [str(script)]
    outputs = [
        subprocess.run(
            [sys.executable, *command, *more],
            capture_output=True, text=True, check=True, env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed, more in (("1", []), ("2", ["later"]))
    ]  # fmt: skip
    assert outputs[0].startswith("() [('algorithm', ")
    assert outputs[0] == outputs[1]
