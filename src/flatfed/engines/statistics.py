"""Running statistics that the server makes for the global model by itself, from samples of its own."""

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.state import State
from flatfed.core.tree import call, first_leaf, map_tree, rows
from flatfed.data.samples import Samples
from flatfed.data.transform import Transform
from flatfed.engines.evaluator import Evaluator, Snapshot
from flatfed.engines.planning import Plan
from flatfed.engines.precision import computing_in
from flatfed.engines.threads import EVALUATION_BATCH


class ServerStatistics(Evaluator):
    """Means and variances over the server's samples, batch by batch, in place of averages of the clients'."""

    def __init__(self, plan: Plan, model: nn.Module, transform: Transform, samples: Samples) -> None:
        super().__init__(plan, model, transform)
        self.samples = samples
        parts = [self.bound.module.get_submodule(name) for name in plan.division.recomputed]
        self._normalising = [part for part in parts if isinstance(part, nn.modules.batchnorm._NormBase)]

    def __call__(self, model: Tensor, buffers: State) -> dict[str, Tensor]:
        """The buffers of a model with its own statistics."""
        self._load(Snapshot(model, buffers))
        self.bound.module.eval()
        momenta = [part.momentum for part in self._normalising]
        for part in self._normalising:
            part.reset_running_stats()
            part.momentum = None  # each batch counts the same
            part.train()
        count = len(first_leaf(self.samples))
        # Even batches: a last one of a single sample would have no variance.
        batches = torch.arange(count).tensor_split(-(-count // EVALUATION_BATCH))
        with torch.no_grad(), random.routed(self.plan.evaluation_generator()):
            for chosen in batches:
                inputs, _ = rows(self.samples, chosen)
                seen = self.transform.evaluate(map_tree(self._here, inputs))
                with computing_in(self.plan.training.precision, self.plan.device):
                    call(self.bound.module, seen)
        for part, momentum in zip(self._normalising, momenta, strict=True):
            part.momentum = momentum
        changed = self.bound.buffers
        return {
            name: changed[name].clone() if name in self.plan.division.stationary else value
            for name, value in buffers.items()
        }

    def _here(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.plan.device, copy=True)
