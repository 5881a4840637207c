"""Messages between a server and its sites: damaged, forged or made of anything, in either direction.

The rule here: a message is taken, or refused in one line that a log can show as it is; whatever one site
sends, the round of the others stays what it would have been without it.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from rule import SOME, limits, scratch
from values import values

import flatfed as ff

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import NAMES, Deployment, normalised
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict

from flatfed.core.aggregate import Aggregate
from flatfed.core.rounds import broadcast
from flatfed.deployment import wire
from flatfed.deployment.engine import FlowerEngine
from flatfed.deployment.nodes import Nodes
from flatfed.deployment.sites import Sites
from flatfed.training.loop import TrainingState

ALGORITHMS: dict[str, dict[str, Any]] = {
    "plain": {"name": "scaffold"},
    "quantized": {"name": "scaffold", "compress": {"part": "quantize", "bits": 4}},
    "top-k": {"name": "fedavg", "compress": {"part": "top_k"}},
    "sign": {"name": "fedavg", "compress": {"part": "sign"}},
    "trimmed": {"name": "scaffold", "aggregate": {"part": "trimmed_mean", "share": 0.4}},
}
REMOVED_AT_THE_END = tempfile.TemporaryDirectory()
FOLDER = Path(REMOVED_AT_THE_END.name)
COHORT = [1, 4, 6]
VICTIM = NAMES[4]

# -- damage ------------------------------------------------------------------------------------------------

Damage = Callable[[RecordDict], None]
ArrayChange = Callable[[Array], Array]
numbers = st.floats() | st.integers() | st.integers(-(10**40), 10**40) | st.booleans()
texts = st.text(max_size=30) | st.sampled_from(
    ["\x1b[2J", "a\nb", "\u202e", "float64", "uint8", "flatfed.raw"]
)
shapes = st.lists(st.integers(-(2**40), 2**40), max_size=5).map(tuple)
fields = st.sampled_from([*wire.TrainReply.model_fields, *wire.Request.model_fields, "x"])
places = st.tuples(st.sampled_from(["vectors", "buffers"]), st.integers(0, 5))


def changed_field(name: str, value: Any) -> Damage:
    def change(content: RecordDict) -> None:
        header = content.get("header")
        if isinstance(header, ConfigRecord) and isinstance(header.get("json"), str):
            try:
                fields = json.loads(str(header["json"]))
            except ValueError:
                return
            if isinstance(fields, dict):
                content["header"] = ConfigRecord({"json": json.dumps(fields | {name: value}, default=str)})

    return change


def changed_header(text: str) -> Damage:
    return lambda content: content.__setitem__("header", ConfigRecord({"json": text}))


def changed_record(name: str, record: Any) -> Damage:
    return lambda content: content.__setitem__(name, record)


def changed_array(place: tuple[str, int], change: ArrayChange, name: str | None = None) -> Damage:
    def damage(content: RecordDict) -> None:
        record = content.get(place[0])
        if not isinstance(record, ArrayRecord) or not record:
            return
        arrays = dict(record)
        key = list(arrays)[place[1] % len(arrays)]
        arrays[key if name is None else name] = change(arrays.pop(key))
        content[place[0]] = ArrayRecord(arrays)

    return damage


def flipped(data: bytes, position: int, mask: int) -> bytes:
    return bytes(byte ^ (mask if place == position % len(data) else 0) for place, byte in enumerate(data))


def filled(array: Array, number: float) -> Array:
    """Of the same length, and all of it one number in double precision."""
    whole = torch.full((len(array.data) // 8 + 1,), number, dtype=torch.float64).numpy().tobytes()
    return Array(array.dtype, array.shape, array.stype, whole[: len(array.data)])


def with_data(array: Array, data: bytes, says_so: bool) -> Array:
    return Array(array.dtype, (len(data),) if says_so else array.shape, array.stype, data)


some_bytes = st.binary(max_size=64)
array_changes: st.SearchStrategy[ArrayChange] = st.one_of(
    st.builds(lambda dtype: lambda a: Array(dtype, a.shape, a.stype, a.data), texts),
    st.builds(lambda shape: lambda a: Array(a.dtype, shape, a.stype, a.data), shapes),
    st.builds(lambda stype: lambda a: Array(a.dtype, a.shape, stype, a.data), texts),
    st.builds(lambda data, so: lambda a: with_data(a, data, so), some_bytes, st.booleans()),
    st.builds(lambda more, so: lambda a: with_data(a, a.data + more, so), some_bytes, st.booleans()),
    st.builds(lambda cut, so: lambda a: with_data(a, a.data[:-cut], so), st.integers(1, 400), st.booleans()),
    st.builds(
        lambda place, mask: lambda a: with_data(a, flipped(a.data, place, mask), False) if a.data else a,
        st.integers(0, 10**4),
        st.integers(1, 255),
    ),
    st.builds(lambda number: lambda a: filled(a, number), st.floats()),
)
records = st.one_of(
    st.builds(lambda key, value: ConfigRecord({key: value}), texts, texts | st.integers(0, 9)),
    st.builds(lambda key, value: MetricRecord({key: value}), texts, st.floats()),
    st.builds(
        lambda key, dtype, shape, stype, data: ArrayRecord({key: Array(dtype, shape, stype, data)}),
        *(texts, texts, shapes, texts, some_bytes),
    ),
)
damages: st.SearchStrategy[Damage] = st.one_of(
    st.builds(changed_field, fields, values | numbers | texts),
    st.builds(changed_header, texts | values.map(lambda value: json.dumps(value, default=str))),
    st.builds(changed_record, st.sampled_from(["header", "vectors", "buffers"]) | texts, records),
    st.builds(lambda name: lambda content: content.pop(name, None), st.sampled_from(["vectors", "buffers"])),
    st.builds(changed_array, places, array_changes, st.none() | texts),
)


def damaged(content: RecordDict, changes: list[Damage]) -> RecordDict:
    copied = RecordDict(dict(content))
    for change in changes:
        try:
            change(copied)
        except (TypeError, ValueError, KeyError):  # Flower itself cannot carry it
            assume(False)
    return copied


def check_line(text: str) -> None:
    assert text and text.isprintable() and len(text) < 2000, text


# -- the server --------------------------------------------------------------------------------------------


class Server(NamedTuple):
    """An engine before its first round, and what its sites answer."""

    engine: FlowerEngine
    state: TrainingState
    answers: dict[str, RecordDict]
    """To be damaged: those of the sites that are trained."""
    everybody: Aggregate
    others: Aggregate
    """Without the victim."""


@functools.cache
def server(kind: str) -> Server:
    deployment = Deployment(FOLDER / kind, ff.build(ALGORITHMS[kind]), normalised, max_refusals=10**6)
    grid, spec = deployment.grid, deployment.spec
    nodes = Nodes(grid, spec.federation)
    model = spec.model()
    engine = FlowerEngine(spec, model, nodes, Sites.of(nodes.assemble()), 0)
    state, answers = TrainingState.initial(engine.plan, model), dict[str, RecordDict]()

    def keep(site: str, message: Message, reply: Message) -> Message:
        answers[site] = reply.content
        return reply

    grid.fault = keep
    everybody = train(engine, state, COHORT)
    others = train(engine, state, [client for client in COHORT if NAMES[client] != VICTIM])
    # From now on nobody trains; a site's answer is the one that it gave.
    grid.call = lambda site, message: Message(answers[site], reply_to=message)  # type: ignore[method-assign]
    return Server(engine, state, answers, everybody, others)


def train(engine: FlowerEngine, state: TrainingState, cohort: list[int]) -> Aggregate:
    sent = broadcast(engine.plan.algorithm, state.server, state.buffers)
    try:
        return engine.train(sent, 0, cohort)
    finally:
        engine.clients.discard()


def same(one: Aggregate, other: Aggregate) -> bool:
    uploads = [torch.equal(value, other.uploads[key]) for key, value in one.uploads.items()]
    buffers = [torch.equal(value, other.buffers[name]) for name, value in one.buffers.items()]
    return one.loss == other.loss and one.clients == other.clients and all(uploads + buffers)


@SOME
@given(st.sampled_from(sorted(ALGORITHMS)), st.lists(damages, min_size=1, max_size=3))
@example("plain", [changed_array(("vectors", 0), lambda array: filled(array, 1e30))])
@example("plain", [changed_field("loss", 10**400)])
def test_any_upload(kind, changes):
    engine, state, answers, everybody, others = server(kind)
    answer = damaged(answers[VICTIM], changes)
    engine.reasons.clear()

    def fault(site: str, message: Message, reply: Message) -> Message:
        return Message(answer, reply_to=message) if site == VICTIM else reply

    engine.nodes.grid.fault = fault  # type: ignore[attr-defined]
    with limits():
        mean = train(engine, state, COHORT)
    if engine.reasons:
        check_line(engine.reasons[4])
        assert mean.clients == 2 and same(mean, others)
    else:
        assert mean.clients == 3
        assert all(bool(torch.isfinite(value).all()) for value in mean.uploads.values())
    engine.nodes.grid.fault = lambda site, message, reply: reply  # type: ignore[attr-defined]
    assert same(train(engine, state, COHORT), everybody)


@SOME
@given(st.sampled_from(["query", "evaluate"]), st.lists(damages, max_size=3))
def test_any_description_or_evaluation(kind, changes):
    """Read as what they are not, too."""
    content = damaged(server("plain").answers[VICTIM], changes)
    for name in ("vectors", "buffers"):
        content.pop(name, None)
    reading = {"query": wire.SiteDescription, "evaluate": wire.EvaluateReply}[kind]
    with limits():
        try:
            wire.read_header(reading, content)
        except ff.FlatfedError as error:
            check_line(str(error))


@SOME
@given(st.integers(-(2**31), 2**31), st.text(max_size=2000))
def test_any_error(code, reason):
    engine, state, _, _, others = server("plain")
    engine.nodes.grid.fault = lambda site, message, reply: (  # type: ignore[attr-defined]
        Message(Error(code, reason), reply_to=message) if site == VICTIM else reply
    )
    with limits():
        mean = train(engine, state, COHORT)
    check_line(engine.reasons[4])
    assert same(mean, others)


# -- a site ------------------------------------------------------------------------------------------------


@functools.cache
def site(kind: str) -> tuple[Deployment, list[tuple[str, Message]]]:
    folder, algorithm = FOLDER / f"{kind} site", ff.build(ALGORITHMS[kind])
    deployment = Deployment(folder, algorithm, normalised, rounds=1, evaluate_every=1)
    deployment.serve()
    kinds = {message.metadata.message_type: (name, message) for name, message in deployment.grid.sent}
    return deployment, [kinds["train"], kinds["evaluate"]]


@SOME
@given(st.sampled_from(["plain", "top-k"]), st.integers(0, 1), st.lists(damages, min_size=1, max_size=3))
def test_any_request(kind, which, changes):
    deployment, messages = site(kind)
    name, message = messages[which]
    content = damaged(message.content, changes)
    changed = Message(content, deployment.grid.ids[name], message.metadata.message_type)
    changed.metadata.__dict__["_message_id"] = changed.object_id
    with scratch() as folder, limits():
        config = {**deployment.grid.nodes[name], "state": str(folder)}
        context = Context(1, deployment.grid.ids[name], config, RecordDict(), {})
        reply = deployment.grid.app(changed, context)
    if reply.has_error():
        assert reply.error.code in {wire.REFUSED, wire.DIVERGED}
        check_line(str(reply.error.reason))
