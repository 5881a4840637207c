"""Gradients of a local step, at any point: of one module in place, or of many clients as a matrix.

An oracle keeps the loss of its first evaluation and counts them all. All evaluations of a step use the same
batch and the same random draws, and only the first moves buffers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vjp, vmap

from flatfed.core.context import Oracle
from flatfed.core.errors import FlatfedError
from flatfed.core.flat import BoundModel, Layout, Loss, buffers_of, load_buffers
from flatfed.core.outputs import judged
from flatfed.core.random import routed
from flatfed.core.settings import Precision
from flatfed.core.tree import Tree, call, leaves, map_tree, versions
from flatfed.data.samples import Samples
from flatfed.engines.dense import dense_gradients, dense_layers, has_labels
from flatfed.engines.precision import computing_in, widened

Shift = Callable[..., Tensor]
UNEXPECTED_DRAWS = (
    "model: it (or the function that loads a client's data) drew from torch's global random stream in "
    "training, though not when it was first tried, so results would depend on the order of work; draw in "
    "every forward pass or in none, and load data without drawing"
)
UNEXPECTED_EDIT = (
    "model: it edited its inputs in place in training, though not when it was first tried, so another "
    "gradient of the same step would see other inputs; let it work on a copy of them"
)


class _Oracle:
    """The loss of the first evaluation, and how many there were."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self.evaluations = 0

    @property
    def loss(self) -> Tensor:
        assert self._loss is not None, "no gradient has been taken"
        return self._loss

    def _record(self, loss: Tensor) -> None:
        self.evaluations += 1
        if self._loss is None:
            self._loss = loss.detach()


class ModuleOracle(_Oracle):
    """One client's batch, evaluated by a module whose parameters are bound to the point."""

    def __init__(
        self,
        bound: BoundModel,
        loss: Loss,
        batch: Samples,
        random_key: int | None,
        moves_buffers: bool,
        precision: Precision = "float32",
    ) -> None:
        super().__init__()
        self.bound, self.loss_function = bound, loss
        self.inputs, self.targets = batch
        self.random_key, self.moves_buffers, self.precision = random_key, moves_buffers, precision

    def __call__(self, point: Tensor) -> Tensor:
        return self._gradients(point, self.inputs, ())[0]

    def on_samples(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        self.evaluations += 1
        other = ModuleOracle(
            self.bound, self.loss_function, (inputs, targets), self.random_key, False, self.precision
        )
        return other(point)

    def shifted(
        self, point: Tensor, shift: Shift, parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        leaves = tuple(parameter.detach().requires_grad_() for parameter in parameters)
        with torch.enable_grad():
            inputs = shift(self.inputs, *leaves)
        return self._gradients(point, inputs, leaves)

    def _gradients(
        self, point: Tensor, inputs: Tree, more: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        bound = self.bound
        bound.bind(point)
        first = self.evaluations == 0
        moves = (first and self.moves_buffers) or not bound.buffers
        kept = None if moves else buffers_of(bound.module)
        generator = None
        if self.random_key is not None:
            generator = torch.Generator(point.device).manual_seed(self.random_key)
        before = versions(inputs)
        with torch.enable_grad(), routed(generator):
            with computing_in(self.precision, point.device):
                loss = judged(self.loss_function, call(bound.module, inputs), self.targets)
            gradients = torch.autograd.grad(
                loss, [*bound.parameters, *more], allow_unused=True, materialize_grads=True
            )
        if versions(inputs) != before:
            raise FlatfedError(UNEXPECTED_EDIT)
        if kept is not None:
            load_buffers(bound.module, kept)
        self._record(widened(self.precision, loss))
        own = len(bound.parameters)
        return bound.layout.pack(gradients[:own]), gradients[own:]


class SplitOracle:
    """Gradients for shared entries, beside private entries that stay as they are meanwhile.

    Those for the private entries are kept from the first evaluation.
    """

    def __init__(self, whole: Oracle, private: Tensor) -> None:
        self.whole, self.private = whole, private
        self.private_gradient: Tensor | None = None

    def __call__(self, point: Tensor) -> Tensor:
        return self._shared(self.whole(self._joined(point)))

    def shifted(
        self, point: Tensor, shift: Shift, parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        gradient, slopes = self.whole.shifted(self._joined(point), shift, parameters)
        return self._shared(gradient), slopes

    def on_samples(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        gradient = self.whole.on_samples(self._joined(point), inputs, targets)
        return gradient[..., : point.shape[-1]].clone()

    def _joined(self, point: Tensor) -> Tensor:
        return torch.cat([point, self.private], -1)

    def _shared(self, gradient: Tensor) -> Tensor:
        count = self.private.shape[-1]
        shared, private = gradient.split([gradient.shape[-1] - count, count], -1)
        if self.private_gradient is None:
            self.private_gradient = private.clone()
        return shared.clone()


class MatrixGradients:
    """The gradients of a chunk of clients at once: point [C, P], inputs [C, B, …] → [C, P] and losses [C]."""

    def __init__(
        self, module: nn.Module, layout: Layout, loss: Loss, precision: Precision = "float32"
    ) -> None:
        names = {entry.name for entry in layout.entries}
        trained = {id(value): name for name, value in module.named_parameters() if name in names}
        # Every place at which one stands, for it may stand at several. Torch's functional_call would leave
        # behind its own tensors in a submodule that has two names.
        places = [
            (part._parameters, own_name, trained[id(value)])
            for part in module.modules()
            for own_name, value in part._parameters.items()
            if id(value) in trained
        ]

        def loss_of(point: Tensor, inputs: Tree, targets: Tree) -> Tensor:
            views: dict[str, Any] = layout.views(point)
            originals = [parameters[own_name] for parameters, own_name, _ in places]
            for parameters, own_name, name in places:
                parameters[own_name] = views[name]
            try:
                with computing_in(precision, point.device):
                    value = judged(loss, call(module, inputs), targets)
                wide: Tensor = widened(precision, value)
                return wide
            finally:
                for (parameters, own_name, _), original in zip(places, originals, strict=True):
                    parameters[own_name] = original

        self.loss_of, self.precision = loss_of, precision
        self.layers = dense_layers(module, layout, loss)
        self.differentiated = vmap(grad_and_value(loss_of))

    def plain(
        self, point: Tensor, inputs: Tree, targets: Tree, labelled: bool | None = None
    ) -> tuple[Tensor, Tensor]:
        """`labelled` says whether no target is left out, if that is known."""
        if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
            return self._of_trees(point, inputs, targets)
        if self.layers is None or not has_labels(inputs, targets, labelled):
            return self.differentiated(point, inputs, targets)
        return dense_gradients(self.layers, point, inputs, targets, self.precision)[:2]

    def _of_trees(self, point: Tensor, inputs: Tree, targets: Tree) -> tuple[Tensor, Tensor]:
        """vmap sees the tensors alone, because it takes a dataclass for something that has no rows."""

        def loss_of(point: Tensor, *tensors: Tensor) -> Tensor:
            own = iter(tensors)
            seen, wanted = map_tree(lambda _: next(own), (inputs, targets))
            return self.loss_of(point, seen, wanted)

        return vmap(grad_and_value(loss_of))(point, *leaves((inputs, targets)))

    def shifted(
        self,
        point: Tensor,
        shift: Shift,
        parameters: tuple[Tensor, ...],
        inputs: Tensor,
        targets: Tensor,
        labelled: bool | None = None,
    ) -> tuple[tuple[Tensor, tuple[Tensor, ...]], Tensor]:
        """Gradients for the points and for the parameters of a map of the inputs, and losses."""
        if self.layers is None or not has_labels(inputs, targets, labelled):

            def loss_of(
                point: Tensor, parameters: tuple[Tensor, ...], inputs: Tensor, targets: Tensor
            ) -> Tensor:
                return self.loss_of(point, shift(inputs, *parameters), targets)

            slopes, loss = vmap(grad_and_value(loss_of, argnums=(0, 1)))(point, parameters, inputs, targets)
            return slopes, loss
        seen, backward, *_ = vjp(lambda *own: vmap(shift)(inputs, *own), *parameters)
        gradient, loss, of_inputs = dense_gradients(
            self.layers, point, seen, targets, self.precision, of_inputs=True
        )
        return (gradient, backward(of_inputs)), loss


@contextmanager
def _no_draws() -> Iterator[None]:
    """vmap refuses random operations; say so in the user's terms."""
    try:
        yield
    except RuntimeError as error:
        if "randomness" not in str(error):
            raise
        raise FlatfedError(UNEXPECTED_DRAWS) from None


class MatrixOracle(_Oracle):
    """The batches of a chunk of clients, inputs [C, B, …]."""

    def __init__(
        self, gradients: MatrixGradients, inputs: Tree, targets: Tree, labelled: bool | None = None
    ) -> None:
        """`labelled` says whether no target is left out, if that is known."""
        super().__init__()
        self.gradients, self.inputs, self.targets, self.labelled = gradients, inputs, targets, labelled

    def __call__(self, point: Tensor) -> Tensor:
        before = versions(self.inputs)
        with _no_draws():
            gradient, loss = self.gradients.plain(point, self.inputs, self.targets, self.labelled)
        if versions(self.inputs) != before:
            raise FlatfedError(UNEXPECTED_EDIT)
        self._record(loss)
        return gradient

    def on_samples(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        self.evaluations += 1
        clients = len(point)
        with _no_draws():
            gradient, _ = self.gradients.plain(
                point,
                inputs.expand(clients, *inputs.shape),
                targets.expand(clients, *targets.shape),
                self.labelled,
            )
        return gradient

    def shifted(
        self, point: Tensor, shift: Shift, parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        with _no_draws():
            slopes, loss = self.gradients.shifted(
                point, shift, parameters, self.inputs, self.targets, self.labelled
            )
        self._record(loss)
        return slopes
