"""A whole experiment as one frozen, checked value, read from a TOML file.

[data]
dataset = "digits"
clients = 100

[partition]
name = "dirichlet_client"
concentration = 0.1

[model]
name = "mlp"
hidden = [64]

[algorithm]
name = "fedmoswa"          # or parts by slot: gradient = { part = "sharpness_aware", radius = 0.05 }

[training]
rounds = 100
participation = 0.1
local_steps = 10

In place of data, partition and model, `task = "my_task.py:make"` names a function of one's own.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

import torch
from pydantic import (
    Discriminator,
    Field,
    SerializerFunctionWrapHandler,
    Tag,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)
from torch import from_numpy, nn

from flatfed.algorithms import build
from flatfed.core import random
from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, check_choice, did_you_mean, one_line, shown
from flatfed.core.files import parse_toml, read_toml
from flatfed.core.part import SLOTS
from flatfed.core.settings import ALTERNATIVES, CheckedModel, Training
from flatfed.core.types import Count, SomeShare
from flatfed.data.client_tests import matching_rows, own_rows
from flatfed.data.datasets import CATALOG, DATASETS, TrainTest
from flatfed.data.datasets.subset import check_share, subset
from flatfed.data.federation import Federation, PooledFederation
from flatfed.data.partition import PARTITIONS, Natural, Partition
from flatfed.data.partition.base import Indices
from flatfed.data.pool import Pool
from flatfed.engines.execution import Execution
from flatfed.models import MODELS
from flatfed.models.lora import OPTIONS as ADAPTERS
from flatfed.models.lora import lora
from flatfed.training import own_task
from flatfed.training.task import Task

DEEPEST = 100
Named = Annotated[dict[str, Any], Field(min_length=1)]
Held = TypeVar("Held", bound=Federation)
ALL = "all"
ClientCount = Annotated[
    Annotated[Count, Tag("int")] | Annotated[Literal["all"], Tag("str")],
    Discriminator(lambda value: "str" if value == ALL else "int"),
]


class DataConfig(CheckedModel):
    """Which data, and among how many clients they are divided."""

    dataset: str = "digits"
    clients: ClientCount = 100
    """How many, or "all" that the data have by nature."""
    client_tests: Count | Literal["matching"] | None = None
    """Test samples for each client that match its training data: how many, or "matching" for as many as an
    equal share of the test set has. Natural clients may have test samples of their own; they get those."""
    validation: SomeShare | None = None
    """The share of the clients' samples that is held out to choose settings by; also beside a task."""
    options: dict[str, Any] = {}
    """What the data set's loader takes, for instance augmentation = "crop_flip", and for all of them
    subset = 0.1: this share of the training and of the test samples, the same for all seeds."""

    @model_serializer(mode="wrap")
    def _without_none(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Run folders are named after their config: those without validation keep their names.
        values: dict[str, Any] = serialise(self)
        return {key: value for key, value in values.items() if key != "validation" or value is not None}

    @field_validator("client_tests", mode="before")
    @classmethod
    def _count_or_matching(cls, value: Any) -> Any:
        whole = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        if value is not None and value != "matching" and not whole:
            raise ValueError(f'{value!r} is neither a number of samples, 1 or more, nor "matching"')
        return value

    @field_validator("dataset")
    @classmethod
    def _known(cls, value: str) -> str:
        if value not in DATASETS:
            raise ValueError(f"{value!r} is unknown; {did_you_mean(value, DATASETS)}")
        return value


TASK = ("data", "partition", "model")
"""The tables that describe one of flatfed's own tasks."""


class Config(CheckedModel):
    """A task (a data set and its partition, and a model), an algorithm, and how to train and execute it."""

    task: Named | None = None
    """A function of the user's own that makes the task: its file, its name as `make`, and options."""
    data: DataConfig = DataConfig()
    partition: Named = {"name": "dirichlet_client", "concentration": 0.1}
    model: Named = {"name": "mlp", "hidden": [64]}
    algorithm: Named = {"name": "fedavg"}
    training: Training
    execution: Execution = Execution()

    @model_validator(mode="before")
    @classmethod
    def _own_clients(cls, values: Any) -> Any:
        data = values.get("data") if isinstance(values, Mapping) else None
        name = data.get("dataset") if isinstance(data, Mapping) else None
        info = CATALOG.get(name) if isinstance(name, str) else None
        if info is None or not info.own_clients:
            return values
        values = {"partition": {"name": "natural"}, **values}
        if values["partition"] in ("natural", {"name": "natural"}):
            values["data"] = {"clients": ALL, **values["data"]}
        return values

    @field_validator("partition", "model", "algorithm", mode="before")
    @classmethod
    def _name_alone(cls, value: Any) -> Any:
        return {"name": value} if isinstance(value, str) else value

    @field_validator("task", mode="before")
    @classmethod
    def _reference(cls, value: Any) -> Any:
        table = own_task.parse_reference(value) if isinstance(value, str) else value
        return value if table is None else table

    @model_validator(mode="after")
    def _one_task(self) -> Self:
        for name in TASK if self.task is not None else ():
            if name == "data" and self.data.model_fields_set <= {"validation"}:
                continue
            if name in self.model_fields_set:
                raise FlatfedError(
                    f"{name}: your own task has its own; give either task or {', '.join(TASK)}"
                )
        return self

    @model_serializer(mode="wrap")
    def _without_the_other(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = serialise(self)
        unused = ("task",) if self.task is None else TASK
        used = {name: value for name, value in values.items() if name not in unused}
        if self.task is not None and self.data.validation is not None:
            used["data"] = {"validation": self.data.validation}
        return used

    @field_validator("training", mode="before")
    @classmethod
    def _nothing_of_execution(cls, value: Any) -> Any:
        for key in value if isinstance(value, Mapping) else ():
            if key in Execution.model_fields:
                raise FlatfedError(f"{key}: unknown; write execution.{key}")
        return value

    @classmethod
    def checked(cls, values: Mapping[str, Any]) -> Config:
        """A config whose every name and option is known to be good, or a one-line error."""
        try:
            config = cls(**values)
        except TypeError:
            raise FlatfedError("config: keys must be strings") from None
        config.make_algorithm()
        if config.task is not None:
            own_task.check(config.task)
            return config
        if config.partition.get("name") != "natural":  # which needs the data's own groups
            config._partition()
        loader = DATASETS[config.data.dataset]
        own = {key: value for key, value in config.data.options.items() if key != "subset"}
        _check_options(f"data.options ({config.data.dataset})", own, loader)
        check_share("data.options.subset", config.data.options.get("subset", 1.0))
        _named_function("model", config.model, MODELS)
        clients = config.data.clients
        if isinstance(clients, int):
            config.training.cohort_size(clients)
        elif config.partition.get("name") != "natural":
            raise FlatfedError("data.clients = 'all': only natural clients are that many; give a number")
        return config

    @classmethod
    def read(cls, path: Path, assignments: Sequence[str] = ()) -> Config:
        """A config from a TOML file or `my_task.py:make`, with `key.key=value` assignments on top."""
        values = own_task.reference_settings(str(path))
        if values is None:
            tables = own_task.located(read_toml(path), path.parent)
            return cls.checked(with_assignments(tables, assignments))
        changed = with_assignments(values, assignments)
        training = changed.setdefault("training", {})
        if isinstance(training, Mapping) and "rounds" not in training:
            raise FlatfedError(
                f"training.rounds: missing; use --set training.rounds=50, or {own_task.SETTINGS} "
                f"in {values['task']['file']}"
            )
        return cls.checked(changed)

    @property
    def setting_words(self) -> list[str]:
        """Data set and split, or the file of one's own task, in short."""
        if self.task is None:
            return [self.data.dataset, self.partition["name"]]
        return [Path(self.task["file"]).stem, *([] if self.task["make"] == "make" else [self.task["make"]])]

    def make_algorithm(self) -> Algorithm:
        return build(self.algorithm)

    def make_federation(self) -> PooledFederation:
        data = _loaded(self.data.dataset, json.dumps(self.data.options))
        generator = random.numpy_generator(self.training.seed, "partition")
        try:
            partition = self._partition(data.groups)
            clients = self.data.clients
            if not isinstance(clients, int):
                assert isinstance(partition, Natural), "which is checked with the config"
                clients = partition.clients
                self.training.cohort_size(clients)
            rows = partition.split(data.train_targets.numpy(), clients, generator)
        except FlatfedError:
            raise
        except ValueError as error:
            raise FlatfedError(f"partition.{self.partition['name']}: {error}") from None
        pool = Pool("clients", data.train_inputs, data.train_targets, list(map(from_numpy, rows)))
        test = (data.test_inputs, data.test_targets)
        tests = self._client_tests(data, rows)
        return self._validated(PooledFederation(pool, test, data.transform, data.classes, tests))

    def _validated(self, federation: Held) -> Held:
        """The federation with the validation samples that the config asks for."""
        share = self.data.validation
        return federation if share is None else federation.with_validation(share, self.training.seed)

    def has_validation(self) -> bool:
        """Whether there are samples to choose settings by; one's own task is made to know that."""
        own = self.task is not None and self.data.validation is None
        return self.make_task().federation.validation is not None if own else self.data.validation is not None

    def _client_tests(self, data: TrainTest, rows: Sequence[Indices]) -> Pool | None:
        requested, clients = self.data.client_tests, len(rows)
        if requested is None:
            return None
        natural = self.partition["name"] == "natural" and "groups" not in self.partition
        try:
            if natural and data.groups is not None and data.test_groups is not None:
                if requested != "matching":
                    raise ValueError('the clients have test samples of their own; use "matching" for those')
                tests = own_rows(rows, data.groups, data.test_groups)
            else:
                count = len(data.test_targets)
                size = count // clients if requested == "matching" else requested
                if size < 1:
                    raise ValueError(f"{count} test samples are too few for {clients} clients; give a number")
                generator = random.numpy_generator(self.training.seed, "client_tests")
                labels = data.train_targets.numpy(), data.test_targets.numpy()
                tests = matching_rows(rows, *labels, size, generator)
        except ValueError as error:
            raise FlatfedError(f"data.client_tests = {requested!r}: {error}") from None
        return Pool("client_tests", data.test_inputs, data.test_targets, list(map(from_numpy, tests)))

    def make_model(self, federation: Federation) -> nn.Module:
        """The model with its first weights, which depend on the seed alone."""
        seen = federation.transform.evaluate(federation.client(0).batch(torch.tensor([0]))[0])
        return make_model(self.model, tuple(seen.shape[1:]), federation.classes, self.training.seed)

    def make_task(self) -> Task:
        if self.task is not None:
            task = own_task.make_task(self.task, self.training.seed)
            self.training.cohort_size(len(task.federation))
            federation = self._validated(task.federation)
            return task if federation is task.federation else replace(task, federation=federation)
        federation = self.make_federation()
        return Task(self.make_model(federation), federation)

    def _partition(self, groups: Any = None) -> Partition:
        make, options = _named_function("partition", self.partition, PARTITIONS)
        if make is Natural and "groups" not in options:
            if groups is None:
                raise FlatfedError(
                    f"partition.name = 'natural': the samples of {self.data.dataset} belong to nobody in "
                    "particular; use another partition"
                )
            options["groups"] = groups
        try:
            return make(**options)
        except ValidationError as error:
            known, prefix = inspect.signature(make).parameters, f"partition.{self.partition['name']}"
            raise FlatfedError(one_line(error, known, prefix)) from None


def load_task(reference: str | Path, settings: Sequence[str] = ()) -> Task:
    """The task of a config file, which may name flatfed's own data and model, or of my_task.py:make.

    `settings` are assignments as on the command line, for instance "training.seed=1" or "task.width=64".
    """
    if not isinstance(reference, str | Path) or isinstance(settings, str):
        raise FlatfedError(
            f"load_task({shown(reference)}, {shown(settings)}): give a file, and assignments in a list"
        )
    return Config.read(Path(reference), settings).make_task()


def make_model(
    description: Mapping[str, Any], input_shape: tuple[int, ...], classes: int | None, seed: int
) -> nn.Module:
    """The model of a {name, options…} table with its first weights."""
    make, options = _named_function("model", description, MODELS)
    adapters = options.pop("lora", None)
    # Not torch's global stream, from which other threads may draw meanwhile.
    with random.routed(random.torch_generator(seed, "weights")):
        try:
            model = make(input_shape, classes, **options)
        except (TypeError, ValueError, RuntimeError) as error:
            raise FlatfedError(f"model.{description['name']}: {error}") from None
    return model if adapters is None else lora(model, **adapters, seed=seed)


def _named_function(
    field: str, description: Mapping[str, Any], known: Mapping[str, Callable[..., Any]]
) -> tuple[Callable[..., Any], dict[str, Any]]:
    """What a {name, options…} table calls, its options checked against the signature."""
    name = description.get("name")
    if name is None:
        raise FlatfedError(f"{field}.name: missing; choose from: {', '.join(sorted(known))}")
    check_choice(f"{field}.name", name, known)
    options = {key: value for key, value in description.items() if key != "name"}
    _check_options(f"{field}.{name}", options, known[name])
    return known[name], options


def _check_options(field: str, options: Mapping[str, Any], function: Callable[..., Any]) -> None:
    # A model's input shape and classes are those of the data.
    is_model = function in MODELS.values()
    given = {"input_shape", "classes"} if is_model else set()
    known = sorted(inspect.signature(function).parameters.keys() - given)
    if is_model and "lora" in options:
        _check_adapters(options["lora"])
        options = {key: value for key, value in options.items() if key != "lora"}
    for option in options:
        if option not in known:
            hint = did_you_mean(option, known) if known else "there are no options"
            raise FlatfedError(f"{field}.{option}: unknown; {hint}")


def _check_adapters(table: object) -> None:
    if not isinstance(table, Mapping):
        raise FlatfedError(f"model.lora = {shown(table)}: give a table, such as {{ rank = 8 }}")
    for option in table:
        if option not in ADAPTERS:
            raise FlatfedError(f"model.lora.{option}: unknown; {did_you_mean(str(option), ADAPTERS)}")


@functools.lru_cache(maxsize=2)
def _loaded(name: str, options: str) -> TrainTest:
    """A data set, read once for all runs of a comparison."""
    own = json.loads(options)
    share = own.pop("subset", 1.0)
    return subset(DATASETS[name](**own), share)


def _copied(value: Any, field: str = "", depth: int = 0) -> Any:
    """A copy of nested tables, which may hold what JSON can say."""
    if depth > DEEPEST:
        raise FlatfedError(f"{shown(field)}: nested too deeply; no setting has so many tables in each other")
    if isinstance(value, Mapping):
        return {
            str(key): _copied(item, f"{field}.{key}".lstrip("."), depth + 1) for key, item in value.items()
        }
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_copied(item, field, depth + 1) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise FlatfedError(
        f"{field} = {value}: a {type(value).__name__} is of no use here; write a text or a number"
    )


def with_assignments(values: Mapping[str, Any], assignments: Sequence[str]) -> dict[str, Any]:
    """A copy of nested tables with `key.key=value` applied; values are TOML or plain text.

    A setting takes the place of its alternative: who asks for steps no longer wants the epochs of a file.
    """
    changed: dict[str, Any] = _copied(values)
    assigned = [assignment.partition("=")[0].strip() for assignment in assignments]
    for pair in ALTERNATIVES if isinstance(changed.get("training"), dict) else ():
        for one, other in (pair, pair[::-1]):
            if f"training.{one}" in assigned and f"training.{other}" not in assigned:
                changed["training"].pop(other, None)
    for assignment in assignments:
        key, sign, text = assignment.partition("=")
        if not sign or not key.strip():
            raise FlatfedError(f"--set {assignment}: write it as key=value, for instance training.lr=0.05")
        try:
            value = parse_toml(f"value = {text}", "")["value"]
        except FlatfedError:
            value = text.strip()
        *tables, last = key.strip().split(".")
        value, place = _copied(value, key.strip(), depth=len(tables)), changed
        for table in tables:
            if isinstance(place.get(table), str):
                place[table] = {"part" if table in SLOTS else "name": place[table]}
            place = place.setdefault(table, {})
            if not isinstance(place, dict):
                raise FlatfedError(f"--set {assignment}: {table} is not a table")
        place[last] = value
    return changed
