"""One digest of a value of any kind, by its content: the same in another process and on another machine.

Tensors are compared by their bytes, modules and other objects by their class and their attributes, functions
and classes by name, source and the constants that they use. What has no such content is noted.
"""

import copyreg
import enum
import functools
import hashlib
import inspect
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from flatfed.core.tree import Tree, form, leaves

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, Path, enum.Enum)
_CODE = (types.FunctionType, types.BuiltinFunctionType, type)
_KNOWN_PACKAGES = {"torch", "numpy", "flatfed", "transformers", *sys.stdlib_module_names}
"""Known by their names alone; the record has the versions."""
_KEPT_BYTES = 2**20
"""From this size on, digests of samples are kept."""
_BLOCK = 1024


class ContentHasher:
    """Feeds values into one digest, and notes those whose content it cannot see.

    With `versioned`, a name and a version stand for those, for what functions use beside their source, and
    for what is in the users' own objects, which may be anything, a file or the time of day.
    """

    def __init__(self, versioned: bool = False) -> None:
        self.digest = hashlib.sha256()
        self.unseen: list[str] = []
        self._versioned = versioned
        self._open: set[int] = set()
        self._known: dict[int, tuple[Any, str]] = {}
        """Digests of values by their ids, and the values, so that no other gets the same id."""
        self._registered: dict[int, str] = {}
        """The names of the parameters and buffers of the module whose structure is being added."""

    def add(self, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self._text(f"{type(value).__name__} {value!r}")
        elif id(value) in self._registered:
            self._text(f"registered as {self._registered[id(value)]}")
        elif isinstance(value, Tensor):
            self._text(f"tensor {value.dtype} {tuple(value.shape)} {tensor_digest(value)}")
        elif id(value) in self._open:
            self._text("itself")
        else:
            if id(value) not in self._known:
                self._open.add(id(value))
                self._known[id(value)] = value, self._separately(self._add_composed, value)
                self._open.discard(id(value))
            self._text(self._known[id(value)][1])

    def add_data(self, tree: Tree) -> None:
        """A tensor of samples, which many runs may share, or a tree of such."""
        if not isinstance(tree, Tensor):
            self._text(f"tree {form(tree, lambda _: 'tensor')!r}")
        for tensor in leaves(tree):
            self._text(f"tensor {tensor.dtype} {tuple(tensor.shape)} {data_digest(tensor)}")

    def add_structure(self, module: nn.Module) -> None:
        """A module without the values of its parameters and buffers."""
        outermost = not self._registered
        if outermost:
            registered = [*module.named_parameters(), *module.named_buffers()]
            self._registered = {id(value): name for name, value in registered}
        self._add_module(module)
        if outermost:
            self._registered = {}

    def note_unseen(self, reason: str) -> None:
        if not self._versioned:
            self.unseen.append(reason)

    def _separately(self, add: Callable[[Any], None], value: Any) -> str:
        """The digest of a value by itself."""
        outer, self.digest = self.digest, hashlib.sha256()
        add(value)
        own, self.digest = self.digest, outer
        return own.hexdigest()

    def _add_composed(self, value: Any) -> None:
        rules: tuple[tuple[Any, Callable[[Any], None]], ...] = (
            (Mapping, self._add_mapping),
            ((list, tuple), self._add_sequence),
            ((set, frozenset), self._add_set),
            (np.ndarray | np.generic, self._add_array),
            (nn.Module, self._add_whole_module),
            (functools.partial, lambda call: self._add_sequence([call.func, call.args, call.keywords])),
            (types.MethodType, lambda method: self._add_sequence([method.__func__, method.__self__])),
            (type, self._add_class),
            (types.FunctionType, self._add_function),
            (types.BuiltinFunctionType, self._add_builtin),
            (types.ModuleType, lambda module: self._text(module.__name__)),
            (torch.Generator, lambda generator: self.add(generator.get_state())),
            (weakref.ReferenceType, lambda reference: self.add(reference())),
            (object, self._add_object),
        )
        add = next(add for kinds, add in rules if isinstance(value, kinds))
        add(value)

    # -- containers ---------------------------------------------------------------------------------------

    def _add_mapping(self, value: Mapping[Any, Any]) -> None:
        self._text(f"mapping {len(value)}")
        keys = {self._separately(self.add, key): key for key in value}
        for digest in sorted(keys):
            self._text(digest)
            self.add(value[keys[digest]])

    def _add_sequence(self, value: Iterable[Any]) -> None:
        items = list(value)
        self._text(f"sequence {len(items)}")
        for item in items:
            self.add(item)

    def _add_set(self, value: Iterable[Any]) -> None:
        self._text("set")
        for digest in sorted(self._separately(self.add, item) for item in value):
            self._text(digest)

    def _add_array(self, value: np.ndarray[Any, Any] | np.generic) -> None:
        array = np.asarray(value)
        self._text(f"array {array.dtype} {array.shape}")
        if array.dtype.hasobject:
            self.add(array.tolist())
        else:
            self._text(hashlib.sha256(array.tobytes()).hexdigest())

    # -- objects ------------------------------------------------------------------------------------------

    def _add_whole_module(self, module: nn.Module) -> None:
        self.add_structure(module)
        self._add_sequence([*module.parameters(), *module.buffers()])

    def _add_module(self, module: nn.Module) -> None:
        self.add(type(module))
        for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
            shape = None if tensor is None else (tensor.dtype, tuple(tensor.shape), tensor.requires_grad)
            self._text(f"{name} {shape}")
        kept_apart = {"training", "_parameters", "_buffers", "_modules"}
        attributes = {name: value for name, value in _attributes(module).items() if name not in kept_apart}
        for name, value in attributes.items():
            if name.endswith("_hooks") and isinstance(value, dict):
                # Torch numbers hooks in the order in which a process registers them.
                attributes[name] = list(value.values())
        self._add_mapping(attributes)
        for name, child in module._modules.items():
            self._text(name)
            if child is not None:
                self._add_module(child)

    def _add_object(self, value: Any) -> None:
        kind = type(value)
        self.add(kind)
        if self._versioned and not _is_library(kind.__module__):
            return
        attributes = _attributes(value)
        if attributes:
            self._add_mapping(attributes)
            return
        try:
            reduced = copyreg.dispatch_table.get(kind, lambda item: item.__reduce_ex__(4))(value)
        except Exception:
            # Whatever an object says to being taken apart.
            self.note_unseen(f"a {kind.__name__} cannot be compared")
        else:
            self._add_sequence(list(part) if isinstance(part, Iterator) else part for part in reduced)

    # -- code ---------------------------------------------------------------------------------------------

    def _add_builtin(self, function: types.BuiltinFunctionType) -> None:
        self._text(_name(function))
        self.add(function.__self__)

    def _add_function(self, function: types.FunctionType) -> None:
        wrapped = getattr(function, "__wrapped__", None)
        if wrapped is not None and _is_library(function.__globals__.get("__name__")):
            self.add(wrapped)  # Its source has the decorator.
            return
        if _is_library(function.__module__):
            self._text(_name(function))
            return
        if "<" in function.__qualname__ or function.__closure__:
            self.note_unseen(f"{function.__qualname__} is a function without a name of its own")
            return
        self._text(_name(function))
        source = _source(function)
        self._text(source or "")
        self._add_surroundings(function, with_code=source is None)

    def _add_class(self, kind: type) -> None:
        for base in kind.__mro__:
            self._text(_name(base))
            if _is_library(base.__module__):
                continue
            source = _source(base)
            self._text(source or "")
            for name, member in sorted(vars(base).items()):
                functions = _functions_of(member)
                for function in functions:
                    self._text(name)
                    self._add_surroundings(function, with_code=source is None)
                if not functions and not name.startswith("__"):
                    self._add_constant(name, member)

    def _add_surroundings(self, function: types.FunctionType, with_code: bool) -> None:
        """What a function's source does not say: values of defaults, and of what it uses from outside."""
        code = function.__code__
        if with_code:
            for text in _code_texts(code):
                self._text(text)
        if self._versioned or _is_installed(function.__module__):
            return
        self._add_constant("defaults", function.__defaults__)
        self._add_constant("keyword defaults", function.__kwdefaults__)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if name.startswith("_"):  # __class__, for super(), and what dataclasses use
                continue
            if not _is_constant(cell.cell_contents):
                self.note_unseen(f"{function.__qualname__} uses {name!r} of the function that it is in")
            self._add_constant(name, cell.cell_contents)
        names = sorted(_names_in(code))
        for name in names:
            value = function.__globals__.get(name)
            if isinstance(value, types.ModuleType) and not _is_installed(value.__name__):
                for inner in names:
                    self._add_constant(f"{name}.{inner}", vars(value).get(inner))
            else:
                self._add_constant(name, value)

    def _add_constant(self, name: str, value: Any) -> None:
        if value is not None and not self._versioned and _is_constant(value):
            self._text(name)
            self.add(value)

    def _text(self, text: str) -> None:
        content = text.encode()
        self.digest.update(len(content).to_bytes(8, "little") + content)


def _name(code: Any) -> str:
    return f"{code.__module__}.{code.__qualname__}"


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _KNOWN_PACKAGES


def _is_installed(module: str | None) -> bool:
    """Whether code comes with a package rather than from the user."""
    path = getattr(sys.modules.get(module or ""), "__file__", None) or ""
    return _is_library(module) or bool({"site-packages", "dist-packages"} & set(Path(path).parts))


_SOURCES: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
"""To find that of a class, Python reads its whole file."""


def _source(code: types.FunctionType | type) -> str | None:
    """None if it was typed into an interpreter."""
    if code not in _SOURCES:
        try:
            _SOURCES[code] = inspect.getsource(code)
        except (OSError, TypeError):
            _SOURCES[code] = None
    return _SOURCES[code]


def _code_texts(code: types.CodeType) -> Iterator[str]:
    """What stands for the source where there is none."""
    yield code.co_code.hex()
    yield repr(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code_texts(constant)
        else:
            yield repr(sorted(constant, key=repr) if isinstance(constant, frozenset) else constant)


def _names_in(code: types.CodeType) -> set[str]:
    """Names that are looked up outside of a function: globals and attributes."""
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _functions_of(member: Any) -> list[types.FunctionType]:
    """The functions that a class has under one name."""
    candidates = [member]
    if isinstance(member, staticmethod | classmethod):
        candidates = [member.__func__]
    elif isinstance(member, property):
        candidates = [member.fget, member.fset]
    elif isinstance(member, functools.cached_property):
        candidates = [member.func]
    functions = [inspect.unwrap(candidate) for candidate in candidates if callable(candidate)]
    return [function for function in functions if isinstance(function, types.FunctionType)]


def _is_constant(value: Any) -> bool:
    """Whether a value is likely to be a setting or a helper, and not something that changes by itself."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_constant, value))
    if isinstance(value, dict):
        return all(map(_is_constant, value)) and all(map(_is_constant, value.values()))
    kinds = (*_PLAIN, *_CODE, Tensor, np.ndarray, np.generic, nn.Module, functools.partial)
    return isinstance(value, kinds)


def _attributes(value: Any) -> dict[str, Any]:
    """What an object is made of; not what it has worked out and kept, or leaves out when it is copied."""
    slots: list[str] = []
    for base in type(value).__mro__:
        own = vars(base).get("__slots__", ())
        slots += [own] if isinstance(own, str) else own
    attributes = {name: getattr(value, name) for name in slots if hasattr(value, name)}
    attributes |= getattr(value, "__dict__", {})
    if any("__getstate__" in vars(base) and not _is_library(base.__module__) for base in type(value).__mro__):
        # torchmetrics, for instance, wraps an object's methods anew in every copy.
        state = value.__getstate__()
        if isinstance(state, dict):
            attributes = {name: attribute for name, attribute in attributes.items() if name in state}
    return {
        name: attribute
        for name, attribute in attributes.items()
        if name not in {"__dict__", "__weakref__"}
        and not isinstance(inspect.getattr_static(type(value), name, None), functools.cached_property)
    }


def _bytes_of(tensor: Tensor) -> Tensor:
    dense = tensor.detach() if tensor.layout == torch.strided else tensor.detach().to_dense()
    return dense.cpu().resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def tensor_digest(tensor: Tensor) -> str:
    """Of a tensor's bytes, whatever its layout and device."""
    return hashlib.sha256(_bytes_of(tensor).numpy().data).hexdigest()


_DATA_DIGESTS = WeakIdKeyDictionary()
"""Digests of large tensors of samples, with what tells whether they are still the same."""


def data_digest(tensor: Tensor) -> str:
    """The `tensor_digest`, kept for the next run on the same tensor.

    Its version changes with every operation in place, and sums over blocks, ten times as fast as the digest,
    tell of changes behind torch's back, by the array whose memory it shares or through `.data`.
    """
    if tensor.layout != torch.strided or tensor.nbytes < _KEPT_BYTES or tensor.is_inference():
        return tensor_digest(tensor)
    whole = _bytes_of(tensor)
    blocks = whole[: len(whole) // (8 * _BLOCK) * 8 * _BLOCK].view(torch.int64).view(-1, _BLOCK)
    rest = whole[blocks.nbytes :]
    state = tensor._version, tuple(tensor.shape), tensor.dtype, blocks.sum(1), rest.sum()
    known = _DATA_DIGESTS.get(tensor)
    if known is not None and all(
        torch.equal(before, now) if isinstance(now, Tensor) else before == now
        for before, now in zip(known[0], state, strict=True)
    ):
        return str(known[1])
    digest = tensor_digest(whole)
    _DATA_DIGESTS[tensor] = state, digest
    return digest
