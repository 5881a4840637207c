"""How parts make an algorithm: what it keeps and sends is what its parts declare, if they work together."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, get_args

from torch import Tensor

from flatfed.core.context import ClientContext
from flatfed.core.errors import FlatfedError, shown
from flatfed.core.part import (
    SLOTS,
    Aggregator,
    Compressor,
    Correction,
    Gradient,
    Optimizer,
    Part,
    Schedule,
    Server,
    ServerTask,
    Start,
    Synthetic,
    Upload,
    describe_part,
    part_name,
)
from flatfed.core.state import Reads, State, Vector

TRANSPORT = ("aggregate", "compress", "uncompressed", "remember")
"""How an algorithm's uploads travel and are combined, which is independent of what it is."""
COMMON = ("optimizer", *TRANSPORT)
"""What may be set beside any algorithm, named or composed."""


def short_names(keys: Iterable[str]) -> dict[str, str]:
    """For every key its name without the owner's, or the whole key where two owners use one name."""
    keys = list(keys)
    names = [key.rpartition(".")[2] for key in keys]
    return {key: name if names.count(name) == 1 else key for key, name in zip(keys, names, strict=True)}


Remember = Literal["sent", "exact"]


class ImpossibleComposition(FlatfedError):
    """Parts that cannot work together, with the reason."""


@dataclass(frozen=True)
class Member:
    """A part within a composition, and the keys that its own names stand for there."""

    part: Part
    owner: str
    server: Mapping[str, str]
    """The part's server vectors, those that it reads, and the model."""
    client: Mapping[str, str]
    uploads: Mapping[str, str]

    def seen(self, state: State) -> dict[str, Tensor]:
        """The server's state, or what of it was broadcast, as the part sees it."""
        return {name: state[key] for name, key in self.server.items() if key in state}

    def received(self, mean: State) -> dict[str, Tensor]:
        """The cohort's mean uploads, as the part sees them."""
        return {name: mean[key] for name, key in self.uploads.items()}

    def context(self, context: ClientContext) -> ClientContext:
        """A client's round as the part sees it."""
        client = {name: context.client[key] for name, key in self.client.items()}
        return replace(context, received=self.seen(context.received), client=client)

    def keyed(self, names: Mapping[str, str], values: State) -> dict[str, Tensor]:
        """What the part gave back, by key; it may give only what it declared."""
        for name in values:
            if name not in names:
                raise ImpossibleComposition(f"{self.owner} gives {name!r}, which it did not declare")
        return {names[name]: value for name, value in values.items()}


@dataclass(frozen=True)
class Algorithm:
    """A composition of parts; `Algorithm()` is FedAvg."""

    start: Start = Start()
    gradient: Gradient = Gradient()
    correct: Correction | tuple[Correction, ...] = ()
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    aggregate: Aggregator = Aggregator()
    server: Server = Server()
    synthetic: Synthetic = Synthetic()
    compress: Compressor = Compressor()
    uncompressed: tuple[str, ...] = ()
    """The keys of uploads that travel as they are, whatever the compressor."""
    remember: Remember = "sent"
    """What a client adds to a vector of which the server keeps a sum, such as its control variate: the upload
    as the server receives it, so that the two stay one, or as it was before compression."""
    name: str = "custom"
    options: dict[str, Any] = field(default_factory=dict, compare=False)
    composed_of: tuple[Part, ...] = field(default=(), compare=False, repr=False)
    """What the named constructor chose; if it was replaced, the name no longer says it all."""

    def __post_init__(self) -> None:
        corrections = self.correct if isinstance(self.correct, list | tuple) else (self.correct,)
        object.__setattr__(self, "correct", tuple(corrections))
        for slot, kind in SLOTS.items():
            filling = getattr(self, slot)
            for part in filling if slot == "correct" else (filling,):
                if not isinstance(part, kind) or part.slot != slot:
                    raise ImpossibleComposition(f"{slot}: {part!r} is not a {kind.__name__} part")
        if self.remember not in get_args(Remember):
            raise ImpossibleComposition(f"remember = {shown(self.remember)}: give 'sent' or 'exact'")
        self._check_composition()

    @cached_property
    def corrections(self) -> tuple[Correction, ...]:
        """The pipeline of a local step: what corrects gradients, the optimizer, what corrects steps."""
        chosen = self.correct if isinstance(self.correct, tuple) else (self.correct,)
        if type(self.optimizer) is Optimizer:
            return chosen
        of_steps = tuple(part for part in chosen if part.measures_steps)
        return (*(part for part in chosen if not part.measures_steps), self.optimizer, *of_steps)

    @property
    def chosen(self) -> tuple[Part, ...]:
        """What fills the slots that make it this algorithm, the optimizer first."""
        assert isinstance(self.correct, tuple)
        before = (self.optimizer, self.start, self.gradient)
        return (*before, *self.correct, self.schedule, self.server, self.synthetic)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """What makes it this algorithm; how uploads travel and are combined is independent of that."""
        return (self.start, self.gradient, *self.corrections, self.schedule, self.server, self.synthetic)

    @cached_property
    def members(self) -> tuple[Member, ...]:
        """The parts with their names resolved; those of a kind are numbered from the second on."""
        owners: list[str] = []
        for part in self.parts:
            name = part_name(part)
            count = sum(part_name(other) == name for other in self.parts[: len(owners)])
            owners.append(f"{name}_{count + 1}" if count else name)
        members = []
        for part, owner in zip(self.parts, owners, strict=True):
            own = {vector.name: f"{owner}.{vector.name}" for vector in part.server_vectors}
            read = {reads.name: f"{owners[self._owner_of(part, reads)]}.{reads.name}" for reads in part.reads}
            client = {vector.name: f"{owner}.{vector.name}" for vector in part.client_vectors}
            uploads = {upload.name: f"{owner}.{upload.name}" for upload in part.uploads}
            server, up = {"model": "model", **own, **read}, {"displacement": "displacement", **uploads}
            members.append(Member(part, owner, server, client, up))
        return tuple(members)

    def member(self, part: Part) -> Member:
        return next(member for member in self.members if member.part is part)

    @cached_property
    def client_members(self) -> tuple[Member, ...]:
        """The gradient and the corrections, which act during local training."""
        return self.members[1 : 2 + len(self.corrections)]

    @cached_property
    def server_tasks(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if isinstance(member.part, ServerTask))

    @cached_property
    def server_vectors(self) -> tuple[Vector, ...]:
        """What the server keeps besides the model; a vector's name is its key."""
        estimates = [Vector(self.estimate_key(key)) for key in self.compressed if self.compress.estimates]
        return (*self._owned("server_vectors"), *estimates)

    @cached_property
    def client_vectors(self) -> tuple[Vector, ...]:
        """What every client keeps; a vector's name is its key."""
        memories = [Vector(self.memory_key(key)) for key in self.compressed if self.compress.remembers]
        return (*self._owned("client_vectors"), *memories)

    def _owned(self, kind: str) -> Iterator[Vector]:
        for member in self.members:
            for vector in getattr(member.part, kind):
                yield replace(vector, name=f"{member.owner}.{vector.name}")

    @cached_property
    def summed(self) -> dict[str, str]:
        """The client vectors that follow what the server receives, each with its upload, by key.

        What a compressor that remembers left out it sends later.
        """
        if self.remember == "exact" or self.compress.remembers:
            return {}
        return {
            member.client[vector]: member.uploads[upload]
            for member in self.members
            for vector, upload in member.part.sums.items()
            if member.uploads[upload] in self.compressed
        }

    def memory_key(self, upload: str) -> str:
        """The client vector in which the compressor remembers about an upload."""
        return f"{part_name(self.compress)}.{self.short_uploads[upload]}_memory"

    def estimate_key(self, upload: str) -> str:
        """The server vector with the compressor's estimate of a mean upload."""
        return f"{part_name(self.compress)}.{self.short_uploads[upload]}_estimate"

    @cached_property
    def broadcast(self) -> tuple[str, ...]:
        """The keys of what travels down to each participant, "model" first."""
        keys = ["model"]
        for member in self.members:
            declared: tuple[Vector | Reads, ...] = (*member.part.server_vectors, *member.part.reads)
            keys += [member.server[vector.name] for vector in declared if vector.broadcast]
        return tuple(dict.fromkeys(keys))

    @cached_property
    def sent_once(self) -> tuple[str, ...]:
        """What of the broadcast travels in one round only, to all clients."""
        once = {vector.name for vector in self.server_vectors if vector.sent_once}
        return tuple(key for key in self.broadcast if key in once)

    @cached_property
    def declared_uploads(self) -> dict[str, Upload]:
        """All that is reduced over the cohort by key, "displacement" first; `of` is a key, too."""
        declared = {"displacement": Upload("displacement")}
        for member in self.members:
            for upload in member.part.uploads:
                source = member.uploads[upload.of] if upload.of else ""
                declared[member.uploads[upload.name]] = replace(upload, of=source)
        return declared

    @cached_property
    def uploads(self) -> tuple[str, ...]:
        """The keys of what travels up from each participant, "displacement" first."""
        return tuple(key for key, upload in self.declared_uploads.items() if not upload.of)

    @cached_property
    def short_uploads(self) -> dict[str, str]:
        """The uploads' keys without the owners' names, where that is not ambiguous."""
        return short_names(self.uploads)

    @cached_property
    def compressed(self) -> tuple[str, ...]:
        """The uploads that pass through the compressor."""
        if type(self.compress) is Compressor:
            return ()
        return tuple(
            key
            for key in self.uploads
            if key not in self.uncompressed and self.declared_uploads[key].size == "model"
        )

    @cached_property
    def uploads_displacement(self) -> bool:
        """Whether the server receives the displacement of a client's model as it is."""
        altered = any(part.alters_displacement for part in self.parts)
        return not altered and "displacement" not in self.compressed

    @cached_property
    def sums_displacements(self) -> bool:
        """Whether the reduced upload "displacement" is the mean displacement of the clients' models."""
        return self.uploads_displacement and self.aggregate.streams

    @cached_property
    def alone(self) -> "Algorithm":
        """What of it acts on parameters that a client shares with nobody: the steps of its optimizer."""
        return Algorithm(optimizer=self.optimizer.alone, schedule=self.schedule)

    @property
    def gradient_evaluations(self) -> int:
        return self.gradient.evaluations

    @cached_property
    def full_gradients(self) -> int:
        """Passes over all local data per round; parts that want the same gradient share one pass."""
        return max(part.full_gradients for part in self.parts)

    def describe(self) -> dict[str, Any]:
        """The algorithm as plain data, from which `flatfed.algorithms.build` makes it again."""
        own, *others = self.composed_of or (None,)
        kept = self.optimizer == own
        # An optimizer may be set beside a name that has none of its own.
        same = others == list(self.chosen[1:]) and (kept or type(own) is Optimizer)
        named = same and self.name != "custom"
        described: dict[str, Any] = {"name": self.name, **self.options} if named else {}
        for slot, kind in SLOTS.items():
            filling = getattr(self, slot)
            if named and (kept if slot == "optimizer" else slot not in TRANSPORT):
                continue
            if slot == "correct":
                described[slot] = [describe_part(part) for part in filling]
            elif type(filling) is not kind:
                described[slot] = describe_part(filling)
        if self.uncompressed:
            described["uncompressed"] = list(self.uncompressed)
        if self.remember != Algorithm.remember:
            described["remember"] = self.remember
        return described

    def _owner_of(self, reader: Part, reads: Reads) -> int:
        """The place among the parts of the one whose vector is read."""
        kind, vector = reads.owner, reads.name
        owners = [place for place, part in enumerate(self.parts) if isinstance(part, kind)]
        if len(owners) == 1:
            return owners[0]
        namesakes = [
            part_name(part)
            for part in self.parts
            if part is not reader and any(kept.name == vector for kept in part.server_vectors)
        ]
        if owners:
            reason = f"there are {len(owners)} of them; use one"
        elif namesakes:
            reason = f"that of {namesakes[0]} is something else; set {kind.slot} to {part_name(kind)}"
        else:
            reason = f"no part keeps it; set {kind.slot} to {part_name(kind)}"
        raise ImpossibleComposition(
            f"{part_name(reader)} needs the server vector {vector!r} of {part_name(kind)}; {reason}"
        )

    def _check_composition(self) -> None:
        for part in self.parts:
            for kind, names in (
                ("server vector", [*(v.name for v in part.server_vectors), *(r.name for r in part.reads)]),
                ("client vector", [vector.name for vector in part.client_vectors]),
                ("upload", ["displacement", *(upload.name for upload in part.uploads)]),
            ):
                if len(set(names)) < len(names):
                    raise ImpossibleComposition(f"{part_name(part)} has two {kind}s of one name: {names}")
            known = {"displacement", *(upload.name for upload in part.uploads if not upload.of)}
            for upload in part.uploads:
                if upload.of and upload.of not in known:
                    raise ImpossibleComposition(
                        f"{part_name(part)}: {upload.name!r} is of {upload.of!r}, which it does not upload"
                    )
        _ = self.members  # resolves every name, or says which vector is missing
        for upload in self.declared_uploads.values():
            if self.compress.estimates and upload.of in self.compressed:
                raise ImpossibleComposition(
                    f"{part_name(self.compress)} sends changes of {upload.of!r}, but {upload.name!r} is a "
                    "statistic of the whole; use another compressor"
                )
        for key in self.uncompressed:
            if key not in self.uploads:
                raise ImpossibleComposition(
                    f"uncompressed: there is no upload {key!r}; there are {', '.join(self.uploads)}"
                )
        altering = [part for part in self.parts if part.alters_displacement]
        reading = [part for part in self.parts if part.reads_displacement]
        shifting = [part for part in self.corrections if part.shifts_model]
        for parts, what in ((altering, "replace the displacement"), (shifting, "shift the new model")):
            if len(parts) > 1:
                first, second = map(part_name, parts[:2])
                raise ImpossibleComposition(f"{first} and {second} both {what}; use one of them")
        if altering and reading:
            raise ImpossibleComposition(
                f"{part_name(altering[0])} changes the uploaded displacement, which {part_name(reading[0])} "
                "takes for a sum of gradient steps"
            )
