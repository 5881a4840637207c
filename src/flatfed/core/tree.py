"""Trees of tensors: what a model takes, what it returns and what it should return.

A tree is a tensor, or a tuple, dictionary or dataclass of trees. What is done in every step looks for a lone
tensor first, so that the common case costs no walk. The containers are walked here and not by torch's own
pytree, which takes a dataclass for a leaf unless its owner registers it with torch.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

Tree = Any
"""A tensor, None, or a tuple, dictionary or dataclass of trees; outputs of models may hold anything else."""


def children(tree: Tree) -> list[tuple[str, Any]] | None:
    """A container's parts, each with how it is written behind the container's name; None for a leaf."""
    if isinstance(tree, Tensor):
        return None
    if (names := _field_names(tree)) is not None:
        return [(f".{name}", getattr(tree, name)) for name in names]
    if isinstance(tree, Mapping):
        return [(f"[{key!r}]", value) for key, value in tree.items()]
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        return [(f"[{number}]", value) for number, value in enumerate(tree)]
    return [] if tree is None else None


def _field_names(tree: Any) -> list[str] | None:
    """Those of a dataclass or a named tuple."""
    if is_dataclass(tree) and not isinstance(tree, type):
        return [field.name for field in fields(tree) if field.init]
    return list(tree._fields) if isinstance(tree, tuple) and hasattr(tree, "_fields") else None


def rebuilt(tree: Tree, values: Sequence[Any]) -> Tree:
    """A container of the same kind with other parts."""
    if tree is None:
        return None
    if (names := _field_names(tree)) is not None:
        parts = dict(zip(names, values, strict=True))
        return type(tree)(**parts) if isinstance(tree, tuple) else replace(tree, **parts)
    if isinstance(tree, Mapping):
        other: Any = {} if type(tree) is dict else copy.copy(tree)
        for key, value in zip(list(tree), values, strict=True):
            other[key] = value
        return other
    return list(values) if isinstance(tree, list) else tuple(values)


def map_tree(function: Callable[..., Any], tree: Tree, *others: Tree) -> Tree:
    """The tree of what a function makes of every leaf, and of the leaves at its place in the other trees."""
    if isinstance(tree, Tensor):
        return function(tree, *others)
    parts = children(tree)
    if parts is None:
        return function(tree, *others)
    places = [dict(children(other) or ()) for other in others]
    return rebuilt(
        tree, [map_tree(function, part, *(place[name] for place in places)) for name, part in parts]
    )


def named_leaves(tree: Tree, name: str = "") -> list[tuple[str, Any]]:
    """All leaves, with how each is written if the tree is called `name`."""
    parts = children(tree)
    if parts is None:
        return [(name, tree)]
    return [leaf for place, part in parts for leaf in named_leaves(part, name + place)]


def leaves(tree: Tree) -> list[Any]:
    return [tree] if isinstance(tree, Tensor) else [leaf for _, leaf in named_leaves(tree)]


def first_leaf(tree: Tree) -> Tensor:
    """Any one of the tensors of samples: they have as many rows and are on one device."""
    leaf: Tensor = tree if isinstance(tree, Tensor) else leaves(tree)[0]
    return leaf


def rows(tree: Tree, chosen: Any) -> Tree:
    """Some samples of each tensor."""
    return map_tree(lambda tensor: tensor[chosen], tree)


def joined(trees: Sequence[Tree]) -> Tree:
    """Samples behind each other."""
    return map_tree(lambda *tensors: torch.cat(tensors), *trees)


def stacked(trees: Sequence[Tree]) -> Tree:
    """Trees of one shape as one, with a new first axis."""
    return map_tree(lambda *tensors: torch.stack(tensors), *trees)


def cloned(tree: Tree) -> Tree:
    return map_tree(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, tree)


def moved(tree: Tree, device: torch.device) -> Tree:
    """With all tensors on a device; what is no tensor stays as it is."""
    return map_tree(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def sample_bytes(tree: Tree) -> int:
    """The size of one sample."""
    return sum(leaf[:1].nbytes for leaf in leaves(tree))


def versions(tree: Tree) -> Any:
    """What changes when a tensor of the tree is edited in place, or another one is put in its place."""
    if isinstance(tree, Tensor):
        return tree._version
    return [(name, id(leaf), getattr(leaf, "_version", None)) for name, leaf in named_leaves(tree)]


def equal(one: Tree, other: Tree) -> bool:
    """Whether two trees hold the same numbers at the same places, NaN being equal to itself."""
    own, others = named_leaves(one), named_leaves(other)
    return len(own) == len(others) and all(
        name == other_name and _same_numbers(leaf, other_leaf)
        for (name, leaf), (other_name, other_leaf) in zip(own, others, strict=True)
    )


def _same_numbers(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


def call(module: nn.Module, inputs: Tree) -> Any:
    """A model's outputs: model(x), model(*x) for a tuple, model(**x) for a dictionary.

    A dataclass or a named tuple is one argument: whoever gives names to the parts of a batch wants the batch.
    """
    if isinstance(inputs, Tensor):
        return module(inputs)
    if isinstance(inputs, dict):
        return module(**inputs)
    if type(inputs) is tuple:
        return module(*inputs)
    return module(inputs)


# -- what a tree looks like, as plain data -----------------------------------------------------------------


def form(tree: Tree, leaf: Callable[[Tensor], Any]) -> Any:
    """Something about every tensor in dictionaries and tuples; a dataclass is a dictionary of CLASS.FIELD."""
    parts = children(tree)
    if parts is None or tree is None:
        return None if tree is None else leaf(tree)
    values = [form(part, leaf) for _, part in parts]
    if (names := _field_names(tree)) is not None:
        kind = type(tree).__name__
        return {f"{kind}.{name}": value for name, value in zip(names, values, strict=True)}
    return dict(zip(tree, values, strict=True)) if isinstance(tree, Mapping) else tuple(values)


def sample_shapes(tree: Tree) -> Any:
    """The form with the shape of one sample at every leaf."""
    return form(tree, lambda tensor: tuple(tensor.shape[1:]))


def dtypes(tree: Tree) -> Any:
    return form(tree, lambda tensor: tensor.dtype)


def described(shapes: Any, kinds: Any) -> str:
    """Shapes and dtypes of one form in a few words."""
    if isinstance(kinds, dict):
        parts = ", ".join(f"{key}: {described(shapes[key], kind)}" for key, kind in kinds.items())
        return f"{{{parts}}}"
    if isinstance(kinds, tuple | list):
        return f"({', '.join(map(described, shapes, kinds))})"
    if kinds is None:
        return "None"
    return f"{list(shapes)} {str(kinds).removeprefix('torch.')}"


def described_tree(tree: Tree) -> str:
    return described(form(tree, lambda tensor: tuple(tensor.shape)), dtypes(tree))


def empty(shapes: Any, kinds: Any, samples: int) -> Tree:
    """Tensors of a form, if they can be made of it: the classes of dataclasses cannot, which gives None."""
    if isinstance(kinds, dict):
        parts = {key: empty(shapes[key], kind, samples) for key, kind in kinds.items()}
        return None if any(not key.isidentifier() or part is None for key, part in parts.items()) else parts
    if isinstance(kinds, tuple | list):
        items = tuple(empty(own, kind, samples) for own, kind in zip(shapes, kinds, strict=True))
        return None if any(part is None for part in items) else items
    return None if kinds is None else torch.empty(samples, *shapes, dtype=kinds)
