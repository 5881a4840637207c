"""Every setting of a cell, and where each comes from.

A source is stated where a value is set, for a setting ("training.lr") or for all below a name ("algorithm"),
or once for the whole paper. What overrides a value does not inherit the source of what it overrides.
"""

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from flatfed.core.errors import FlatfedError
from flatfed.core.settings import Training
from flatfed.data.datasets import DATASETS
from flatfed.data.partition import PARTITIONS
from flatfed.models import MODELS
from flatfed.papers.schema import Values
from flatfed.training.config import Config

# Of the settings of training that a config leaves alone, those that papers speak of.
SPOKEN_OF = ("sampling", "lr_decay", "weight_decay", "clip", "weighting")
# What a loader or a model is given that decides no number, or that follows from the data.
NO_SETTING = {"folder", "verify", "input_shape", "classes", "groups", "config", "crop_seed", "redraws"}


def settings(config: Values) -> dict[str, Any]:
    """All settings of a config by their dotted names, those at their defaults among them."""
    return dict(_settings(json.dumps(config)))


@functools.lru_cache(maxsize=4096)
def _settings(text: str) -> dict[str, Any]:
    """Checking a config takes milliseconds, and the cells of a table are asked for again and again."""
    config = json.loads(text)
    checked = Config.checked(config)
    data, options = config["data"], checked.data.options
    algorithm = checked.make_algorithm()
    remember = {"remember": algorithm.remember} if algorithm.summed else {}
    spoken_of = {name: Training.model_fields[name].default for name in SPOKEN_OF}
    complete = {
        "data": {**data, "options": _with_defaults(DATASETS[checked.data.dataset], options)},
        "partition": _with_defaults(PARTITIONS[checked.partition["name"]], checked.partition),
        "model": _with_defaults(MODELS[checked.model["name"]], checked.model),
        "algorithm": {**algorithm.describe(), **remember},
        "training": {**spoken_of, **config["training"]},
    }
    return {name: value for name, value in flattened(complete) if value != []}


def _with_defaults(function: Callable[..., Any], given: Mapping[str, Any]) -> Values:
    parameters = inspect.signature(function).parameters.items()
    defaults = {name: parameter.default for name, parameter in parameters if name not in NO_SETTING}
    return {**defaults, **{name: value for name, value in given.items() if name not in NO_SETTING}}


def flattened(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested tables by their dotted names."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flattened(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def names_set(layer: Mapping[Any, Any]) -> list[str]:
    """The settings that a part of a config sets."""
    return [name for name, _ in flattened({key: layer[key] for key in layer if key != "sources"})]


def resolved(
    names: Sequence[str], layers: Sequence[Mapping[str, Any]], stated: Mapping[str, str]
) -> dict[str, str]:
    """The source of every setting, from the layers that its config is put together from.

    The layer that sets a value last may state its source, and so may later ones. `stated` is for the rest.
    """
    set_by = [set(names_set(layer)) for layer in layers]
    sources = {}
    for name in names:
        last = max((place for place, own in enumerate(set_by) if name in own), default=0)
        statements = [*(layer.get("sources", {}) for layer in reversed(layers[last:])), stated]
        fitting = (source for statement in statements if (source := _most_specific(statement, name)))
        source = next(fitting, None)
        if source is None:
            raise FlatfedError(f"{name}: no source; state one")
        sources[name] = source
    return sources


def _most_specific(statement: Mapping[str, str], name: str) -> str | None:
    fitting = [stated for stated in statement if f"{name}.".startswith(f"{stated}.")]
    return statement[max(fitting, key=len)] if fitting else None
