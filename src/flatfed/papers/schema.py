"""What the data files may say; an unknown key or name in one is an error."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, field_validator, model_validator

from flatfed.core.errors import FlatfedError, did_you_mean, one_line
from flatfed.core.settings import Settings
from flatfed.training.config import DataConfig, read_toml

Values = dict[str, Any]
# A dash stands for a number that the paper does not print, "1000+" for a target not reached in 1000 rounds.
Number = Annotated[float | None, BeforeValidator(lambda value: None if value == "-" else value)]
Rounds = Annotated[
    int | None, BeforeValidator(lambda value: None if value == "-" or str(value).endswith("+") else value)
]
Statistic = Literal["last accuracy", "best accuracy", "top eigenvalue"]
FOLDER = Path(__file__).parent
SMALL = FOLDER / "small.toml"


class Entry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Changes(Entry):
    """Settings of a config, with the sources of those that deserve one ("training.lr" = "paper")."""

    data: Values = {}
    algorithm: Values = {}
    training: Values = {}
    sources: dict[str, str] = {}

    @field_validator("data", "training")
    @classmethod
    def _known(cls, values: Values, info: Any) -> Values:
        fields = {"data": DataConfig, "training": Settings}[info.field_name].model_fields
        _check_names(info.field_name, values, fields)
        return values


class PartialConfig(Changes):
    partition: Values = {}
    model: Values = {}


class PaperMethod(PartialConfig):
    datasets: dict[str, PartialConfig] = {}
    """What differs on some data sets."""


class PrintedRow(Entry):
    """A method's numbers as the paper prints them, a list where a setting is swept."""

    acc: Number | list[Number] = None
    top_acc: Number = None
    train_acc: Number = None
    val_acc: Number = None
    acc_250: Number = None
    acc_500: Number = None
    top_eigenvalue: Number = None
    gain: Number = None
    std: Number | list[Number] = None
    train_dev: Number = None
    """The deviation between clients on their own training data."""
    val_dev: Number = None
    rounds_to_target: Rounds = None
    rounds_to_targets: list[Rounds] = []
    impossible: str = ""
    """In what way the numbers contradict each other."""


class Block(Changes):
    """The part of a table that shares one setting."""

    title: str | None = None
    """Made from the setting unless given."""
    dataset: str
    model: str
    partition: str | None = None
    compressor: str | None = None
    methods: dict[str, PartialConfig] = {}
    """What differs for some methods."""
    targets: list[float] = []
    """Accuracies to count rounds to, in percent."""
    sweep: str | None = None
    values: list[float | str] = []
    stated: Values = {}
    """What else the paper says about the setting, in its own words; no run depends on it."""
    results: dict[str, PrintedRow]

    @property
    def changes(self) -> Values:
        return self.model_dump(include=set(Changes.model_fields), exclude_unset=True)


class PaperTable(Entry):
    title: str
    notes: list[str] = []
    diagnostic: str | None = None
    """What a figure without accuracies shows."""
    statistics: dict[str, Statistic] = {}
    """What the columns report; the first is compared with ours."""
    unprinted: list[str] = []
    """Methods that are run beside the paper's."""
    blocks: list[Block] = []

    @model_validator(mode="before")
    @classmethod
    def _with_common(cls, values: Values) -> Values:
        """Blocks on top of what they have in common."""
        common = values.get("common", {})
        blocks = [merged(common, block) for block in values.get("blocks", [])]
        return {**{key: value for key, value in values.items() if key != "common"}, "blocks": blocks}


class Tuning(Entry):
    """The best settings that a sweep of ours found for some methods in some cells of one data set."""

    tables: list[str]
    dataset: str
    part: str = ""
    """Only cells with this in their title."""
    origin: str
    """How the settings were found."""
    best: dict[str, PartialConfig]


class Paper(Entry):
    title: str
    citation: str
    defaults: PartialConfig
    datasets: dict[str, PartialConfig]
    models: dict[str, Values]
    partitions: dict[str, Values]
    compressors: dict[str, Values] = {}
    methods: dict[str, PaperMethod]
    aliases: dict[str, str] = {}
    """Rows whose names carry a remark."""
    sweeps: dict[str, dict[str, PartialConfig]] = {}
    """What a swept symbol's values are here."""
    tuned: list[Tuning] = []
    tables: dict[str, PaperTable]

    @model_validator(mode="after")
    def _known_names(self) -> Paper:
        _check_names("aliases", self.aliases.values(), self.methods)
        rows = {*self.methods, *self.aliases}
        for name, method in self.methods.items():
            _check_names(f"methods.{name}.datasets", method.datasets, self.datasets)
        for tuning in self.tuned:
            _check_names("tuned.tables", tuning.tables, self.tables)
            _check_names("tuned.dataset", [tuning.dataset], self.datasets)
            _check_names("tuned.best", tuning.best, rows)
        for name, table in self.tables.items():
            _check_names(f"tables.{name}.statistics", table.statistics, PrintedRow.model_fields)
            _check_names(f"tables.{name}.unprinted", table.unprinted, rows)
            for number, block in enumerate(table.blocks):
                place = f"tables.{name}.blocks.{number}"
                _check_names(f"{place}.dataset", [block.dataset], self.datasets)
                _check_names(f"{place}.model", [block.model], self.models)
                _check_names(f"{place}.partition", {block.partition} - {None}, self.partitions)
                _check_names(f"{place}.compressor", {block.compressor} - {None}, self.compressors)
                _check_names(f"{place}.results", block.results, rows)
                _check_names(f"{place}.methods", block.methods, block.results)
                _check_names(f"{place}.sweep", {block.sweep} - {None}, self.sweeps)
                values = self.sweeps[block.sweep] if block.sweep else {}
                _check_names(f"{place}.values", map(str, block.values), values)
        return self


class SmallScale(Entry):
    """What the cut-down variant of a config changes: `data` and `training` always, the rest by name."""

    data: Values
    training: Values
    datasets: dict[str, Values]
    partitions: dict[str, Values]
    models: dict[str, Values]
    algorithms: dict[str, Values]


def merged(values: Values, changes: Values) -> Values:
    """Nested tables with others on top."""
    both = {**values, **changes}
    for key in values.keys() & changes.keys():
        if isinstance(values[key], dict) and isinstance(changes[key], dict):
            both[key] = merged(values[key], changes[key])
    return both


@functools.cache
def papers() -> dict[str, Paper]:
    return {path.stem: read(path, Paper) for path in sorted(FOLDER.glob("*.toml")) if path != SMALL}


@functools.cache
def tables() -> dict[str, PaperTable]:
    return {f"{paper}/{name}": table for paper in papers() for name, table in papers()[paper].tables.items()}


EntryType = TypeVar("EntryType", bound=Entry)


def read(path: Path, kind: type[EntryType]) -> EntryType:
    """A data file, or a one-line error that names the file and the field."""
    try:
        return kind(**read_toml(path))
    except ValidationError as error:
        raise FlatfedError(f"{path.name}: {one_line(error)}") from None


def _check_names(field: str, names: Iterable[Any], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise ValueError(f"{field}: {name!r} is unknown; {did_you_mean(str(name), known)}")
