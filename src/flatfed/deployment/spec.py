"""What the server and the sites of a federation have agreed on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import torch.nn.functional as F
from pydantic import AfterValidator, Field
from torch import nn

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError
from flatfed.core.files import read_toml
from flatfed.core.flat import Loss
from flatfed.core.settings import CheckedModel, Training
from flatfed.core.types import Count, Positive
from flatfed.data.transform import AsStored, Transform
from flatfed.deployment.wire import MOST_SAMPLES
from flatfed.engines.execution import Execution
from flatfed.engines.metrics import Metric
from flatfed.runs.identity import Identity, digest_of, federation_identity
from flatfed.training.best import check_validation
from flatfed.training.config import Config, make_model
from flatfed.training.task import check_metrics, check_version, default_metrics

PROTOCOL = 3
"""Sites and servers of different numbers do not understand each other."""


def _at_least_one(clients: int | tuple[str, ...]) -> int | tuple[str, ...]:
    if clients == ():
        raise ValueError("() names no site; give the number of sites or their names")
    return clients


class FederationSettings(CheckedModel):
    """Which sites belong to a federation, how long it waits for them, and what it takes from them."""

    clients: Annotated[Count | tuple[str, ...], AfterValidator(_at_least_one)]
    """How many sites there are, or their names. A run begins when all of them are connected."""
    minimum_clients: Count = 1
    """With fewer valid uploads (or fewer than the whole cohort, if that is smaller) a round is repeated."""
    round_timeout: Positive = 600.0
    """Seconds after which uploads that have not arrived are left out of a round."""
    attempts: Count = 3
    """How often a round is tried before the run stops."""
    wait: Positive = 600.0
    """Seconds to wait for the sites at the start."""
    evaluate_every: Count | None = None
    """Rounds between evaluations on the sites' own data; without it, only the final model is evaluated."""
    max_samples: Count = MOST_SAMPLES
    """A site that claims to have more samples does not belong to the federation."""
    max_samples_ratio: Positive = 1000.0
    """How many times the sites' median of samples one may claim, if samples are weights."""
    max_norm_ratio: Positive = 1000.0
    """How many times the cohort's median norm an upload may have; a longer one is refused."""
    max_refusals: Count = 3
    """A site with so many refused answers is no longer asked."""
    leave_out: tuple[str, ...] = ()
    """The names of sites that are not asked although they belong to the run."""
    keep_states: Annotated[int, Field(strict=True, ge=0)] = 3
    """How many earlier states of the server are kept, to which it can go back."""


class FederationTable(FederationSettings):
    """The table of a config file, which also says what the server, having no data, cannot see."""

    input_shape: tuple[Count, ...]
    """Of one sample, as the model sees it."""
    classes: Count


@dataclass(frozen=True)
class FederationSpec:
    """The model, the algorithm and the settings; the apps of the server and of the sites are made from it."""

    model: Callable[[], nn.Module]
    """Makes the architecture and, on the server, the first weights."""
    algorithm: Algorithm
    training: Training
    federation: FederationSettings
    execution: Execution = field(default_factory=Execution)
    loss: Loss = F.cross_entropy
    metrics: Mapping[str, Metric] | None = None
    """As of a `Task`; with the default loss there is "accuracy"."""
    transform: Transform = field(default_factory=AsStored)
    name: str = ""
    version: str = ""
    """As of a `Task`: for what cannot be compared, such as a lambda; change it whenever that changes."""

    def __post_init__(self) -> None:
        check_metrics(self.used_metrics)
        check_validation(self.training, (), self.used_metrics)
        check_version(self.name, self.version)

    @classmethod
    def read(cls, path: Path) -> FederationSpec:
        """From a config file with the table `[federation]`.

        `[data]` and `[partition]` say nothing here: sites have their own data.
        """
        values = read_toml(path)
        table = values.pop("federation", None)
        if not isinstance(table, dict):
            raise FlatfedError("federation: missing; add a table with clients, input_shape and classes")
        try:
            federation = FederationTable(**table)
        except FlatfedError as error:
            raise FlatfedError(f"federation.{error}") from None
        config = Config.checked(values)
        shape, seed = federation.input_shape, config.training.seed
        return cls(
            model=functools.partial(make_model, config.model, shape, federation.classes, seed),
            algorithm=config.make_algorithm(),
            training=config.training,
            federation=federation,
            execution=config.execution,
        )

    @property
    def used_metrics(self) -> Mapping[str, Metric]:
        return default_metrics(self.loss) if self.metrics is None else self.metrics

    @property
    def site_training(self) -> Training:
        """Sites train one client, so never as a matrix."""
        return self.training.replaced(path="client")

    def identity(self, model: nn.Module) -> Identity:
        """What decides the numbers, besides the sites' data."""
        return federation_identity(
            self.algorithm,
            self.site_training,
            model,
            self.loss,
            self.used_metrics,
            self.transform,
            f"{self.name} {self.version}".strip(),
        )

    def digest(self, model: nn.Module) -> str:
        """By which a site sees whether its app is the server's; if not, it refuses to train."""
        return digest_of([PROTOCOL, self.identity(model).digest])
