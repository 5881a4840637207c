"""Many ways to write a module: each trains like a plain loop, or is refused with the reason."""

from __future__ import annotations

import copy
import math
import random as python_random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import train
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

import flatfed as ff
from flatfed.core import random

CLIENTS, SAMPLES, FEATURES, CLASSES, ROUNDS, STEPS, RATE = 3, 6, 4, 3, 2, 2, 0.1

Data = list[tuple[Tensor, Tensor]]
Make = Callable[[], nn.Module]


def data(
    dtype: torch.dtype = torch.float64, inputs: Callable[[Tensor], Tensor] = lambda value: value
) -> Data:
    generator = torch.Generator().manual_seed(5)
    clients = []
    for _ in range(CLIENTS):
        features = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        clients.append((inputs(features.to(dtype)), labels))
    return clients


def plain_loop(model: nn.Module, clients: Data, loss: Callable[[Any, Tensor], Tensor]) -> nn.Module:
    """FedAvg as one would write it: copies of the model, SGD, the mean of parameters and buffers."""
    model = copy.deepcopy(model)
    for round_number in range(ROUNDS):
        trained = []
        for client, (inputs, targets) in enumerate(clients):
            own = copy.deepcopy(model).train()
            optimizer = torch.optim.SGD([value for value in own.parameters() if value.requires_grad], RATE)
            for step in range(STEPS):
                optimizer.zero_grad()
                key = random.key(0, "step", round_number, client, step)
                with random.routed(torch.Generator().manual_seed(key)):
                    loss(own(inputs.clone()), targets.clone()).backward()
                optimizer.step()
            trained.append(own)
        with torch.no_grad():
            for kind in ("named_parameters", "named_buffers"):
                everyones = [dict(getattr(own, kind)()) for own in trained]
                for name, value in getattr(model, kind)():
                    mean = torch.stack([own[name].double() for own in everyones]).mean(0)
                    value.copy_(mean if value.is_floating_point() else mean.round())
    return model


class Net(nn.Module):
    """A linear layer between whatever is done before and after it."""

    def __init__(
        self,
        before: Callable[[Tensor], Tensor] = lambda inputs: inputs,
        after: Callable[[Tensor], Any] = lambda outputs: outputs,
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(FEATURES, CLASSES)
        self.before, self.after = before, after

    def forward(self, inputs: Tensor) -> Any:
        return self.after(self.linear(self.before(inputs)))


class Written(nn.Module):
    """A module from what it has and what it does."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **content: Any) -> None:
        super().__init__()
        for name, value in content.items():
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                self.register_buffer(name, value)
            else:
                setattr(self, name, value)
        self.compute = forward

    def forward(self, inputs: Tensor) -> Any:
        return self.compute(self, inputs)


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * 0.3)


def linear(inputs: int = FEATURES, outputs: int = CLASSES) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def stack(*more: nn.Module) -> nn.Sequential:
    return nn.Sequential(linear(FEATURES, 5), *more, linear(5, CLASSES))


def changed(module: nn.Module, change: Callable[[nn.Module], Any]) -> nn.Module:
    change(module)
    return module


class Square(torch.autograd.Function):
    @staticmethod
    def forward(context, inputs):
        context.save_for_backward(inputs)
        return inputs.square()

    @staticmethod
    def backward(context, slope):
        return 2 * context.saved_tensors[0] * slope


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


@dataclass
class Answer:
    logits: Tensor


@dataclass
class Scores:
    scores: Tensor


def tied() -> nn.Module:
    model = nn.Sequential(linear(4, 4), nn.Tanh(), linear(4, 4), linear())
    model[2].weight = model[0].weight
    return model


def frozen() -> nn.Module:
    model = stack(nn.Tanh())
    model[0].requires_grad_(False)
    return model


def listed() -> nn.Module:
    """A parameter that is read from a list beside its registration."""
    model = Written(lambda self, inputs: inputs @ self.plain[0], weight=parameter(FEATURES, CLASSES))
    model.plain = [model.weight]
    return model


def kept_view() -> nn.Module:
    model = Written(lambda self, inputs: self.linear(inputs) + self.view[:CLASSES], linear=linear().double())
    object.__setattr__(model, "view", model.linear.weight.data.view(-1))
    return model


def overlapping() -> nn.Module:
    model = Written(lambda self, inputs: inputs @ self.one + self.other, one=parameter(FEATURES, CLASSES))
    model.double()
    model.other = nn.Parameter(model.one.data[0])
    return model


def counted(self: Any, inputs: Tensor) -> Tensor:
    self.calls = getattr(self, "calls", 0) + 1
    return self.linear(inputs) * (1 + 0.1 * self.calls)


def grown_buffer(self: Any, inputs: Tensor) -> Tensor:
    self.memory = torch.cat([self.memory, inputs.detach().mean(0, keepdim=True)])
    return self.linear(inputs)


def new_buffer(self: Any, inputs: Tensor) -> Tensor:
    if not hasattr(self, "mean"):
        self.register_buffer("mean", inputs.detach().mean(0))
    return self.linear(inputs - self.mean)


def flagged(self: Any, inputs: Tensor) -> Tensor:
    self.ready.fill_(True)
    return self.linear(inputs)


def moving_mean(self: Any, inputs: Tensor) -> Tensor:
    if self.training:
        self.mean = 0.9 * self.mean + 0.1 * inputs.detach().mean(0)
    return self.linear(inputs - self.mean)


def in_place_mean(self: Any, inputs: Tensor) -> Tensor:
    if self.training:
        self.mean.mul_(0.9).add_(inputs.detach().mean(0), alpha=0.1)
    return self.linear(inputs - self.mean)


def clamped(self: Any, inputs: Tensor) -> Tensor:
    self.linear.weight.data.clamp_(-0.2, 0.2)
    return self.linear(inputs)


def early(self: Any, inputs: Tensor) -> Tensor:
    outputs = self.first(inputs)
    return outputs if len(inputs) > 2 else self.second(outputs)


def branching(self: Any, inputs: Tensor) -> Tensor:
    return self.linear(inputs if inputs.sum() > 0 else -inputs)


def own_generator() -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    return Written(
        lambda self, inputs: self.linear(inputs + torch.rand(inputs.shape, generator=generator)),
        linear=linear(),
    )


def input_edits(*kinds: str) -> dict[str, Make]:
    edits: dict[str, Callable[[Tensor], Tensor]] = {
        "sub_": lambda inputs: inputs.sub_(0.5),
        "item assignment": changed_item,
        "relu_": lambda inputs: F.relu(inputs, inplace=True),
        "data": lambda inputs: inputs.data.mul_(0.5),
        "numpy": lambda inputs: torch.from_numpy(np.multiply(inputs.numpy(), 0.5, out=inputs.numpy())),
        "unsqueeze_": lambda inputs: inputs.unsqueeze_(1).squeeze(1),
    }
    return {f"edits its inputs by {kind}": lambda kind=kind: Net(edits[kind]) for kind in kinds or edits}


def changed_item(inputs: Tensor) -> Tensor:
    inputs[:, 0] = 1.0
    return inputs


def hooked(kind: str, hook: Callable[..., Any]) -> nn.Module:
    model = stack(nn.Tanh())
    getattr(model[0], kind)(hook)
    return model


ZOO: dict[str, Make] = {
    "one layer": linear,
    "a stack": lambda: stack(nn.Tanh()),
    "nested": lambda: nn.Sequential(
        nn.Sequential(stack(nn.ReLU()), nn.Identity()), nn.Sequential(linear(3, 3))
    ),
    "activations in place": lambda: stack(nn.ReLU(inplace=True)),
    "additions in place": lambda: Net(after=lambda outputs: outputs.add_(1).mul_(2)),
    **input_edits(),
    "a leading ReLU in place": lambda: nn.Sequential(nn.ReLU(inplace=True), stack(nn.Tanh())),
    "tied weights": tied,
    "frozen layer": frozen,
    "frozen bias": lambda: changed(linear(), lambda model: model.bias.requires_grad_(False)),
    "no bias": lambda: nn.Linear(FEATURES, CLASSES, bias=False),
    "shared submodule": lambda: Written(
        lambda self, inputs: self.head(self.one(torch.tanh(self.two(inputs)))),
        **dict.fromkeys(("one", "two"), linear(4, 4)),
        head=linear(),
    ),
    "unused parameters": lambda: Written(
        lambda self, inputs: self.used(inputs), used=linear(), unused=linear(), scale=parameter(3)
    ),
    "empty parameter": lambda: Written(
        lambda self, inputs: self.linear(inputs), linear=linear(), nothing=nn.Parameter(torch.empty(0))
    ),
    "empty buffer": lambda: Written(
        lambda self, inputs: self.linear(inputs), linear=linear(), nothing=torch.empty(0)
    ),
    "scalar parameter": lambda: Written(
        lambda self, inputs: self.linear(inputs) * self.scale,
        linear=linear(),
        scale=nn.Parameter(torch.tensor(2.0)),
    ),
    "functional parameters": lambda: Written(
        lambda self, inputs: F.linear(inputs, self.weight, self.bias),
        weight=parameter(3, 4),
        bias=parameter(3),
    ),
    "parameter list": lambda: Written(
        lambda self, inputs: inputs @ self.weights[0] + self.weights[1],
        weights=nn.ParameterList([parameter(4, 3), parameter(3)]),
    ),
    "parameter dictionary": lambda: Written(
        lambda self, inputs: inputs @ self.weights["one"] + self.weights["two"],
        weights=nn.ParameterDict({"two": parameter(3), "one": parameter(4, 3)}),
    ),
    "module dictionary": lambda: Written(
        lambda self, inputs: self.parts["b"](torch.tanh(self.parts["a"](inputs))),
        parts=nn.ModuleDict({"b": linear(), "a": linear(4, 4)}),
    ),
    "parameter in a plain list": listed,
    "non-contiguous parameter": lambda: Written(
        lambda self, inputs: inputs @ self.weight, weight=nn.Parameter(torch.randn(3, 4).T)
    ),
    "transposed use": lambda: Written(
        lambda self, inputs: inputs @ self.weight.T.contiguous(), weight=parameter(3, 4)
    ),
    "parametrized": lambda: changed(
        nn.Sequential(linear(4, 4), linear()),
        lambda model: parametrize.register_parametrization(model[0], "weight", Symmetric()),
    ),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(linear(4, 4)), linear()),
    "spectral norm": lambda: nn.Sequential(parametrizations.spectral_norm(linear(4, 4)), linear()),
    "orthogonal": lambda: nn.Sequential(parametrizations.orthogonal(linear(4, 4)), linear()),
    "spectral norm by a hook": lambda: nn.Sequential(nn.utils.spectral_norm(linear(4, 4)), linear()),
    "batch norm": lambda: stack(nn.BatchNorm1d(5)),
    "batch norm without statistics": lambda: stack(nn.BatchNorm1d(5, track_running_stats=False)),
    "batch norm with a cumulative mean": lambda: stack(nn.BatchNorm1d(5, momentum=None)),
    "layer norm": lambda: stack(nn.LayerNorm(5)),
    "group norm": lambda: stack(nn.GroupNorm(1, 5)),
    "buffer replaced by assignment": lambda: Written(moving_mean, linear=linear(), mean=torch.zeros(4)),
    "buffer changed in place": lambda: Written(in_place_mean, linear=linear(), mean=torch.zeros(4)),
    "constant buffer": lambda: Written(
        lambda self, inputs: self.linear(inputs * self.scale), linear=linear(), scale=torch.full((4,), 2.0)
    ),
    "buffer with infinities": lambda: Written(
        lambda self, inputs: self.linear(inputs) + self.mask.nan_to_num(neginf=0.0),
        linear=linear(),
        mask=torch.tensor([0.0, -math.inf, 0.0]),
    ),
    "dropout": lambda: stack(nn.Dropout(0.3)),
    "alpha dropout": lambda: stack(nn.AlphaDropout(0.3)),
    "noise": lambda: Net(lambda inputs: inputs + torch.randn_like(inputs)),
    "stochastic depth": lambda: Net(lambda inputs: inputs if torch.rand(()) < 0.5 else -inputs),
    "checkpointed": lambda: Written(
        lambda self, inputs: self.head(checkpoint(self.body, inputs, use_reentrant=False)),
        body=nn.Sequential(linear(4, 4), nn.Tanh()),
        head=linear(),
    ),
    "forward hook": lambda: hooked("register_forward_hook", lambda module, args, outputs: 2 * outputs),
    "forward pre-hook": lambda: hooked("register_forward_pre_hook", lambda module, args: (2 * args[0],)),
    "backward hook": lambda: hooked(
        "register_full_backward_hook",
        lambda module, inputs, outputs: tuple(2 * slope for slope in inputs if slope is not None) or None,
    ),
    "backward pre-hook": lambda: hooked(
        "register_full_backward_pre_hook", lambda module, outputs: (outputs[0] * 2,)
    ),
    "gradient hook inside": lambda: Net(after=hooked_slope),
    "part without gradient": lambda: Written(
        lambda self, inputs: self.head(without_gradient(self.body, inputs)), body=linear(4, 4), head=linear()
    ),
    "detached": lambda: Written(
        lambda self, inputs: self.one(inputs) + self.two(inputs).detach(), one=linear(), two=linear()
    ),
    "early return": lambda: Written(early, first=linear(), second=linear(3, 3)),
    "data-dependent branch": lambda: Written(branching, linear=linear()),
    "data-dependent loop": lambda: Net(lambda inputs: inputs * (1 + int(inputs[0, 0].abs().item() * 3))),
    "custom function": lambda: Net(after=Square.apply),
    "numpy for constants": lambda: Net(lambda inputs: inputs * float(np.mean([1.0, 3.0]))),
    "numpy inside": lambda: Net(lambda inputs: inputs + torch.from_numpy(inputs.detach().numpy().cumsum(1))),
    "complex arithmetic": lambda: Net(lambda inputs: torch.fft.fft(inputs).real),
    "sorting": lambda: Net(lambda inputs: inputs.sort(1).values),
    "masked assignment": lambda: Net(after=lambda outputs: outputs.masked_fill(outputs < 0, 0.1)),
    "einsum": lambda: Net(lambda inputs: torch.einsum("bi,bj->bi", inputs, inputs)),
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 2, 2, padding=1), nn.Flatten(), linear(18, 3)
    ),
    "recurrent": lambda: Written(
        lambda self, inputs: self.head(self.body(inputs[:, :, None])[0][:, -1]),
        body=nn.LSTM(1, 3, batch_first=True),
        head=linear(3, 3),
    ),
    "attention": lambda: Written(
        lambda self, inputs: self.head(
            self.body(*3 * (inputs[:, None] * torch.eye(4, dtype=inputs.dtype),))[0].mean(1)
        ),
        body=nn.MultiheadAttention(4, 2, batch_first=True),
        head=linear(),
    ),
    "compiled": lambda: torch.compile(stack(nn.Tanh()), backend="eager"),
    "lazy, called once": lambda: changed(
        nn.Sequential(nn.LazyLinear(5), nn.Tanh(), nn.LazyLinear(3)), lambda model: model(torch.zeros(1, 4))
    ),
    "generator of modules": lambda: nn.Sequential(*(linear(4, 4) for _ in range(3)), linear()),
    "deep residual": lambda: Written(
        lambda self, inputs: self.head(sum_of_blocks(self.blocks, inputs)),
        blocks=nn.ModuleList(linear(4, 4) for _ in range(3)),
        head=linear(),
    ),
    "keyword arguments": lambda: Written(lambda self, inputs: self.linear(input=inputs), linear=linear()),
    "replaced forward": lambda: changed(
        linear(), lambda model: setattr(model, "forward", Doubled(model.weight))
    ),
}


class Doubled:
    """A forward that is set on an instance, and reads a parameter by itself."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

    def __call__(self, inputs: Tensor) -> Tensor:
        return 2 * inputs @ self.weight.T


def hooked_slope(outputs: Tensor) -> Tensor:
    if outputs.requires_grad:
        outputs.register_hook(lambda slope: 3 * slope)
    return outputs


def without_gradient(module: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return module(inputs)


def sum_of_blocks(blocks: nn.ModuleList, inputs: Tensor) -> Tensor:
    for block in blocks:
        inputs = inputs + torch.tanh(block(inputs))
    return inputs


REFUSED: dict[str, tuple[Make, str]] = {
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(CLASSES)), "lazy module has no shape yet"),
    "weight norm by a hook": (lambda: nn.utils.weight_norm(linear()), "parametrizations.weight_norm"),
    "on meta": (lambda: nn.Linear(FEATURES, CLASSES, device="meta"), "has no numbers"),
    "parameter hook": (
        lambda: changed(linear(), lambda model: model.weight.register_hook(lambda slope: 2 * slope)),
        "'weight' has a hook",
    ),
    "hook after accumulation": (
        lambda: changed(
            linear(), lambda model: model.weight.register_post_accumulate_grad_hook(lambda weight: None)
        ),
        "'weight' has a hook",
    ),
    "complex parameter": (
        lambda: Written(
            lambda self, inputs: (inputs.to(torch.cfloat) @ self.weight).real,
            weight=nn.Parameter(torch.randn(4, 3, dtype=torch.cfloat)),
        ),
        "is complex",
    ),
    "several dtypes": (
        lambda: nn.Sequential(
            linear().double(), Written(lambda self, inputs: inputs * self.scale, scale=parameter(3))
        ),
        "several dtypes",
    ),
    "no parameters": (nn.Identity, "no trainable parameters"),
    "all frozen": (lambda: linear().requires_grad_(False), "no trainable parameters"),
    "numpy's stream": (
        lambda: Net(lambda inputs: inputs + float(np.random.rand())),
        "global stream of numpy.random",
    ),
    "Python's stream": (
        lambda: Net(lambda inputs: inputs * python_random.random()),
        "global stream of random",
    ),
    "Python's stream, hardly felt": (
        lambda: Net(lambda inputs: inputs if python_random.random() < 2 else -inputs),
        "global stream of random",
    ),
    "numpy's new generators": (
        lambda: Net(lambda inputs: inputs * np.random.default_rng().random()),
        "two passes over one batch",
    ),
    "a generator of its own": (own_generator, "two passes over one batch"),
    "counts its calls": (lambda: Written(counted, linear=linear()), "two passes over one batch"),
    "keeps a view of a parameter": (kept_view, "share memory without being one parameter"),
    "overlapping parameters": (overlapping, "share memory without being one parameter"),
    "clamps its weights": (
        lambda: Written(clamped, linear=linear()),
        "changes the parameter 'linear.weight'",
    ),
    "growing buffer": (
        lambda: Written(grown_buffer, linear=linear(), memory=torch.zeros(1, 4)),
        "buffer 'memory' changes from",
    ),
    "new buffer": (lambda: Written(new_buffer, linear=linear()), "makes or removes parameters or buffers"),
    "boolean buffer": (
        lambda: Written(flagged, linear=linear(), ready=torch.tensor(False)),
        "buffer 'ready' of dtype",
    ),
    "dictionary": (
        lambda: Net(after=lambda outputs: {"scores": outputs}),
        "takes one tensor, and the model returns a dict of 'scores' without logits; give a loss",
    ),
    "tuple": (
        lambda: Net(after=lambda outputs: (outputs, outputs)),
        "takes one tensor, and the model returns a tuple of 2 parts without logits; give a loss",
    ),
    "dataclass": (lambda: Net(after=Scores), "the model returns a Scores of 'scores' without logits"),
    "nothing": (lambda: Net(after=lambda outputs: None), "cannot be trained on a batch"),
    "too few features": (lambda: linear(3), "cannot be trained on a batch"),
    "dropout under checkpoints": (
        lambda: Written(
            lambda self, inputs: checkpoint(self.body, inputs, use_reentrant=False),
            body=nn.Sequential(linear(), nn.Dropout()),
        ),
        "again in the backward pass",
    ),
    "detached loss": (lambda: Net(after=lambda outputs: outputs.detach()), "cannot be trained on a batch"),
    "not a number": (
        lambda: changed(linear(), lambda model: model.weight.data.fill_(math.nan)),
        "before any training",
    ),
    "gradient of a root of 0": (
        lambda: Net(lambda inputs: 0 * inputs, lambda outputs: (outputs - outputs.detach()).sqrt()),
        "look for roots and norms of 0",
    ),
}


def work(path: str, workers: int = 1) -> dict[str, Any]:
    return {
        "rounds": ROUNDS,
        "local_steps": STEPS,
        "batch_size": None,
        "lr": RATE,
        "path": path,
        "workers": workers,
    }


def flat(clients: Data) -> list[Tensor]:
    return [tensor for pair in clients for tensor in pair]


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().double() for value in (*model.parameters(), *model.buffers())]


@pytest.mark.parametrize("name", ZOO)
def test_a_model_trains_like_a_plain_loop(name):
    torch.manual_seed(7)
    model = ZOO[name]().double()
    given = copy.deepcopy([value.data for value in (*model.parameters(), *model.buffers())])
    clients = data()
    originals = copy.deepcopy(clients)
    expected = plain_loop(model, clients, F.cross_entropy)
    federation = ff.Federation.from_tensors(clients, test=clients[0])
    stored = federation.inputs.clone()
    paths = []
    for path in ("auto", "client", "matrix"):
        try:
            stream = torch.get_rng_state()
            run = train(model, federation, ff.fedavg(), **work(path))
            assert torch.equal(torch.get_rng_state(), stream)
        except ff.FlatfedError as refusal:
            assert path == "matrix", refusal
            assert "path = 'matrix'" in str(refusal)
            continue
        paths.append(run.path)
        for own, other in zip(values(run.model), values(expected), strict=True):
            torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)
        with torch.no_grad():
            module = copy.deepcopy(run.model).eval()
            losses = {float(F.cross_entropy(module(clients[0][0].clone()), clients[0][1])) for _ in range(9)}
        # Not that of a model that draws even then.
        assert len(losses) > 1 or run.history[-1]["test_loss"] == pytest.approx(losses.pop())
    assert paths[:2] in (["client", "client"], ["matrix", "client"])
    # Whatever the model does to its inputs, it did it to a copy; and it was given back as it was.
    assert torch.equal(federation.inputs, stored)
    assert all(torch.equal(mine, yours) for mine, yours in zip(flat(clients), flat(originals), strict=True))
    for own, other in zip((*model.parameters(), *model.buffers()), given, strict=True):
        assert torch.equal(own.data, other)


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("path", ["auto", "matrix"])
def test_a_model_is_refused_with_the_reason(name, path):
    torch.manual_seed(7)
    make, reason = REFUSED[name]
    model = make()
    if name not in {"lazy", "several dtypes", "weight norm by a hook", "complex parameter"}:
        model = model.double()
    clients = data(torch.float32 if name == "complex parameter" else torch.float64)
    streams = python_random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    with pytest.raises(ff.FlatfedError) as refusal:
        train(model, ff.Federation.from_tensors(clients, test=clients[0]), ff.fedavg(), **work(path))
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value)
    after = python_random.getstate(), repr(np.random.get_state()), torch.get_rng_state()
    assert streams[:2] == after[:2]
    assert torch.equal(streams[2], after[2])


@pytest.mark.parametrize(
    ("outputs", "logits"),
    [
        (lambda outputs: {"logits": outputs}, lambda outputs: outputs["logits"]),
        (lambda outputs: (outputs, outputs), lambda outputs: outputs[1]),
        (Answer, lambda outputs: outputs.logits),
    ],
    ids=["dictionary", "tuple", "dataclass"],
)
def test_outputs_of_any_kind_train_with_a_loss_that_takes_them(outputs, logits):
    def loss(value: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits(value), targets)

    torch.manual_seed(7)
    model = Net(after=outputs).double()
    expected = plain_loop(model, data(), loss)
    federation = ff.Federation.from_tensors(data(), test=data()[0])
    run = train(model, federation, ff.fedavg(), loss=loss, metrics={}, **work("auto"))
    for own, other in zip(values(run.model), values(expected), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    "outputs", [lambda outputs: {"logits": outputs, "loss": None}, Answer], ids=["dictionary", "dataclass"]
)
@pytest.mark.parametrize("path", ["client", "matrix"])
def test_logits_among_other_outputs_train_like_logits_alone(outputs, path):
    results = []
    for after in (outputs, lambda outputs: outputs):
        torch.manual_seed(7)
        federation = ff.Federation.from_tensors(data(), test=data()[0])
        run = train(Net(after=after).double(), federation, ff.fedsam(), **work(path))
        results.append((run.server["model"], run.history[-1]["test_loss"], run.history[-1]["test_accuracy"]))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:]


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 3e-3)]
)
@pytest.mark.parametrize("path", ["client", "matrix"])
def test_a_model_of_any_precision_trains_like_a_plain_loop(dtype, tolerance, path):
    torch.manual_seed(7)
    model = stack(nn.Tanh()).to(dtype)
    clients = data(dtype)
    expected = plain_loop(model, clients, F.cross_entropy)
    run = train(model, ff.Federation.from_tensors(clients, test=clients[0]), ff.fedavg(), **work(path))
    for own, other in zip(values(run.model), values(expected), strict=True):
        torch.testing.assert_close(own, other, rtol=tolerance, atol=tolerance)


def test_frozen_parts_may_be_of_another_dtype():
    torch.manual_seed(7)

    def forward(self: Any, inputs: Tensor) -> Tensor:
        return self.head(self.body(inputs.to(torch.bfloat16)).double())

    model = Written(forward, body=linear(4, 4).bfloat16().requires_grad_(False), head=linear().double())
    expected = plain_loop(model, data(), F.cross_entropy)
    run = train(model, ff.Federation.from_tensors(data()), ff.fedavg(), **work("auto"))
    for own, other in zip(values(run.model), values(expected), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("algorithm", [ff.fedsam(radius=0.1), ff.scaffold()], ids=["fedsam", "scaffold"])
@pytest.mark.parametrize("path", ["client", "matrix"])
def test_all_evaluations_of_a_step_see_the_same_inputs(algorithm, path):
    """An edit in place must not add up over the two gradients of a sharpness-aware step."""
    results = []
    for edit in (lambda inputs: inputs.sub_(0.5), lambda inputs: inputs - 0.5):
        torch.manual_seed(7)
        run = train(Net(edit).double(), ff.Federation.from_tensors(data()), algorithm, **work(path))
        results.append(run.server["model"])
    assert torch.equal(*results)


def test_a_model_that_edits_its_inputs_later_is_refused():
    calls: list[int] = []

    def edit(inputs: Tensor) -> Tensor:
        calls.append(0)
        return inputs.sub_(0.5) if len(calls) > 10 else inputs - 0.5

    with pytest.raises(ff.FlatfedError, match="edited its inputs"):
        train(Net(edit).double(), ff.Federation.from_tensors(data()), ff.fedsam(), **work("client"))
