"""Evaluating models on stored samples."""

from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.flat import (
    BoundModel,
    buffers_of,
    load_buffers,
)
from flatfed.core.outputs import ignored_label, judged
from flatfed.core.sharing import PRIVATE_BUFFERS, PRIVATE_MODEL
from flatfed.core.state import State
from flatfed.core.tree import Tree, call, first_leaf, map_tree
from flatfed.data.samples import Samples
from flatfed.data.transform import Transform
from flatfed.engines.devices import set_products
from flatfed.engines.metrics import Measured, evaluated_on, is_streaming, named_errors, one_number
from flatfed.engines.model_copy import protect_inputs
from flatfed.engines.planning import Plan
from flatfed.engines.precision import computing_in, widened


class Snapshot(NamedTuple):
    """A model at some moment: its flat vector and its buffers."""

    model: Tensor
    """What is shared of it."""
    buffers: State
    private: State = MappingProxyType({})
    """The state of the client whose model it is; without it, what is private has its first values."""


class Evaluator:
    """A private copy of the model, ready to be evaluated."""

    def __init__(self, plan: Plan, model: nn.Module, transform: Transform) -> None:
        self.plan, self.transform = plan, transform
        self.bound = BoundModel(model, plan.division.whole, plan.device, plan.division.evaluating)
        self._first_buffers = {
            name: value
            for name, value in buffers_of(self.bound.module).items()
            if name in plan.division.stationary
        }
        means = {name: metric for name, metric in plan.metrics.items() if not is_streaming(metric)}
        functions: dict[str, Any] = {"loss": plan.loss, **means}
        self._means = {name: (function, ignored_label(function)) for name, function in functions.items()}
        if plan.edits_inputs:
            protect_inputs(self.bound.module)

    def evaluate(self, snapshot: Snapshot, samples: Samples) -> Measured:
        """What a model's loss and metrics are on some stored samples, in evaluation mode."""
        # Copies: the model, the transform or a metric may edit them in place.
        inputs, targets = map_tree(lambda tensor: tensor.to(self.plan.device, copy=True), samples)
        precision = self.plan.training.precision
        set_products(precision, self.plan.device)
        self._load(snapshot)
        self.bound.module.eval()
        sums, weights, kept = [], [], Measured(torch.empty(0), torch.empty(0))
        with torch.no_grad(), random.routed(self.plan.evaluation_generator()):
            with named_errors("model", evaluated_on(inputs)):
                seen = self.transform.evaluate(inputs)
                with computing_in(precision, self.plan.device):
                    raw = call(self.bound.module, seen)
            outputs = widened(precision, raw)
            if any(map(is_streaming, self.plan.metrics.values())):
                kept = kept._replace(outputs=_set_aside(outputs), targets=_set_aside(targets))
            for name, (function, ignored) in self._means.items():
                with named_errors(name, evaluated_on(inputs)):
                    weight = _weight(targets, ignored)
                    if name == "loss":
                        with computing_in(precision, self.plan.device):
                            value = judged(function, raw, targets)
                    else:
                        value = judged(function, outputs, targets)
                    number = one_number(name, value)
                    sums.append(number * weight if weight else torch.zeros_like(number))
                    weights.append(weight)
        return kept._replace(sums=torch.stack(sums), weights=torch.tensor(weights, dtype=torch.float64))

    def _load(self, snapshot: Snapshot) -> None:
        """Makes the module the model of a snapshot, its private part included."""
        division, private = self.plan.division, {**self.plan.private_state, **snapshot.private}
        whole = snapshot.model
        if division.private.entries:
            whole = division.joined(whole, private[PRIVATE_MODEL].to(whole))
        self.bound.bind(whole)
        self._load_buffers(snapshot.buffers, snapshot.private)

    def _load_buffers(self, buffers: State, private: State) -> None:
        """Those that came, the first values of those that do not travel, and a client's own."""
        own = self.plan.division.unpacked(private[PRIVATE_BUFFERS]) if PRIVATE_BUFFERS in private else {}
        load_buffers(self.bound.module, {**self._first_buffers, **buffers, **own})


def _set_aside(tree: Tree) -> Tree:
    """Tensors that nobody else will edit."""
    return map_tree(lambda leaf: leaf.detach().cpu().clone() if isinstance(leaf, Tensor) else leaf, tree)


def _weight(targets: Tree, ignored: int | None) -> float:
    """How much a batch weighs in a mean: its samples, or the share of them whose targets are not left out."""
    samples = len(first_leaf(targets))
    if ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return float(samples)
    return float((targets != ignored).sum()) * samples / max(1, targets.numel())
