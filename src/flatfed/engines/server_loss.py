"""The loss as the server can compute it by itself, on samples that it made up or was given.

It is differentiated twice and summed over many steps, so it is in float32 whatever the training's precision.
"""

import copy
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatfed.core import random
from flatfed.core.flat import load_buffers
from flatfed.core.state import State
from flatfed.core.tree import Tree
from flatfed.engines.oracles import MatrixGradients
from flatfed.engines.planning import Plan
from flatfed.engines.trial import protect_inputs


def server_loss(plan: Plan, model: nn.Module, buffers: State) -> Callable[[Tensor, Tree, Tree], Tensor]:
    """The loss of a flat model on inputs and targets, in evaluation mode, differentiable repeatedly."""
    module = copy.deepcopy(model).to(plan.device).eval()
    load_buffers(module, buffers)
    if plan.edits_inputs:
        protect_inputs(module)
    loss_of = MatrixGradients(module, plan.layout, plan.loss).loss_of

    def loss(point: Tensor, inputs: Tree, targets: Tree) -> Tensor:
        # Of torch's attention kernels only the plain one can be differentiated twice.
        with random.routed(plan.evaluation_generator()), sdpa_kernel(SDPBackend.MATH):
            return loss_of(point, inputs, targets)

    return loss
