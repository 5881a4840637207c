"""Tasks that users write in files of their own: `my_task.py:make` names a function that returns a task."""

import functools
import inspect
import json
import random
import re
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import chdir, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from flatfed.core import task_files
from flatfed.core.errors import USER_ERRORS, FlatfedError, did_you_mean, first_line, shown
from flatfed.training.task import Task

SETTINGS = "settings"
"""The name under which a file may keep the settings that go with its task, as a config file has them."""


def parse_reference(text: str) -> dict[str, Any] | None:
    """The config's table of a reference such as `my_task.py:make`; None if it is something else."""
    matched = re.fullmatch(r"(.+\.py)(?::(.*))?", text)
    if matched is None:
        return None
    return {"file": matched[1], "make": "make" if matched[2] is None else matched[2]}


def reference_settings(text: str) -> dict[str, Any] | None:
    """The config that a reference stands for: its task, and the settings that the file gives for it."""
    table = parse_reference(text)
    if table is None:
        return None
    module = _module(table["file"])
    with _one_line_errors(table["file"], ""):
        settings = getattr(module, SETTINGS, {})
    if not isinstance(settings, Mapping):
        raise FlatfedError(f"{table['file']}: {SETTINGS} = {shown(settings)}; give a dictionary of tables")
    if "task" in settings:
        raise FlatfedError(f"{table['file']}: {SETTINGS} has a task; the file is the task, so leave it out")
    # The whole path, so that a run can be resumed from anywhere.
    return {**settings, "task": {**table, "file": str(Path(table["file"]).resolve())}}


def located(values: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A config file's tables, in which the file of a task is sought beside the config file."""
    table = values.get("task")
    table = parse_reference(table) if isinstance(table, str) else table
    if not isinstance(table, Mapping) or not isinstance(table.get("file"), str):
        return dict(values)
    return {**values, "task": {**table, "file": str((folder / table["file"]).resolve())}}


def check(table: Mapping[str, Any]) -> None:
    """Refuses a table whose file, function or options there are not, without making the task."""
    for key in ("file", "make"):
        if not isinstance(table.get(key), str):
            raise FlatfedError(f"task.{key} = {shown(table.get(key))}: write it as my_task.py:make")
    parameters = _parameters(table)
    for parameter in parameters:
        if parameter.kind in {parameter.POSITIONAL_ONLY, parameter.VAR_POSITIONAL}:
            raise FlatfedError(
                f"{table['file']}:{table['make']}: its parameter {parameter.name!r} cannot be given by name"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    known = [parameter.name for parameter in parameters]
    for option in _options(table):
        if option not in known:
            hint = did_you_mean(option, known) if known else f"{table['make']} has no parameters"
            raise FlatfedError(f"task.{option}: unknown; {hint}")
    given = {*_options(table), "seed"}
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.name not in given:
            raise FlatfedError(f"task.{parameter.name}: missing; use --set task.{parameter.name}=…")


def make_task(table: Mapping[str, Any], seed: int) -> Task:
    """The task under a seed. Made once, so that every method is given the same data."""
    check(table)
    return _made(json.dumps(dict(table), sort_keys=True), seed)


@functools.lru_cache(maxsize=2)
def _made(description: str, seed: int) -> Task:
    table = json.loads(description)
    make, options = _function(table), _options(table)
    if "seed" in {parameter.name for parameter in _parameters(table)}:
        options.setdefault("seed", seed)
    with _one_line_errors(table["file"], table["make"]), _seeded(seed):
        task = make(**options)
    if not isinstance(task, Task):
        raise FlatfedError(f"{table['file']}:{table['make']} returns {shown(task)}; return a flatfed.Task")
    return task


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """What a task draws, its first weights above all, depends on the seed, and leaves the program's alone."""
    python, array, tensor = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(array)
        torch.set_rng_state(tensor)


def defaults(table: Mapping[str, Any]) -> dict[str, Any]:
    """What the function's options are where nothing is said."""
    parameters = _parameters(table)
    return {one.name: one.default for one in parameters if one.default is not one.empty}


def _options(table: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in table.items() if key not in {"file", "make"}}


def _parameters(table: Mapping[str, Any]) -> list[inspect.Parameter]:
    function = _function(table)
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        raise FlatfedError(
            f"{table['file']}: {table['make']} has no signature; give a function that returns a flatfed.Task"
        ) from None


def _function(table: Mapping[str, Any]) -> Callable[..., Any]:
    module, name = _module(table["file"]), table["make"]
    with _one_line_errors(table["file"], ""):
        function = getattr(module, name, None)
    if not callable(function):
        own = [
            key
            for key, value in vars(module).items()
            if inspect.isfunction(value) and value.__module__ == module.__name__
        ]
        raise FlatfedError(f"{table['file']}: it has no function {name!r}; {did_you_mean(name, own)}")
    return function


def _module(file: str) -> ModuleType:
    return _loaded(Path(file).resolve())


@functools.cache
def _loaded(path: Path) -> ModuleType:
    if not path.is_file():
        raise FlatfedError(f"{path}: no such file; flatfed new {path.stem} writes one to start from")
    with _one_line_errors(str(path), ""):
        return task_files.load(path)


@contextmanager
def _one_line_errors(file: str, function: str) -> Iterator[None]:
    """Whatever a user's code raises, with the line of their file that it came from; the cause is attached.

    Relative paths mean the same after it as before, should it change the current folder.
    """
    called = f":{function}" if function else ""
    try:
        with chdir("."):
            yield
    except FlatfedError as error:
        raise FlatfedError(f"{file}{called}: {error}") from error
    except USER_ERRORS as error:
        path = str(Path(file).resolve())
        lines = [
            frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == path
        ]
        line = error.lineno if isinstance(error, SyntaxError) else lines[-1] if lines else None
        place = f", line {line}" if line else ""
        raise FlatfedError(f"{file}{called}{place}: {type(error).__name__}: {first_line(error)}") from error
