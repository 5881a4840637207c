"""Settings that decide a training's numbers: one checked value for Python, config files and run records."""

import math
from typing import Any, Literal, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from flatfed.core.errors import FlatfedError, one_line
from flatfed.core.types import SMALLEST, Count, NonNegative, Positive, PositiveShare, Seed

Precision = Literal["float32", "tf32", "bfloat16"]
"""What a model and its loss are computed in: its own numbers, products of rounded ones on CUDA, or torch's
autocast to bfloat16."""
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


class Sharing(CheckedModel):
    """What of a model clients share, and what each of them keeps to itself.

    What is kept never travels and belongs to the client's state. A client trains its private parameters with
    the algorithm's optimizer by plain steps; everything else of an algorithm is about what is shared.
    """

    private: tuple[str, ...] = ()
    """Names of modules, parameters and buffers that clients keep, with * for anything: "*.lora_B*"."""
    normalisation: Literal["average", "local", "frozen", "recompute"] = "average"
    """Normalisation layers are shared like all others, or private ("local"), or stay as they are, statistics
    and parameters ("frozen"), or their statistics stay where they are and the server makes those of the
    global model from its validation samples ("recompute")."""
    private_steps: Count | None = None
    """So many local steps are private: they change only what is private, and the others only the rest."""

    @field_validator("private", mode="before")
    @classmethod
    def _one_name(cls, value: Any) -> Any:
        # Layers of a stack are numbered.
        return (str(value),) if isinstance(value, str | int) else value

    @model_validator(mode="after")
    def _something_private(self) -> Self:
        if self.private_steps is not None and not self.private and self.normalisation != "local":
            raise ValueError(f"private_steps = {self.private_steps}: nothing is private; name it in private")
        return self


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
    patience: Count | None = None
    """Training ends after so many rounds without a better value on the validation samples."""
    best_by: str | None = None
    """What `patience` and the best model go by on the validation samples: a metric, better the higher it is,
    or "loss"; the accuracy if there is one, or else the loss, unless given."""
    seed: Seed = 0
    precision: Precision = "float32"
    """Forward passes and losses in the model's own float32, in bfloat16 (autocast), or with products in TF32
    on CUDA, where vectors and all algebra stay as they are; gradients of clients, full gradients and
    evaluation alike."""
    path: Literal["auto", "matrix", "client"] = "auto"
    """Train chunks of clients as one matrix, or client by client; chosen from model and shapes if auto."""
    sharing: Sharing = Sharing()
    """What of the model is shared, and what stays with each client; everything is shared by default."""
    fine_tuning_steps: Count | None = None
    """Evaluate the final model on every client also after so many local steps there."""

    @model_serializer(mode="wrap")
    def _without_unused(self, serialise: SerializerFunctionWrapHandler) -> dict[str, Any]:
        # Runs without these settings have the identities and folders from before there was a choice.
        values: dict[str, Any] = serialise(self)
        unused = {"sharing": self.sharing == Sharing()}
        unused |= {name: getattr(self, name) is None for name in ("fine_tuning_steps", "patience", "best_by")}
        return {key: value for key, value in values.items() if not unused.get(key)}

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
            raise ValueError(self._underflow())
        return self

    def _underflow(self) -> str:
        """Which setting makes the last round's step size too small."""
        decays = (self.rounds - 1) // self.lr_decay_every
        problem = f"in round {self.rounds} single precision cannot hold the step size {self.lr:g} · "
        if self.lr * self.lr_decay**decays < SMALLEST:
            return (
                f"lr_decay = {self.lr_decay:g}: {problem}{self.lr_decay:g}^{decays}; raise lr_decay or take "
                "fewer rounds"
            )
        return (
            f"lr_cosine = {self.lr_cosine}: {problem}cos²(π/2 · {self.rounds - 1}/{self.lr_cosine}); raise "
            "lr_cosine or lr"
        )

    def continued(self, rounds: int) -> Self:
        """The settings with which a run goes on to more rounds."""
        if self.lr_cosine is not None and rounds > self.lr_cosine:
            raise FlatfedError(
                f"rounds = {rounds}: the run's step size falls to 0 by lr_cosine = {self.lr_cosine}, which "
                "decided the rounds that it has; begin a new run with a longer lr_cosine"
            )
        return self.replaced(rounds=rounds)

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
