"""Gradients in closed form, for stacks of linear layers under cross-entropy.

These are the models of quick experiments (logistic regression, multilayer perceptrons), and they are so small
that automatic differentiation takes longer than their arithmetic. A chunk of clients goes through as batched
matrix products, forwards and backwards, and every layer's gradient is written to its place in [C, P].
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.flat import Layout, Loss
from flatfed.core.settings import Precision

_BACKWARD: dict[type[nn.Module], Callable[[Tensor, Tensor], Tensor]] = {
    nn.ReLU: lambda slope, value: torch.ops.aten.threshold_backward(slope, value, 0),
    nn.Tanh: torch.ops.aten.tanh_backward,
    nn.Sigmoid: torch.ops.aten.sigmoid_backward,
}
"""The slope before an activation, from the slope behind it and its value."""
BACKWARD_HOOKS = ("backward_hooks", "backward_pre_hooks")
_HOOKS = ("forward_hooks", "forward_pre_hooks", *BACKWARD_HOOKS)


@dataclass(frozen=True)
class Layer:
    """A linear layer's place in the vector, and the activation behind it."""

    start: int
    outputs: int
    inputs: int
    has_bias: bool
    activation: nn.Module | None = None

    def weight(self, matrix: Tensor) -> Tensor:
        """Its weights [C, O, I] as a view of [C, P]."""
        size = self.outputs * self.inputs
        return matrix[:, self.start : self.start + size].view(-1, self.outputs, self.inputs)

    def bias(self, matrix: Tensor) -> Tensor:
        """Its biases [C, O] as a view of [C, P]."""
        start = self.start + self.outputs * self.inputs
        return matrix[:, start : start + self.outputs]


def dense_layers(module: nn.Module, layout: Layout, loss: Loss) -> list[Layer] | None:
    """The layers of a stack under cross-entropy, or None for every other model and loss."""
    children = list(_flat_children(module))
    linear = [child for child in children if type(child) is nn.Linear]
    if loss is not F.cross_entropy or not linear or children[-1] is not linear[-1]:
        return None
    # Modules that do something else than their classes say.
    if has_hooks(module, _HOOKS) or any("forward" in vars(part) for part in module.modules()):
        return None
    own = [value for child in linear for value in (child.weight, child.bias) if value is not None]
    # In this order and nothing else, once each, all of them trained.
    if [id(value) for value in own] != [id(value) for value in module.parameters()]:
        return None
    if [value.shape for value in own] != [entry.shape for entry in layout.entries]:
        return None
    layers: list[Layer] = []
    start = 0
    for child in children:
        if type(child) is nn.Linear:
            outputs, inputs = child.weight.shape
            layers.append(Layer(start, outputs, inputs, child.bias is not None))
            start += sum(value.numel() for value in child.parameters())
        elif type(child) in _BACKWARD and layers and layers[-1].activation is None:
            layers[-1] = replace(layers[-1], activation=child)
        elif type(child) is not nn.Flatten or layers or (child.start_dim, child.end_dim) != (1, -1):
            return None
    return layers


def has_hooks(module: nn.Module, kinds: Sequence[str]) -> bool:
    """Whether some of its modules, or all modules everywhere, have hooks of these kinds."""
    everywhere = any(getattr(nn.modules.module, f"_global_{kind}") for kind in kinds)
    return everywhere or any(getattr(part, f"_{kind}") for part in module.modules() for kind in kinds)


def _flat_children(module: nn.Module) -> Iterator[nn.Module]:
    if type(module) is nn.Sequential:
        for child in module:
            yield from _flat_children(child)
    else:
        yield module


def has_labels(inputs: Tensor, targets: Tensor, labelled: bool | None = None) -> bool:
    """Whether there is a class for every sample of a chunk, and none is left out.

    `labelled` says the latter if it is known, so that the numbers need not be looked at.
    """
    if inputs.dim() < 3 or targets.dim() != 2 or targets.dtype != torch.int64:
        return False
    return int(targets.min()) >= 0 if labelled is None else labelled


def dense_gradients(
    layers: Sequence[Layer],
    point: Tensor,
    inputs: Tensor,
    labels: Tensor,
    precision: Precision = "float32",
    of_inputs: bool = False,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Gradients [C, P], losses [C] and, if asked for, slopes of the inputs: at points [C, P], for inputs
    [C, B, …] and labels [C, B].

    With less precision, layers are computed in it and the loss is not, as under torch's autocast.
    """
    seen, used = inputs, point
    if precision == "bfloat16":
        seen, used = inputs.to(torch.bfloat16), point.to(torch.bfloat16)
    # Samples last: a few outputs of many samples are then long rows for every operation.
    values = [seen.flatten(2).transpose(1, 2)]  # what each layer sees, [C, I, B]
    for layer in layers:
        weight = layer.weight(used)
        if layer.has_bias:
            value = torch.baddbmm(layer.bias(used).unsqueeze(2), weight, values[-1])
        else:
            value = torch.bmm(weight, values[-1])
        values.append(value if layer.activation is None else layer.activation(value))
    labelled = labels.unsqueeze(1)
    slope = torch.log_softmax(values.pop(), 1, dtype=point.dtype)  # [C, O, B]
    right = slope.gather(1, labelled)
    # Of the mean loss, with respect to the outputs: (probability − whether it is the label) / B.
    slope.exp_().scatter_add_(1, labelled, right.new_full((), -1.0).expand_as(right))
    slope = slope.mul_(1 / labels.shape[1]).to(used.dtype)
    gradient = torch.empty_like(point)
    for number in reversed(range(len(layers))):
        layer, value = layers[number], values[number]
        if used is point:
            torch.bmm(slope, value.transpose(1, 2), out=layer.weight(gradient))
        else:
            layer.weight(gradient).copy_(torch.bmm(slope, value.transpose(1, 2)))
        if layer.has_bias:
            torch.sum(slope, 2, dtype=gradient.dtype, out=layer.bias(gradient))
        if number:
            slope = torch.bmm(layer.weight(used).transpose(1, 2), slope)
            before = layers[number - 1].activation
            slope = slope if before is None else _BACKWARD[type(before)](slope, value)
    input_slope = None
    if of_inputs:
        input_slope = torch.bmm(slope.transpose(1, 2), layers[0].weight(used))
        input_slope = input_slope.view(inputs.shape).to(inputs.dtype)
    return gradient, right.mean((1, 2)).neg_(), input_slope
