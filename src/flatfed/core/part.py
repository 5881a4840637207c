"""What a part is: the questions about a round that an algorithm answers, each with a neutral default.

All algebra is written for `[..., P]`: the last axis is parameters, a leading client axis is optional. The
same code then runs one client in place or a whole cohort as a matrix. Parts keep nothing on themselves: state
goes in and comes out. A part sees its own vectors and uploads under the names that it gave them.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, ClassVar, Protocol, cast

import torch
from pydantic import ConfigDict, ValidationError
from torch import Tensor

from flatfed.core.context import (
    Affine,
    Carry,
    ClientContext,
    Finish,
    MergeContext,
    Oracle,
    ServerContext,
    Stepped,
    TaskStep,
)
from flatfed.core.errors import FlatfedError, one_line
from flatfed.core.flat import all_finite
from flatfed.core.state import Reads, Size, State, Vector, Vectors
from flatfed.core.types import Range


def identity(upload: Tensor) -> Tensor:
    return upload


def squared_norm(upload: Tensor) -> Tensor:
    """‖u‖² over the last axis, kept: [..., n] → [..., 1]."""
    return torch.linalg.vector_norm(upload, dim=-1, keepdim=True).square()


@dataclass(frozen=True)
class Upload:
    """What the server learns from every participant, and how the cohort's values become one.

    `reduce` maps a client's vector [..., n] to [..., m]; the server gets the cohort's mean of that, by the
    algorithm's aggregation rule. With `of`, nothing travels: it is a statistic of another upload, taken from
    what the server receives (after decoding). `of="displacement"` is about the clients' displacements.
    """

    name: str
    size: Size = "model"
    reduce: Callable[[Tensor], Tensor] = identity
    of: str = ""


def snake_case(name: str) -> str:
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


class _PartType(type):
    """Parts are made with one-line errors."""

    def __call__(cls, *positional: Any, **named: Any) -> Any:
        try:
            return super().__call__(*positional, **named)
        except ValidationError as error:
            known: list[str] = [item.name for item in fields(cls)] if is_dataclass(cls) else []
            raise FlatfedError(one_line(error, known, prefix=part_name(cast(type[Part], cls)))) from None


class Part(metaclass=_PartType):
    """One ingredient. Everything has a neutral default, so a part overrides only what it is about."""

    slot: ClassVar[str]
    label: ClassVar[str] = ""
    """What it is called in config files, if not by its class's name in snake_case."""
    # An option that a part does not know is refused; a part may hold another.
    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", arbitrary_types_allowed=True, strict=True
    )
    needs_float_inputs: ClassVar[bool] = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        return ()

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        return ()

    @property
    def reads(self) -> tuple[Reads, ...]:
        """The server vectors of other parts that it reads."""
        return ()

    @property
    def uploads(self) -> tuple[Upload, ...]:
        """What goes up beside the displacement, and statistics of what goes up."""
        return ()

    @property
    def sums(self) -> Mapping[str, str]:
        """Client vectors of which the server keeps a sum or mean, each with the upload that it changes by."""
        return {}

    @property
    def alters_displacement(self) -> bool:
        """Whether its `finish` replaces the uploaded displacement by something else."""
        return False

    @property
    def reads_displacement(self) -> bool:
        """Whether it takes the uploaded displacement for a sum of gradient steps."""
        return False

    @property
    def full_gradients(self) -> int:
        """Passes over all of a client's data in each round."""
        return 0

    def begin(self, context: ClientContext) -> Carry:
        """What the part remembers from step to step inside one round."""
        return {}

    def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
        return Finish()

    def merge(self, server: State, mean: State, context: MergeContext) -> Vectors:
        """The part's server vectors after the round, from the cohort's mean uploads."""
        return {}


class ServerTask:
    """A mixin for parts that give the server work of its own, such as making synthetic samples."""

    needs_classes: ClassVar[bool] = False
    """Whether targets must be class labels."""

    @property
    def first_round(self) -> int:
        """The first round, counted from 1, in which it makes a difference."""
        return 1

    @property
    def first_round_hint(self) -> str:
        """How to have an earlier `first_round`: the end of a sentence."""
        return ""

    def before_round(self, server: State, context: ServerContext) -> Iterator[TaskStep]:
        """What the server does before a round, step by step; a run may be stopped between steps.

        What is left to do must follow from the server's vectors, so that it goes on where it stopped.
        """
        return iter(())

    def after_round(self, server: State, context: ServerContext) -> Vectors:
        """What the server changes at the end of a round, after its rule."""
        return {}


class Start(Part):
    """Where does local training begin? Here: at the global model."""

    slot = "start"

    def start(self, server: State) -> Tensor:
        """The point that is broadcast; computed on the server, so a look-ahead costs no traffic."""
        return server["model"]


class Gradient(Part):
    """Which gradient drives the step? Here: the one at the local model."""

    slot = "gradient"

    @property
    def evaluations(self) -> int:
        """Forward and backward passes in each local step."""
        return 1

    @property
    def bounded(self) -> bool:
        """Whether its directions are no longer than the longest gradient of a client's loss."""
        return type(self) is Gradient

    def constant_shift(self, context: ClientContext) -> Tensor | None:
        """How far from the local model gradients are taken, where that does not change during the round."""
        return None

    def gradient(self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry) -> Stepped:
        """The gradient for the step; `point` is the local model, shifted if there is a `constant_shift`."""
        return oracle(point), carry


class Correction(Part):
    """Which direction is taken? Corrections form a pipeline; here: the gradient's own.

    A part says which affine map it is for the round, if it is one, else it overrides `direction`. The last
    affine maps of the pipeline are folded into one, which costs a step one pass over the model.
    """

    slot = "correct"

    @property
    def measures_steps(self) -> bool:
        """Whether it makes its vectors of how far the model moved, so that they correct steps, not gradients.

        Without an optimizer there is no difference; with one, such a part comes after it.
        """
        return False

    @property
    def shifts_model(self) -> bool:
        """Whether it has a `shift`."""
        return False

    def affine(self, context: ClientContext, carry: Carry) -> Affine:
        """What it does to the direction of every step, from what it knew when the round began."""
        return Affine()

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> Stepped:
        """The direction after this part; the local model is `context.origin + context.displacement`."""
        return self.affine(context, carry)(direction, context.displacement), carry

    def shift(self, server: State) -> Tensor:
        """What the merged state adds to the new model, beyond the server's rule."""
        return torch.zeros_like(server["model"])


class Optimizer(Correction):
    """Which step is made of a gradient? Here: the gradient itself, as SGD does.

    It stands between the corrections of gradients and those of steps (`measures_steps`).
    """

    slot = "optimizer"
    decays_gradient: ClassVar[bool] = False
    """Whether weight decay belongs to the gradient that it accumulates, and not to the step."""
    step_sizes: ClassVar[Range] = Range(0.003, 1.0)
    """Where the step size η is sought when it is tuned."""

    @property
    def alone(self) -> "Optimizer":
        """The same for parameters that a client shares with nobody: what would be averaged, it keeps."""
        return self


class Schedule(Part):
    """Which local step sizes? Here: constant within a round."""

    slot = "schedule"

    def rates(self, rate: float, steps: int) -> list[float]:
        return [rate] * steps


class UploadRows(Protocol):
    """One upload of all participants of a round, [S, n], which may be larger than memory."""

    weights: Tensor
    """How much each participant counts, [S]."""

    def blocks(self) -> Iterator[Tensor]:
        """The rows block by block, [S, B], from the first coordinate to the last; as often as needed."""
        ...


class Aggregator(Part):
    """How do many uploads become one? Here: by their weighted mean, which is summed up as they come.

    A rule that must see all uploads of a cohort has `streams = False`.
    """

    slot = "aggregate"
    streams: ClassVar[bool] = True

    def combine(self, rows: UploadRows) -> Tensor:
        """The participants' rows [S, n] as one [n]."""
        return torch.cat([rows.weights @ block for block in rows.blocks()]) / rows.weights.sum()


class Server(Part):
    """How is the global model updated? Here: by the mean displacement, and whatever corrections add."""

    slot = "server"

    @property
    def majorant(self) -> "Server | None":
        """A rule that is linear in displacements and never takes shorter steps, for bounds of one that is
        not."""
        return None

    def update(self, server: State, mean: State, shift: Tensor | None, context: MergeContext) -> Vectors:
        """The new "model" and the rule's own vectors."""
        return {"model": plus_shift(server["model"] + mean["displacement"], shift)}


class Synthetic(Part):
    """What stands for the clients' data on the server, and then on every client? Here: nothing."""

    slot = "synthetic"


class Compressor(Part):
    """What goes up the wire? Here: the vectors as they are.

    One that `remembers` keeps a vector on each client for every upload: `target` is what is encoded given
    that memory, `memory` what is kept after it was sent. One that `estimates` keeps the mean upload of the
    whole population on the server, and the participants only bring it up to date.
    """

    slot = "compress"
    remembers: ClassVar[bool] = False
    estimates: ClassVar[bool] = False

    def encode(self, vector: Tensor, generator: torch.Generator) -> bytes:
        """A vector [P] as the bytes that travel; draws come from the generator alone."""
        # As bytes first, because numpy does not know every dtype.
        return vector.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()

    def decode(self, payload: bytes, size: int, dtype: torch.dtype) -> Tensor:
        """The vector [size] that the receiver sees; a payload that cannot be right is refused."""
        expected = size * dtype.itemsize
        if len(payload) != expected:
            raise FlatfedError(
                f"payload: {len(payload)} bytes where {expected} belong; it was cut or damaged"
            )
        vector = torch.frombuffer(bytearray(payload), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        if not all_finite(vector):
            raise FlatfedError("payload: it holds numbers that are not finite; it was damaged")
        return vector

    def target(self, vector: Tensor, memory: Tensor) -> Tensor:
        return vector

    def memory(self, target: Tensor, decoded: Tensor, memory: Tensor) -> Tensor:
        return memory

    def estimate(self, estimate: Tensor, mean: Tensor, context: MergeContext) -> Tensor:
        return mean


SLOTS: dict[str, type[Part]] = {
    kind.slot: kind
    for kind in (
        Start,
        Gradient,
        Correction,
        Optimizer,
        Schedule,
        Aggregator,
        Server,
        Synthetic,
        Compressor,
    )
}
NEUTRAL = "none"
"""What a slot's neutral part is called in config files."""


def plus_shift(model: Tensor, shift: Tensor | None) -> Tensor:
    return model if shift is None else model + shift


def part_name(part: Part | type[Part]) -> str:
    """The name by which a part is called in config files."""
    kind = part if isinstance(part, type) else type(part)
    return kind.label or snake_case(kind.__name__)


def describe_part(part: Part) -> dict[str, Any]:
    if type(part) is SLOTS[part.slot]:
        return {"part": NEUTRAL}
    names: list[str] = [item.name for item in fields(part)] if is_dataclass(part) else []
    described: dict[str, Any] = {"part": part_name(part)}
    for name in names:
        value = getattr(part, name)
        described[name] = describe_part(value) if isinstance(value, Part) else value
    return described
