"""Is this the same run? One answer for folders, comparisons, reports and federations between organisations.

A run's identity is a digest of everything that decides its numbers: algorithm, training settings, the model
with its first, frozen and buffered values, the data, the loss, the metrics, how clients are trained. Rounds
are left out, because a run may go on for more of them, and so is the patience that may end it before; so is
execution, which decides no number.

Values are compared by content (see `runs.content`). What has none (a lambda, a function inside a function,
one that loads data) is covered by the name and version that the user gives; without them the identity says
what it does not cover, and a folder refuses to go on.
"""

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, first_line
from flatfed.core.flat import Loss
from flatfed.core.settings import Sharing, Training
from flatfed.core.sharing import divided
from flatfed.data.federation import Federation
from flatfed.data.transform import Transform
from flatfed.engines.metrics import Metric
from flatfed.engines.planning import Plan
from flatfed.runs.content import ContentHasher
from flatfed.training.config import Config
from flatfed.training.task import Task

Component = Callable[[ContentHasher], None]
"""Feeds the hasher one of the things that decide a run's numbers."""


@dataclass(frozen=True)
class Identity:
    """Digests of what decides a run's numbers, by component."""

    components: Mapping[str, str]
    uncovered: tuple[str, ...] = ()
    """What could not be compared and has no version."""

    @property
    def digest(self) -> str:
        return digest_of(dict(self.components))

    def difference(self, other: Mapping[str, str]) -> str | None:
        """The first component that is not the same."""
        names = [*self.components, *(name for name in other if name not in self.components)]
        return next((name for name in names if self.components.get(name) != other.get(name)), None)


def run_identity(task: Task, plan: Plan) -> Identity:
    """That of a training on this machine or a cluster."""
    return _identity(
        {
            **_method(plan.algorithm, plan.training),
            **_model(task.model),
            "loss": lambda hasher: hasher.add(task.loss),
            "metrics": lambda hasher: hasher.add(dict(task.used_metrics)),
            "data": lambda hasher: _add_data(hasher, task.federation),
            "execution path": lambda hasher: hasher.add([plan.path, plan.device.type]),
        },
        f"{task.name} {task.version}".strip(),
    )


def federation_identity(
    algorithm: Algorithm,
    training: Training,
    model: nn.Module,
    loss: Loss,
    metrics: Mapping[str, Metric],
    transform: Transform,
    version: str = "",
) -> Identity:
    """What the server and the sites of a federation must have in common: no data, and no first weights."""
    components: dict[str, Component] = {
        **_method(algorithm, training),
        **_model(model),
        "loss": lambda hasher: hasher.add(loss),
        "metrics": lambda hasher: hasher.add(dict(metrics)),
        "transform": lambda hasher: hasher.add(transform),
    }
    if training.sharing.normalisation == "frozen":
        # It never travels, so that both sides must have the same.
        components["frozen normalisation"] = lambda hasher: hasher.add(_kept_still(model, training.sharing))
    del components["first weights"]
    return _identity(components, version)


def _identity(components: Mapping[str, Component], version: str) -> Identity:
    digests, uncovered = {"version": digest_of(version)}, []
    for name, add in components.items():
        hasher = ContentHasher(versioned=bool(version))
        try:
            add(hasher)
        except RecursionError:
            hasher = ContentHasher(versioned=bool(version))
            hasher.note_unseen("it is nested too deeply to be compared")
        except (FlatfedError, MemoryError):
            raise
        except Exception as error:
            # A user's object may do anything when it is looked at.
            hasher = ContentHasher(versioned=bool(version))
            hasher.note_unseen(f"it cannot be looked at ({type(error).__name__}: {first_line(error)})")
        digests[name] = hasher.digest.hexdigest()
        uncovered += [f"{name}: {reason}" for reason in hasher.unseen]
    return Identity(digests, tuple(dict.fromkeys(uncovered)))


def _method(algorithm: Algorithm, training: Training) -> dict[str, Component]:
    # The description names parts and their options; a part of the user's own is known by its code.
    parts = [*algorithm.parts, algorithm.aggregate, algorithm.compress]
    return {
        "algorithm": lambda hasher: hasher.add([algorithm.describe(), parts]),
        "training": lambda hasher: hasher.add(training.model_dump(exclude={"rounds", "patience"})),
    }


def _model(model: nn.Module) -> dict[str, Component]:
    """A model's structure, its trainable weights and what stays frozen; buffers go with the weights."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    return {
        "model": lambda hasher: hasher.add_structure(model),
        "first weights": lambda hasher: hasher.add([trained, dict(model.named_buffers())]),
        "frozen weights": lambda hasher: hasher.add(frozen),
    }


def _kept_still(model: nn.Module, sharing: Sharing) -> dict[str, Tensor]:
    """The parameters that a policy leaves out of training, and the buffers that it keeps as they are."""
    division = divided(model, sharing)
    trained = {entry.name for entry in division.whole.entries}
    still = {
        name: value for name, value in model.named_parameters() if value.requires_grad and name not in trained
    }
    kept = {name for name, *_ in division.private_buffers}
    buffers = dict(model.named_buffers())
    return still | {name: buffers[name] for name in sorted(division.stationary - kept)}


def _add_data(hasher: ContentHasher, federation: Federation) -> None:
    hasher.add([len(federation), federation.transform])
    tensors = federation.tensors()
    if tensors is None:
        hasher.note_unseen("clients' data that come from a function")
        hasher.add([federation.client(0), federation.client_test(0)])
    for tree in (*(federation.test or ()), *(tensors or ())):
        hasher.add_data(tree)
    if federation.validation is not None:
        hasher.add("validation")
        for tree in federation.validation:
            hasher.add_data(tree)


def config_digest(config: Config) -> str:
    """By which a folder is named before its data are loaded: what is asked for, and for how many rounds."""
    return digest_of(config.model_dump(mode="json", exclude={"execution"}))


def setting_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be compared."""
    return {key: config.get(key) for key in ("task", "data", "partition", "model")}


def method_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be one method under different seeds."""
    training = {key: value for key, value in config["training"].items() if key != "seed"}
    return {**{key: value for key, value in config.items() if key != "execution"}, "training": training}


def digest_of(value: Any) -> str:
    """The digest of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
