"""The named algorithms, and how a name or a composition in a config file becomes one.

Decorating a constructor with `register` enrols the algorithm in the command line, the documentation and the
tests that run over all algorithms.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ParamSpec, get_type_hints

from pydantic import ConfigDict, ValidationError, validate_call

from flatfed import parts
from flatfed.core.algorithm import COMMON, Algorithm, ImpossibleComposition
from flatfed.core.errors import FlatfedError, did_you_mean, match_name, one_line, shown
from flatfed.core.part import NEUTRAL, SLOTS, Optimizer, Part, describe_part, part_name
from flatfed.core.types import Range, plain, tuned_range

Options = ParamSpec("Options")

ALGORITHMS: dict[str, Callable[..., Algorithm]] = {}
VARIANTS: dict[str, dict[str, Mapping[str, Any]]] = {}
"""By algorithm and name, options that something else than its paper has, such as released code."""


def variant(
    name: str, **options: Any
) -> Callable[[Callable[Options, Algorithm]], Callable[Options, Algorithm]]:
    """Gives options of a registered algorithm a name: `fedswa(variant="released")`."""

    def enrol(construct: Callable[Options, Algorithm]) -> Callable[Options, Algorithm]:
        VARIANTS.setdefault(construct.__name__, {})[name] = options
        return construct

    return enrol


def _options_of_variant(algorithm: str, name: object) -> Mapping[str, Any]:
    known = VARIANTS.get(algorithm, {})
    if not isinstance(name, str) or name not in known:
        hint = did_you_mean(shown(name), known) if known else "it has none"
        raise FlatfedError(f"{algorithm}.variant = {shown(name)}: unknown; {hint}")
    return known[name]


def register(make: Callable[Options, Algorithm]) -> Callable[Options, Algorithm]:
    """Enrols an algorithm's constructor under its function name and checks what it is called with."""
    name = make.__name__
    signature = inspect.signature(make)
    checked: Callable[..., Algorithm] = validate_call(config=ConfigDict(strict=True))(make)

    @functools.wraps(make)
    def construct(*positional: Options.args, **named: Options.kwargs) -> Algorithm:
        if "variant" in named and "variant" not in signature.parameters:
            own = _options_of_variant(name, named.pop("variant"))
            named.update({key: value for key, value in own.items() if key not in named})
        try:
            # Positional arguments get their names first, so that a complaint can use them.
            given = signature.bind_partial(*positional).arguments
            algorithm = checked(**{**given, **named})
        except ValidationError as error:
            raise FlatfedError(one_line(error, signature.parameters, prefix=name)) from None
        bound = signature.bind(*positional, **named)
        bound.apply_defaults()
        options = {option: plain(value) for option, value in bound.arguments.items()}
        return replace(algorithm, name=name, options=options, composed_of=algorithm.chosen)

    ALGORITHMS[name] = construct
    return construct


def equations(name: str) -> str:
    """The docstring of an algorithm's file: equations, limits, deviations."""
    return inspect.cleandoc(sys.modules[ALGORITHMS[name].__module__].__doc__ or "")


FAMILIES = {
    "synthetic": "synthetic data on the server",
    "gradient": "gradients at a perturbed point",
    "start": "another starting point",
    "optimizer": "optimizers on the clients",
    "correct": "corrected and regularised directions",
    "schedule": "step sizes within a round",
    "": "averaging and server optimizers",
}
"""Algorithms by the first of these slots that they fill."""


def facts(name: str) -> dict[str, Any]:
    """What there is to know about an algorithm with its defaults, as plain data."""
    algorithm = ALGORITHMS[name]()
    chosen = [part for part in algorithm.parts if type(part) is not SLOTS[part.slot]]
    slots = {part.slot for part in chosen}
    described = [describe_part(part) for part in chosen]
    sizes = {"model": "model"} | {vector.name: vector.size for vector in algorithm.server_vectors}
    down = [key for key in algorithm.broadcast if key not in algorithm.sent_once]
    return {
        "family": next(family for slot, family in FAMILIES.items() if slot in slots or not slot),
        "title": equations(name).splitlines()[0].rstrip("."),
        "equations": equations(name),
        "options": algorithm.options,
        **({"variants": VARIANTS[name]} if name in VARIANTS else {}),
        "gradients_per_step": algorithm.gradient_evaluations,
        "passes_per_round": algorithm.full_gradients,
        "models_down": sum(sizes[key] == "model" for key in down),
        "models_up": sum(algorithm.declared_uploads[key].size == "model" for key in algorithm.uploads),
        "down": down,
        "down_once": [key for key in algorithm.broadcast if key in algorithm.sent_once],
        "up": list(algorithm.uploads),
        "server_keeps": ["model", *(vector.name for vector in algorithm.server_vectors)],
        "client_keeps": [vector.name for vector in algorithm.client_vectors],
        "parts": [
            f"{part['part']}({', '.join(f'{key}={value}' for key, value in part.items() if key != 'part')})"
            for part in described
        ],
    }


TUNED_OPTIONS = 2
"""How many options of its own an algorithm is tuned in, beside the step size."""


def tuned_options(algorithm: Algorithm) -> dict[tuple[str | int, ...], Range]:
    """The options that matter, by their place in the algorithm's description, and where to seek them.

    Those of a named algorithm are declared by its constructor, those of a composition by its parts.
    """
    description = algorithm.describe()
    options: dict[tuple[str | int, ...], Range] = {}
    if "name" in description:
        hints = get_type_hints(ALGORITHMS[description["name"]], include_extras=True)
        options = {(name,): kind for name, hint in hints.items() if (kind := tuned_range(hint))}
    else:
        for slot, filling in description.items():
            several = getattr(algorithm, slot) if slot in SLOTS else ()
            for place, part in enumerate(several if isinstance(several, tuple) else (several,)):
                where = (slot, place) if isinstance(filling, list) else (slot,)
                hints = get_type_hints(type(part), include_extras=True)
                options |= {
                    (*where, name): kind for name, hint in hints.items() if (kind := tuned_range(hint))
                }
    return dict(list(options.items())[:TUNED_OPTIONS])


def parts_by_name(slot: str) -> dict[str, type[Part]]:
    kinds = (kind for kind in vars(parts).values() if isinstance(kind, type) and issubclass(kind, Part))
    return {NEUTRAL: SLOTS[slot]} | {part_name(kind): kind for kind in kinds if kind.slot == slot}


def build(description: str | Mapping[str, Any]) -> Algorithm:
    """An algorithm from its name, from {name, options…}, or from parts by slot.

    >>> build({"name": "fedsam", "radius": 0.05, "optimizer": "adamw"})
    >>> build({"gradient": {"part": "sharpness_aware", "radius": 0.05}, "correct": ["control_variate"]})
    """
    if isinstance(description, str):
        description = {"name": description}
    if not isinstance(description, Mapping):
        raise FlatfedError(f"algorithm = {shown(description)}: give a name, or a table of parts by slot")
    _check_names(description, "algorithm")
    if "name" in description:
        common = {key: value for key, value in description.items() if key in COMMON}
        options = {key: value for key, value in description.items() if key not in {"name", *common}}
        named = build_named(description["name"], options)
        if "optimizer" in common and type(named.optimizer) is not Optimizer:
            raise FlatfedError(
                f"algorithm.optimizer = {shown(common['optimizer'])}: {named.name} has a local optimizer of "
                f"its own, {part_name(named.optimizer)}; leave this out, or compose parts"
            )
        return _composed(functools.partial(replace, named), common) if common else named
    unknown = sorted(set(description) - {*SLOTS, *COMMON})
    if unknown:
        known = [*dict.fromkeys([*SLOTS, *COMMON]), "name"]
        raise FlatfedError(f"algorithm.{unknown[0]}: unknown; {did_you_mean(unknown[0], known)}")
    return _composed(Algorithm, description)


def _composed(make: Callable[..., Algorithm], description: Mapping[str, Any]) -> Algorithm:
    chosen: dict[str, Any] = {}
    for slot, filling in description.items():
        if slot == "uncompressed":
            names = filling if isinstance(filling, list | tuple) else [filling]
            if not all(isinstance(name, str) for name in names):
                raise FlatfedError(f"algorithm.uncompressed = {shown(filling)}: give the names of uploads")
            chosen[slot] = tuple(names)
        elif slot == "remember":
            chosen[slot] = filling
        elif slot == "correct":
            several = filling if isinstance(filling, list | tuple) else [filling]
            chosen[slot] = tuple(_build_part(slot, one) for one in several)
        else:
            chosen[slot] = _build_part(slot, filling)
    try:
        return make(**chosen)
    except ImpossibleComposition as reason:
        raise FlatfedError(f"algorithm: {reason}") from None


def build_named(name: str, options: Mapping[str, Any]) -> Algorithm:
    return ALGORITHMS[match_name("algorithm", name, ALGORITHMS)](**options)


def _build_part(slot: str, description: Any, within: str = "") -> Part:
    if isinstance(description, str):
        description = {"part": description}
    known, place = parts_by_name(slot), f"algorithm.{slot}{within}"
    if not isinstance(description, Mapping):
        raise FlatfedError(f"{place} = {shown(description)}: give the name of a part, or a table with it")
    name = description.get("part")
    if name is None:
        raise FlatfedError(f"{place}.part: missing; choose from: {', '.join(sorted(known))}")
    if not isinstance(name, str) or name not in known:
        raise FlatfedError(f"{place}.part = {shown(name)}: unknown; {did_you_mean(shown(name), known)}")
    _check_names(description, place)
    kind = known[name]
    options = {key: value for key, value in description.items() if key != "part"}
    if name == NEUTRAL and options:
        raise FlatfedError(f"{place}.{next(iter(options))}: unknown; {NEUTRAL!r} has no options")
    if "of" in options:  # a part around another of its slot
        options["of"] = _build_part(slot, options["of"], f"{within}.of")
    try:
        return kind(**options)
    except FlatfedError as error:
        raise FlatfedError(f"{place}.{error}") from None


def _check_names(description: Mapping[Any, Any], place: str) -> None:
    for name in description:
        if not isinstance(name, str):
            raise FlatfedError(f"{place}: {shown(name)} is not the name of an option; remove it")
