"""Cells cut down to smaller machines: what `--scale` changes, and what it leaves alone.

A scale is a file in `scales/`. It goes by the names of data sets, partitions, models and algorithms; a table
or figure may have more to say (`scales` in the paper's file).
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from flatfed.algorithms import build
from flatfed.core.errors import FlatfedError
from flatfed.core.files import read_toml
from flatfed.core.part import ServerTask
from flatfed.papers.presets import OPPOSITES, PaperCell, combined
from flatfed.papers.schema import SCALES, Changes, Entry, Measure, Panel, PaperTable, Values

FULL = "full"


class Scale(Entry):
    """What a scale changes."""

    every: Changes = {}
    """In every config; of the data, only what a config has."""
    datasets: dict[str, Changes] = {}
    partitions: dict[str, Changes] = {}
    models: dict[str, Changes] = {}
    algorithms: dict[str, Changes] = {}
    diagnostics: dict[str, Values] = {}
    """Options of diagnostics."""
    measures: Values = {}
    """What is measured during training: `every` so many rounds."""
    cost: dict[str, tuple[float, float]] = {}
    """By model, about what a gradient of a batch and the loss of a sample take on a core, in milliseconds."""


@functools.cache
def scales() -> dict[str, Scale]:
    """The scales by name; the papers' own needs no file."""
    named = {path.stem: Scale(**read_toml(path)) for path in sorted(SCALES.glob("*.toml"))}
    return {FULL: Scale(), **named}


def check_scale(name: str) -> None:
    if name not in scales():
        raise FlatfedError(f"scale = {name!r}: must be one of: {', '.join(scales())}")


def scaled(cell: PaperCell, name: str, table: PaperTable) -> PaperCell:
    """The cell at a scale; what its table sweeps stays as it is."""
    if name == FULL:
        return cell
    config = cell.config
    own = table.scales.get(name, {})
    for changes in _changes(config, scales()[name], own):
        config = _changed(config, _without_swept(changes, cell))
    # What the server does by itself must come to act.
    parts = build(config["algorithm"]).parts
    acting = [part.first_round for part in parts if isinstance(part, ServerTask)]
    rounds = max(config["training"]["rounds"], *acting, 0)
    return cell.changed(combined(config, {"training": {"rounds": rounds}}), f"--scale {name}")


def _changes(config: Values, scale: Scale, own: Changes) -> Iterator[Mapping[Any, Any]]:
    """From the general to the special; what a table says of its model is instead of what the scale does."""
    data, algorithm = config["data"], config["algorithm"].get("name")
    kept = {key: value for key, value in scale.every.get("data", {}).items() if key in data}
    yield {**scale.every, "data": kept}
    yield scale.datasets.get(data["dataset"], {})
    yield scale.partitions.get(config["partition"]["name"], {})
    if "model" not in own:
        yield scale.models.get(config["model"]["name"], {})
    yield scale.algorithms.get(algorithm, {})
    yield own


def _changed(config: Values, changes: Mapping[Any, Any]) -> Values:
    """With changes on top; another model or data set has none of the options of the one it replaces."""
    if "name" in changes.get("model", {}):
        config = {**config, "model": {}}
    if "dataset" in changes.get("data", {}):
        config = {**config, "data": {**config["data"], "options": {}}}
    return combined(config, changes)


def _without_swept(changes: Mapping[Any, Any], cell: PaperCell) -> Mapping[Any, Any]:
    """The changes but for what is swept and its alternatives, which would take its place."""
    swept = {alternative for name in cell.swept_settings for alternative in (name, _alternative(name))}
    return {
        section: {name: value for name, value in values.items() if f"{section}.{name}" not in swept}
        for section, values in changes.items()
    }


def _alternative(name: str) -> str:
    section, _, option = name.partition(".")
    return f"{section}.{OPPOSITES.get(option, option)}"


def scaled_options(panel: Panel, name: str) -> Values:
    """The options of a panel's diagnostic at a scale."""
    return {**panel.options, **scales()[name].diagnostics.get(panel.of_diagnostic, {})}


def scaled_measure(measure: Measure, name: str) -> Measure:
    """What is measured during training at a scale."""
    scale = scales()[name]
    options = {**measure.options, **scale.diagnostics.get(measure.diagnostic, {})}
    return measure.model_copy(update={**scale.measures, "options": options})
