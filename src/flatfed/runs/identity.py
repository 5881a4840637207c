"""Is this the same run? One answer for folders, comparisons, reports and federations between organisations.

A run's identity is a digest of everything that decides its numbers: algorithm, training settings, the model
with its first, frozen and buffered values, the data, the loss, the metrics, how clients are trained. Rounds
are left out, because a run may go on for more of them; so is execution, which decides no number.

Values are compared by content: tensors by their bytes, modules and other objects by their class, the source
of that class and their attributes, functions by name and source. What has no such content (a lambda, a
function inside a function, one that loads data) is covered by the name and version that the user gives;
without them the identity says what it does not cover, and a folder refuses to go on.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import json
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from flatfed.core.algorithm import Algorithm
from flatfed.core.flat import Loss
from flatfed.core.settings import Training
from flatfed.data.federation import Federation
from flatfed.engines.planning import Metric, Plan
from flatfed.training.config import Config
from flatfed.training.task import Task

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Path, enum.Enum)
_LIBRARIES = ("torch", "numpy", "flatfed", "transformers", "builtins", "functools", "collections")
"""What is known by its name alone; the record has the versions."""


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
            **described(plan.algorithm, plan.training),
            **model_parts(task.model),
            "loss": task.loss,
            "metrics": dict(task.used_metrics),
            "data": _Data(task.federation),
            "execution path": [plan.path, plan.device.type],
        },
        f"{task.name} {task.version}".strip(),
    )


def federation_identity(
    algorithm: Algorithm, training: Training, model: nn.Module, loss: Loss, metrics: Mapping[str, Metric]
) -> Identity:
    """What the server and the sites of a federation must have in common: no data, and no first weights."""
    parts = {name: value for name, value in model_parts(model).items() if name != "first weights"}
    return _identity({**described(algorithm, training), **parts, "loss": loss, "metrics": dict(metrics)}, "")


def described(algorithm: Algorithm, training: Training) -> dict[str, Any]:
    return {"algorithm": algorithm.describe(), "training": training.model_dump(exclude={"rounds"})}


def model_parts(model: nn.Module) -> dict[str, Any]:
    """A model's structure, its trainable weights and what stays frozen; buffers go with the weights."""
    frozen = {name: value for name, value in model.named_parameters() if not value.requires_grad}
    trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
    buffers = dict(model.named_buffers())
    return {"model": _Structure(model), "first weights": [trained, buffers], "frozen weights": frozen}


def config_digest(config: Config) -> str:
    """By which a folder is named before its data are loaded: what is asked for, and for how many rounds."""
    return digest_of(config.model_dump(mode="json", exclude={"execution"}))


def setting_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be compared."""
    return {key: config.get(key) for key in ("data", "partition", "model")}


def method_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """What two runs must have in common to be one method under different seeds."""
    training = {key: value for key, value in config["training"].items() if key != "seed"}
    return {**{key: value for key, value in config.items() if key != "execution"}, "training": training}


def digest_of(value: Any) -> str:
    """The digest of plain data."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _identity(components: Mapping[str, Any], version: str) -> Identity:
    digests, uncovered = {}, []
    for name, value in components.items():
        hasher = _Hasher(version)
        hasher.add(value)
        digests[name] = hasher.digest.hexdigest()
        uncovered += [f"{name}: {reason}" for reason in hasher.uncovered]
    return Identity(digests, tuple(dict.fromkeys(uncovered)))


@dataclass(frozen=True)
class _Structure:
    """A module without the values of its tensors."""

    module: nn.Module


@dataclass(frozen=True)
class _Data:
    federation: Federation


class _Hasher:
    """Feeds values of any kind into one digest, and notes those that it cannot tell apart."""

    def __init__(self, version: str) -> None:
        self.digest = hashlib.sha256()
        self.uncovered: list[str] = []
        self._version = version
        self._open: set[int] = set()

    def add(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._text(f"{type(value).__name__} {value!r}")
        elif isinstance(value, Tensor):
            self._text(f"tensor {value.dtype} {tuple(value.shape)} {tensor_digest(value)}")
        elif isinstance(value, np.ndarray | np.generic):
            self.add(
                torch.from_numpy(np.asarray(value).copy()) if value.dtype.kind in "biuf" else repr(value)
            )
        elif id(value) in self._open:
            self._text("itself")
        else:
            self._open.add(id(value))
            self._add_composed(value)
            self._open.discard(id(value))

    def _add_composed(self, value: Any) -> None:
        rules: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (Mapping, self._add_mapping),
            ((list, tuple), self._add_sequence),
            ((set, frozenset), lambda items: self.add(sorted(map(repr, items)))),
            (_Data, lambda data: self._add_data(data.federation)),
            (_Structure, lambda structure: self._add_module(structure.module)),
            (
                nn.Module,
                lambda module: self.add([_Structure(module), *module.parameters(), *module.buffers()]),
            ),
            (functools.partial, lambda call: self.add([call.func, call.args, call.keywords])),
            (types.MethodType, lambda method: self.add([method.__func__, method.__self__])),
            ((types.FunctionType, types.BuiltinFunctionType, type), self._add_code),
            (torch.Generator, lambda generator: self.add(generator.get_state())),
            (object, self._add_object),
        )
        add = next(add for kinds, add in rules if isinstance(value, kinds))
        add(value)

    def _add_mapping(self, value: Mapping[Any, Any]) -> None:
        self._text(f"mapping {len(value)}")
        for key in sorted(value, key=repr):
            self.add(key)
            self.add(value[key])

    def _add_sequence(self, value: Sequence[Any]) -> None:
        self._text(f"sequence {len(value)}")
        for item in value:
            self.add(item)

    def _add_data(self, federation: Federation) -> None:
        self._text(f"{len(federation)} clients")
        self.add([federation.transform, federation.test])
        tensors = federation.tensors()
        if tensors is None:
            first = federation.client(0)
            self.add([first.inputs, first.targets])
            self._uncovered("clients' data that come from a function")
        else:
            self.add(tensors)

    def _add_module(self, module: nn.Module) -> None:
        self._add_code(type(module))
        for name, parameter in [*module._parameters.items(), *module._buffers.items()]:
            shape = (
                None
                if parameter is None
                else (parameter.dtype, tuple(parameter.shape), parameter.requires_grad)
            )
            self._text(f"{name} {shape}")
        hidden = {"training", "_parameters", "_buffers", "_modules"}
        self.add({name: value for name, value in vars(module).items() if name not in hidden})
        for name, child in module._modules.items():
            self._text(name)
            if child is not None:
                self._add_module(child)

    def _add_code(self, value: types.FunctionType | types.BuiltinFunctionType | type) -> None:
        name = f"{value.__module__}.{value.__qualname__}"
        self._text(name)
        if (value.__module__ or "").partition(".")[0] in _LIBRARIES:
            return
        if isinstance(value, types.FunctionType) and ("<" in value.__qualname__ or value.__closure__):
            self._uncovered(f"{value.__qualname__} is a function without a name of its own")
            return
        try:
            self._text(inspect.getsource(value))
        except (OSError, TypeError):
            # Typed into an interpreter: the compiled code stands for the source.
            functions = [value] if isinstance(value, types.FunctionType) else vars(value).values()
            for function in functions:
                if isinstance(function, types.FunctionType):
                    for text in _code_texts(function.__code__):
                        self._text(text)

    def _add_object(self, value: Any) -> None:
        self._add_code(type(value))
        if hasattr(value, "__dict__"):
            self.add(vars(value))
        elif hasattr(type(value), "__slots__"):
            self.add({name: getattr(value, name, None) for name in type(value).__slots__})
        else:
            self._uncovered(f"a {type(value).__name__} cannot be compared")

    def _uncovered(self, reason: str) -> None:
        if self._version:
            self._text(self._version)
        else:
            self.uncovered.append(reason)

    def _text(self, text: str) -> None:
        content = text.encode()
        self.digest.update(len(content).to_bytes(8, "little") + content)


def _code_texts(code: types.CodeType) -> Iterator[str]:
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_texts(constant)
        else:
            yield repr(constant)


_TENSOR_DIGESTS = WeakIdKeyDictionary()
"""Digests of large tensors that many runs share, with the version of the tensor that they are of."""


def tensor_digest(tensor: Tensor) -> str:
    known = _TENSOR_DIGESTS.get(tensor)
    if known is not None and known[0] == tensor._version:
        return str(known[1])
    content = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    digest = hashlib.sha256(content.data).hexdigest()
    if tensor.nbytes > 2**20:
        _TENSOR_DIGESTS[tensor] = tensor._version, digest
    return digest
