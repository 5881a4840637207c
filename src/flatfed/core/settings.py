"""Settings that decide a training's numbers: one checked value for Python, config files and run records."""

import math
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator

from flatfed.core.errors import FlatfedError, one_line
from flatfed.core.types import SMALLEST, Count, NonNegative, Positive, PositiveShare, Seed

Precision = Literal["float32", "bfloat16"]
"""What a model and its loss are computed in: its own numbers, or torch's autocast to bfloat16."""
ALTERNATIVES = (("participation", "participants"), ("local_epochs", "local_steps"))
"""Pairs of training settings of which only one is given."""


class CheckedModel(BaseModel):
    """A frozen set of fields; one that is unknown or out of range is a one-line error."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise FlatfedError(one_line(error, type(self).model_fields)) from None

    def replaced(self, **changes: Any) -> Self:
        """A copy with some fields changed, checked again."""
        return type(self)(**{**self.model_dump(), **changes})


class Training(CheckedModel):
    """Everything that decides a training's numbers besides its task and its algorithm.

    Local work is counted in epochs or in steps. An epoch goes through the client's samples once in a new
    order, and its last batch may be smaller. Steps take batches of exactly `batch_size` from an endless
    sequence of epochs, across their ends, so that every client does the same work; a client with fewer
    samples than that sees some of them more than once in a batch.
    """

    rounds: Count
    """Communication rounds."""
    participation: PositiveShare | None = None
    """The share of clients that take part in a round; all of them unless `participants` is given."""
    participants: Count | None = None
    """The number of clients that take part in a round, instead of a share."""
    sampling: Literal["fixed", "bernoulli"] = "fixed"
    """A fixed number of participants, or each client by itself with that probability (but at least one)."""
    local_epochs: Count | None = None
    """Passes over a client's data per round; 1 unless `local_steps` is given."""
    local_steps: Count | None = None
    """Optimizer steps per round, instead of epochs."""
    batch_size: Count | None = 32
    """Samples per step; None (in files: "full") takes all of a client's samples."""
    lr: Positive = 0.1
    """The local step size η."""
    lr_decay: PositiveShare = 1.0
    """η is multiplied by this after every `lr_decay_every` rounds."""
    lr_decay_every: Count = 1
    lr_cosine: Count | None = None
    """Rounds over which η falls to zero along half a cosine: as many as there are, or more to go on later."""
    lr_warmup: Count | None = None
    """Rounds over which η rises to its full size in equal steps, beside what the others do to it."""
    radius_schedule: Literal["constant", "lr", "sqrt"] = "constant"
    """Radii ρ of local perturbations are constant, in proportion to η, or ρ/√t in round t = 1, 2, …."""
    weight_decay: NonNegative = 0.0
    clip: Positive | None = None
    """The largest norm of a gradient; None (in files: "none") for any."""
    clip_stage: Literal["loss", "total"] = "loss"
    """Clip the loss gradient, or the direction after the algorithm's corrections."""
    weighting: Literal["uniform", "samples"] = "uniform"
    """Every participant counts the same, or by its number of samples."""
    evaluate_every: Count = 1
    """Rounds between evaluations; the last round is always evaluated."""
    evaluate: Literal["broadcast", "active_mean"] = "broadcast"
    """Evaluate the global model, or the mean of the participants' models."""
    seed: Seed = 0
    precision: Precision = "float32"
    """Forward passes and losses in the model's own float32, or in bfloat16 (autocast), where vectors and all
    algebra stay as they are; gradients of clients, full gradients and evaluation alike."""
    path: Literal["auto", "matrix", "client"] = "auto"
    """Train chunks of clients as one matrix, or client by client; chosen from model and shapes if auto."""

    @field_validator("batch_size", mode="before")
    @classmethod
    def _full_batch(cls, value: Any) -> Any:
        return None if value == "full" else value

    @field_validator("clip", mode="before")
    @classmethod
    def _no_clipping(cls, value: Any) -> Any:
        return None if value == "none" else value

    @model_validator(mode="after")
    def _together(self) -> Self:
        for one, other in ALTERNATIVES:
            if getattr(self, one) is not None and getattr(self, other) is not None:
                raise ValueError(
                    f"{one} = {getattr(self, one)} and {other} = {getattr(self, other)}: give only one"
                )
        if self.lr_cosine is not None and self.lr_cosine < self.rounds:
            raise ValueError(
                f"lr_cosine = {self.lr_cosine}: the step size is 0 from round {self.lr_cosine + 1} on; use "
                f"at least rounds = {self.rounds}"
            )
        if self.rate(0) < SMALLEST:
            raise ValueError(
                f"lr_warmup = {self.lr_warmup}: in round 1 single precision cannot hold the step size "
                f"{self.lr:g} / {self.lr_warmup}; lower lr_warmup or raise lr"
            )
        if self.rate(self.rounds - 1) < SMALLEST:
            decays = (self.rounds - 1) // self.lr_decay_every
            raise ValueError(
                f"lr_decay = {self.lr_decay:g}: in round {self.rounds} single precision cannot hold the step "
                f"size {self.lr:g} · {self.lr_decay:g}^{decays}; raise lr_decay or take fewer rounds"
            )
        return self

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
        """η in a round, counted from 0."""
        rate = self.lr * self.lr_decay ** (round_number // self.lr_decay_every)
        if self.lr_cosine is not None:
            rate *= math.cos(math.pi / 2 * round_number / self.lr_cosine) ** 2
        if self.lr_warmup is not None:
            rate *= min(1.0, (round_number + 1) / self.lr_warmup)
        return rate

    def radius_factor(self, round_number: int) -> float:
        """What radii are multiplied by in a round, counted from 0."""
        if self.radius_schedule == "lr":
            return self.rate(round_number) / self.lr
        return 1.0 if self.radius_schedule == "constant" else (round_number + 1) ** -0.5
