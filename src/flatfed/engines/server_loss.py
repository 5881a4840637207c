"""The loss as the server can compute it by itself, on samples that it made up or was given.

It is differentiated twice and summed over many steps, so it is in float32 whatever the training's precision.
"""

import copy
from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatfed.core import random
from flatfed.core.flat import load_buffers
from flatfed.core.sharing import PRIVATE_MODEL
from flatfed.core.state import State
from flatfed.core.tree import Tree
from flatfed.engines.devices import set_products
from flatfed.engines.model_copy import protect_inputs
from flatfed.engines.oracles import MatrixGradients
from flatfed.engines.planning import Plan


def server_loss(plan: Plan, model: nn.Module, buffers: State) -> Callable[[Tensor, Tree, Tree], Tensor]:
    """The loss of a flat model on inputs and targets, in evaluation mode, differentiable repeatedly."""
    module = copy.deepcopy(model).to(plan.device).eval()
    load_buffers(module, buffers)
    if plan.edits_inputs:
        protect_inputs(module)
    division = plan.division
    loss_of = MatrixGradients(module, division.whole, plan.loss).loss_of
    private = plan.private_state.get(PRIVATE_MODEL)
    own = None if private is None else private.to(plan.device)

    def loss(point: Tensor, inputs: Tree, targets: Tree) -> Tensor:
        set_products("float32", plan.device)
        # Of torch's attention kernels only the plain one can be differentiated twice.
        with random.routed(plan.evaluation_generator()), sdpa_kernel(SDPBackend.MATH):
            return loss_of(point if own is None else division.joined(point, own), inputs, targets)

    return loss
