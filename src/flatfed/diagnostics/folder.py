"""Diagnostics of a run folder: RUN/diagnostics/NAME.json, made again only when something has changed."""

from __future__ import annotations

import inspect
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from flatfed.core.errors import FlatfedError, did_you_mean, one_line
from flatfed.diagnostics.drift import drift
from flatfed.diagnostics.flatness import perturbation, sharpness
from flatfed.diagnostics.generalization import clients, generalization
from flatfed.diagnostics.hessian import hessian
from flatfed.diagnostics.stability import global_stability, local_stability
from flatfed.diagnostics.subject import Subject, Tick, examine_folder
from flatfed.diagnostics.surface import line, plane, surface
from flatfed.diagnostics.theory import theory
from flatfed.runs.folder import RunFolder, read_json, write_json
from flatfed.runs.identity import fingerprint

FORMAT = 1
Diagnostic = Callable[..., dict[str, Any]]

DIAGNOSTICS: dict[str, Diagnostic] = {
    function.__name__: function
    for function in (
        generalization, clients, drift, sharpness, perturbation, local_stability,
        hessian, surface, plane, line, global_stability, theory,
    )
}  # fmt: skip
CHEAP = ("generalization", "clients", "drift", "sharpness", "perturbation", "local_stability")
"""About as much work as an evaluation or a round."""


def options_of(name: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """A diagnostic's options: its defaults, and those of the given ones that it knows."""
    parameters = inspect.signature(DIAGNOSTICS[name]).parameters
    defaults = {key: value.default for key, value in parameters.items() if key not in {"subject", "tick"}}
    return defaults | {key: value for key, value in given.items() if key in defaults}


def check(names: Sequence[str], given: Mapping[str, Any]) -> None:
    """Refuses unknown diagnostics, options that none of the chosen ones has, and bad values."""
    for name in names:
        if name not in DIAGNOSTICS:
            raise FlatfedError(f"{name}: no such diagnostic; {did_you_mean(name, DIAGNOSTICS)}")
    kinds = {
        key: get_type_hints(DIAGNOSTICS[name], include_extras=True)[key]
        for name in names
        for key in options_of(name, {})
    }
    for key, value in given.items():
        if key not in kinds:
            raise FlatfedError(f"{key}: {', '.join(names)} has no such option; {did_you_mean(key, kinds)}")
        try:
            TypeAdapter(kinds[key]).validate_python(value, strict=True)
        except ValidationError as error:
            raise FlatfedError(one_line(error, prefix=key)) from None


def diagnose(
    folder: str | Path,
    names: Sequence[str] = CHEAP,
    options: Mapping[str, Any] | None = None,
    again: bool = False,
    watch: Callable[[str], Tick] | None = None,
    failed: Callable[[str, FlatfedError], None] | None = None,
    subject: Subject | None = None,
) -> dict[str, dict[str, Any]]:
    """Examines a run's last checkpoint; what is in the folder for the same state and options is kept.

    A run made from Python cannot be rebuilt from its folder: give it as an examined `subject`. With `failed`,
    which is told of each error, the other diagnostics are measured all the same. Returns what
    RUN/diagnostics/NAME.json holds, by name.
    """
    folder = Path(folder)
    given = {key: None if value == "all" else value for key, value in (options or {}).items()}
    check(names, given)
    if other := given.get("other"):  # wherever the next command is called from
        given["other"] = str(Path(other).resolve())
    found: dict[str, dict[str, Any]] = {}
    opened = examine_folder(folder) if subject is None else nullcontext((subject, _digest(folder, subject)))
    with opened as (examined, digest):
        (folder / "diagnostics").mkdir(exist_ok=True)
        for name in names:
            chosen = options_of(name, given)
            head = {
                "format": FORMAT,
                "name": name,
                "round": examined.round,
                "fingerprint": digest,
                "options": chosen,
            }
            try:
                if chosen.get("other"):
                    head["other"] = _state(Path(chosen["other"]))
                path = folder / "diagnostics" / f"{name}.json"
                found[name] = (None if again else _kept(path, head)) or _measure(examined, path, head, watch)
            except FlatfedError as error:
                if failed is None:
                    raise
                failed(name, error)
    return found


def _measure(
    subject: Subject, path: Path, head: Mapping[str, Any], watch: Callable[[str], Tick] | None
) -> dict[str, Any]:
    """Takes a diagnostic and writes its file."""
    name, began = head["name"], time.perf_counter()
    tick = {} if watch is None else {"tick": watch(name)}
    result = DIAGNOSTICS[name](subject, **head["options"], **tick)
    content = {**head, "seconds": time.perf_counter() - began, "result": plain(result)}
    write_json(path, content)
    return content


def _state(folder: Path) -> dict[str, Any]:
    """What tells a run's last checkpoint from any other."""
    last = RunFolder.existing(folder).last_checkpoint()
    return {"round": last.round, "fingerprint": last.fingerprint}


def _digest(folder: Path, subject: Subject) -> str:
    """That of the run in the folder, which must be the subject."""
    own = {"round": subject.round, "fingerprint": fingerprint(subject.engine)}
    if _state(folder) != own:
        raise FlatfedError(
            f"{folder}: it holds another run or state than the subject; examine the model, federation and "
            f"run of flatfed.train(…, folder={str(folder)!r})"
        )
    return str(own["fingerprint"])


def _kept(path: Path, head: Mapping[str, Any]) -> dict[str, Any] | None:
    if not path.exists():
        return None
    try:
        content = read_json(path)
    except FlatfedError:
        return None
    same = isinstance(content, dict) and all(content.get(key) == value for key, value in head.items())
    return content if same and "result" in content else None


def plain(value: Any) -> Any:
    """For JSON, which has no NaN or infinity."""
    if isinstance(value, dict):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [plain(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
