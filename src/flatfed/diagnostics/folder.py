"""Diagnostics of a run folder: RUN/diagnostics/NAME.json, measured again only when something has changed."""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from flatfed.core.errors import FlatfedError, did_you_mean, one_line
from flatfed.core.files import as_path
from flatfed.diagnostics.plain import plain, read_plain
from flatfed.diagnostics.registry import DIAGNOSTICS, MISUNDERSTANDINGS, cheap_diagnostics
from flatfed.diagnostics.subject import Subject, Tick, inspect_folder, silent
from flatfed.runs.files import write_json
from flatfed.runs.folder import RunFolder

FORMAT = 1


def check(names: Sequence[str], options: Mapping[str, Any]) -> None:
    """Refuses unknown diagnostics, options that none of the chosen ones has, and bad values."""
    for name in names:
        if name not in DIAGNOSTICS:
            raise FlatfedError(f"{name}: no such diagnostic; {did_you_mean(name, DIAGNOSTICS)}")
    types = {key: kind for name in names for key, kind in DIAGNOSTICS[name].option_types.items()}
    for key, value in options.items():
        if key not in types:
            raise FlatfedError(f"{key}: {', '.join(names)} has no such option; {did_you_mean(key, types)}")
        try:
            TypeAdapter(types[key]).validate_python(value, strict=True)
        except ValidationError as error:
            raise FlatfedError(one_line(error, prefix=key)) from None


def diagnose(
    folder: str | Path,
    names: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    again: bool = False,
    watch: Callable[[str], Tick] = lambda name: silent,
    failed: Callable[[str, FlatfedError], None] | None = None,
    subject: Subject | None = None,
) -> dict[str, dict[str, Any]]:
    """Measures a run's last checkpoint; what the folder has for the same state and options is kept.

    The cheap diagnostics unless `names` are given. A run made from Python cannot be rebuilt from its folder:
    give it as a `subject`. With `failed`, which is called with each error, the other diagnostics are measured
    all the same. Returns the content of RUN/diagnostics/NAME.json by name.
    """
    folder, names = as_path("folder", folder), cheap_diagnostics() if names is None else names
    chosen = {key: None if value == "all" else value for key, value in (options or {}).items()}
    check(names, chosen)
    contents: dict[str, dict[str, Any]] = {}
    with inspect_folder(folder) if subject is None else nullcontext(subject) as inspected:
        state = {"round": inspected.round, "identity": inspected.identity}
        if subject is not None and _state(folder) != state:
            raise FlatfedError(
                f"{folder}: it holds another run or state than the subject; inspect the task and the run of "
                f"flatfed.train(…, folder={str(folder)!r})"
            )
        results = folder / "diagnostics"
        if not results.is_dir() and os.path.lexists(results):
            raise FlatfedError(f"{results}: not a folder, so no result can be written there; remove it")
        results.mkdir(exist_ok=True)
        for name in names:
            path = results / f"{name}.json"
            try:
                if path.is_dir():
                    raise FlatfedError(f"{path}: a folder, so no result can be written there; remove it")
                head = {"format": FORMAT, "name": name, **state, **_options(name, chosen)}
                content = None if again else _kept(path, head)
                if content is None:
                    began, tick = time.perf_counter(), watch(name)
                    result = DIAGNOSTICS[name].measure(inspected, **head["options"], tick=tick)
                    content = {**head, "seconds": time.perf_counter() - began, "result": plain(result)}
                    write_json(path, content)
                contents[name] = content
            except FlatfedError as error:
                if failed is None:
                    raise
                failed(name, error)
    return contents


def _options(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A diagnostic's options, and beside them the states of other runs on which its result depends."""
    known, states = DIAGNOSTICS[name], {}
    options = known.options(given)
    for key in known.run_options:
        if options[key]:
            options[key] = str(Path(options[key]).resolve())  # the same from any working directory
            states[key] = _state(Path(options[key]))
    return {"options": options, **states}


def _state(folder: Path) -> dict[str, Any]:
    """What tells a run's last checkpoint from any other."""
    last = RunFolder.existing(folder).last_checkpoint()
    return {"round": last.round, "identity": last.identity}


def _kept(path: Path, head: Mapping[str, Any]) -> dict[str, Any] | None:
    """The content of a file that was measured in the same way, if there is one that can be understood."""
    left_out: list[str] = []
    try:
        content = read_plain(path, left_out) if path.exists() else {}
        if not isinstance(content, dict) or any(content.get(key) != value for key, value in head.items()):
            return None
        DIAGNOSTICS[head["name"]].summary(content["result"])
    except MISUNDERSTANDINGS:  # it is damaged, or of another version
        return None
    return None if left_out else content
