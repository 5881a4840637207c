"""How a cell of a paper's table becomes a config.

A config is put together from the paper's data file: its defaults, then what its names for data set, model,
partition, compressor, method and swept value stand for. Later parts win over earlier ones.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatfed.core.errors import FlatfedError, did_you_mean
from flatfed.papers.schema import (
    SMALL,
    Block,
    Paper,
    PartialConfig,
    SmallScale,
    Statistic,
    Values,
    merged,
    papers,
    read,
    tables,
)
from flatfed.training.config import Config

SWEEP = "flatfed sweep"
# Of each pair a config has one.
OPPOSITE = {
    "participation": "participants",
    "participants": "participation",
    "local_epochs": "local_steps",
    "local_steps": "local_epochs",
}


@dataclass(frozen=True)
class PaperCell:
    """One number of a table: the method, its setting, and what the paper prints."""

    block: int
    title: str
    """The block's setting in words."""
    method: str
    swept: Any
    """The value of the swept setting, or None."""
    config: Values
    printed: Mapping[str, Any]
    column: str
    """The key of the printed number that ours is compared with."""
    statistic: Statistic
    targets: tuple[float, ...]
    """Accuracies to count rounds to, as shares."""
    dataset: str
    origin: str
    """Where the step size comes from, and after a colon what else there is to say about it."""

    @property
    def label(self) -> str:
        return self.method if self.swept is None else f"{self.method}, {self.swept}"

    @property
    def printed_rounds(self) -> Sequence[int | None]:
        """To each target, None where the paper says that it is not reached."""
        alone = [self.printed.get("rounds_to_target")] * len(self.targets)
        return self.printed.get("rounds_to_targets", alone)

    @property
    def printed_deviations(self) -> dict[str, float]:
        """Between clients on their "train" and "test" data, where the paper prints them."""
        columns = {"train": "train_dev", "test": "val_dev"}
        return {name: self.printed[key] for name, key in columns.items() if key in self.printed}


def cells(name: str) -> list[PaperCell]:
    """All cells of a table, in its order."""
    if name not in tables():
        raise FlatfedError(f"table = {name!r}: unknown; {did_you_mean(name, tables())}")
    table = tables()[name]
    if table.diagnostic is not None:
        raise FlatfedError(f"{name}: not accuracies but {table.diagnostic}; there is nothing to run")
    paper = papers()[name.partition("/")[0]]
    column, statistic = next(iter(table.statistics.items()))
    made = []
    for index, block in enumerate(table.blocks):
        printed = {method: row.model_dump(exclude_unset=True) for method, row in block.results.items()}
        for method, row in (printed | {method: {} for method in table.unprinted}).items():
            for position, swept in enumerate(block.values or [None]):
                config = functools.reduce(_changed, _changes(paper, block, method, swept))
                sources = config.pop("sources")
                made.append(
                    PaperCell(
                        block=index,
                        title=block.title or _title(paper, block),
                        method=method,
                        swept=swept,
                        config=config,
                        printed=row if swept is None else _at(position, row),
                        column=column,
                        statistic=statistic,
                        targets=tuple(target / 100 for target in block.targets),
                        dataset=block.dataset,
                        origin=sources["training.lr"],
                    )
                )
    return made


def _changes(paper: Paper, block: Block, method: str, swept: Any) -> Iterator[Values]:
    """The parts of a cell's config, from the general to the special."""
    yield {"data": {"options": {}}, "model": paper.models[block.model]}
    if block.partition is not None:
        yield {"partition": paper.partitions[block.partition]}
    if block.compressor is not None:
        yield {"algorithm": {"compress": paper.compressors[block.compressor]}}
    yield _given(paper.defaults)
    yield _given(paper.datasets[block.dataset])
    yield block.changes
    known = paper.methods[paper.aliases.get(method, method)]
    yield _given(known)
    yield _given(known.datasets.get(block.dataset, PartialConfig()))
    yield _given(block.methods.get(method, PartialConfig()))
    if block.sweep is not None:
        yield _given(paper.sweeps[block.sweep][str(swept)])


def _given(changes: PartialConfig) -> Values:
    return changes.model_dump(include=set(PartialConfig.model_fields), exclude_unset=True)


def _changed(config: Values, changes: Values) -> Values:
    """A config with changes on top; one of two opposite settings takes the other's place."""
    kept = {
        key: value
        for key, value in config.get("training", {}).items()
        if OPPOSITE.get(key) not in changes.get("training", {})
    }
    return merged({**config, "training": kept}, changes)


def _at(position: int, row: Values) -> Values:
    """A row's numbers for one of the swept values."""
    return {key: value[position] if isinstance(value, list) else value for key, value in row.items()}


def _title(paper: Paper, block: Block) -> str:
    """The setting in words, without what is swept."""
    general = (_given(paper.defaults), _given(paper.datasets[block.dataset]), block.changes)
    config = functools.reduce(_changed, general)
    swept = paper.sweeps[block.sweep][str(block.values[0])] if block.sweep else PartialConfig()
    words = [block.dataset, block.model]
    if block.partition is not None:
        words.append(block.partition)
    if "participation" in config["training"] and "participation" not in swept.training:
        words.append(f"{config['data']['clients']} clients at {config['training']['participation']:.0%}")
    if block.compressor is not None:
        words.append(block.compressor)
    return ", ".join(words)


def with_tuning(name: str, cell: PaperCell) -> PaperCell:
    """The cell with the settings that a sweep found for it; the cell itself if there was no sweep."""
    paper, _, table = name.partition("/")
    for tuning in papers()[paper].tuned:
        applies = table in tuning.tables and cell.dataset == tuning.dataset and tuning.part in cell.title
        if applies and cell.method in tuning.best:
            config = _changed(cell.config, _given(tuning.best[cell.method]))
            return replace(cell, config=config, origin=f"{SWEEP}: {tuning.origin}")
    return cell


@functools.cache
def _small_scale() -> SmallScale:
    return read(SMALL, SmallScale)


def small(config: Values) -> Values:
    """The same config cut down so that it runs in seconds on a few samples."""
    scale, data = _small_scale(), config["data"]
    changes = {
        "data": {key: value for key, value in scale.data.items() if key in data}
        | {"options": scale.datasets.get(data["dataset"], {})},
        "partition": scale.partitions.get(config["partition"]["name"], {}),
        "model": scale.models.get(config["model"]["name"], {}),
        "algorithm": scale.algorithms.get(config["algorithm"].get("name"), {}),
        "training": scale.training,
    }
    return _changed(config, changes)


def checked(cell: PaperCell) -> Config:
    return Config.checked(cell.config)
