"""Trying a model on one batch before it is trained, to refuse what would silently train something else.

A model is tried in training mode, twice, and in evaluation mode, with torch's random operations routed to a
stream of its own: torch's global stream, which other threads may use meanwhile, is never touched.
"""

import pickle
import random as python_random
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.errors import (
    USER_ERRORS,
    FlatfedError,
    FlatfedWarning,
    first_line,
    memory_ran_out,
    name_of,
    user_errors,
)
from flatfed.core.flat import (
    BoundModel,
    Layout,
    Loss,
    all_finite,
    buffer_change,
    buffers_of,
    load_buffers,
)
from flatfed.core.outputs import ignored_label, judged
from flatfed.core.sampling import batches, local_steps
from flatfed.core.settings import Precision, Training
from flatfed.core.tree import (
    Tree,
    call,
    cloned,
    described_tree,
    equal,
    leaves,
    named_leaves,
    sample_bytes,
    versions,
)
from flatfed.data.federation import Federation, LoadedFederation
from flatfed.data.pool import ClientData
from flatfed.engines.precision import computing_in

MOST_STEPS = 10**6
"""Of one client in one round; every one of them is drawn and kept."""
MOST_SAMPLES = 2**27
"""That one client's steps of a round look at."""
MOST_BATCH_BYTES = 2**32
_LOOKUPS = ("embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only")


@contextmanager
def plain_torch() -> Iterator[None]:
    """Without the settings of the calling thread that would change numbers in it, but not in workers."""
    if torch.get_default_dtype() != torch.float32:
        raise FlatfedError(
            f"torch.set_default_dtype({torch.get_default_dtype()}): workers and resumed runs would not have "
            "it; convert the model and the data instead, for instance by model.double()"
        )
    with ExitStack() as settings:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                settings.enter_context(torch.autocast(kind, enabled=False))
                warnings.warn(
                    "torch.autocast: it is switched off in a training; set Training's precision instead",
                    FlatfedWarning,
                    stacklevel=2,
                )
        if torch.get_default_device().type != "cpu":
            settings.enter_context(torch.device("cpu"))
        settings.enter_context(torch.inference_mode(False))
        settings.enter_context(torch.enable_grad())
        yield


class Trial(NamedTuple):
    """What one batch of client 0 showed."""

    samples: int
    """Those of client 0."""
    inputs: Tree
    targets: Tree
    outputs: Any
    gradient: Tensor
    """In float32, whatever the precision: it is compared with the one that vmap takes."""
    draws_random_numbers: bool
    draws_in_evaluation: bool
    edits_inputs: bool
    changes_buffers: bool
    looks_up: bool
    """Whether it looks up rows of a table (an embedding)."""
    saved_bytes: int
    """What its backward pass needs of the forward pass, parameters aside; 0 on the CPU, where nobody asks."""


class _Watch(random.RouteRandomness):
    """Routes random operations to a stream of their own and notes what a model does."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(torch.Generator(device).manual_seed(0))
        self.looks_up = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.looks_up = self.looks_up or func.overloadpacket.__name__ in _LOOKUPS
        return super().__torch_dispatch__(func, types, args, kwargs)


class _Pass(NamedTuple):
    outputs: Any
    loss: Tensor
    gradient: Tensor
    """[P], where there was a backward pass."""
    draws: bool
    looks_up: bool
    edits_inputs: bool
    saved_bytes: int


@contextmanager
def _counting_saved(device: torch.device) -> Iterator[list[int]]:
    """The sizes of what passes inside keep for their backward passes, on an accelerator."""
    sizes: list[int] = []

    def kept(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            sizes.append(tensor.nbytes)
        return tensor

    if device.type == "cpu":
        yield sizes
        return
    with torch.autograd.graph.saved_tensors_hooks(kept, lambda tensor: tensor):
        yield sizes


def try_model(
    bound: BoundModel, federation: Federation, loss: Loss, training: Training, check: Callable[..., None]
) -> Trial:
    """Trains and evaluates one batch of client 0, after a check of its (inputs, targets)."""
    data = _first_client(federation)
    _check_loading(federation, data)
    _check_work(training, data)
    (positions, *_) = batches(training, len(data), 0, 0)
    stored, targets = data.batch(positions.to(data.device))
    inputs = _transformed(federation, stored)
    check(inputs, targets)
    device = data.device
    module, before = bound.module, buffers_of(bound.module)
    parameters = {name: (value._version, value.detach().clone()) for name, value in module.named_parameters()}

    def one_pass(
        training_mode: bool, backward: bool = False, precision: Precision = training.precision
    ) -> _Pass:
        load_buffers(module, before)
        bound.train(training_mode)
        seen, labels = cloned(inputs), cloned(targets)
        untouched = versions(seen), versions(labels)
        with (
            torch.set_grad_enabled(training_mode),
            _Watch(device) as watch,
            _counting_saved(device) as saved,
        ):
            with computing_in(precision, device):
                outputs = call(module, seen)
                value = judged(loss, outputs, labels)
            _check_one_number(value)
            gradient = value.new_empty(0)
            if backward:
                gradient = bound.layout.pack(
                    torch.autograd.grad(value, bound.parameters, allow_unused=True, materialize_grads=True)
                )
        if versions(labels) != untouched[1] or not equal(labels, targets):
            raise FlatfedError("loss: it edits the targets in place; let it work on a copy of them")
        edits = versions(seen) != untouched[0] or not equal(seen, inputs)
        habits = watch.drew, watch.looks_up, edits
        return _Pass(outputs, value.detach(), gradient, *habits, sum(saved))

    def tried(training_mode: bool) -> _Pass:
        streams = other_streams()
        first = one_pass(training_mode, backward=training_mode)
        _check_state(module, parameters, before)
        # A second evaluation would show little that the second training pass does not.
        again = one_pass(training_mode) if training_mode else first
        if names := drawn_streams(streams, lambda: one_pass(training_mode)):
            raise FlatfedError(
                f"model: it (or the loss) draws from the global stream of {names[0]}, which does not follow "
                "the seed and is another one in every worker; draw with torch instead"
            )
        # Other devices do not promise the same bits twice.
        if device.type == "cpu" and not equal(first.loss, again.loss):
            raise FlatfedError(
                "model: two passes over one batch gave different results, so it (or the loss) draws numbers "
                "that are not torch's or remembers something; draw with torch, keep state in buffers"
            )
        return first

    try:
        passed = tried(True)
        changes = buffer_change(before, bound.buffers)
        exact = passed if training.precision != "bfloat16" else one_pass(True, True, "float32")
        evaluated = tried(False)
    except FlatfedError:
        raise
    except USER_ERRORS as error:
        # Whatever a user's model or loss raises, say where; the cause stays attached.
        raise FlatfedError(
            f"model: it cannot be trained on a batch of client 0 (inputs {described_tree(inputs)}, targets "
            f"{described_tree(targets)}): {first_line(error)}"
        ) from error
    load_buffers(module, before)
    bound.train()
    _check_finite(passed, bound.layout, loss, targets)
    return Trial(
        samples=len(data),
        inputs=inputs,
        targets=targets,
        outputs=passed.outputs,
        gradient=exact.gradient,
        draws_random_numbers=passed.draws,
        draws_in_evaluation=evaluated.draws,
        edits_inputs=passed.edits_inputs or evaluated.edits_inputs,
        changes_buffers=any(bool((change != 0).any()) for change in changes.values()),
        looks_up=passed.looks_up,
        saved_bytes=passed.saved_bytes,
    )


def _first_client(federation: Federation) -> ClientData:
    try:
        return federation.client(0)
    except FlatfedError:
        raise
    except Exception as error:
        if not memory_ran_out(error):
            raise
        raise FlatfedError(
            f"clients[0]: memory ran out while its data were loaded ({first_line(error)}); load less of them"
        ) from error


def _check_one_number(loss: object) -> None:
    if not isinstance(loss, Tensor):
        raise FlatfedError(f"loss: it must return a tensor, not {type(loss).__name__}")
    if loss.dim() != 0:
        raise FlatfedError(
            f"loss: it must return one number, not a tensor shaped {list(loss.shape)}; take the mean "
            "over the batch"
        )


def _check_loading(federation: Federation, data: ClientData) -> None:
    """Refuses a function that gives a client other data every time, and so every worker others."""
    if not isinstance(federation, LoadedFederation):
        return
    again = federation.client(0)
    if not equal((data.inputs, data.targets), (again.inputs, again.targets)):
        raise FlatfedError(
            "clients: client 0 was loaded twice and its data were not the same; load the same data every "
            "time, and seed what is drawn for them with the client's number"
        )


def _check_work(training: Training, data: ClientData) -> None:
    """Refuses a round that would never end, before its batches are drawn."""
    samples, size = len(data), training.batch_size
    steps = local_steps(training, samples)
    field = "local_epochs" if training.local_steps is None else "local_steps"
    if steps > MOST_STEPS:
        raise FlatfedError(
            f"{field} = {getattr(training, field)}: a client of {samples} samples would take {steps} steps "
            f"in a round; take at most {MOST_STEPS}, and more rounds"
        )
    if (training.fine_tuning_steps or 0) > MOST_STEPS:
        raise FlatfedError(
            f"fine_tuning_steps = {training.fine_tuning_steps}: every client takes them at the end; use "
            f"at most {MOST_STEPS}"
        )
    if size is None:
        return
    if training.local_steps is None:
        size = min(size, samples)
    if steps * size > MOST_SAMPLES or size * sample_bytes(data.inputs) > MOST_BATCH_BYTES:
        raise FlatfedError(
            f"batch_size = {size}: a client of {samples} samples would look at {steps * size} of them in a "
            'round; use a smaller batch_size, or "full" to see each of them once a step'
        )


def _transformed(federation: Federation, stored: Tree) -> Tree:
    original = cloned(stored)
    with user_errors(f"transform: {name_of(federation.transform)}"):
        inputs = federation.transform.evaluate(stored)
    if not equal(stored, original):
        raise FlatfedError("transform: it edits the stored inputs in place; let it return new ones")
    if not equal(inputs, federation.transform.evaluate(original)):
        raise FlatfedError("transform: its `evaluate` draws random numbers; draw in `train`, if at all")
    check_finite_inputs(inputs, "client 0")
    return inputs


def check_finite_inputs(inputs: Tree, client: str) -> None:
    for name, tensor in named_leaves(inputs, "inputs"):
        if tensor.is_floating_point() and not all_finite(tensor):
            raise FlatfedError(
                f"data: the {name} of {client} contain NaN or infinity once they are transformed; check the "
                "mean and std that they are normalised with"
            )


def check_some_targets(loss: Loss, targets: Tree, client: str) -> None:
    """Refuses a batch without a target that counts: its mean loss would be 0/0."""
    ignored = ignored_label(loss)
    if ignored is None or not isinstance(targets, Tensor) or targets.is_floating_point():
        return
    if bool((targets == ignored).all()):
        raise FlatfedError(
            f"targets: a batch of {client} has only the label {ignored}, which the loss leaves out, so its "
            "mean is 0/0; leave out such samples, or take larger batches"
        )


def other_streams() -> tuple[Any, ...]:
    """The states of the random streams of Python and numpy."""
    return python_random.getstate(), np.random.get_state()


def drawn_streams(before: tuple[Any, ...], call: Callable[[], object]) -> list[str]:
    """Those of Python and numpy from which a call draws that was made since; they are set back then."""

    def drawn(earlier: tuple[Any, ...]) -> list[str]:
        now = zip(("random", "numpy.random"), earlier, other_streams(), strict=True)
        return [name for name, one, other in now if pickle.dumps(one) != pickle.dumps(other)]

    names = drawn(before)
    # Another thread may have drawn meanwhile, but hardly every time.
    for _ in range(3 if names else 0):
        now = other_streams()
        call()
        names = [name for name in names if name in drawn(now)]
    if names:
        python_random.setstate(before[0])
        np.random.set_state(before[1])
    return names


def _check_state(
    module: nn.Module, parameters: dict[str, tuple[int, Tensor]], buffers: dict[str, Tensor]
) -> None:
    """Refuses a forward pass that changes what only training may change."""
    own = dict(module.named_parameters())
    if own.keys() != parameters.keys() or dict(module.named_buffers()).keys() != buffers.keys():
        raise FlatfedError("model: it makes or removes parameters or buffers in a pass; make them before")
    for name, (version, value) in parameters.items():
        if own[name]._version != version or not equal(own[name].detach(), value):
            raise FlatfedError(
                f"model: a forward pass changes the parameter {name!r} itself; compute a new tensor from it "
                "(torch.nn.utils.parametrize), or keep it as a buffer"
            )
    for name, value in module.named_buffers():
        old = buffers[name]
        if value.shape != old.shape or value.dtype != old.dtype:
            raise FlatfedError(
                f"model: the buffer {name!r} changes from {list(old.shape)} {old.dtype} to "
                f"{list(value.shape)} {value.dtype} in a pass; keep its shape and dtype"
            )
        if (value.dtype == torch.bool or value.is_complex()) and not torch.equal(value, old):
            raise FlatfedError(
                f"model: the buffer {name!r} of dtype {value.dtype} changes in a pass, and there is no mean "
                "of such changes over clients; keep it as a real number"
            )


def _check_finite(passed: _Pass, layout: Layout, loss: Loss, targets: Tree) -> None:
    """Refuses a model that is not finite before it is trained, which no learning rate would change."""
    if not all_finite(passed.loss):
        check_some_targets(loss, targets, "client 0")
        outputs_finite = all(all_finite(leaf) for leaf in leaves(passed.outputs) if isinstance(leaf, Tensor))
        which = "loss: it is" if outputs_finite else "model: its outputs are not finite and the loss is"
        raise FlatfedError(
            f"{which} {float(passed.loss)} on a batch of client 0 before any training; look for divisions by "
            "0, logarithms of 0 and numbers beyond the range of the dtype"
        )
    for entry, values in zip(layout.entries, passed.gradient.split(layout.sizes), strict=True):
        if not all_finite(values):
            raise FlatfedError(
                f"model: the gradient of {entry.name!r} is not finite on a batch of client 0 before any "
                f"training, though the loss is {float(passed.loss):g}; look for roots and norms of 0"
            )
