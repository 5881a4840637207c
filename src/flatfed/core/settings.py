"""How to train: one frozen, checked set of settings for the Python API, config files and the run record."""

from __future__ import annotations

import math
from typing import Any, Literal, TypedDict

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from flatfed.core.errors import FlatfedError, one_line
from flatfed.core.rounds import StepRule
from flatfed.core.types import Count, NonNegative, Positive, PositiveShare, Seed


class Settings(BaseModel):
    """Everything about a training besides its data, model, loss and algorithm.

    Local work is counted in epochs or in steps. An epoch goes through the client's samples once in a new
    order, and its last batch may be smaller. Steps take batches of exactly `batch_size` from an endless
    sequence of epochs, across their ends, so that every client does the same work; a client with fewer
    samples than that sees some of them more than once in a batch.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    rounds: Count
    """Communication rounds."""
    participation: PositiveShare | None = None
    """The share of clients that take part in a round; everybody, unless `participants` is given."""
    participants: Count | None = None
    """The number of clients that take part in a round, instead of a share."""
    sampling: Literal["fixed", "bernoulli"] = "fixed"
    """A fixed number of participants, or each client by itself with that probability (never nobody)."""
    local_epochs: Count | None = None
    """Passes over a client's data per round; 1 unless `local_steps` is given."""
    local_steps: Count | None = None
    """Optimizer steps per round, instead of epochs."""
    batch_size: Count | None = 32
    """Samples per step; None (in files: "full") takes all of a client's samples."""
    lr: Positive = 0.1
    """The local step size η."""
    lr_decay: PositiveShare = 1.0
    """η is multiplied by this after every round."""
    weight_decay: NonNegative = 0.0
    clip: Positive | None = None
    """The largest norm of a gradient."""
    clip_stage: Literal["loss", "total"] = "loss"
    """Clip the loss gradient, or the direction after the algorithm's corrections."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """Every participant counts the same, or by its number of samples."""
    evaluate_every: Count = 1
    """Rounds between evaluations; the last round is always evaluated."""
    evaluate: Literal["broadcast", "active_mean"] = "broadcast"
    """Evaluate the global model, or the mean of the participants' models."""
    seed: Seed = 0
    device: str = "cpu"
    engine: Literal["local", "ray"] = "local"
    """Clients are trained on this machine or by a Ray cluster. Results do not depend on it."""
    ray_address: str | None = None
    """The Ray cluster to join, "auto" to look for one, "local" (or none) to start one on this machine."""
    workers: Count | None = None
    """Workers, several in processes of their own; one per core unless given. Results do not depend on it."""
    path: Literal["auto", "matrix", "client"] = "auto"
    """Train chunks of clients as one matrix, or client by client; chosen from model and shapes if auto."""
    client_memory: NonNegative = 1024.0
    """Megabytes of client state kept in memory; what is beyond lies in a memory-mapped file."""
    checkpoint_every: Count = 10
    """Rounds between checkpoints; long rounds are saved at least every half minute."""

    @field_validator("batch_size", mode="before")
    @classmethod
    def _full_batch(cls, value: Any) -> Any:
        return None if value == "full" else value

    @model_validator(mode="after")
    def _one_of_two(self) -> Settings:
        for one, other in (("participation", "participants"), ("local_epochs", "local_steps")):
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(
                    f"{one} = {getattr(self, one)} and {other} = {getattr(self, other)}: give only one"
                )
        return self

    @classmethod
    def checked(cls, **values: Any) -> Settings:
        """Settings, or a one-line error."""
        try:
            return cls(**values)
        except ValidationError as error:
            raise FlatfedError(one_line(error, cls.model_fields)) from None

    def cohort_size(self, clients: int) -> int:
        """Participants of a round (their expected number under Bernoulli sampling)."""
        if self.participants is not None:
            if self.participants > clients:
                raise FlatfedError(
                    f"participants = {self.participants}: there are only {clients} clients; use at most that"
                )
            return self.participants
        share = 1.0 if self.participation is None else self.participation
        return max(1, math.floor(share * clients + 0.5))

    def rate(self, round_number: int) -> float:
        return self.lr * self.lr_decay**round_number

    @property
    def step_rule(self) -> StepRule:
        return StepRule(self.weight_decay, self.clip, self.clip_stage)


class SettingsOptions(TypedDict, total=False):
    """The same fields as keyword arguments, for type checkers and editors."""

    rounds: int
    participation: float | None
    participants: int | None
    sampling: Literal["fixed", "bernoulli"]
    local_epochs: int | None
    local_steps: int | None
    batch_size: int | None
    lr: float
    lr_decay: float
    weight_decay: float
    clip: float | None
    clip_stage: Literal["loss", "total"]
    weighting: Literal["uniform", "samples"]
    evaluate_every: int
    evaluate: Literal["broadcast", "active_mean"]
    seed: int
    device: str
    engine: Literal["local", "ray"]
    ray_address: str | None
    workers: int | None
    path: Literal["auto", "matrix", "client"]
    client_memory: float
    checkpoint_every: int
