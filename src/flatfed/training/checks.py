"""What is checked before a training begins."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import USER_ERRORS, FlatfedError, shown
from flatfed.core.outputs import ignored_label, logits_of
from flatfed.core.part import ServerTask, part_name
from flatfed.core.settings import Training
from flatfed.core.tree import call as call_model
from flatfed.core.tree import cloned, rows
from flatfed.data.federation import Federation, PooledFederation
from flatfed.engines.precision import slow_precision
from flatfed.engines.trial import drawn_streams, other_streams
from flatfed.training.best import check_validation
from flatfed.training.task import Task, is_cross_entropy

MOST_PARTICIPANTS = 10**7
"""Of one round, whose numbers are kept in a list."""


def check_before_training(task: object, algorithm: object, training: object, callbacks: object) -> None:
    for name, value, kind, fix in (
        ("task", task, Task, "make one with flatfed.Task(model, federation)"),
        ("algorithm", algorithm, Algorithm, "call its constructor, for instance flatfed.fedavg()"),
        ("training", training, Training, "give flatfed.Training(rounds=…)"),
        ("callbacks", callbacks, Sequence, "give a list of functions"),
    ):
        if not isinstance(value, kind):
            raise FlatfedError(f"{name} = {shown(value)}: {fix}")
    assert isinstance(task, Task) and isinstance(training, Training) and isinstance(callbacks, Sequence)
    for number, callback in enumerate(callbacks):
        if not callable(callback):
            raise FlatfedError(f"callbacks[{number}] = {shown(callback)}: give a function of the progress")
    if (participants := training.cohort_size(len(task.federation))) > MOST_PARTICIPANTS:
        raise FlatfedError(
            f"participants = {participants}: a round has at most {MOST_PARTICIPANTS}, who are all "
            "listed; give participants or participation"
        )
    if training.weighting == "samples" and task.federation.total_samples is None:
        raise FlatfedError(
            "weighting = 'samples': the federation does not know its clients' sizes; use uniform"
        )
    if training.sharing.normalisation == "recompute" and training.evaluate == "active_mean":
        raise FlatfedError(
            "evaluate = 'active_mean': with sharing.normalisation = 'recompute' the statistics are those of "
            "the global model; evaluate that (broadcast)"
        )
    check_validation(training, task.federation.evaluated, task.used_metrics)
    if is_cross_entropy(task.loss):
        check_labels(task.model, task.federation, ignored_label(task.loss))


def check_labels(model: nn.Module, federation: Federation, ignored: int | None) -> None:
    """Cross-entropy needs whole labels below the number of outputs; torch would stop in mid-training."""
    if not isinstance(federation, PooledFederation):
        return
    streams = other_streams()
    try:
        clone = copy.deepcopy(model).eval()

        @torch.no_grad()
        def call() -> Tensor:
            with random.routed(torch.Generator()):
                first = cloned(rows(federation.inputs, slice(1)))
                return logits_of(call_model(clone, federation.transform.evaluate(first)))

        outputs = call()
        drawn_streams(streams, call)
    except USER_ERRORS:
        return  # The engine's own first try says what is wrong with more to go by.
    if outputs.dim() < 2 or not isinstance(federation.targets, Tensor):
        return
    classes = outputs.shape[1]
    if classes == 1:
        raise FlatfedError(
            "loss: cross-entropy over a single output is always 0; for regression give "
            "loss=torch.nn.functional.mse_loss"
        )
    if federation.targets.is_floating_point() or federation.targets.is_complex():
        return
    everything = {
        "client": federation.targets,
        **{name: targets for name, (_, targets) in federation.evaluated.items()},
        "client test": None if federation.client_tests is None else federation.client_tests.targets,
    }
    for name, targets in everything.items():
        if targets is None:
            continue
        bad = targets[((targets < 0) | (targets >= classes)) & (targets != ignored)]
        if len(bad):
            raise FlatfedError(
                f"targets: the {name} data have the label {int(bad[0])}, but the model has {classes} outputs "
                f"(labels 0 … {classes - 1}); correct the labels or the model"
            )


def notes(algorithm: Algorithm, training: Training, device: str) -> list[str]:
    """What somebody should know who begins such a run on this machine."""
    return [
        note for note in (too_short(algorithm, training), slow_precision(training.precision, device)) if note
    ]


def too_short(algorithm: Algorithm, training: Training) -> str | None:
    """Why a run would not show what its algorithm is about, if that is so."""
    for part in algorithm.parts:
        if isinstance(part, ServerTask) and training.rounds < part.first_round:
            return (
                f"rounds = {training.rounds}: {part_name(part)} acts from round {part.first_round} on, so "
                f"not at all in this run; ask for at least {part.first_round} rounds{part.first_round_hint}"
            )
    return None
