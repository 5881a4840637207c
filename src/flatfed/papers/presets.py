"""How a cell of a paper's table becomes a config.

A config is put together from the paper's data file: its defaults, then what its names for the data set, the
method and the swept value stand for. What comes later wins.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatfed.core.errors import FlatfedError, check_choice
from flatfed.core.files import read_toml
from flatfed.papers import schema
from flatfed.papers.schema import Block, Paper, Values, merged, papers, tables

TUNED = "flatfed tune"
# A config has one of each pair.
OPPOSITES = {"participation": "participants", "local_epochs": "local_steps"}
OPPOSITES |= {other: one for one, other in OPPOSITES.items()}


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
    """Which of the printed numbers ours is compared with."""
    statistic: schema.Statistic
    targets: tuple[float, ...]
    """Accuracies to count rounds to, as shares."""
    dataset: str
    origin: str
    """Where the step size comes from, and after a colon what else there is to say about it."""

    @property
    def label(self) -> str:
        return self.method if self.swept is None else f"{self.method}, {self.swept}"

    @property
    def printed_scale(self) -> int:
        """Accuracies are printed in percent."""
        return 1 if self.statistic == "top eigenvalue" else 100

    @property
    def printed_rounds(self) -> Sequence[int | None]:
        """To each target, None where the paper does not say or says that it is not reached."""
        single = [self.printed.get("rounds_to_target")] * len(self.targets)
        return self.printed.get("rounds_to_targets", single)

    @property
    def printed_deviations(self) -> dict[str, float]:
        """Between clients on their "train" and "test" data, where the paper prints them."""
        columns = {"train": "train_dev", "test": "val_dev"}
        return {name: self.printed[column] for name, column in columns.items() if column in self.printed}


def cells(name: str) -> list[PaperCell]:
    """All cells of a table, in its order."""
    check_choice("table", name, tables())
    table, paper = tables()[name], papers()[name.partition("/")[0]]
    if table.diagnostic is not None:
        raise FlatfedError(f"{name}: not accuracies but {table.diagnostic}; there is nothing to run")
    return [
        cell
        for index, block in enumerate(table.blocks)
        for method in (*block.results, *table.unprinted)
        for cell in _cells(paper, table, index, block, method)
    ]


def _cells(
    paper: Paper, table: schema.PaperTable, index: int, block: Block, method: str
) -> Iterator[PaperCell]:
    """One cell, or one for each value of the swept setting."""
    column, statistic = next(iter(table.statistics.items()))
    row: Mapping[Any, Any] = block.results.get(method, {})
    for position, swept in enumerate(block.values or [None]):
        config = _config(*_parts(paper, block, method, swept))
        at_value = {key: value[position] if isinstance(value, list) else value for key, value in row.items()}
        yield PaperCell(
            block=index,
            title=block.title or _title(paper, block),
            method=method,
            swept=swept,
            origin=config.pop("sources")["training.lr"],
            config=config,
            printed=at_value if block.values else row,
            column=column,
            statistic=statistic,
            targets=tuple(target / 100 for target in block.targets),
            dataset=block.dataset,
        )


def _parts(paper: Paper, block: Block, method: str, swept: Any) -> Iterator[Mapping[Any, Any]]:
    """The parts of a cell's config, from the general to the special."""
    known = paper.aliases.get(method, method)
    yield {"data": {"options": {}}, "model": paper.models[block.model]}
    if block.partition is not None:
        yield {"partition": paper.partitions[block.partition]}
    if block.compressor is not None:
        yield {"algorithm": {"compress": paper.compressors[block.compressor]}}
    yield from (paper.defaults, paper.datasets[block.dataset], block.config, paper.methods[known])
    yield paper.overrides.get(block.dataset, {}).get(known, {})
    yield block.methods.get(method, {})
    if block.sweep is not None:
        yield paper.sweeps[block.sweep][str(swept)]


def _config(*parts: Mapping[Any, Any]) -> Values:
    """Parts of a config on top of each other; a setting takes the place of its opposite."""
    config: Values = {"training": {}}
    for part in parts:
        replaced = {OPPOSITES.get(name) for name in part.get("training", {})}
        training = {name: value for name, value in config["training"].items() if name not in replaced}
        config = merged({**config, "training": training}, part)
    return config


def _title(paper: Paper, block: Block) -> str:
    """The setting in words, without what is swept."""
    config = _config(paper.defaults, paper.datasets[block.dataset], block.config)
    swept = paper.sweeps[block.sweep][str(block.values[0])] if block.sweep else {}
    share, clients = config["training"].get("participation"), None
    if share is not None and "participation" not in swept.get("training", {}):
        clients = f"{config['data']['clients']} clients at {share:.0%}"
    words = (block.dataset, block.model, block.partition, clients, block.compressor)
    return ", ".join(word for word in words if word is not None)


def with_tuning(name: str, cell: PaperCell) -> PaperCell:
    """The cell with the settings that tuning found for it; the cell itself if it was not tuned."""
    paper, _, table = name.partition("/")
    for tuning in papers()[paper].tuned:
        applies = table in tuning.tables and cell.dataset == tuning.dataset and tuning.part in cell.title
        if applies and cell.method in tuning.best:
            config = _config(cell.config, tuning.best[cell.method])
            return replace(cell, config=config, origin=f"{TUNED}: {tuning.origin}")
    return cell


def small(config: Values) -> Values:
    """The same config cut down so that it runs in seconds on a few samples."""
    scale, data = read_toml(schema.SMALL), config["data"]
    changes = {
        "data": {key: value for key, value in scale["data"].items() if key in data},
        "partition": scale["partitions"].get(config["partition"]["name"], {}),
        "model": scale["models"].get(config["model"]["name"], {}),
        "algorithm": scale["algorithms"].get(config["algorithm"].get("name"), {}),
        "training": scale["training"],
    }
    return _config(config, {"data": {"options": scale["datasets"].get(data["dataset"], {})}}, changes)
