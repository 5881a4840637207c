"""What the server and the sites of a federation have agreed on."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch.nn.functional as F
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from torch import nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, one_line
from flatfed.core.flat import Loss
from flatfed.core.settings import Settings
from flatfed.core.types import Count, Positive
from flatfed.data.transform import AsStored, Transform
from flatfed.engines.worker import Metric
from flatfed.runs.folder import FREE_SETTINGS
from flatfed.training.config import Config, make_model, read_toml
from flatfed.training.loop import default_metrics

PROTOCOL = 1
"""Sites and servers of different numbers do not understand each other."""


def _somebody(clients: int | tuple[str, ...]) -> int | tuple[str, ...]:
    if clients == ():
        raise ValueError("() names no site; give the number of sites or their names")
    return clients


class FederationSettings(BaseModel):
    """Which sites belong to a federation, and how long it waits for them."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    clients: Annotated[Count | tuple[str, ...], AfterValidator(_somebody)]
    """How many sites there are, or their names. A run begins when all are there."""
    minimum_clients: Count = 1
    """With fewer valid uploads (or fewer than the whole cohort, if that is smaller) a round is repeated."""
    round_timeout: Positive = 600.0
    """Seconds after which uploads that have not come are left out of a round."""
    attempts: Count = 3
    """How often a round is tried before the run stops."""
    wait: Positive = 600.0
    """Seconds to wait for the sites at the start."""
    evaluate_every: Count | None = None
    """Rounds between evaluations on the sites' own data; without it, only the final model is evaluated."""


class FederationTable(FederationSettings):
    """The table of a config file, which also says what the server, having no data, cannot see."""

    input_shape: tuple[Count, ...]
    """Of one sample, as the model sees it."""
    classes: Count

    @classmethod
    def checked(cls, table: Any) -> FederationTable:
        if not isinstance(table, dict):
            raise FlatfedError("federation: missing; add a table with clients, input_shape and classes")
        try:
            return cls(**table)
        except ValidationError as error:
            raise FlatfedError(one_line(error, cls.model_fields, prefix="federation")) from None


@dataclass(frozen=True)
class Task:
    """The model, the algorithm and the settings; both apps are made from the same one."""

    model: Callable[[], nn.Module]
    """Makes the architecture and, on the server, the first weights."""
    algorithm: Algorithm
    settings: Settings
    federation: FederationSettings
    loss: Loss = F.cross_entropy
    metrics: Mapping[str, Metric] | None = None
    """Functions of (outputs, targets); with the default loss there is "accuracy"."""
    transform: Transform = field(default_factory=AsStored)

    @classmethod
    def read(cls, path: Path) -> Task:
        """A task from a config file with the table `[federation]`.

        `[data]` and `[partition]` say nothing here: sites have their own data.
        """
        values = read_toml(path)
        table = FederationTable.checked(values.pop("federation", None))
        config = Config.checked(values)
        shape, seed = table.input_shape, config.training.seed
        return cls(
            model=functools.partial(make_model, config.model, shape, table.classes, seed),
            algorithm=config.make_algorithm(),
            settings=config.training,
            federation=table,
        )

    @property
    def chosen_metrics(self) -> Mapping[str, Metric]:
        return default_metrics(self.loss) if self.metrics is None else self.metrics

    def engine_settings(self, **changes: Any) -> Settings:
        """The settings of an engine that trains client by client, as sites do."""
        return self.settings.model_copy(update={"path": "client", **changes})

    def digest(self, model: nn.Module) -> str:
        """What decides the numbers on a site; a site whose app differs from the server's refuses to train."""
        settings = self.settings.model_dump(exclude=FREE_SETTINGS | {"device", "path"})
        loss = getattr(self.loss, "__qualname__", repr(self.loss))
        told = json.dumps([PROTOCOL, self.algorithm.describe(), settings, str(model), loss])
        # Addresses in representations change from process to process.
        return hashlib.sha256(re.sub(r"0x[0-9a-fA-F]+", "", told).encode()).hexdigest()
