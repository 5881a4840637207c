"""Samples as users give them: turned into trees of tensors, and checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from flatfed.core.errors import USER_ERRORS, FlatfedError, first_line, name_of, user_errors
from flatfed.core.flat import all_finite
from flatfed.core.tree import (
    Tree,
    children,
    cloned,
    described_tree,
    first_leaf,
    leaves,
    named_leaves,
    rebuilt,
    rows,
    stacked,
)

Samples = tuple[Tree, Tree]
IGNORED = -100  # the target that torch's losses leave out
INTEGERS = {torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def copied_samples(test: Samples | None) -> Samples | None:
    return None if test is None else cloned(checked_samples("test", test))


def as_tensors(
    dataset: Any, collate: Callable[[list[Any]], Samples] | None, test: Any
) -> tuple[Samples, Samples | None]:
    """The samples of a dataset, and those of the test data, which may be one, too."""
    if collate is None:
        test_samples = _stacked_samples(test) if isinstance(test, Dataset) else copied_samples(test)
        return _stacked_samples(dataset), test_samples
    separate = test is None or isinstance(test, tuple)
    own, others = _listed(dataset), [] if separate else _listed(test)
    everything, count = collated([*own, *others], collate), len(own)
    if separate:
        return everything, copied_samples(test)
    return rows(everything, slice(count)), rows(everything, slice(count, None))


def collated(samples: list[Any], collate: Callable[[list[Any]], Samples]) -> Samples:
    """What a user's function makes of samples, copied."""
    try:
        pair = collate(samples)
    except USER_ERRORS as error:
        # Whatever a user's function raises, say where; the cause stays attached.
        raise FlatfedError(
            f"collate: it cannot put together {len(samples)} samples ({first_line(error)})"
        ) from error
    everything = cloned(checked_samples("collate", pair))
    count = len(first_leaf(everything))
    if count != len(samples):
        raise FlatfedError(f"collate: it makes {count} samples of {len(samples)}; keep each of them")
    return everything


def _listed(dataset: Any) -> list[Any]:
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise FlatfedError("dataset: it has no length or no numbered samples; give a map-style dataset")
    samples: list[Any] = []
    with user_errors(f"dataset: the length of {name_of(dataset)}"):
        count = len(dataset)
    for index in range(count):
        with user_errors(f"dataset[{index}]: {name_of(dataset)}"):
            samples.append(dataset[index])
    if not samples:
        raise FlatfedError("dataset: it is empty; give it samples")
    return samples


def _stacked_samples(dataset: Any) -> Samples:
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == 2:
        return dataset.tensors[0].clone(), dataset.tensors[1].clone()
    return stacked_samples(_listed(dataset))


def stacked_samples(samples: Sequence[Any]) -> Samples:
    """(input, target) of samples of one shape."""
    try:
        inputs, targets = (
            stacked([_canonical(value, torch.as_tensor) for value in column])
            for column in zip(*samples, strict=True)
        )
    except (TypeError, ValueError, RuntimeError, KeyError) as error:
        raise FlatfedError(
            f"dataset: its samples are not (input, target) of one shape ({first_line(error)}); make them so, "
            "or give a collate function that pads them"
        ) from None
    return inputs, targets


def _canonical(value: Any, leaf: Callable[[Any], Tensor]) -> Tree:
    """A user's tensor, array or list as a tensor, and a container of such as a tree of tensors.

    Lists are arrays, and so are tuples of numbers and lists; mappings of other kinds become dictionaries.
    """
    parts = None if isinstance(value, list) else children(value)
    if isinstance(value, tuple) and not any(map(_is_array, value)):
        parts = None
    if parts is None or value is None:
        return None if value is None else leaf(value)
    if isinstance(value, Mapping) and not is_dataclass(value):
        if names := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"the key {names[0]!r} is no text")
        return {key: _canonical(part, leaf) for key, part in value.items()}
    return rebuilt(value, [_canonical(part, leaf) for _, part in parts])


def _is_array(value: Any) -> bool:
    """Whether something in a tuple makes that a container of arrays, where numbers and lists make it one."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    if type(value) is tuple:
        return any(map(_is_array, value))
    return not isinstance(value, list) and bool(children(value))


def checked_samples(
    name: str, pair: Any, like: Samples | None = None, whose: str = "the clients'"
) -> Samples:
    """(inputs, targets) as trees of tensors, from tensors, arrays or lists; of the form of `like`."""
    try:
        inputs, targets = (_canonical(values, lambda part: torch.as_tensor(part).detach()) for values in pair)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise FlatfedError(
            f"{name}: give (inputs, targets) as tensors or arrays ({first_line(error)})"
        ) from None
    if not leaves(inputs) or not leaves(targets):
        raise FlatfedError(f"{name}: its inputs or targets are an empty container; give tensors in it")
    _check_tensors(name, [*named_leaves(inputs, "inputs"), *named_leaves(targets, "targets")])
    if not bool(has_label(targets).any()):
        raise all_ignored(name)
    if like is not None:
        for what, tree, other in (("inputs", inputs, like[0]), ("targets", targets, like[1])):
            _check_alike(name, what, tree, other, whose)
    return inputs, targets


def _check_tensors(name: str, tensors: Sequence[tuple[str, Tensor]]) -> None:
    for what, tensor in tensors:
        if tensor.dim() == 0 or tensor.is_meta or tensor.layout != torch.strided:
            raise FlatfedError(f"{name}: its {what} are no plain tensor [samples, …]; give one")
    (first, one), *others = tensors
    if len(one) == 0:
        raise FlatfedError(f"{name}: it has no samples; leave it out or give it data")
    for what, tensor in others:
        if len(tensor) != len(one):
            raise FlatfedError(f"{name}: {len(one)} {first} but {len(tensor)} {what}; give as many of each")
    if not any(tensor.numel() for what, tensor in tensors if what.startswith("inputs")):
        raise FlatfedError(f"{name}: its {first} are {list(one.shape)}, which is no number; give them some")
    for what, tensor in tensors:
        numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
        if numbers.is_floating_point() and not all_finite(numbers):
            raise FlatfedError(f"{name}: its {what} contain NaN or infinity; clean the data first")


def _check_alike(name: str, what: str, tree: Tree, like: Tree, whose: str) -> None:
    own, others = dict(named_leaves(tree, what)), dict(named_leaves(like, what))
    if own.keys() != others.keys():
        raise FlatfedError(
            f"{name}: its {what} are {described_tree(tree)}, {whose} {described_tree(like)}; make them alike"
        )
    for place, tensor in own.items():
        for word, mine, theirs in (
            ("shaped", list(tensor.shape[1:]), list(others[place].shape[1:])),
            ("of type", tensor.dtype, others[place].dtype),
        ):
            if mine != theirs:
                raise FlatfedError(
                    f"{name}: its {place} are {word} {mine}, {whose} {theirs}; make them alike"
                )


def has_label(targets: Tree) -> Tensor:
    """[samples]: which of them have a target that is not left out."""
    tensors = leaves(targets)
    if any(tensor.is_floating_point() for tensor in tensors):
        return torch.ones(1, dtype=torch.bool).expand(len(tensors[0]))
    counted = [(tensor != IGNORED).reshape(len(tensor), -1).any(1) for tensor in tensors]
    return torch.stack(counted).any(0)


def all_ignored(name: str) -> FlatfedError:
    return FlatfedError(
        f"{name}: all its targets are {IGNORED}, which losses leave out; give it labels or leave it out"
    )
