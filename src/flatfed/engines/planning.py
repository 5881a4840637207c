"""Trying a model once, and deciding by a fixed rule how its clients are trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.flat import BoundModel, Layout, Loss, buffer_change, buffers_of, load_buffers
from flatfed.core.sampling import batches, equal_batches
from flatfed.core.settings import Settings
from flatfed.core.state import Dimensions
from flatfed.data.federation import Federation, PooledFederation
from flatfed.engines.dense import dense_layers
from flatfed.engines.oracles import MatrixGradients
from flatfed.engines.worker import Metric, Plan

MATRIX_PARAMETERS = 2**18
"""Larger models keep a core busy by themselves, and a matrix of them falls out of the cache."""
_CLIENT_BY_CLIENT = (nn.modules.conv._ConvNd, nn.RNNBase, nn.Embedding, nn.EmbeddingBag)


def make_plan(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    loss: Loss,
    settings: Settings,
    metrics: Mapping[str, Metric],
) -> Plan:
    """Everything workers need to know, after one forward and backward pass on a batch of client 0."""
    layout, device = Layout(model), usable_device(settings.device)
    bound = BoundModel(model, layout, device)
    tried = _try(bound, federation.to(device), loss, settings, algorithm)
    path, reason = _choose_path(bound, tried, loss, settings, federation.common_size)
    if path == "matrix":
        _check_indices(bound, federation)
    return Plan(
        algorithm=algorithm,
        loss=loss,
        settings=settings,
        metrics=metrics,
        layout=layout,
        dimensions=Dimensions(layout.size, tuple(tried.inputs.shape[1:]), tried.classes),
        device=device,
        draws_random_numbers=tried.draws_random_numbers,
        draws_in_evaluation=tried.draws_in_evaluation,
        path=path,
        path_reason=reason,
    )


def usable_device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        reason = str(error).strip().splitlines()[0]
        raise FlatfedError(f"device = {name!r}: cannot be used here ({reason})") from None


@dataclass(frozen=True)
class _Tried:
    inputs: Tensor
    targets: Tensor
    classes: int
    draws_random_numbers: bool
    draws_in_evaluation: bool
    changes_buffers: bool


def _try(
    bound: BoundModel, federation: Federation, loss: Loss, settings: Settings, algorithm: Algorithm
) -> _Tried:
    data = federation.client(0)
    (positions, *_) = batches(settings, len(data), 0, 0)
    stored, targets = data.batch(positions.to(data.inputs.device))
    inputs = federation.transform.evaluate(stored)
    before = buffers_of(bound.module)
    shown = f"inputs {list(inputs.shape)} {_dtype(inputs)}"
    if any(part.needs_float_inputs for part in algorithm.parts) and not inputs.is_floating_point():
        raise FlatfedError(
            f"algorithm: {algorithm.name} changes or makes up inputs, which must be floats, not {shown}"
        )
    bound.module.train()
    values: list[Tensor] = []
    outputs: list[Tensor] = []

    def call() -> None:
        outputs.append(bound.module(inputs))
        values.append(loss(outputs[0], targets))
        torch.autograd.grad(values[0], bound.parameters, allow_unused=True)

    def check_value() -> None:
        if values and not isinstance(values[0], Tensor):
            raise FlatfedError(f"loss: it must return a tensor, not {type(values[0]).__name__}")
        if values and values[0].dim() != 0:
            raise FlatfedError(
                f"loss: it must return one number, not a tensor shaped {list(values[0].shape)}; take the "
                "mean over the batch"
            )

    try:
        drawn = random.draws_random_numbers(call)
    except FlatfedError:
        raise
    except Exception as error:
        # Whatever a user's model or loss raises, say where; the cause stays attached.
        check_value()
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FlatfedError(
            f"model: it cannot be trained on a batch of client 0 ({shown}, targets {list(targets.shape)} "
            f"{_dtype(targets)}): {reason}"
        ) from error
    check_value()
    changed = any(bool((change != 0).any()) for change in buffer_change(before, bound.buffers).values())
    load_buffers(bound.module, before)
    bound.module.eval()
    with torch.no_grad():
        drawn_in_evaluation = random.draws_random_numbers(lambda: bound.module(inputs))
    bound.module.train()
    labelled = targets.dim() == 1 and not targets.is_floating_point() and outputs[0].dim() == 2
    if any(part.needs_classes for part in algorithm.parts) and not labelled:
        raise FlatfedError(
            f"algorithm: {algorithm.name} makes up samples of every class, so targets must be class labels, "
            f"not {list(targets.shape)} {_dtype(targets)} for outputs {list(outputs[0].shape)}"
        )
    classes = outputs[0].shape[1] if labelled else 0
    return _Tried(inputs, targets, classes, drawn, drawn_in_evaluation, changed)


def _check_indices(bound: BoundModel, federation: Federation) -> None:
    """As a matrix, an index beyond a client's embedding would silently read another client's."""
    embeddings = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in bound.module.modules())
    if not embeddings or not isinstance(federation, PooledFederation):
        return
    bound.module.eval()
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for batch in federation.inputs.split(1024):
                bound.module(federation.transform.evaluate(batch.to(bound.parameters[0].device)))
    except IndexError as error:
        raise FlatfedError(f"data: an input is outside the model's embedding ({error})") from None
    finally:
        bound.module.train()


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _choose_path(
    bound: BoundModel, tried: _Tried, loss: Loss, settings: Settings, common_size: int | None
) -> tuple[str, str]:
    """How to train, and why: a fixed rule, so that the same configuration always takes the same path."""
    if settings.path == "client":
        return "client", "asked for"
    impossible = _obstacle(tried, settings, common_size)
    if settings.path == "auto" and impossible is None:
        if any(isinstance(module, _CLIENT_BY_CLIENT) for module in bound.module.modules()):
            return "client", "the model has convolutional, recurrent or embedding layers"
        if bound.layout.size > MATRIX_PARAMETERS:
            return "client", f"the model has more than {MATRIX_PARAMETERS} parameters"
    if impossible is None:
        vector, inputs, targets = bound.layout.vector(bound.module), tried.inputs, tried.targets
        try:
            MatrixGradients(bound.module, bound.layout, loss).plain(vector[None], inputs[None], targets[None])
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            impossible = f"the model cannot be vectorised ({type(error).__name__})"
    if settings.path == "matrix":
        if impossible:
            raise FlatfedError(f"path = 'matrix': {impossible}; use path = 'client' or 'auto'")
        return "matrix", "asked for"
    if impossible:
        return "client", impossible
    reason = f"the model has at most {MATRIX_PARAMETERS} parameters and all batches have one shape"
    if dense_layers(bound.module, bound.layout, loss):
        reason += "; its gradients have a closed form"
    return "matrix", reason


def _obstacle(tried: _Tried, settings: Settings, common_size: int | None) -> str | None:
    """Why clients cannot be trained as a matrix, as far as that can be seen without trying."""
    if tried.draws_random_numbers:
        return "the model draws random numbers"
    if tried.changes_buffers:
        return "the model changes its buffers"
    if not equal_batches(settings, common_size):
        return "clients take different numbers of steps or batches of different sizes"
    return None
