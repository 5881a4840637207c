"""What is learnt: a model, the clients' data, a loss and metrics."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from flatfed.core.errors import FlatfedError, shown
from flatfed.core.flat import Loss
from flatfed.core.outputs import ignored_label, logits_of
from flatfed.data.federation import Federation
from flatfed.data.samples import IGNORED
from flatfed.engines.metrics import Metric, is_streaming

RESERVED = ("loss", "samples")
"""Recorded of every evaluation beside the metrics."""


def accuracy(outputs: Any, targets: Tensor, ignore_index: int = IGNORED) -> Tensor:
    """The share of samples, tokens or pixels whose largest output (or logit) is at the target, or where the
    target is largest; classes are the second dimension, and targets that are `ignore_index` do not count."""
    logits = logits_of(outputs)
    if targets.shape == logits.shape:
        targets = targets.argmax(1)
    right, counted = (logits.argmax(1) == targets).double(), targets != ignore_index
    return right.mean() if bool(counted.all()) else right[counted].mean()


def is_cross_entropy(loss: Loss) -> bool:
    plain = loss.func if isinstance(loss, functools.partial) else loss
    return plain is F.cross_entropy or isinstance(plain, nn.CrossEntropyLoss)


def default_metrics(loss: Loss) -> Mapping[str, Metric]:
    if not is_cross_entropy(loss):
        return {}
    ignored = ignored_label(loss)
    if ignored in {None, IGNORED}:
        return {"accuracy": accuracy}
    return {"accuracy": functools.partial(accuracy, ignore_index=ignored)}


def check_version(name: str, version: str) -> None:
    """Refuses a name without a version, or the other way round."""
    for field_name, value in (("name", name), ("version", version)):
        if not isinstance(value, str):
            raise FlatfedError(f"{field_name} = {shown(value)}: give a text")
    if bool(name) != bool(version):
        raise FlatfedError(f"name = {name!r}, version = {version!r}: give both or neither")


def check_metrics(metrics: object) -> None:
    """Refuses metrics whose names stand for something else in a history."""
    if not isinstance(metrics, Mapping):
        raise FlatfedError(f"metrics = {shown(metrics)}: give a dictionary of names and functions")
    for name, function in metrics.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            raise FlatfedError(f"metrics: the name {shown(name)} is not a text; give it one")
        if name in RESERVED:
            raise FlatfedError(
                f"metrics: {name!r} is what the history calls something else; use another name"
            )
        if not callable(function) and not is_streaming(function):
            raise FlatfedError(
                f"metrics[{name!r}] = {shown(function)}: give a function of (outputs, targets), or an object "
                "with update, compute and reset"
            )


@dataclass(frozen=True)
class Task:
    """A model to train on a federation's clients.

    `model` gives the architecture and the first weights and is left as it is. It is called as model(x) for an
    input that is a tensor, model(*x) for a tuple, model(**x) for a dictionary. `loss(outputs, targets)` is
    the mean over a batch; it gets both as they are, but torch's own losses take tensors and get the "logits"
    of outputs that are more than that. `metrics` are functions of (outputs, targets) that average over
    samples, functions of all of them (`flatfed.whole`), or objects with update(outputs, targets), compute()
    and reset(); with cross-entropy there is "accuracy" unless others are given.

    A run folder is continued only with the same task. What cannot be compared, such as a lambda or a function
    that loads data, needs a `name` and a `version`, which you change whenever it changes.
    """

    model: nn.Module
    federation: Federation
    loss: Loss = F.cross_entropy
    metrics: Mapping[str, Metric] | None = None
    name: str = ""
    version: str = ""

    def __post_init__(self) -> None:
        for field_name, kind, fix in (
            ("model", nn.Module, "give a torch.nn.Module"),
            ("federation", Federation, "make one with Federation.from_tensors"),
        ):
            value = getattr(self, field_name)
            if not isinstance(value, kind):
                raise FlatfedError(f"{field_name} = {shown(value)}: {fix}")
        if not callable(self.loss):
            raise FlatfedError(f"loss = {shown(self.loss)}: give a function of (outputs, targets)")
        check_metrics(self.used_metrics)
        check_version(self.name, self.version)

    @property
    def used_metrics(self) -> Mapping[str, Metric]:
        """The metrics that are recorded: those given, or those that go with the loss."""
        return default_metrics(self.loss) if self.metrics is None else self.metrics

    @property
    def words(self) -> list[str]:
        """What run folders say about it in their names."""
        return [self.name] if self.name else []
