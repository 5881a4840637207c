"""What the data files may say; an unknown key or name in one is an error."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    StringConstraints,
    ValidationError,
    model_validator,
)

from flatfed.core.errors import FlatfedError, did_you_mean, one_line
from flatfed.core.files import read_toml

FOLDER = Path(__file__).parent
SCALES = FOLDER / "scales"
"""What shrinks a run, a file for each scale."""

Values = dict[str, Any]
Section = Literal["data", "partition", "model", "algorithm", "training", "sources"]
Changes = dict[Section, Values]
"""Some settings of a config; `sources` says where values come from, as in "training.lr" = "paper"."""
KINDS = ("paper", "released code", "tuned in the paper", "our choice")
"""A source is one of these, mostly followed by a colon and details: stated in the paper, read from released
code at a commit, tuned in the paper over a grid without saying what came out, or none of these."""
Accuracy = Literal["acc", "top_acc", "train_acc", "val_acc", "acc_250", "acc_500"]
Deviation = Literal["std", "train_dev", "val_dev"]
Rounds = Literal["rounds_to_target", "rounds_to_targets"]
Column = Literal[Accuracy, Deviation, Rounds, "top_eigenvalue", "gain", "impossible"]
STATISTIC = r"(last|best) accuracy|accuracy at round \d+|mean over clients, (train|test)|top eigenvalue"
Statistic = Annotated[str, StringConstraints(pattern=f"^({STATISTIC})$")]


def _unprinted_is_none(value: Any) -> Any:
    """Papers print a dash for a missing number; 1000+, not reached in 1000 rounds, stays as it is."""
    return None if value == "-" else value


Unreached = Annotated[str, StringConstraints(pattern=r"^\d+\+$")]
Number = Annotated[int | float | Unreached | None, BeforeValidator(_unprinted_is_none)]
PrintedRow = dict[Column, Annotated[Number | list[Number] | str, BeforeValidator(_unprinted_is_none)]]
"""A method's numbers; "impossible" says in what way they contradict each other."""


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Block(Entry):
    """The part of a table that shares one setting."""

    title: str | None = None
    """Made from the setting unless given."""
    dataset: str
    model: str
    partition: str | None = None
    compressor: str | None = None
    config: Changes = {}
    methods: dict[str, Changes] = {}
    """What differs for some methods."""
    sweep: str | None = None
    values: list[float | str] = []
    targets: list[float] = []
    """Accuracies to count rounds to, in percent."""
    stated: Values = {}
    """What else the paper says about the setting, in its own words; no run depends on it."""
    results: dict[str, PrintedRow]


class Repeats(Entry):
    """Blocks of another table, whose runs a figure shows."""

    table: str
    blocks: list[int]
    """Which ones, counted from 0, in the figure's order."""
    methods: list[str] = []
    """All unless some are named."""
    dataset: str | None = None
    model: str | None = None
    config: Changes = {}
    """On other data, with another model or other settings."""


class Measure(Entry):
    """A diagnostic that is taken during training."""

    diagnostic: str
    numbers: dict[str, str]
    """What its numbers are called in the history, and where in its result they are ("gap.loss")."""
    every: int = 1
    """Rounds from one measurement to the next."""
    options: Values = {}


class Panel(Entry):
    """One kind of picture of a figure's runs."""

    draw: Literal["curves", "final", "surfaces", "result"]
    """Quantities of the history over rounds; the statistic of the figure over what is swept; losses around
    the final models; what a diagnostic of the final models shows."""
    title: str = ""
    y: str = "test_accuracy"
    """The quantity: of the history, or whose loss ("train" or "test") a surface is of."""
    label: str = ""
    """What the axis says; made from the quantity unless given."""
    logarithmic: bool = False
    absolute: bool = False
    """Whether the sign is left out."""
    quantities: dict[str, str] = {}
    """Several quantities of every run in one picture, by what the legend calls them."""
    blocks: list[int] = []
    """The blocks in one picture; each in its own unless given."""
    diagnostic: str = ""
    """For a result: of which diagnostic."""
    options: Values = {}
    """Of the diagnostic."""
    overlaid: bool = False
    """Whether the surfaces of all runs are in one picture."""

    @property
    def of_diagnostic(self) -> str:
        """The diagnostic of the final models that it draws; empty without one."""
        return "surface" if self.draw == "surfaces" else self.diagnostic


class PaperTable(Entry):
    """A table, or a figure if it has panels."""

    title: str
    notes: list[str] = []
    statistics: dict[Column, Statistic] = {"acc": "last accuracy"}
    """What the columns report, and what ours is compared in; the first is the table's main number."""
    unprinted: list[str] = []
    """Methods that are run beside the paper's."""
    repeats: Repeats | None = None
    """Its first blocks."""
    blocks: list[Block] = []
    panels: list[Panel] = []
    measures: list[Measure] = []
    """What is recorded while the runs go on."""
    scales: dict[str, Changes] = {}
    """What else a scale changes here."""

    @model_validator(mode="before")
    @classmethod
    def _complete_blocks(cls, values: Values) -> Values:
        """Adds what the blocks have in common to each of them."""
        common = values.get("common", {})
        rest = {key: value for key, value in values.items() if key != "common"}
        return {**rest, "blocks": [merged(common, block) for block in values.get("blocks", [])]}


class Tuning(Entry):
    """The best settings that tuning of ours found for some methods on one data set."""

    tables: list[str]
    dataset: str
    part: str = ""
    """Only for cells with this in their title."""
    origin: str
    """How the settings were found."""
    best: dict[str, Changes]


class BoundsTable(Entry):
    """A table of bounds, for which nothing is run."""

    title: str
    kind: Literal["stability", "generalisation"]
    notes: list[str] = []
    constants: dict[str, float]
    """What the bounds are computed at, by the symbols of `flatfed.theory`."""
    columns: list[str] = []
    """What else the paper says of a method."""
    rows: dict[str, list[str]]
    """By method: what stands in the columns, or the formulas as printed."""


Status = Literal["run in full", "run in part", "tried out", "missing", "no numbers"]


class Exhibit(Entry):
    """What there is of a table or figure; one that can be run is "tried out" unless this says more."""

    status: Status
    shows: str = ""
    results: list[str] = []
    """Pages below docs/results."""


class Paper(Entry):
    title: str
    citation: str
    """Authors, where and when, and an identifier."""
    sources: dict[str, str]
    """Where settings come from unless what sets them says otherwise; the longest name that fits counts."""
    pretrained: list[str] = []
    """Models that the paper starts from published weights."""
    released: list[str] = []
    """What the authors' code does otherwise, besides what the algorithms themselves say."""
    defaults: Changes
    datasets: dict[str, Changes]
    models: dict[str, Values]
    partitions: dict[str, Values]
    compressors: dict[str, Values] = {}
    methods: dict[str, Changes]
    overrides: dict[str, dict[str, Changes]] = {}
    """What differs on a data set for a method."""
    aliases: dict[str, str] = {}
    """Methods by names that carry a remark."""
    sweeps: dict[str, dict[str, Changes]] = {}
    """What the values of a swept symbol are here."""
    sweep_sources: dict[str, str] = {}
    """Where the values of a swept symbol come from, if not from the paper."""
    tuned: list[Tuning] = []
    tables: dict[str, PaperTable]
    bounds: dict[str, BoundsTable] = {}
    exhibits: dict[Annotated[str, StringConstraints(pattern=r"^(table|figure)\d+$")], Exhibit] = {}

    @model_validator(mode="after")
    def _repeat_blocks(self) -> Paper:
        for name, table in self.tables.items():
            if table.repeats is not None:
                blocks = [*self._repeated(name, table.repeats), *table.blocks]
                self.tables[name] = table.model_copy(update={"blocks": blocks})
        return self

    def _repeated(self, name: str, repeats: Repeats) -> list[Block]:
        if repeats.table not in self.tables:
            raise ValueError(f"{name}: {did_you_mean(repeats.table, self.tables)}")
        blocks = self.tables[repeats.table].blocks
        if not all(0 <= number < len(blocks) for number in repeats.blocks):
            raise ValueError(f"{name}: {repeats.table} has the blocks 0 to {len(blocks) - 1}")
        return [_changed(blocks[number], repeats) for number in repeats.blocks]

    @model_validator(mode="after")
    def _check_references(self) -> Paper:
        for name, table in self.tables.items():
            for block in table.blocks:
                named = [("method", self.aliases.get(row, row)) for row in (*block.results, *table.unprinted)]
                for kind in ("dataset", "model", "partition", "compressor", "sweep"):
                    named.append((kind, getattr(block, kind)))
                for kind, used in named:
                    known = getattr(self, f"{kind}s")
                    if used is not None and used not in known:
                        raise ValueError(f"{name}: {kind} {used!r} is unknown; {did_you_mean(used, known)}")
        return self

    @model_validator(mode="after")
    def _check_bounds(self) -> Paper:
        for name, table in self.bounds.items():
            for method in table.rows:
                if method not in self.methods:
                    suggestion = did_you_mean(method, self.methods)
                    raise ValueError(f"{name}: method {method!r} is unknown; {suggestion}")
        return self

    @model_validator(mode="after")
    def _check_sources(self) -> Paper:
        for setting, source in (*self._all_sources(), *self.sweep_sources.items()):
            if source.partition(":")[0] not in KINDS:
                raise ValueError(f"the source {source!r} of {setting} must be one of: {', '.join(KINDS)}")
        return self

    def _all_sources(self) -> Iterator[tuple[str, str]]:
        yield from self.sources.items()
        tables = [self.datasets, self.methods, *self.overrides.values(), *self.sweeps.values()]
        changes = [self.defaults, *(change for table in tables for change in table.values())]
        for block in (block for table in self.tables.values() for block in table.blocks):
            changes += [block.config, *block.methods.values()]
        for change in changes:
            yield from change.get("sources", {}).items()


def _changed(block: Block, repeats: Repeats) -> Block:
    """Numbers that are printed of other data are not those of the figure."""
    elsewhere = {key: value for key in ("dataset", "model") if (value := getattr(repeats, key)) is not None}
    results = {
        method: {} if elsewhere else block.results[method] for method in repeats.methods or block.results
    }
    targets = [] if elsewhere else block.targets
    config = merged(block.config, repeats.config)
    return block.model_copy(update={**elsewhere, "results": results, "targets": targets, "config": config})


def merged(values: Mapping[Any, Any], changes: Mapping[Any, Any]) -> Values:
    """Nested tables with others on top."""
    both = {**values, **changes}
    for key in values.keys() & changes.keys():
        if isinstance(values[key], dict) and isinstance(changes[key], dict):
            both[key] = merged(values[key], changes[key])
    return both


def read(path: Path) -> Paper:
    """A paper's file, or a one-line error that names the file and the field."""
    try:
        return Paper(**read_toml(path))
    except ValidationError as error:
        known = {name for entry in Entry.__subclasses__() for name in entry.model_fields}
        raise FlatfedError(f"{path.name}: {one_line(error, known)}") from None


@functools.cache
def papers() -> dict[str, Paper]:
    return {path.stem: read(path) for path in sorted(FOLDER.glob("*.toml"))}


@functools.cache
def tables() -> dict[str, PaperTable]:
    return {
        f"{name}/{table}": paper.tables[table] for name, paper in papers().items() for table in paper.tables
    }


@functools.cache
def bounds() -> dict[str, BoundsTable]:
    return {
        f"{name}/{table}": paper.bounds[table] for name, paper in papers().items() for table in paper.bounds
    }
