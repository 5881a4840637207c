"""What is checked before a training begins."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, shown
from flatfed.core.part import ServerTask, part_name
from flatfed.core.settings import Training
from flatfed.data.federation import Federation, PooledFederation
from flatfed.engines.trial import other_streams_kept
from flatfed.training.task import Task, is_cross_entropy


def check_before_training(task: object, algorithm: object, training: object, callbacks: object) -> None:
    for name, value, kind, fix in (
        ("task", task, Task, "make one with flatfed.Task(model, federation)"),
        ("algorithm", algorithm, Algorithm, "call its constructor, for instance flatfed.fedavg()"),
        ("training", training, Training, "give flatfed.Training(rounds=…)"),
        ("callbacks", callbacks, Sequence, "give a list of functions"),
    ):
        if not isinstance(value, kind):
            raise FlatfedError(f"{name} = {shown(value)}: {fix}")
    assert isinstance(task, Task) and isinstance(training, Training)
    training.cohort_size(len(task.federation))
    if training.weighting == "samples" and task.federation.total_samples is None:
        raise FlatfedError(
            "weighting = 'samples': the federation does not know its clients' sizes; use uniform"
        )
    if is_cross_entropy(task.loss):
        check_labels(task.model, task.federation)


def check_labels(model: nn.Module, federation: Federation) -> None:
    """Cross-entropy needs whole labels below the number of outputs; torch would stop in mid-training."""
    if not isinstance(federation, PooledFederation):
        return
    try:
        clone = copy.deepcopy(model).eval()
        with torch.no_grad(), random.routed(torch.Generator()), other_streams_kept():
            outputs = clone(federation.transform.evaluate(federation.inputs[:1].clone()))
    except Exception:
        return  # The engine's own first try says what is wrong with more to go by.
    if not isinstance(outputs, Tensor) or outputs.dim() < 2:
        return
    classes = outputs.shape[1]
    if classes == 1:
        raise FlatfedError(
            "loss: cross-entropy over a single output is always 0; for regression give "
            "loss=torch.nn.functional.mse_loss"
        )
    if federation.targets.is_floating_point():
        return
    everything = {
        "client": federation.targets,
        "test": federation.test and federation.test[1],
        "client test": None if federation.client_tests is None else federation.client_tests.targets,
    }
    for name, targets in everything.items():
        if targets is None:
            continue
        # −100 marks targets that cross-entropy leaves out.
        bad = targets[((targets < 0) & (targets != -100)) | (targets >= classes)]
        if len(bad):
            raise FlatfedError(
                f"targets: the {name} data have the label {int(bad[0])}, but the model has {classes} outputs "
                f"(labels 0 … {classes - 1}); correct the labels or the model"
            )


def too_short(algorithm: Algorithm, training: Training) -> str | None:
    """Why a run would not show what its algorithm is about, if that is so."""
    for part in algorithm.parts:
        if isinstance(part, ServerTask) and training.rounds < part.first_round:
            return (
                f"rounds = {training.rounds}: {part_name(part)} acts from round {part.first_round} on, so "
                f"not at all in this run; ask for at least {part.first_round} rounds{part.first_round_hint}"
            )
    return None
