"""How parts make an algorithm: what it keeps and sends is what its parts do, if they can work together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from flatfed.core.part import (
    SLOTS,
    Compressor,
    Correction,
    Gradient,
    Part,
    Schedule,
    Server,
    Start,
    Synthetic,
    describe_part,
    part_name,
)
from flatfed.core.state import Vector


class ImpossibleComposition(ValueError):
    """Parts that cannot work together, with the reason."""


@dataclass(frozen=True)
class Algorithm:
    """A composition of parts; `Algorithm()` is FedAvg."""

    start: Start = Start()
    gradient: Gradient = Gradient()
    correct: Correction | tuple[Correction, ...] = ()
    schedule: Schedule = Schedule()
    server: Server = Server()
    synthetic: Synthetic = Synthetic()
    compress: Compressor = Compressor()
    uncompressed: tuple[str, ...] = ()
    """Uploads that travel as they are, whatever the compressor."""
    name: str = "custom"
    options: dict[str, Any] = field(default_factory=dict, compare=False)
    made_of: tuple[Part, ...] = field(default=(), compare=False, repr=False)
    """The parts that the named constructor chose; if they were replaced, the name says too little."""

    def __post_init__(self) -> None:
        several = self.correct if isinstance(self.correct, list | tuple) else (self.correct,)
        object.__setattr__(self, "correct", tuple(several))
        for slot, kind in SLOTS.items():
            filling = getattr(self, slot)
            for part in filling if slot == "correct" else (filling,):
                if not isinstance(part, kind):
                    raise ImpossibleComposition(f"{slot}: {part!r} is not a {kind.__name__} part")
        self._check_composition()

    @property
    def corrections(self) -> tuple[Correction, ...]:
        return self.correct if isinstance(self.correct, tuple) else (self.correct,)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What makes it this algorithm; how uploads are compressed is independent of that."""
        return (self.start, self.gradient, *self.corrections, self.schedule, self.server, self.synthetic)

    @property
    def client_parts(self) -> tuple[Gradient | Correction, ...]:
        """The parts that act during local training."""
        return (self.gradient, *self.corrections)

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        estimates = [Vector(estimate_of(name)) for name in self.compressed if self.compress.estimates]
        return (*(vector for part in self.parts for vector in part.server_vectors), *estimates)

    @property
    def client_vectors(self) -> tuple[Vector, ...]:
        memories = [Vector(memory_of(name)) for name in self.compressed if self.compress.remembers]
        return (*(vector for part in self.parts for vector in part.client_vectors), *memories)

    @property
    def broadcast(self) -> tuple[str, ...]:
        """What travels down to each participant, "model" first."""
        return ("model", *dict.fromkeys(name for part in self.parts for name in part.receives))

    @property
    def sent_once(self) -> tuple[str, ...]:
        """What of the broadcast travels in one round only, to all clients."""
        once = {vector.name for vector in self.server_vectors if vector.sent_once}
        return tuple(name for name in self.broadcast if name in once)

    @property
    def uploads(self) -> tuple[str, ...]:
        """What travels up from each participant, "displacement" first."""
        return ("displacement", *(name for part in self.parts for name in part.uploads))

    @property
    def compressed(self) -> tuple[str, ...]:
        """The uploads that pass through the compressor."""
        if type(self.compress) is Compressor:
            return ()
        return tuple(name for name in self.uploads if name not in self.uncompressed)

    @property
    def gradient_evaluations(self) -> int:
        return self.gradient.evaluations

    @property
    def full_gradients(self) -> int:
        """Passes over all local data per round; parts that want the same gradient share one pass."""
        return max(part.full_gradients for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """The algorithm as plain data, from which `flatfed.algorithms.build` makes it again."""
        described: dict[str, Any] = {}
        named = self.name != "custom" and self.made_of == self.parts
        if named:
            described |= {"name": self.name, **self.options}
        for slot, kind in SLOTS.items():
            filling = getattr(self, slot)
            if named and slot != "compress":
                continue
            if slot == "correct":
                described[slot] = [describe_part(part) for part in filling]
            elif type(filling) is not kind:
                described[slot] = describe_part(filling)
        if self.uncompressed:
            described["uncompressed"] = list(self.uncompressed)
        return described

    def _check_composition(self) -> None:
        owners: dict[tuple[str, str], Part] = {}
        for part in self.parts:
            for kind, names in (
                ("server vector", [vector.name for vector in part.server_vectors]),
                ("client vector", [vector.name for vector in part.client_vectors]),
                ("upload", [*part.uploads, *(["displacement"] if part.alters_displacement else [])]),
            ):
                for name in names:
                    if (kind, name) in owners:
                        raise ImpossibleComposition(
                            f"{part_name(part)} and {part_name(owners[kind, name])} both define the {kind} "
                            f"{name!r}; use one of them"
                        )
                    owners[kind, name] = part
        kept = {vector.name for vector in self.server_vectors}
        for part in self.parts:
            for name in [*part.receives, *part.needs]:
                if name not in kept:
                    raise ImpossibleComposition(
                        f"{part_name(part)} needs the server vector {name!r}, which no part keeps; "
                        f"{_HOW_TO_KEEP.get(name, 'add a part that does')}"
                    )
        for name in self.uncompressed:
            if name not in self.uploads:
                raise ImpossibleComposition(
                    f"uncompressed: there is no upload {name!r}; there are {', '.join(self.uploads)}"
                )
        altering = [part for part in self.parts if part.alters_displacement]
        reading = [part for part in self.parts if part.reads_displacement]
        if altering and reading:
            raise ImpossibleComposition(
                f"{part_name(altering[0])} changes the uploaded displacement, which {part_name(reading[0])} "
                "takes for a sum of gradient steps"
            )


def memory_of(upload: str) -> str:
    """The client vector in which a compressor remembers about an upload."""
    return f"{upload}_memory"


def estimate_of(upload: str) -> str:
    """The server vector with a compressor's estimate of a mean upload."""
    return f"{upload}_estimate"


_HOW_TO_KEEP = {
    "momentum": "set server to momentum",
    "synthetic_inputs": "set synthetic to trajectory_matching",
}
