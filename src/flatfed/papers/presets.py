"""How a cell of a paper's table becomes a config.

A config is put together from the paper's data file: its defaults, then what its names for the data set, the
method and the swept value stand for. What comes later wins.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatfed.core.errors import check_choice
from flatfed.core.settings import ALTERNATIVES
from flatfed.papers import schema
from flatfed.papers.schema import Block, Paper, Values, merged, papers, tables
from flatfed.papers.sources import names_set, resolved, settings

TUNED = "flatfed tune"
# What a title says of runs that are not those of the paper.
SIZES = (
    "data.dataset",
    "model.name",
    "model.width",
    "model.hidden",
    "data.clients",
    "data.options.subset",
    "training.participation",
    "training.participants",
    "training.rounds",
    "training.local_epochs",
    "training.local_steps",
    "training.batch_size",
)
OPPOSITES = {one: other for pair in ALTERNATIVES for one, other in (pair, pair[::-1])}


@dataclass(frozen=True)
class PaperCell:
    """One number of a table: the method, its setting, and what the paper prints."""

    block: int
    title: str
    """The block's setting in words."""
    method: str
    swept: Any
    """The value of the swept setting, or None."""
    sweep: str | None
    """What the paper calls the swept setting."""
    config: Values
    sources: Mapping[str, str]
    """Where each setting comes from, and after a colon what else there is to say about it."""
    printed: Mapping[str, Any]
    statistics: Mapping[schema.Column, schema.Statistic]
    """What the printed columns report, the main one first."""
    targets: tuple[float, ...]
    """Accuracies to count rounds to, as shares."""
    dataset: str
    known_as: str
    """The method's name in the rest of the paper."""
    swept_settings: tuple[str, ...]
    needs_weights: bool
    """Whether the paper starts from published weights."""

    @property
    def label(self) -> str:
        if self.swept is None:
            return self.method
        value = f"{self.swept:g}" if isinstance(self.swept, float) else self.swept
        return f"{self.method}, {self.sweep} = {value}"

    @property
    def origin(self) -> str:
        """Where the step size comes from."""
        return self.sources["training.lr"]

    @property
    def column(self) -> schema.Column:
        """Which of the printed numbers ours is compared with first."""
        return next(iter(self.statistics))

    @property
    def statistic(self) -> schema.Statistic:
        return self.statistics[self.column]

    @property
    def sizes_of_its_own(self) -> list[str]:
        """Sizes of the run, such as rounds = 2, that are not the paper's."""
        values = settings(self.config)
        own = [name for name in SIZES if name in values and self.sources[name].startswith("--")]
        return [f"{name.removesuffix('.name').rpartition('.')[2]} = {values[name]}" for name in own]

    def changed(self, config: Values, source: str, names: Iterable[str] = ()) -> "PaperCell":
        """With another config; `source` is that of the settings that differ, and of those named."""
        before, after, named = settings(self.config), settings(config), set(names)
        kept = {name for name in before if name not in named and before[name] == after.get(name)}
        sources = {name: self.sources[name] if name in kept else source for name in after}
        return replace(self, config=config, sources=sources)

    @property
    def printed_scale(self) -> int:
        """Accuracies are printed in percent."""
        return 1 if self.statistic == "top eigenvalue" else 100

    @property
    def printed_rounds(self) -> Sequence[int | None]:
        """To each target, None where the paper does not say or says that it is not reached."""
        return [number if isinstance(number, int) else None for number in self.rounds_as_printed]

    @property
    def rounds_as_printed(self) -> Sequence[int | str | None]:
        """To each target; 1000+ where it is not reached within 1000 rounds."""
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
    row: Mapping[Any, Any] = block.results.get(method, {})
    for position, swept in enumerate(block.values or [None]):
        parts = list(_parts(paper, block, method, swept))
        config = combined(*parts)
        config.pop("sources", None)
        at_value = {key: value[position] if isinstance(value, list) else value for key, value in row.items()}
        yield PaperCell(
            block=index,
            title=block.title or _title(paper, block),
            method=method,
            swept=swept,
            sweep=block.sweep,
            config=config,
            sources=resolved(list(settings(config)), parts, paper.sources),
            printed=at_value if block.values else row,
            statistics=table.statistics,
            targets=tuple(target / 100 for target in block.targets),
            dataset=block.dataset,
            known_as=paper.aliases.get(method, method),
            swept_settings=() if block.sweep is None else tuple(names_set(parts[-1])),
            needs_weights=block.model in paper.pretrained,
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
        point = paper.sweeps[block.sweep][str(swept)]
        source = paper.sweep_sources.get(block.sweep, "paper")
        yield merged({"sources": dict.fromkeys(names_set(point), source)}, point)


def combined(*parts: Mapping[Any, Any]) -> Values:
    """Parts of a config on top of each other; a setting takes the place of its opposite."""
    config: Values = {"training": {}}
    for part in parts:
        replaced = {OPPOSITES.get(name) for name in part.get("training", {})}
        training = {name: value for name, value in config["training"].items() if name not in replaced}
        config = merged({**config, "training": training}, part)
    return config


def _title(paper: Paper, block: Block) -> str:
    """The setting in words, without what is swept."""
    config = combined(paper.defaults, paper.datasets[block.dataset], block.config)
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
            best = tuning.best[cell.method]
            return cell.changed(combined(cell.config, best), f"{TUNED}: {tuning.origin}", names_set(best))
    return cell
