"""A site that lies, boasts or sends what it likes costs the others at most its own upload."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import FEATURES, federation, generic, network
from torch import nn

import flatfed as ff

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import (
    NAMES,
    REFUSALS,
    Deployment,
    assert_same_bits,
    changed_header,
    changed_vector,
    local,
    normalised,
    only,
    trained_in,
)
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from flatfed.deployment import wire
from flatfed.deployment.wire import plain

Change = Callable[[Message], Message]

# -- uploads that are too long -----------------------------------------------------------------------------


def single() -> nn.Module:
    return network().float()


def single_precision() -> ff.Federation:
    data = federation()
    clients = [data.client(number) for number in range(len(data))]
    samples = [client.batch(torch.arange(len(client))) for client in clients]
    return ff.Federation.from_tensors([(inputs.float(), targets) for inputs, targets in samples])


def filled(number: float, algorithm: ff.Algorithm, name: str = "displacement") -> Change:
    """An upload of which every number is this one, encoded as the algorithm would."""

    def forge(reply: Message) -> Message:
        arrays = dict(reply.content["vectors"])
        size, dtype = sum(value.numel() for value in network().parameters()), torch.float64
        compress = algorithm.compress
        if name not in algorithm.compressed:
            compress = ff.Algorithm().compress
            dtype = {4: torch.float32, 8: torch.float64}[len(arrays[name].data) // size]
        data = compress.encode(torch.full((size,), number, dtype=dtype), torch.Generator())
        arrays[name] = Array("uint8", (len(data),), arrays[name].stype, data)
        reply.content["vectors"] = ArrayRecord(arrays)
        return reply

    return forge


QUANTIZED, SINGLE = {"part": "quantize", "bits": 4}, {"model": single, "data": single_precision()}
LONG: dict[str, tuple[dict[str, Any], str, float, dict[str, Any]]] = {
    "double": ({"name": "fedavg"}, "displacement", 1e30, {}),
    "single": ({"name": "fedavg"}, "displacement", 3.4e38, SINGLE),
    "single, merged": ({"name": "fedavg"}, "displacement", 1e30, SINGLE),
    "single, small": ({"name": "fedavg"}, "displacement", 1e14, SINGLE),
    "second upload": ({"name": "scaffold"}, "control_variate.control_change", -1e30, {}),
    "by samples": ({"name": "scaffold"}, "displacement", 1e30, {"weighting": "samples"}),
    "quantized": ({"name": "scaffold", "compress": QUANTIZED}, "displacement", 1e30, {}),
    "top-k": ({"name": "fedavg", "compress": {"part": "top_k"}}, "displacement", 1e30, {}),
    "sign": ({"name": "fedavg", "compress": {"part": "sign"}}, "displacement", -1e30, {}),
    "error feedback": (
        {"name": "fedavg", "compress": {"part": "error_feedback21", "of": {"part": "top_k"}}},
        "displacement",
        1e30,
        {},
    ),
    "trimmed mean": ({"name": "scaffold", "aggregate": {"part": "trimmed_mean"}}, "displacement", 1e30, {}),
}


@pytest.mark.parametrize("kind", LONG)
def test_an_upload_far_beyond_the_others_never_enters_the_mean(kind, tmp_path, caplog):
    """The round is that of the others, the client goes on from its state before it, and a restart works."""
    described, name, number, options = LONG[kind]
    algorithm = ff.build(described)
    deployment = Deployment(tmp_path, algorithm, rounds=2, participants=4, **options)
    client = next(client for client in deployment.members(1) if client in deployment.members(2))
    only(deployment, client, 1, filled(number, algorithm, name))
    deployment.serve()
    deployment.restart(rounds=3)
    served = deployment.serve()
    counted = {key: value for key, value in served.history[1].items() if key.startswith(REFUSALS)}
    limit = counted.pop(f"norm_limit_{name}", None)
    assert counted == {"refused": 1.0, f"refused_client_{client}": 1.0}
    assert limit is None or 1 < limit < 1e6
    assert f"site-{client} (client {client}) is left out: refused, {name}: " in caplog.text
    also = ["flatness_distance"] if algorithm.compressed else []
    assert_same_bits(local(deployment, {(1, client)}), served, *also)


def test_numbers_whose_squares_are_too_large_are_refused_whatever_the_ratio(tmp_path, caplog):
    """Beside the ratio, which an operator may set to anything, their own precision is a bound."""
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=2, max_norm_ratio=1e38, **SINGLE)
    client = deployment.members(1)[0]
    only(deployment, client, 1, filled(1e30, ff.fedavg()))
    served = deployment.serve()
    assert "refused, displacement: it holds numbers beyond" in caplog.text
    assert_same_bits(local(deployment, {(1, client)}), served)


def test_a_buffer_far_beyond_the_others_is_refused(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), normalised)
    client = deployment.returning(1)

    def huge(array: Array) -> Array:
        data = torch.full(tuple(array.shape), 1e30, dtype=torch.float64).numpy().tobytes()
        return Array(array.dtype, array.shape, array.stype, data)

    only(deployment, client, 1, changed_vector(huge, "buffers"))
    served = deployment.serve()
    assert "refused, buffer 1.running_mean: its norm 2.24e+30 is beyond 1000 times the median " in caplog.text
    assert_same_bits(local(deployment, {(1, client)}), served)


def test_a_minority_cannot_move_the_bound(tmp_path):
    """Half of a cohort agree on what they forge; the lower median is still one of the others."""
    algorithm = ff.fedavg()
    deployment = Deployment(tmp_path, algorithm, participants=4, rounds=2)
    hostile = deployment.members(1)[::2]
    forge = filled(1e30, algorithm)

    def fault(site: str, message: Message, reply: Message) -> Message:
        forged = trained_in(message) == 1 and NAMES.index(site) in hostile
        return forge(reply) if forged else reply

    deployment.grid.fault = fault
    served = deployment.serve()
    assert served.history[1]["refused"] == 2
    assert_same_bits(local(deployment, {(1, client) for client in hostile}), served)


def test_without_a_median_the_model_is_the_measure(tmp_path, caplog):
    """A lone participant that is refused as often as it takes is replaced by the next site."""
    algorithm = ff.fedavg()
    deployment = Deployment(tmp_path, algorithm, participants=1, attempts=2, max_refusals=3)
    (client,) = deployment.members(1)
    forge = filled(1e30, algorithm)

    def fault(site: str, message: Message, reply: Message) -> Message:
        return forge(reply) if site == NAMES[client] and trained_in(message) is not None else reply

    deployment.grid.fault = fault
    served = deployment.serve()
    assert [line["participants"] for line in served.history] == [1] * 5
    assert "the rule for so few uploads" in caplog.text
    assert len(deployment.asked(client)) == 3 and "is no longer asked: 3 of its answers" in caplog.text
    successor = (client + 1) % len(NAMES)
    assert deployment.asked(successor)[0] == deployment.asked(client)[-1]
    assert served.history[-1]["left_out"] == 1
    assert math.isfinite(served.history[-1]["train_loss"]) and served.history[-1]["state_norm_model"] < 100


def heterogeneous() -> ff.Federation:
    """Sizes from 5 to 500 and inputs from 0.001 to 30 times as large; some have a single class."""
    data, clients = federation(), []
    for number, (size, scale) in enumerate(
        [(5, 1.0), (500, 30.0), (5, 0.001), (40, 1.0), (10, 10.0), (200, 0.1), (5, 5.0), (15, 1.0)]
    ):
        own = data.client(number)
        inputs, targets = own.batch(torch.arange(size) % len(own))
        clients.append((scale * inputs, torch.zeros_like(targets) if number % 3 == 0 else targets))
    return ff.Federation.from_tensors(clients)


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "scaffold"},
        {"name": "mimelite"},
        {"name": "fedavg", "compress": {"part": "error_feedback21", "of": {"part": "top_k"}}},
    ],
    ids=lambda algorithm: algorithm["name"],
)
def test_an_honest_cohort_is_never_refused(algorithm, weighting, tmp_path):
    """However unequal its members: by epochs over their own data, one does 100 times another's work."""
    options = {"local_steps": None, "local_epochs": 3, "participants": 5, "rounds": 4, "weighting": weighting}
    built = ff.build(algorithm)
    deployment = Deployment(tmp_path, built, normalised, data=heterogeneous(), **options)
    served = deployment.serve()
    assert not [name for line in served.history for name in line if name.startswith(REFUSALS)]
    assert_same_bits(local(deployment), served, *(["flatness_distance"] if built.compressed else []))


def test_an_honest_minority_beside_sites_that_have_learnt_everything_is_not_refused(tmp_path):
    """Their uploads are millions of times longer than the median, but not longer than the model."""
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=1, participants=8)

    def fault(site: str, message: Message, reply: Message) -> Message:
        learnt = trained_in(message) is not None and NAMES.index(site) >= 2
        return filled(1e-12, ff.fedavg())(reply) if learnt else reply

    deployment.grid.fault = fault
    assert deployment.serve().history[0]["participants"] == 8


def test_the_ratio_can_be_set(tmp_path):
    strict = Deployment(tmp_path, ff.fedavg(), participants=8, rounds=2, max_norm_ratio=1.01, max_refusals=99)
    client = 3
    only(strict, client, 1, filled(1.0, ff.fedavg()))
    served = strict.serve()
    assert served.history[1][f"refused_client_{client}"] == 1.0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["execution"]["federation"]["max_norm_ratio"] == 1.01


# -- sites that are no longer asked ------------------------------------------------------------------------


def forging(deployment: Deployment, client: int) -> None:
    """From the second round on, a client's uploads are of another round."""

    def fault(site: str, message: Message, reply: Message) -> Message:
        forged = site == NAMES[client] and (trained_in(message) or 0) > 0
        return changed_header(round=99)(reply) if forged else reply

    deployment.grid.fault = fault


def test_a_site_is_left_out_after_several_refusals_also_when_the_server_is_restarted(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), participants=8, rounds=3, max_refusals=3)
    forging(deployment, 5)
    deployment.serve()
    assert deployment.asked(5) == [0, 1, 2]
    deployment.restart(rounds=7)
    forging(deployment, 5)
    served = deployment.serve()
    assert deployment.asked(5) == [3]
    assert "site-5 (client 5) is no longer asked: 3 of its answers were refused" in caplog.text
    assert [line.get("left_out", 0) for line in served.history] == [0, 0, 0, 1, 1, 1, 1]
    assert_same_bits(local(deployment, {(number, 5) for number in range(1, 7)}), served)
    deployment.restart({"max_refusals": 9}, rounds=8)
    served = deployment.serve()
    assert deployment.asked(5) == [7] and served.history[7]["participants"] == 8
    assert_same_bits(local(deployment, {(number, 5) for number in range(1, 7)}), served)


def test_an_operator_can_leave_a_site_out(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), participants=8, rounds=2)
    deployment.serve()
    deployment.restart({"leave_out": (NAMES[2],)}, rounds=4)
    served = deployment.serve()
    assert deployment.asked(2) == [] and served.history[3]["left_out"] == 1
    assert_same_bits(local(deployment, {(2, 2), (3, 2)}), served)
    deployment.restart({"leave_out": ("site-9",)}, rounds=5)
    with pytest.raises(ff.FlatfedError, match=r"leave_out = 'site-9': unknown; did you mean 'site-7'"):
        deployment.serve()


def test_too_few_sites_that_are_still_asked_stop_the_run_at_once(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), participants=8, minimum_clients=8, max_refusals=1)
    forging(deployment, 5)
    complaint = (
        r"round 2 had 7 valid uploads .*\(site-5: 1 of its answers were refused, and max_refusals is 1\)"
    )
    with pytest.raises(ff.FlatfedError, match=complaint):
        deployment.serve()


def test_refused_evaluations_count_too(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=4, evaluate_every=1, max_refusals=2)

    def fault(site: str, message: Message, reply: Message) -> Message:
        forged = site == NAMES[1] and message.metadata.message_type == "evaluate"
        return changed_header(metrics={"loss": True})(reply) if forged else reply

    deployment.grid.fault = fault
    served = deployment.serve()
    evaluated = [
        site for site, message in deployment.grid.sent if message.metadata.message_type == "evaluate"
    ]
    assert evaluated.count(NAMES[1]) == 2 and evaluated.count(NAMES[0]) == 5
    assert [line.get("refused_client_1", 0) for line in served.history] == [1, 1, 0, 0]


# -- claims ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "claim", [-1, 0, math.nan, math.inf, True, "12", 12.0, 10**18, 10**400, None, [12]], ids=repr
)
def test_a_site_whose_claim_is_no_number_of_samples_does_not_belong(claim, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg())

    def boast(site: str, message: Message, reply: Message) -> Message:
        return changed_header(samples=claim)(reply) if site == NAMES[3] else reply

    deployment.grid.fault = boast
    with pytest.raises(ff.FlatfedError, match=r"only 7 sites are connected \(site-0, site-1, site-2, site-4"):
        deployment.serve()
    assert "does not say what it is: message: " in caplog.text and "samples" in caplog.text
    assert max(len(record.getMessage()) for record in caplog.records) < 500


@pytest.mark.parametrize("claim", [2 * 10**4, 10**8])
def test_a_claim_does_not_take_over_the_weighted_mean(claim, tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), weighting="samples", rounds=1)

    def boast(site: str, message: Message, reply: Message) -> Message:
        boasts = site == NAMES[3] and message.metadata.message_type in {"query", "train"}
        return changed_header(samples=claim)(reply) if boasts else reply

    deployment.grid.fault = boast
    complaint = f"^max_samples_ratio = 1000: site-3 claims {claim} samples, .*the median is 12; leave it out"
    with pytest.raises(ff.FlatfedError, match=complaint):
        deployment.serve()
    assert not (tmp_path / "run").exists()
    deployment.restart({"max_samples_ratio": 1e7})
    deployment.grid.fault = boast
    assert deployment.serve().history[0]["participants"] == 3


def test_the_most_samples_can_be_set(tmp_path, caplog):
    with pytest.raises(ff.FlatfedError, match="only 0 sites are connected"):
        Deployment(tmp_path, ff.fedavg(), max_samples=11).serve()
    assert "samples = 12: more than max_samples = 11" in caplog.text


# -- messages that are not answers -------------------------------------------------------------------------


def with_records(**records: Any) -> Change:
    def changed(reply: Message) -> Message:
        for name, record in records.items():
            reply.content[name] = record
        return reply

    return changed


def long_payload(reply: Message) -> Message:
    arrays = dict(reply.content["vectors"])
    arrays["displacement"] = Array("uint8", (2**20,), arrays["displacement"].stype, bytes(2**20))
    reply.content["vectors"] = ArrayRecord(arrays)
    return reply


def payload_form(dtype: str, shape: tuple[int, ...]) -> Change:
    return changed_vector(lambda array: Array(dtype, shape, array.stype, array.data))


FORGED: dict[str, tuple[Change, str]] = {
    "extra record": (with_records(more=ConfigRecord({"x": 1})), "records that do not belong, such as 'more'"),
    "long header": (changed_header(kept=["x" * 100] * 1000), "characters, at most 65536 are possible"),
    "header not text": (with_records(header=ConfigRecord({"json": 3})), "it has no header"),
    "header not JSON": (with_records(header=ConfigRecord({"json": "{"})), "message: "),
    "header nested deeply": (with_records(header=ConfigRecord({"json": "[" * 60000})), "message: "),
    "vectors not arrays": (with_records(vectors=ConfigRecord({"x": 1})), "its vectors are missing"),
    "many arrays": (
        with_records(vectors=ArrayRecord({str(n): Array("uint8", (0,), "x", b"") for n in range(2000)})),
        "2000 of them",
    ),
    "long payload": (long_payload, "displacement: 1048576 bytes for 43 numbers"),
    "payload of another dtype": (payload_form("float64", (344,)), "float64 [344] with 344 bytes"),
    "payload of another shape": (payload_form("uint8", (43, 8)), "uint8 [43, 8] with 344 bytes"),
    "payload of a negative shape": (payload_form("uint8", (-344,)), "[-344] with 344 bytes"),
    "missing field": (changed_header(loss=None), "loss = None"),
    "loss as text": (changed_header(loss="0.5"), "loss = '0.5'"),
    "loss as truth": (changed_header(loss=True), "loss = True"),
    "huge loss": (changed_header(loss=1e300), "loss = 1e+300"),
    "client as text": (changed_header(client="1"), "client = '1'"),
    "negative client": (changed_header(client=-1), "client = -1"),
    "huge client": (changed_header(client=10**30), "client = 1000000000000000000000000000000"),
    "huge count": (changed_header(gradient_evaluations=10**30), "gradient_evaluations = 1000"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_message_is_refused_by_name(kind, tmp_path, caplog):
    forge, complaint = FORGED[kind]
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=2)
    client = deployment.members(1)[0]
    only(deployment, client, 1, forge)
    served = deployment.serve()
    assert complaint in caplog.text and f"site-{client} (client {client}) is left out: refused" in caplog.text
    assert_same_bits(local(deployment, {(1, client)}), served)


def test_an_oversized_payload_never_reaches_a_decoder(tmp_path, monkeypatch):
    deployment = Deployment(tmp_path, ff.build({"name": "fedavg", "compress": {"part": "top_k"}}), rounds=2)
    kind, sizes = type(deployment.spec.algorithm.compress), []
    real = kind.decode

    def decode(self: Any, payload: bytes, *rest: Any) -> torch.Tensor:
        sizes.append(len(payload))
        return real(self, payload, *rest)

    monkeypatch.setattr(kind, "decode", decode)
    only(deployment, deployment.members(1)[0], 1, long_payload)
    deployment.serve()
    assert sizes and max(sizes) < 1000


@pytest.mark.parametrize("which", ["the same twice", "an error beside it", "another upload"])
def test_a_site_that_answers_twice_is_refused(which, tmp_path, caplog):
    """Whichever came first would be taken, so neither is."""
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=2)
    client = deployment.members(1)[0]
    real = deployment.grid.send_and_receive

    def send_and_receive(messages: Any, *, timeout: float | None = None) -> list[Message]:
        replies = list(real(messages, timeout=timeout))
        again = []
        for site, message in deployment.grid.sent[-len(replies) :]:
            if site == NAMES[client] and trained_in(message) == 1:
                if which == "an error beside it":
                    again.append(Message(Error(7, "no"), reply_to=message))
                else:
                    number = 1.0 if which == "another upload" else None
                    reply = deployment.grid.call(site, message)
                    again.append(filled(number, ff.scaffold())(reply) if number else reply)
        return [*again, *replies]

    deployment.grid.send_and_receive = send_and_receive  # type: ignore[method-assign]
    served = deployment.serve()
    assert f"site-{client} (client {client}) is left out: refused, it answered more than once" in caplog.text
    assert served.history[1]["refused"] == 1
    assert_same_bits(local(deployment, {(1, client)}), served)


# -- text from sites ---------------------------------------------------------------------------------------

NASTY = "\x1b[2Jgone\r\nERROR root: all is lost\x00\u202egnp.exe\u2028\ud800" + "x" * 10**5


def assert_plain(records: list[Any]) -> None:
    for record in records:
        text = record.getMessage()
        assert text.isprintable(), text
        assert len(text) < 700


def test_text_becomes_one_printable_line():
    text = plain(NASTY)
    assert text.startswith(r"\x1b[2Jgone ERROR root: all is lost\x00\u202egnp.exe \ud800xx")
    assert text.isprintable() and len(text) == 300 and text.endswith("…")
    assert plain("as it is, Zürich") == "as it is, Zürich"


NASTY_ANSWERS: dict[str, Change] = {
    "field": changed_header(**{NASTY: 1}),
    "value": changed_header(loss=NASTY),
    "long value": changed_header(client=NASTY),
    "dtype": changed_vector(lambda array: Array("\x1b[2J\n", array.shape, array.stype, array.data)),
    "form": changed_vector(lambda array: Array(array.dtype, array.shape, "\x1b[2J\n", array.data)),
    "buffer dtype": changed_vector(
        lambda array: Array("\x1b[2J\n" * 999, array.shape, array.stype, array.data), "buffers"
    ),
    "shape": changed_vector(lambda array: Array(array.dtype, (1,) * 10**4, array.stype, array.data)),
    "name of a vector": with_records(vectors=ArrayRecord({"\x1b[2J\n": Array("uint8", (0,), "x", b"")})),
    "name of a record": with_records(**{"\x1b[2J\n": ConfigRecord({})}),
}


@pytest.mark.parametrize("kind", NASTY_ANSWERS)
def test_nothing_that_a_site_sends_reaches_the_log_as_it_is(kind, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), normalised, rounds=2)
    client = deployment.members(1)[0]
    only(deployment, client, 1, NASTY_ANSWERS[kind])
    served = deployment.serve()
    assert served.history[1]["refused"] == 1
    assert_plain(caplog.records)


def test_an_error_reaches_the_log_and_the_final_line_in_plain_text(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), attempts=1)

    def fault(site: str, message: Message, reply: Message) -> Message:
        failed = trained_in(message) is not None
        return Message(Error(7, NASTY.replace("\ud800", "")), reply_to=message) if failed else reply

    deployment.grid.fault = fault
    with pytest.raises(ff.FlatfedError, match=r"error 7: \\x1b\[2Jgone ERROR root") as raised:
        deployment.serve()
    assert str(raised.value).isprintable() and len(str(raised.value)) < 700
    assert_plain(caplog.records)


@pytest.mark.parametrize("registered", [True, False])
def test_a_name_that_cannot_be_shown_takes_no_part(registered, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), registered=registered)
    name = NASTY[:60].replace("\ud800", "")
    if registered:
        real = deployment.grid.get_nodes
        renamed = {NAMES[3]: name}
        deployment.grid.get_nodes = lambda: [  # type: ignore[method-assign]
            NodeInfo(node_id=node.node_id, name=renamed.get(node.name, node.name)) for node in real()
        ]
    else:
        deployment.grid.fault = lambda site, message, reply: (
            changed_header(name=name)(reply) if site == NAMES[3] else reply
        )
    with pytest.raises(ff.FlatfedError, match=r"only 7 sites are connected \(site-0, site-1, site-2, site-4"):
        deployment.serve()
    assert r"\x1b[2Jgone" in caplog.text
    assert_plain(caplog.records)


def test_features_are_as_many_as_the_forged_payloads_assume():
    assert sum(value.numel() for value in network().parameters()) == 43 and FEATURES == 4
    assert generic("fedavg").uploads == ("displacement",)


@pytest.mark.parametrize("loss", [1e206, math.inf, math.nan])
def test_a_model_too_bad_to_be_measured_is_reported_as_diverged(tmp_path, monkeypatch, loss):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=1, evaluate_every=1)
    deployment.serve()
    name, message = next(sent for sent in deployment.grid.sent if sent[1].metadata.message_type == "evaluate")
    monkeypatch.setattr("flatfed.deployment.client.evaluate_clients", lambda *_: [{"loss": loss}])
    context = Context(1, deployment.grid.ids[name], dict(deployment.grid.nodes[name]), RecordDict(), {})
    reply = deployment.grid.app(message, context)
    assert reply.error.code == wire.DIVERGED and f"the loss reaches {loss:g}" in reply.error.reason
