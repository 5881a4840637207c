"""Deciding by a fixed rule how clients are trained, from one try of the model or from shapes alone."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, first_line
from flatfed.core.flat import BoundModel, Layout, Loss
from flatfed.core.outputs import judged, logits_of
from flatfed.core.part import ServerTask
from flatfed.core.sampling import equal_batches
from flatfed.core.settings import Training
from flatfed.core.sharing import Division, check_sharing, private_state
from flatfed.core.state import Dimensions, State
from flatfed.core.tree import (
    Tree,
    call,
    described,
    dtypes,
    empty,
    first_leaf,
    map_tree,
    rows,
    sample_shapes,
    versions,
)
from flatfed.data.federation import Federation, PooledFederation
from flatfed.engines.alignment import check_alignment
from flatfed.engines.dense import BACKWARD_HOOKS, dense_layers, has_hooks
from flatfed.engines.devices import set_products, usable_device
from flatfed.engines.metrics import Metric, is_streaming
from flatfed.engines.model_copy import bound_copy, check_model, protect_inputs
from flatfed.engines.oracles import MatrixGradients
from flatfed.engines.precision import check_precision
from flatfed.engines.trial import Trial, plain_torch, try_model

MATRIX_PARAMETERS = 2**18
"""Larger models keep a core busy by themselves, and a matrix of them falls out of the cache."""
ACCELERATOR_PARAMETERS = 2**20
"""On an accelerator, where small operations cost most; larger models keep it busy by themselves."""
_LOOKING_UP = (nn.RNNBase, nn.Embedding, nn.EmbeddingBag)
_CLIENT_BY_CLIENT = (nn.modules.conv._ConvNd, *_LOOKING_UP)
VECTORS, PASSES = 16, 3
"""What a client of the matrix path takes: so many vectors as long as the model, and so many times what its
backward pass needs of the forward pass."""


@dataclass(frozen=True)
class Population:
    """How many clients there are and how much data they have, without the data."""

    clients: int
    samples: int | None
    """Those of all clients together, None if that is not known."""
    first_samples: int
    """Those of client 0, which stands for a typical one."""

    def weight(self, training: Training) -> float:
        """What all clients weigh together."""
        return float(self.clients if training.weighting == "uniform" else self.samples or 0)


@dataclass(frozen=True)
class SampleShape:
    """What one sample looks like to the model: shapes and dtypes, or forms of them (`core.tree`)."""

    inputs: Any
    input_dtype: Any
    targets: Any
    target_dtype: Any

    @classmethod
    def of(cls, inputs: Tree, targets: Tree) -> SampleShape:
        """That of the samples of a batch."""
        return cls(sample_shapes(inputs), dtypes(inputs), sample_shapes(targets), dtypes(targets))

    def __str__(self) -> str:
        inputs, targets = described(self.inputs, self.input_dtype), described(self.targets, self.target_dtype)
        return f"inputs {inputs}, targets {targets}"

    @property
    def one_input(self) -> tuple[int, ...] | None:
        """The shape of the input, where that is one tensor."""
        return tuple(self.inputs) if isinstance(self.input_dtype, torch.dtype) else None

    def classes(self, outputs: Any) -> int:
        """The number of classes, where targets are labels and outputs (or logits) [B, classes]; else 0."""
        if self.targets != () or not isinstance(self.target_dtype, torch.dtype):
            return 0
        try:
            logits = logits_of(outputs)
        except TypeError:
            return 0
        return logits.shape[1] if logits.dim() == 2 and not self.target_dtype.is_floating_point else 0


@dataclass(frozen=True)
class Plan:
    """What all workers of a training have in common."""

    algorithm: Algorithm
    loss: Loss
    training: Training
    metrics: Mapping[str, Metric]
    division: Division
    private_state: State
    """What a client keeps to itself before it first takes part."""
    dimensions: Dimensions
    population: Population
    device: torch.device
    draws_random_numbers: bool
    """Whether the model does, in training."""
    draws_in_evaluation: bool
    edits_inputs: bool
    path: str
    """"matrix" or "client"."""
    path_reason: str
    client_bytes: int = 1
    """About what one client takes on an accelerator on the matrix path."""
    most_clients: int | None = None
    """So many at a time fit there, if that is known."""

    @property
    def layout(self) -> Layout:
        """Of the vectors that the server and the parts know."""
        return self.division.shared

    def weight(self, samples: int) -> float:
        """How much a client counts."""
        return float(samples) if self.training.weighting == "samples" else 1.0

    def evaluation_generator(self) -> torch.Generator | None:
        """For models that are random even in evaluation mode: the same draws every time."""
        if not self.draws_in_evaluation:
            return None
        return torch.Generator(self.device).manual_seed(random.key(self.training.seed, "evaluation"))


@plain_torch()
def make_plan(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    loss: Loss,
    metrics: Mapping[str, Metric],
    training: Training,
    device: str,
) -> Plan:
    """Everything workers need to know, after a trial of the model on a batch of client 0."""
    division, chosen_device = check_model(model, training.sharing), usable_device(device)
    check_sharing(division, algorithm)
    check_precision(training.precision, division.whole.dtype, chosen_device)
    set_products("float32", chosen_device)
    bound = bound_copy(model, division, chosen_device)

    def check(inputs: Tree, targets: Tree) -> None:
        _check_shape(algorithm, SampleShape.of(inputs, targets))

    trial = try_model(bound, federation.to(chosen_device), loss, training, check)
    for name, function in {"loss": loss, **metrics}.items():
        if callable(function) and not is_streaming(function):
            check_alignment(name, function, trial.outputs, trial.targets)
    shape = SampleShape.of(trial.inputs, trial.targets)
    classes = shape.classes(trial.outputs)
    _check_shape(algorithm, shape, classes)
    if trial.edits_inputs:
        protect_inputs(bound.module)
    path, reason = _choose_path(bound, trial, loss, training, federation)
    if path == "matrix":
        _check_indices(bound, trial, federation)
    kept = private_state(division, algorithm, model)
    common = algorithm, loss, training, metrics, division, kept
    dimensions = _dimensions(division, shape, classes)
    population = Population(len(federation), federation.total_samples, trial.samples)
    habits = trial.draws_random_numbers, trial.draws_in_evaluation, trial.edits_inputs
    client_bytes = VECTORS * trial.gradient.nbytes + PASSES * trial.saved_bytes
    return Plan(*common, dimensions, population, chosen_device, *habits, path, reason, client_bytes)


def plan_from_shape(
    model: nn.Module,
    shape: SampleShape,
    population: Population,
    algorithm: Algorithm,
    loss: Loss,
    metrics: Mapping[str, Metric],
    training: Training,
    device: str,
) -> Plan:
    """The plan of a server whose clients train elsewhere, one by one, on data that it never sees."""
    division, chosen_device = check_model(model, training.sharing), usable_device(device)
    check_sharing(division, algorithm)
    check_precision(training.precision, division.whole.dtype, chosen_device)
    outputs, edits_inputs = _try_without_numbers(model, shape, loss)
    if outputs is None and _needs_classes(algorithm):
        raise FlatfedError(
            f"algorithm: {algorithm.name} makes up samples of every class, but how many classes there are "
            "cannot be seen without data, because this model looks at the numbers themselves"
        )
    classes = shape.classes(outputs)
    _check_shape(algorithm, shape, None if outputs is None else classes)
    common = algorithm, loss, training, metrics, division, private_state(division, algorithm, model)
    dimensions = _dimensions(division, shape, classes)
    # It cannot be tried here, and routing the draws of a model that has none changes nothing.
    habits = True, True, edits_inputs
    reason = "clients train where their data are"
    return Plan(*common, dimensions, population, chosen_device, *habits, "client", reason)


def _dimensions(division: Division, shape: SampleShape, classes: int) -> Dimensions:
    layout = division.shared
    return Dimensions(layout.size, shape.one_input or (), classes, len(layout.entries))


@torch.no_grad()
def _try_without_numbers(model: nn.Module, shape: SampleShape, loss: Loss) -> tuple[Any, bool]:
    """The outputs for two samples, of which torch works out only the shapes, and whether inputs are edited.

    The outputs are None if that is not possible. Then the clients, who have numbers, are the first to try.
    """
    outputs = None
    try:
        with torch.device("meta"):
            inputs = empty(shape.inputs, shape.input_dtype, 2)
            targets = empty(shape.targets, shape.target_dtype, 2)
            if inputs is None or targets is None:
                return None, True
            before = versions(inputs)
            outputs = call(copy.deepcopy(model).to("meta"), inputs)
            judged(loss, outputs, targets)
    except Exception as error:
        # Torch names the device where an operation needs numbers, or meets a tensor that has some.
        if not isinstance(error, NotImplementedError) and "meta" not in str(error):
            raise FlatfedError(f"model: it cannot be trained on {shape}: {first_line(error)}") from error
    return outputs, outputs is None or versions(inputs) != before


def _check_shape(algorithm: Algorithm, shape: SampleShape, classes: int | None = None) -> None:
    """Refuses samples that the algorithm's parts cannot work with; `classes` is None if not known yet."""
    if any(part.needs_float_inputs for part in algorithm.parts):
        if shape.one_input is None:
            raise FlatfedError(
                f"algorithm: {algorithm.name} changes or makes up inputs, which must be one tensor of "
                f"floats, not {shape}"
            )
        if not shape.input_dtype.is_floating_point:
            raise FlatfedError(
                f"algorithm: {algorithm.name} changes or makes up inputs, which must be floats, not {shape}"
            )
    if _needs_classes(algorithm) and classes == 0:
        raise FlatfedError(
            f"algorithm: {algorithm.name} makes up samples of every class, so targets must be class labels "
            f"and outputs one number per class, not {shape}"
        )


def _needs_classes(algorithm: Algorithm) -> bool:
    return any(isinstance(part, ServerTask) and part.needs_classes for part in algorithm.parts)


def _check_indices(bound: BoundModel, trial: Trial, federation: Federation) -> None:
    """As a matrix, an index beyond a client's embedding would silently read another client's."""
    if not trial.looks_up or not isinstance(federation, PooledFederation):
        return
    bound.module.eval()
    try:
        device = first_leaf(trial.inputs).device
        with torch.no_grad(), random.routed(torch.Generator(device)):
            for start in range(0, len(first_leaf(federation.inputs)), 1024):
                batch = rows(federation.inputs, slice(start, start + 1024))
                copied = map_tree(lambda tensor: tensor.to(device, copy=True), batch)
                call(bound.module, federation.transform.evaluate(copied))
    except IndexError as error:
        raise FlatfedError(f"data: an input is outside the model's embedding ({error})") from None
    finally:
        bound.train()


def _choose_path(
    bound: BoundModel, trial: Trial, loss: Loss, training: Training, federation: Federation
) -> tuple[str, str]:
    """How to train, and why: a fixed rule, so that the same configuration always takes the same path."""
    if training.path == "client":
        return "client", "asked for"
    unequal = not equal_batches(training, federation.common_size)
    unchecked = trial.looks_up and not isinstance(federation, PooledFederation)
    obstacles = {
        "the model draws random numbers": trial.draws_random_numbers,
        "the model changes its buffers": trial.changes_buffers,
        "clients take different numbers of steps or batches of different sizes": unequal,
        "the model looks up embeddings, and the data are not there to check the indices": unchecked,
        "the model has backward hooks": has_hooks(bound.module, BACKWARD_HOOKS),
    }
    obstacle = next((reason for reason, holds in obstacles.items() if holds), None)
    on_cpu = trial.gradient.device.type == "cpu"
    limit = MATRIX_PARAMETERS if on_cpu else ACCELERATOR_PARAMETERS
    where = "" if on_cpu else "on an accelerator: "
    if training.path == "auto" and obstacle is None:
        kinds = _CLIENT_BY_CLIENT if on_cpu else _LOOKING_UP
        if trial.looks_up or any(isinstance(module, kinds) for module in bound.module.modules()):
            which = "convolutional, recurrent or embedding" if on_cpu else "recurrent or embedding"
            return "client", f"{where}the model has {which} layers"
        if bound.layout.size > limit:
            return "client", f"{where}the model has more than {limit} parameters"
    obstacle = obstacle or _matrix_obstacle(bound, trial, loss, training)
    if training.path == "matrix":
        if obstacle:
            raise FlatfedError(f"path = 'matrix': {obstacle}; use path = 'client' or 'auto'")
        return "matrix", "asked for"
    if obstacle:
        return "client", obstacle
    reason = f"{where}the model has at most {limit} parameters and all batches have one shape"
    if dense_layers(bound.module, bound.layout, loss):
        reason += "; its gradients have a closed form"
    return "matrix", reason


def _matrix_obstacle(bound: BoundModel, trial: Trial, loss: Loss, training: Training) -> str | None:
    """Why the gradient of the trial cannot be had as a matrix, if that is so."""
    vector = bound.layout.vector(bound.module)
    try:
        one_client = map_tree(lambda tensor: tensor[None], (trial.inputs, trial.targets))
        MatrixGradients(bound.module, bound.layout, loss, training.precision).plain(vector[None], *one_client)
        matrix = MatrixGradients(bound.module, bound.layout, loss)
        (gradient,), _ = matrix.plain(vector[None], *one_client)
    except Exception as error:
        # A module that vmap cannot look into may raise anything.
        return f"the model cannot be vectorised ({type(error).__name__})"
    precision = 1e-3 if vector.dtype in {torch.float32, torch.float64} else 0.1
    size = float(trial.gradient.norm())
    # Parameters that are read from elsewhere than the module are not seen there.
    if float((gradient - trial.gradient).norm()) > precision * (size + 1e-3):
        return "the model has another gradient as a matrix"
    return None
