"""Closed-form gradients of dense stacks against automatic differentiation, and who gets them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import train
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.utils import prune

import flatfed as ff
from flatfed.core.flat import Layout
from flatfed.engines.dense import dense_gradients, dense_layers
from flatfed.engines.oracles import MatrixGradients

CLIENTS, BATCH, FEATURES, CLASSES = 3, 7, 6, 4
STACKS = {
    "logistic regression": lambda: nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, CLASSES)),
    "one layer": lambda: nn.Linear(FEATURES, CLASSES),
    "no biases": lambda: nn.Sequential(
        nn.Linear(FEATURES, 5, bias=False), nn.ReLU(), nn.Linear(5, CLASSES, bias=False)
    ),
    "deep": lambda: nn.Sequential(
        nn.Linear(FEATURES, 5), nn.ReLU(), nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5), nn.Sigmoid(),
        nn.Linear(5, CLASSES),
    ),
    "nothing between": lambda: nn.Sequential(nn.Linear(FEATURES, 5), nn.Linear(5, CLASSES)),
    "nested": lambda: nn.Sequential(
        nn.Sequential(nn.Flatten(), nn.Linear(FEATURES, 5)), nn.ReLU(inplace=True), nn.Linear(5, CLASSES)
    ),
}  # fmt: skip


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return STACKS[name]().double()


def differentiated(module: nn.Module, layout: Layout) -> Any:
    def loss(point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(functional_call(module, layout.views(point), (inputs,)), targets)

    return vmap(grad_and_value(loss))


def problem(layout: Layout, shape: tuple[int, ...] = (FEATURES,)) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    point = torch.randn(CLIENTS, layout.size, generator=generator, dtype=torch.float64)
    inputs = torch.randn(CLIENTS, BATCH, *shape, generator=generator, dtype=torch.float64)
    return point, inputs, torch.randint(CLASSES, (CLIENTS, BATCH), generator=generator)


@pytest.mark.parametrize("name", STACKS)
def test_gradients_and_losses_are_those_of_automatic_differentiation(name):
    module = made(name)
    layout = Layout(module)
    layers = dense_layers(module, layout, F.cross_entropy)
    assert layers is not None
    arguments = problem(layout)
    kept = [argument.clone() for argument in arguments]
    gradient, loss, _ = dense_gradients(layers, *arguments)
    expected, expected_loss = differentiated(module, layout)(*arguments)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-14)
    assert torch.allclose(loss, expected_loss, rtol=1e-12, atol=0)
    assert all(torch.equal(before, after) for before, after in zip(kept, arguments, strict=True))
    assert gradient.is_contiguous()


def test_images_are_flattened():
    module = made("logistic regression")
    layout = Layout(module)
    layers = dense_layers(module, layout, F.cross_entropy)
    assert layers is not None
    arguments = problem(layout, (1, 2, 3))
    gradient, *_ = dense_gradients(layers, *arguments)
    assert torch.allclose(gradient, differentiated(module, layout)(*arguments)[0], rtol=1e-12, atol=1e-14)


def test_one_batch_for_all_clients_is_not_copied_wrongly():
    """As FedSynSAM asks for it: the same inputs, expanded over the clients."""
    module = made("deep")
    layout = Layout(module)
    layers = dense_layers(module, layout, F.cross_entropy)
    assert layers is not None
    point, inputs, targets = problem(layout)
    shared = point, inputs[:1].expand_as(inputs), targets[:1].expand_as(targets)
    gradient, *_ = dense_gradients(layers, *shared)
    assert torch.allclose(gradient, differentiated(module, layout)(*shared)[0], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", STACKS)
def test_a_map_of_the_inputs_has_the_gradients_of_automatic_differentiation(name):
    def shift(inputs: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
        return torch.sin(inputs * scale) + offset

    module = made(name)
    layout = Layout(module)
    point, inputs, targets = problem(layout)
    generator = torch.Generator().manual_seed(2)
    parameters = tuple(
        torch.randn(CLIENTS, FEATURES, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    gradients = MatrixGradients(module, layout, F.cross_entropy)
    assert gradients.layers is not None
    closed_form = gradients.shifted(point, shift, parameters, inputs, targets)
    gradients.layers = None
    torch.testing.assert_close(
        closed_form, gradients.shifted(point, shift, parameters, inputs, targets), rtol=1e-11, atol=1e-14
    )


@pytest.mark.parametrize("targets", ["labels", "left out", "probabilities", "bytes"])
def test_other_targets_are_differentiated(targets):
    module = made("logistic regression")
    layout = Layout(module)
    point, inputs, labels = problem(layout)
    if targets == "left out":
        labels[0, 0] = -100
    elif targets == "bytes":
        labels = labels.to(torch.uint8)
    elif targets == "probabilities":
        labels = F.one_hot(labels, CLASSES).double()
    gradients = MatrixGradients(module, layout, F.cross_entropy)
    other = point, point[:, 0]
    gradients.differentiated = lambda *_: other
    gradient = gradients.plain(point, inputs, labels)
    assert (gradient[0] is other[0]) is (targets != "labels")


class Doubled(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        return 2 * super().forward(inputs)


class Own(nn.Sequential):
    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + 1


def frozen() -> nn.Module:
    module = made("deep")
    next(iter(module.parameters())).requires_grad_(False)
    return module


def shared() -> nn.Module:
    layer = nn.Linear(4, 4)
    return nn.Sequential(layer, nn.ReLU(), layer)


def hooked() -> nn.Module:
    module = made("deep")
    module[0].register_forward_hook(lambda *_: None)
    return module


def pruned() -> nn.Module:
    """Afterwards the bias comes before the weight."""
    module = made("deep")
    prune.l1_unstructured(module[0], "weight", amount=0.3)
    prune.remove(module[0], "weight")
    return module


def with_more_parameters() -> nn.Module:
    module = made("deep")
    module.temperature = nn.Parameter(torch.ones(1).double())
    return module


def with_a_scale() -> nn.Module:
    module = made("deep")
    module[0].scale = nn.Parameter(torch.ones(3).double())
    return module


def with_another_forward() -> nn.Module:
    module = made("deep")
    module[0].forward = lambda inputs: 2 * inputs
    return module


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(Doubled(4, 4)),
        Own(nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4)),
        nn.Sequential(nn.ReLU(), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Tanh(), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Flatten(), nn.Linear(4, 4)),
        nn.Sequential(nn.Flatten(2), nn.Linear(4, 4)),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.Linear(4, 4)),
        nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)),
        nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))),
        frozen(),
        shared(),
        hooked(),
        pruned(),
        with_more_parameters(),
        with_a_scale(),
        with_another_forward(),
    ],
    ids=lambda module: str(module).replace("\n", "")[:40],
)
def test_anything_else_is_left_to_automatic_differentiation(module):
    assert dense_layers(module, Layout(module), F.cross_entropy) is None


def test_hooks_of_all_modules_are_respected():
    module = made("deep")
    assert dense_layers(module, Layout(module), F.cross_entropy) is not None
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert dense_layers(module, Layout(module), F.cross_entropy) is None
    finally:
        hook.remove()


def test_other_losses_are_left_to_automatic_differentiation():
    module = made("deep")
    assert dense_layers(module, Layout(module), lambda outputs, targets: outputs.mean()) is None


@pytest.mark.parametrize("name", ["fedavg", "fedsam", "fedlesam", "fedsmoo"])
def test_a_training_agrees_with_the_one_client_by_client(name):
    generator = torch.Generator().manual_seed(2)
    data = ff.Federation.from_tensors(
        [
            (
                torch.randn(8, FEATURES, generator=generator, dtype=torch.float64),
                torch.randint(CLASSES, (8,), generator=generator),
            )
            for _ in range(6)
        ]
    )
    runs = [
        train(
            made("deep"),
            data,
            ff.build(name),
            rounds=3,
            local_steps=3,
            batch_size=4,
            lr=0.1,
            path=path,
            workers=1,
        )
        for path in ("matrix", "client")
    ]
    assert torch.allclose(runs[0].server["model"], runs[1].server["model"], rtol=0, atol=1e-12)
