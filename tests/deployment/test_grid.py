"""The real ServerApp and ClientApp over a grid inside this process: the local engine's numbers, and faults.

Equality is that of bits: the sites train client by client in double precision, as the local engine does with
path="client", and the server adds their uploads up in the same order.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from problems import DEFAULTS, FEATURES, Recorder, federation, generic, in_float32, network, run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import flatfed as ff
from flatfed.core.state import Dimensions
from flatfed.data.transform import AsStored

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import (
    NAMES,
    REFUSALS,
    Deployment,
    Fault,
    assert_same_bits,
    changed_header,
    changed_names,
    changed_vector,
    local,
    normalised,
    only,
    poisoned,
    trained_in,
    without_record,
)
from flwr.app import Array, Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

from flatfed.deployment import client_app, server_app
from flatfed.deployment.wire import decode_payloads, pack_payloads


def records_flatness(finished: ff.Run) -> set[bool]:
    return {"flatness_distance" in line for line in finished.history}


@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_every_algorithm_gives_the_bits_of_the_local_engine(name, tmp_path):
    deployment = Deployment(tmp_path, generic(name))
    expected, served = local(deployment), deployment.serve()
    # FedSpeed's sites upload Δ + h, and Δ alone, of which the flatness distance is, stays with them.
    altered = any(part.alters_displacement for part in deployment.spec.algorithm.parts)
    assert_same_bits(expected, served, *(["flatness_distance"] if altered else []))
    assert records_flatness(served) == {not altered} and records_flatness(expected) == {True}
    assert not [name for line in served.history for name in line if name.startswith(REFUSALS)]


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ({"name": "scaffold"}, {"weighting": "samples", "data": federation(unequal=True)}),
        ({"name": "fedmoswa"}, {"sampling": "bernoulli"}),
        ({"name": "scaffold", "compress": {"part": "error_feedback", "of": {"part": "quantize"}}}, {}),
        ({"name": "fedavg", "compress": {"part": "top_k", "ratio": 0.3}}, {}),
        ({"name": "fedavg"}, {"evaluate": "active_mean", "registered": False}),
    ],
    ids=["samples", "bernoulli", "error feedback", "top-k", "names only claimed"],
)
def test_settings_and_compressors_change_nothing_about_that(algorithm, options, tmp_path):
    deployment = Deployment(tmp_path, ff.build(algorithm), **options)
    compressed = bool(deployment.spec.algorithm.compressed)
    assert_same_bits(local(deployment), deployment.serve(), *(["flatness_distance"] if compressed else []))


def test_buffers_travel_and_are_averaged(tmp_path):
    deployment = Deployment(tmp_path, ff.fedsam(), normalised)
    served = deployment.serve()
    assert_same_bits(local(deployment), served)
    assert float(served.model[1].running_mean.abs().max()) > 0


QUANTIZED = {"part": "quantize", "bits": 4}
TRIMMED = {"part": "trimmed_mean", "share": 0.4}


@pytest.mark.parametrize(
    ("algorithm", "travels"),
    [
        ({"name": "fedavg"}, True),
        ({"name": "scaffold"}, True),
        ({"name": "scaffold", "aggregate": TRIMMED}, True),
        ({"name": "scaffold", "compress": QUANTIZED, "uncompressed": ["displacement"]}, True),
        ({"name": "scaffold", "compress": QUANTIZED}, False),
        ({"name": "fedavg", "compress": {"part": "error_feedback", "of": QUANTIZED}}, False),
        ({"name": "fedavg", "compress": QUANTIZED, "aggregate": TRIMMED}, False),
        ({"name": "fedspeed"}, False),
        ({"name": "fedspeed", "aggregate": TRIMMED}, False),
    ],
    ids=str,
)
def test_the_flatness_distance_is_the_local_engines_or_absent(algorithm, travels, tmp_path):
    """The server needs Δ̄ for it, which is not what compressed or altered displacements add up to."""
    deployment = Deployment(tmp_path, ff.build(algorithm))
    expected, served = local(deployment), deployment.serve()
    assert all(line["flatness_distance"] > 0 and line["client_drift"] > 0 for line in expected.history)
    assert records_flatness(served) == {travels}
    for name in ("client_drift", *(["flatness_distance"] if travels else [])):
        assert [line[name] for line in served.history] == [line[name] for line in expected.history]


@pytest.mark.parametrize("weighting", ["uniform", "samples"])
@pytest.mark.parametrize("aggregate", [{"part": "none"}, TRIMMED], ids=["mean", "trimmed mean"])
def test_the_flatness_distance_is_that_of_the_clients_models(aggregate, weighting, tmp_path):
    """mean ‖Δ_i − Δ̄‖² around their mean, whatever rule the server's step follows."""
    algorithm = ff.build({"name": "fedsam", "aggregate": aggregate})
    deployment = Deployment(tmp_path, algorithm, data=federation(unequal=True), weighting=weighting)
    uploads: dict[int, list[tuple[float, torch.Tensor]]] = {}

    def watch(site: str, message: Message, reply: Message) -> Message:
        number = trained_in(message)
        if number is not None:
            data = reply.content["vectors"]["displacement"].data
            samples = len(deployment.data.client(NAMES.index(site)))
            weight = float(samples) if weighting == "samples" else 1.0
            displacement = torch.frombuffer(bytearray(data), dtype=torch.float64)
            uploads.setdefault(number, []).append((weight, displacement))
        return reply

    deployment.grid.fault = watch
    served = deployment.serve()
    for number, line in enumerate(served.history):
        weights = torch.tensor([weight for weight, _ in uploads[number]], dtype=torch.float64)
        rows = torch.stack([displacement for _, displacement in uploads[number]])
        mean = weights @ rows / weights.sum()
        distance = float(weights @ (rows - mean).square().sum(1) / weights.sum())
        assert line["flatness_distance"] == pytest.approx(distance, rel=1e-9)


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        ({"name": "fedavg"}, {}),
        ({"name": "scaffold"}, {}),
        ({"name": "scaffold"}, {"model": normalised}),
        ({"name": "scaffold"}, {"weighting": "samples", "data": federation(unequal=True)}),
        (
            {"name": "fedmoswa"},
            {"model": normalised, "weighting": "samples", "data": federation(unequal=True)},
        ),
        ({"name": "scaffold", "compress": QUANTIZED}, {"model": normalised}),
    ],
    ids=["fedavg", "uploads", "buffers", "samples", "buffers and samples", "compressed"],
)
@pytest.mark.parametrize("loses", [False, True], ids=["all answer", "one is lost"])
def test_a_trimmed_mean_gives_the_models_of_the_local_engine(algorithm, options, loses, tmp_path):
    trimmed = ff.build({**algorithm, "aggregate": {"part": "trimmed_mean", "share": 0.25}})
    deployment = Deployment(tmp_path, trimmed, participants=5, **options)
    lost = {(1, deployment.returning(1))} if loses else set()
    for number, client in lost:
        only(deployment, client, number, lambda reply: None)
    here, there = Recorder(), Recorder()
    deployment.callbacks.append(there)
    expected, served = local(deployment, lost, recorder=here), deployment.serve()
    assert torch.equal(here.models, there.models)
    assert_same_bits(expected, served, *(["flatness_distance"] if trimmed.compressed else []))
    mean = local(deployment, lost, algorithm=ff.build(algorithm))
    assert not torch.equal(mean.server["model"], served.server["model"])


TWO_OWNERS: dict[str, tuple[ff.Algorithm, set[str]]] = {
    "momenta": (
        ff.Algorithm(
            correct=(ff.parts.GlobalMomentum(0.4, 0.6), ff.parts.FullGradientMomentum(0.3)),
            server=ff.parts.Momentum(0.5),
        ),
        {"global_momentum.momentum_gradient", "full_gradient_momentum.momentum_gradient"},
    ),
    "momenta of one kind": (
        ff.Algorithm(correct=(ff.parts.FullGradientMomentum(0.5), ff.parts.FullGradientMomentum(0.3))),
        {"full_gradient_momentum.momentum_gradient", "full_gradient_momentum_2.momentum_gradient"},
    ),
    "controls": (
        ff.Algorithm(correct=(ff.parts.ControlVariate(), ff.parts.MomentumControlVariate(rate=0.4))),
        {"control_variate.control", "momentum_control_variate.control"},
    ),
    "compressed controls": (
        ff.Algorithm(
            correct=(ff.parts.ControlVariate(), ff.parts.MomentumControlVariate(rate=0.4)),
            compress=ff.parts.ErrorFeedback(ff.parts.Quantize(4)),
        ),
        {"control_variate.control", "momentum_control_variate.control"},
    ),
}
"""Compositions in which two parts use one name, and what each of the two keeps under it."""


@pytest.mark.parametrize("kind", TWO_OWNERS)
def test_parts_that_use_one_name_keep_apart(kind, tmp_path):
    algorithm, keys = TWO_OWNERS[kind]
    deployment = Deployment(tmp_path, algorithm, rounds=3)
    deployment.serve()
    deployment.restart(rounds=7)
    served = deployment.serve()
    assert_same_bits(local(deployment), served, *(["flatness_distance"] if algorithm.compressed else []))
    broadcasts = [message for _, message in deployment.grid.sent if trained_in(message) is not None]
    assert all(keys <= set(message.content["vectors"]) for message in broadcasts)
    one, other = (served.server[key] for key in keys)
    assert float(one.norm()) > 0 and float(other.norm()) > 0 and not torch.equal(one, other)


# -- what travels ------------------------------------------------------------------------------------------


def test_exactly_what_is_declared_travels(tmp_path):
    algorithm = ff.build({"name": "fedmoswa", "compress": {"part": "quantize", "bits": 4}})
    deployment = Deployment(tmp_path, algorithm, normalised)
    uploads = []

    def watch(site: str, message: Message, reply: Message) -> Message:
        if trained_in(message) is not None:
            assert set(message.content["vectors"]) == set(algorithm.broadcast)
            assert set(reply.content["vectors"]) == set(algorithm.uploads)
            names = {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
            assert set(message.content["buffers"]) == set(reply.content["buffers"]) == names
            uploads.append(sum(len(array.data) for array in reply.content["vectors"].values()))
        return reply

    deployment.grid.fault = watch
    served = deployment.serve()
    assert len(uploads) == 15
    buffers = sum(value.nbytes for value in normalised().buffers())
    assert sum(line["bytes_up"] for line in served.history) == sum(uploads) + 15 * buffers
    plain = Deployment(tmp_path / "plain", ff.fedmoswa(), normalised).serve()
    assert max(uploads) < plain.history[0]["bytes_up"] / 3 / 4


def carried(deployment: Deployment, name: str) -> list[str]:
    """The sites to which messages took a vector."""
    return [site for site, message in deployment.grid.sent if name in message.content.get("vectors", {})]


def test_vectors_that_are_sent_once_are_sent_once(tmp_path):
    deployment = Deployment(tmp_path, generic("fedsynsam"), rounds=9)
    assert_same_bits(local(deployment), deployment.serve())
    members = [client for number in range(9) for client in deployment.members(number)]
    late = [client for number in range(2, 9) for client in deployment.members(number)]
    sites = carried(deployment, "trajectory_matching.synthetic_inputs")
    assert sorted(sites) == sorted({NAMES[client] for client in late})
    assert len(carried(deployment, "model")) == len(members) + len(NAMES)  # and the final evaluation


def test_a_site_that_lost_such_a_vector_gets_it_again(tmp_path, caplog):
    deployment = Deployment(tmp_path, generic("fedsynsam"), rounds=9)
    client = deployment.returning(3)
    lost = next(number for number in range(4, 9) if client in deployment.members(number))

    def lose(progress: ff.Progress) -> None:
        if progress.round == lost:
            for path in deployment.files(client, "trajectory_matching.synthetic_inputs-*"):
                path.unlink()

    deployment.callbacks.append(lose)
    served = deployment.serve()
    assert "trajectory_matching.synthetic_inputs: this site does not have it yet" in caplog.text
    assert_same_bits(local(deployment, {(lost, client)}), served)


# -- malformed uploads -------------------------------------------------------------------------------------


def as_single(array: Array) -> Array:
    data = torch.frombuffer(bytearray(array.data), dtype=torch.float64).float().numpy().tobytes()
    return Array(array.dtype, (len(data),), array.stype, data)


MALFORMED: dict[str, tuple[Fault, str]] = {
    "missing vector": (
        changed_names(lambda arrays: {"displacement": arrays["displacement"]}),
        "vectors: ['displacement'] where",
    ),
    "extra vector": (
        changed_names(lambda arrays: arrays | {"extra": arrays["displacement"]}),
        "'extra'",
    ),
    "renamed vector": (
        changed_names(lambda arrays: {name.upper(): array for name, array in arrays.items()}),
        "DISPLACEMENT",
    ),
    "cut": (
        changed_vector(lambda array: Array(array.dtype, array.shape, array.stype, array.data[:-8])),
        "it was cut or damaged",
    ),
    "empty": (changed_vector(lambda array: Array("uint8", (0,), array.stype, b"")), "0 bytes where"),
    "single precision": (changed_vector(as_single), "it was cut or damaged"),
    "pickled": (
        changed_vector(lambda array: Array(array.dtype, array.shape, "numpy.ndarray", array.data)),
        "'numpy.ndarray' where a payload belongs",
    ),
    "not a number": (changed_vector(poisoned(math.nan)), "not finite"),
    "infinite": (changed_vector(poisoned(math.inf)), "not finite"),
    "infinite buffer": (changed_vector(poisoned(math.inf), "buffers"), "not finite"),
    "vector whose square overflows": (changed_vector(poisoned(1e200)), "numbers beyond 1e+100"),
    "buffer whose sum overflows": (changed_vector(poisoned(-1e308), "buffers"), "numbers beyond 1e+100"),
    "buffer of another shape": (
        changed_vector(
            lambda array: Array(array.dtype, (1, *array.shape), array.stype, array.data), "buffers"
        ),
        "where float64 [5] belongs",
    ),
    "wrong round": (changed_header(round=0), "round = 0: it should be 1"),
    "wrong run": (changed_header(run="0" * 32), f"run = {'0' * 32}: it should be"),
    "wrong client": (changed_header(client=99), "client = 99: it should be"),
    "other data": (changed_header(samples=10**9), "samples = 1000000000: it had 12 when the run began"),
    "loss not a number": (changed_header(loss=math.nan), "loss"),
    "negative drift": (changed_header(drift=-1.0), "drift = -1"),
    "negative square": (changed_header(squared_displacement=-1.0), "squared_displacement = -1"),
    "negative count": (changed_header(gradient_evaluations=-1), "gradient_evaluations = -1"),
    "unknown field": (changed_header(weight=1e9), "weight: unknown"),
    "no header": (without_record("header"), "it has no header"),
    "no vectors": (without_record("vectors"), "its vectors are missing"),
    "no buffers": (without_record("buffers"), "its buffers are missing"),
    "reply to another message": (
        lambda reply: Message(RecordDict(), reply_to=reply),
        "that was never sent is ignored",
    ),
    "nothing": (lambda reply: (reply.content.clear(), reply)[1], "it has no header"),
    "late": (lambda reply: None, "no answer within 0.02 s"),
}


@pytest.mark.parametrize("kind", sorted(MALFORMED))
def test_what_is_malformed_or_late_never_enters_the_mean(kind, tmp_path, caplog):
    """The round is that of the others, and the client goes on from its state before it."""
    fault, complaint = MALFORMED[kind]
    deployment = Deployment(tmp_path, ff.scaffold(), normalised)
    client = deployment.returning(1)
    only(deployment, client, 1, fault)
    served = deployment.serve()
    assert complaint in caplog.text
    assert f"site-{client} (client {client}) is left out" in caplog.text
    assert served.history[1]["participants"] == 2
    counted = {name: value for name, value in served.history[1].items() if name.startswith(REFUSALS)}
    lost = kind in {"late", "reply to another message"}
    assert counted == ({} if lost else {"refused": 1.0, f"refused_client_{client}": 1.0})
    assert_same_bits(local(deployment, {(1, client)}), served)


BROADCASTS: dict[str, tuple[Callable[[Message], Message], str]] = {
    "missing vector": (changed_names(lambda arrays: {"model": arrays["model"]}), "vectors: ['model'] where"),
    "extra vector": (changed_names(lambda arrays: arrays | {"extra": arrays["model"]}), "'extra'"),
    "cut": (
        changed_vector(lambda array: Array(array.dtype, array.shape, array.stype, array.data[:-8])),
        "bytes where",
    ),
    "another length": (
        changed_vector(lambda array: Array(array.dtype, (4,), array.stype, array.data[:32])),
        "float64 [4]",
    ),
    "another dtype": (
        changed_vector(lambda array: Array("int64", array.shape, array.stype, array.data)),
        "int64",
    ),
    "not a number": (changed_vector(poisoned(math.nan)), "not finite"),
    "another spec": (changed_header(spec="0" * 64), "another model, algorithm or settings"),
    "path in the run": (changed_header(run="../../etc"), "run = '../../etc'"),
    "impossible round": (changed_header(round=-1), "round = -1"),
    "state that never was": (changed_header(merged=0), "the state after round 1 is not in"),
    "no buffers": (without_record("buffers"), "its buffers are missing"),
    "no header": (without_record("header"), "it has no header"),
    "path in a digest": (changed_header(kept={"x": "/../../../etc/x"}), "kept.x"),
    "unknown vector to keep": (changed_header(kept={"../x": ""}), "which vectors this site should have"),
}


@pytest.mark.parametrize("kind", sorted(BROADCASTS))
def test_a_site_refuses_a_malformed_broadcast(kind, tmp_path):
    change, complaint = BROADCASTS[kind]
    deployment = Deployment(tmp_path, ff.scaffold(), normalised, rounds=1)
    deployment.serve()
    site, message = next(sent for sent in deployment.grid.sent if trained_in(sent[1]) == 0)
    for path in deployment.files(NAMES.index(site)):
        path.unlink()
    reply = deployment.grid.call(site, change(message))
    assert reply.has_error() and complaint in str(reply.error.reason)
    assert deployment.files(NAMES.index(site)) == []


def test_a_damaged_compressed_upload_is_refused(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.build({"name": "fedavg", "compress": {"part": "top_k"}}))
    client = deployment.returning(1)

    def flipped(array: Array) -> Array:
        data = bytearray(array.data)
        data[0] ^= 1
        return Array(array.dtype, array.shape, array.stype, bytes(data))

    only(deployment, client, 1, changed_vector(flipped))
    served = deployment.serve()
    assert f"site-{client} (client {client}) is left out" in caplog.text
    assert_same_bits(local(deployment, {(1, client)}), served, "flatness_distance")


def test_a_payload_beyond_the_models_precision_is_refused():
    algorithm = ff.build({"name": "fedavg", "compress": {"part": "sign"}})
    payload = algorithm.compress.encode(torch.full((8,), 1e30), torch.Generator())
    record = pack_payloads({"displacement": payload})
    with pytest.raises(ff.FlatfedError, match=r"^displacement: .* numbers beyond torch.float16"):
        decode_payloads(record, algorithm, Dimensions(8, (4,)), torch.float16)


class Single(nn.Module):
    """Has a buffer in single precision."""

    def __init__(self, step: float) -> None:
        super().__init__()
        self.step = step
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += self.step
        return inputs


def test_a_buffer_beyond_its_own_precision_is_refused(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), lambda: nn.Sequential(Single(1.0), network()))
    client = deployment.members(1)[0]
    only(deployment, client, 1, changed_vector(poisoned(1e50), "buffers"))
    served = deployment.serve()
    assert "0.seen: with this change it would not be finite" in caplog.text
    assert_same_bits(local(deployment, {(1, client)}), served)


def test_a_buffer_that_diverges_stops_the_run():
    model = nn.Sequential(Single(3e38), network())
    with pytest.raises(ff.DivergedError, match=r"^round 1: the buffer '0\.seen' is no longer finite"):
        run(ff.fedavg(), model=model, **{**DEFAULTS, "path": "client"})


def test_a_client_that_raises_or_vanishes_is_left_out(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold())
    raising, vanishing = deployment.members(1)[0], deployment.members(3)[1]
    real = deployment.load

    def load(context: Context) -> Any:
        if context.node_config["name"] == NAMES[raising] and deployment.grid.sent[-1][0] == NAMES[raising]:
            message = deployment.grid.sent[-1][1]
            if trained_in(message) == 1:
                raise OSError("disk on fire")
        return real(context)

    deployment.load = load  # type: ignore[method-assign]
    deployment.restart()

    def vanish(progress: ff.Progress) -> None:
        deployment.grid.offline = {NAMES[vanishing]} if progress.round == 3 else set()

    deployment.callbacks.append(vanish)
    served = deployment.serve()
    assert "error 2: OSError('disk on fire')" in caplog.text
    assert f"site-{vanishing} (client {vanishing}) is left out: train: not connected" in caplog.text
    assert_same_bits(local(deployment, {(1, raising), (3, vanishing)}), served)


# -- state on the sites ------------------------------------------------------------------------------------


def test_a_round_that_was_lost_on_the_way_leaves_no_trace(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold())
    client = deployment.returning(1)
    only(deployment, client, 1, lambda reply: None)
    seen = {}

    def look(progress: ff.Progress) -> None:
        seen[progress.round] = [path.name for path in deployment.files(client)]

    deployment.callbacks.append(look)
    deployment.serve()
    again = next(number for number in range(2, 5) if client in deployment.members(number))
    assert "state-1.safetensors" in seen[2]
    assert "state-1.safetensors" not in seen[again + 1] and f"state-{again}.safetensors" in seen[again + 1]


@pytest.mark.parametrize("name", ["scaffold", "fedsmoo", "fedsynsam"])
def test_both_sides_may_be_restarted_between_rounds(name, tmp_path):
    """Control variates and duals are on the sites' disks, everything else in the run's folder."""
    deployment = Deployment(tmp_path, generic(name), rounds=3)
    deployment.serve()
    deployment.restart(rounds=7)
    assert_same_bits(local(deployment), deployment.serve())


class Killed(BaseException):
    """As good as kill -9: nobody catches it."""


def test_a_server_killed_in_the_middle_of_a_round_goes_on(tmp_path):
    deployment = Deployment(tmp_path, ff.fedmoswa())

    def kill(site: str, message: Message, reply: Message) -> Message:
        # The others have trained and kept their new states by now.
        if trained_in(message) == 3 and site == NAMES[deployment.members(3)[0]]:
            raise Killed
        return reply

    deployment.grid.fault = kill
    with pytest.raises(Killed):
        deployment.serve()
    assert len((tmp_path / "run" / "history.jsonl").read_text().splitlines()) == 3
    deployment.restart()
    assert_same_bits(local(deployment), deployment.serve())


def test_state_of_another_run_is_never_used(tmp_path):
    first = Deployment(tmp_path, ff.scaffold())
    first.serve()
    (tmp_path / "run").rename(tmp_path / "earlier")
    again = Deployment(tmp_path, ff.scaffold())
    assert_same_bits(local(again), again.serve())


def test_a_site_whose_state_is_gone_does_not_take_part(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold())
    client = deployment.returning(0)
    again = [number for number in range(1, 5) if client in deployment.members(number)]

    def lose(progress: ff.Progress) -> None:
        for path in deployment.files(client):
            path.unlink()

    deployment.callbacks.append(lose)
    served = deployment.serve()
    assert "the state after round 1 is not in" in caplog.text
    assert_same_bits(local(deployment, {(number, client) for number in again}), served)


def test_a_damaged_state_is_refused(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), rounds=5)
    client = deployment.returning(0)

    def damage(progress: ff.Progress) -> None:
        if progress.round == 1:
            (path,) = deployment.files(client)
            path.write_bytes(path.read_bytes()[:-8])

    deployment.callbacks.append(damage)
    deployment.serve()
    assert "state-0.safetensors: cannot be read" in caplog.text


def test_a_message_that_comes_too_late_is_refused(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold())
    deployment.serve()
    client = deployment.returning(0)
    old = next(
        message
        for site, message in deployment.grid.sent
        if site == NAMES[client] and trained_in(message) == 0
    )
    before = {path: path.read_bytes() for path in deployment.files(client)}
    reply = deployment.grid.call(NAMES[client], old)
    assert reply.has_error() and "the message is out of date" in str(reply.error.reason)
    assert {path: path.read_bytes() for path in deployment.files(client)} == before


def test_a_site_with_another_app_refuses(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), attempts=1)
    other = replace(deployment.spec, algorithm=ff.fedavg())
    deployment.grid.app = client_app(other, deployment.load)
    with pytest.raises(ff.FlatfedError, match="round 1 had 0 valid uploads after 1 attempts"):
        deployment.serve()
    assert "another model, algorithm or settings than the server's" in caplog.text


@dataclass(frozen=True)
class Doubled(AsStored):
    def evaluate(self, inputs: torch.Tensor) -> torch.Tensor:
        return 2 * inputs


@pytest.mark.parametrize(
    "changes",
    [
        {"transform": Doubled()},
        {"loss": nn.functional.multi_margin_loss},
        {"name": "margins", "version": "2"},
        {"model": normalised},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_a_site_notices_whatever_else_differs(changes, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), attempts=1)
    deployment.spec = replace(deployment.spec, name="margins", version="1")
    deployment.restart()
    deployment.grid.app = client_app(replace(deployment.spec, **changes), deployment.load)
    with pytest.raises(ff.FlatfedError, match="error 1000: spec: this site's app has another model"):
        deployment.serve()


def test_what_cannot_be_compared_needs_a_version_to_go_on(tmp_path):
    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(outputs, targets)

    deployment = Deployment(tmp_path / "without", ff.scaffold(), rounds=2)
    deployment.spec = replace(deployment.spec, loss=loss)
    deployment.restart()
    deployment.serve()
    deployment.restart(rounds=5)
    with pytest.raises(ff.FlatfedError, match="it cannot be continued safely"):
        deployment.serve()
    deployment = Deployment(tmp_path / "with", ff.scaffold(), rounds=2)
    deployment.spec = replace(deployment.spec, loss=loss, name="entropy", version="1")
    deployment.restart()
    deployment.serve()
    deployment.restart(rounds=5)
    assert_same_bits(local(deployment), deployment.serve())
    deployment.spec = replace(deployment.spec, version="2")
    deployment.restart(rounds=6)
    with pytest.raises(ff.FlatfedError, match="it holds another run"):
        deployment.serve()
    with pytest.raises(ff.FlatfedError, match="give both or neither"):
        replace(deployment.spec, name="")


# -- enough clients ----------------------------------------------------------------------------------------


def test_a_round_with_too_few_uploads_is_repeated(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.scaffold(), minimum_clients=3)
    client, failures = deployment.members(2)[1], []

    def fail_twice(reply: Message) -> Message | None:
        failures.append(client)
        return None if len(failures) < 3 else reply

    only(deployment, client, 2, fail_twice)
    served = deployment.serve()
    assert len(failures) == 3 and "round 3: 2 of at least 3 uploads after attempt 2 of 3" in caplog.text
    assert_same_bits(local(deployment), served)


def test_after_the_last_attempt_the_run_stops_and_can_go_on(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), minimum_clients=3, attempts=2)
    only(deployment, deployment.members(2)[1], 2, lambda reply: None)
    with pytest.raises(
        ff.FlatfedError, match=r"^minimum_clients = 3: round 3 had 2 valid uploads after 2 attempts"
    ):
        deployment.serve()
    deployment.restart()
    assert_same_bits(local(deployment), deployment.serve())


@pytest.mark.parametrize("steps", [8, 30])
def test_divergence_at_every_site_is_told_as_such(steps, tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), lr=3e38, local_steps=steps)
    names = ", ".join(NAMES[client] for client in deployment.members(0))
    with pytest.raises(ff.DivergedError, match=f"^round 1: training diverged at {names}; lower lr "):
        deployment.serve()
    trained = [site for site, message in deployment.grid.sent if trained_in(message) is not None]
    assert len(trained) == 3, "they would do the same again"


def test_divergence_of_buffers_alone_is_told_as_such(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), lambda: nn.Sequential(Single(3e38), network()))
    with pytest.raises(ff.DivergedError, match=r"^round 1: training diverged at "):
        deployment.serve()


def test_sites_that_are_missing_have_not_diverged(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), lr=3e38, local_steps=30, attempts=2)
    only(deployment, deployment.members(0)[0], 0, lambda reply: None)
    with pytest.raises(ff.FlatfedError, match=r"^minimum_clients = 1: round 1 had 0 valid uploads"):
        deployment.serve()


def test_a_node_that_comes_back_is_waited_for(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), minimum_clients=3, round_timeout=10.0)
    looks, (client, *_) = [], deployment.members(2)
    real = deployment.grid.get_nodes

    def get_nodes() -> Any:
        if deployment.grid.offline:
            looks.append(client)
            if len(looks) == 3:
                deployment.grid.offline = set()
        return real()

    deployment.grid.get_nodes = get_nodes  # type: ignore[method-assign]

    def leave(progress: ff.Progress) -> None:
        if progress.round == 2:
            deployment.grid.offline = {NAMES[client]}

    deployment.callbacks.append(leave)
    assert_same_bits(local(deployment), deployment.serve())
    assert len(looks) == 3


@pytest.mark.parametrize("lost", [1, 3])
def test_a_site_whose_description_was_lost_is_asked_again(lost, tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), registered=False, rounds=2)
    deployment.serve()
    deployment.restart(rounds=9)
    queries = []

    def lose(site: str, message: Message, reply: Message) -> Message | None:
        if (site, message.metadata.message_type) == (NAMES[3], "query"):
            queries.append(site)
            return None if len(queries) <= lost else reply
        return reply

    deployment.grid.fault = lose
    served = deployment.serve()
    member = [number for number in range(2, 9) if 3 in deployment.members(number)]
    # One query comes with the first round, then one with each round in which it is missing.
    assert_same_bits(local(deployment, {(number, 3) for number in member[: lost - 1]}), served)
    assert len(queries) == lost + 1


def test_a_stranger_that_says_nothing_is_asked_once(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), registered=False, clients=tuple(NAMES))
    deployment.grid.ids["stranger"], deployment.grid.nodes["stranger"] = 99, {"name": "stranger"}
    deployment.grid.fault = lambda site, message, reply: None if site == "stranger" else reply
    assert_same_bits(local(deployment), deployment.serve())
    assert [site for site, _ in deployment.grid.sent].count("stranger") == 1


# -- who belongs to it -------------------------------------------------------------------------------------


def test_a_node_that_does_not_belong_is_never_asked_to_train(tmp_path):
    """Neither one under a name of its own nor one that claims the name of a registered one."""
    members = NAMES[:6]
    deployment = Deployment(tmp_path, ff.scaffold(), clients=tuple(reversed(members)))
    deployment.data = federation(6)
    deployment.grid.ids["intruder"] = 99
    deployment.grid.nodes["intruder"] = {"name": NAMES[2], "state": str(tmp_path / "intruder")}
    real = deployment.grid.get_nodes

    def get_nodes() -> Any:
        nodes = list(real())
        nodes[-1].ClearField("name")
        return nodes

    deployment.grid.get_nodes = get_nodes  # type: ignore[method-assign]
    served = deployment.serve()
    assert_same_bits(local(deployment), served)
    asked = {site for site, message in deployment.grid.sent if message.metadata.message_type != "query"}
    assert asked == set(members)


@pytest.mark.parametrize(
    ("clients", "complaint"),
    [
        (7, "clients = 7: 8 sites are connected"),
        (9, r"clients = 9: after 0.05 s only 8 sites are connected \(site-0, "),
        ((*NAMES, "site-x"), "only 8 sites are connected"),
    ],
)
def test_a_federation_that_is_not_complete_does_not_begin(clients, complaint, tmp_path):
    with pytest.raises(ff.FlatfedError, match=complaint):
        Deployment(tmp_path, ff.fedavg(), clients=clients).serve()
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("claim", "complaint"),
    [
        ({"samples": 10**13}, "samples = 10000000000000: "),
        ({"samples": 10**19}, "samples = 10000000000000000000: "),
        ({"input_shape": [-1]}, "input_shape.0 = -1: "),
        ({"input_shape": [2**20, 2**20]}, "input_shape: 1099511627776 values in one sample"),
    ],
    ids=["many samples", "more samples than a number holds", "negative shape", "huge shape"],
)
def test_sites_with_impossible_data_do_not_belong(claim, complaint, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg())

    def boast(site: str, message: Message, reply: Message) -> Message:
        return changed_header(**claim)(reply) if message.metadata.message_type == "query" else reply

    deployment.grid.fault = boast
    with pytest.raises(ff.FlatfedError, match="only 0 sites are connected"):
        deployment.serve()
    assert complaint in caplog.text


def test_a_site_with_very_many_samples_costs_the_server_nothing(tmp_path):
    """What it draws from them is its own affair; its server only counts the steps."""
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=2, participants=8)
    claimed = 10**8

    def boast(site: str, message: Message, reply: Message) -> Message:
        boasting = site == NAMES[3] and message.metadata.message_type in {"query", "train"}
        return changed_header(samples=claimed)(reply) if boasting else reply

    deployment.grid.fault = boast
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "randperm", limited(torch.randperm))
        served = deployment.serve()
    assert [line["participants"] for line in served.history] == [8, 8]


class Made(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made, and not only described."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.on = 0, True

    def __torch_dispatch__(self, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        outputs = function(*given, **(named or {}))
        for value in tree_leaves(outputs):
            if self.on and isinstance(value, torch.Tensor) and value.device.type != "meta":
                self.largest = max(self.largest, value.nbytes)
        return outputs


class Narrow(nn.Module):
    """Looks at the first of however many features."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs[:, :FEATURES])


def test_the_server_makes_no_data_of_its_own(tmp_path):
    """Not one sample: sites say how many and how large theirs are, which may be too much for it."""
    deployment = Deployment(tmp_path, ff.fedavg(), Narrow, rounds=2)
    made, answer, planned = Made(), deployment.grid.call, []

    def call(site: str, message: Message) -> Message:
        made.on = False  # what a site does is its own affair
        reply = answer(site, message)
        made.on = True
        if message.metadata.message_type == "query":
            return changed_header(samples=10**8, input_shape=[2**28])(reply)
        return changed_header(samples=10**8)(reply) if trained_in(message) is not None else reply

    deployment.grid.call = call  # type: ignore[method-assign]
    deployment.callbacks.append(lambda progress: planned.append(progress.dimensions.input_shape))
    with made:
        served = deployment.serve()
    assert [line["participants"] for line in served.history] == [3, 3] and planned == [(2**28,)] * 2
    assert 0 < made.largest < 2**16


MISFITS: dict[str, tuple[Callable[[], nn.Module], ff.Algorithm, dict[str, Any], str]] = {
    "model": (
        lambda: nn.Linear(FEATURES + 1, 3).double(),
        ff.fedavg(),
        {},
        r"^model: it cannot be trained on inputs \[4\] float64, targets \[\] int64: .*4.*5",
    ),
    "layer inside": (
        lambda: nn.Sequential(nn.Unflatten(1, (2, 3)), nn.Flatten(), network()),
        ff.fedavg(),
        {},
        r"^model: it cannot be trained on inputs \[4\] float64, targets \[\] int64: ",
    ),
    "loss": (
        network,
        ff.fedavg(),
        {"target_shape": [2]},
        r"^model: it cannot be trained on inputs \[4\] float64, targets \[2\] int64: .*target",
    ),
    "inputs that cannot be shifted": (
        lambda: nn.Sequential(nn.Embedding(9, 2), nn.Flatten(), nn.Linear(8, 3)),
        generic("fedrobust"),
        {"input_dtype": "int64"},
        r"^algorithm: fedrobust changes or makes up inputs, which must be floats, not inputs \[4\] int64, ",
    ),
    "targets that are no classes": (
        network,
        generic("fedsynsam"),
        {"target_shape": [3], "target_dtype": "float64"},
        r"^algorithm: fedsynsam makes up samples of every class, so targets must be class labels ",
    ),
    "unknown dtype": (network, ff.fedavg(), {"input_dtype": "float65"}, r"^dtype = 'float65': unknown"),
}
"""A model and an algorithm, what sites claim about their samples, and the complaint."""


@pytest.mark.parametrize("kind", MISFITS)
def test_samples_that_do_not_fit_are_refused_before_the_first_round(kind, tmp_path):
    model, algorithm, claim, complaint = MISFITS[kind]
    deployment = Deployment(tmp_path, algorithm, model)

    def describe(site: str, message: Message, reply: Message) -> Message:
        return changed_header(**claim)(reply) if message.metadata.message_type == "query" else reply

    deployment.grid.fault = describe
    with pytest.raises(ff.FlatfedError, match=complaint) as raised:
        deployment.serve()
    assert "\n" not in str(raised.value)
    assert {message.metadata.message_type for _, message in deployment.grid.sent} == {"query"}
    assert not (tmp_path / "run").exists()


class Looks(nn.Module):
    """Has a tensor that is no buffer, makes another, and looks at its inputs' numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.centre = network(), torch.full((FEATURES,), 0.1, dtype=torch.float64)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        shifted = inputs - self.centre - 0.01 * torch.arange(FEATURES)
        return self.inner(-shifted if float(inputs.mean()) > 0 else shifted)


def test_a_model_that_cannot_be_tried_without_numbers_is_tried_at_the_sites(tmp_path):
    deployment = Deployment(tmp_path, ff.scaffold(), Looks)
    assert_same_bits(local(deployment), deployment.serve())
    with pytest.raises(ff.FlatfedError, match="fedsynsam makes up samples of every class, but how many"):
        Deployment(tmp_path / "classes", generic("fedsynsam"), Looks).serve()


def test_what_only_the_sites_can_see_is_in_the_error(tmp_path):
    """Numbers of another precision fit as far as shapes go."""
    deployment = Deployment(tmp_path, ff.fedavg(), lambda: network().float(), attempts=2)
    first = NAMES[deployment.members(0)[0]]
    complaint = (
        rf"had 0 valid uploads after 2 attempts \({first}: train: error 1000: model: it cannot be trained "
        r"on a batch of client 0 \(inputs \[5, 4\] float64, "
    )
    with pytest.raises(ff.FlatfedError, match=complaint) as raised:
        deployment.serve()
    assert "\n" not in str(raised.value)


def test_sites_train_in_the_precision_of_the_spec(tmp_path):
    _, data = in_float32()
    deployment = Deployment(tmp_path, ff.scaffold(), lambda: in_float32()[0], data, precision="bfloat16")
    served = deployment.serve()
    assert_same_bits(local(deployment), served)
    assert not torch.equal(served.server["model"], local(deployment, precision="float32").server["model"])
    model = deployment.spec.model()
    other = replace(deployment.spec, training=deployment.spec.training.replaced(precision="float32"))
    assert other.digest(model) != deployment.spec.digest(model)


def limited(draw: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def drawn(count: int, **options: Any) -> torch.Tensor:
        assert count < 10**6
        return draw(count, **options)

    return drawn


def test_nodes_of_one_name_do_not_take_part(tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), registered=False)
    deployment.grid.nodes["site-3"] = deployment.grid.nodes["site-4"]
    with pytest.raises(ff.FlatfedError, match="only 6 sites are connected"):
        deployment.serve()
    assert "2 nodes are called 'site-4'; none of them takes part" in caplog.text


def test_a_run_is_not_continued_with_other_clients_or_another_algorithm(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg())
    deployment.serve()
    with pytest.raises(ff.FlatfedError, match="clients = 9: the run in the folder is that of site-0, "):
        Deployment(tmp_path, ff.fedavg(), clients=9).serve()
    with pytest.raises(ff.FlatfedError, match="it holds another run"):
        Deployment(tmp_path, ff.scaffold()).serve()


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda stored: stored | {"run": "../.."}, r"config\.json: federation\.run = '\.\./\.\.': "),
        (lambda stored: stored | {"samples": "many"}, r"config\.json: federation\.samples = 'many': "),
        (
            lambda stored: stored | {"samples": [3]},
            r"config\.json: federation: samples: 1 numbers for 8 names",
        ),
        (lambda stored: stored | {"names": 3}, r"config\.json: federation\.names = 3: "),
        (lambda stored: stored | {"extra": 3}, r"config\.json: federation\.extra: unknown"),
        (lambda stored: 3, r"config\.json: federation = 3: "),
    ],
)
def test_a_damaged_population_is_refused(damage, complaint, tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=1)
    deployment.serve()
    path = tmp_path / "run" / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"federation": damage(config["federation"])}))
    with pytest.raises(ff.FlatfedError, match=complaint):
        deployment.serve()


def test_sites_whose_samples_differ_in_form_are_refused(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg())
    real = deployment.load

    def load(context: Context) -> Any:
        inputs, targets = real(context)
        return (inputs.float() if context.node_config["name"] == "site-3" else inputs), targets

    deployment.load = load  # type: ignore[method-assign]
    deployment.restart()
    with pytest.raises(ff.FlatfedError, match="input_dtype: float32 at site-3, float64 at site-0"):
        deployment.serve()


# -- evaluation and the apps -------------------------------------------------------------------------------


def test_evaluation_on_the_sites_own_data(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), data=federation(unequal=True), evaluate_every=2)
    served = deployment.serve()
    expected = run(
        ff.fedavg(),
        data=deployment.data,
        evaluate_on_clients=True,
        **deployment.spec.training.model_dump(),
    )
    local_values = [{**site, "client": number} for number, site in enumerate(expected.per_client)]
    assert local_values == served.per_client
    assert ["clients_loss" in line for line in served.history] == [False, True, False, True, False]
    halfway = local(deployment, rounds=4).model
    sums, total = 0.0, 0
    for client in range(len(NAMES)):
        own = deployment.data.client(client)
        inputs, targets = own.batch(torch.arange(len(own)))
        with torch.no_grad():
            sums += float(nn.functional.cross_entropy(halfway(inputs), targets, reduction="sum"))
        total += len(own)
    assert served.history[3]["clients_loss"] == pytest.approx(sums / total, rel=1e-12)


def test_sites_may_differ_in_whether_they_have_test_data(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=1, evaluate_every=1)
    deployment.spec = replace(deployment.spec, metrics=None)
    deployment.restart()

    def load_test(context: Context) -> Any:
        return None if context.node_config["name"] == "site-3" else deployment.load(context)

    deployment.grid.app = client_app(deployment.spec, deployment.load, load_test)
    served = deployment.serve()
    assert ["test_samples" in site for site in served.per_client] == [name != "site-3" for name in NAMES]
    assert set(served.client_spreads) == {"train", "test"} and "clients_test_accuracy" in served.history[0]
    assert (tmp_path / "run" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("forged", "complaint"),
    [
        ([{"test_samples": 0.0}], "test_samples = 0: at least 1"),
        ([{"loss": 1e308}, {"loss": -1e308}], "metrics.loss = -1e+308"),
        ([{"test_loss": 1e308}, {"test_loss": -1e308}], "metrics.test_loss = 1e+308"),
    ],
    ids=["no test samples", "huge losses", "huge test losses"],
)
def test_a_forged_evaluation_is_left_out(forged, complaint, tmp_path, caplog):
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=1, evaluate_every=1)
    deployment.grid.app = client_app(deployment.spec, deployment.load, deployment.load)

    def forge(site: str, message: Message, reply: Message) -> Message:
        number = NAMES.index(site)
        if message.metadata.message_type == "evaluate" and number < len(forged):
            header = json.loads(reply.content["header"]["json"])
            return changed_header(metrics=header["metrics"] | forged[number])(reply)
        return reply

    deployment.grid.fault = forge
    served = deployment.serve()
    assert complaint in caplog.text
    assert [site["client"] for site in served.per_client] == list(range(len(forged), len(NAMES)))
    assert 0 < served.history[0]["clients_loss"] < 10


def test_the_apps_run_with_test_data_of_the_servers_own(tmp_path):
    deployment = Deployment(tmp_path, ff.fedavg())
    own = deployment.data.client(0)
    test = own.batch(torch.arange(len(own)))
    app = server_app(deployment.spec, lambda: test)
    app(deployment.grid, Context(1, 1, {}, RecordDict(), {"folder": str(tmp_path / "run")}))
    lines = [json.loads(line) for line in (tmp_path / "run" / "history.jsonl").read_text().splitlines()]
    model = local(deployment).model
    with torch.no_grad():
        expected = float(nn.functional.cross_entropy(model(test[0]), test[1]))
    assert lines[-1]["test_loss"] == pytest.approx(expected, rel=1e-12)
    with pytest.raises(ff.FlatfedError, match="folder: missing"):
        app(deployment.grid, Context(1, 1, {}, RecordDict(), {}))


def test_a_run_too_short_for_its_algorithm_is_noted(tmp_path, caplog):
    Deployment(tmp_path, generic("fedsynsam"), rounds=2).serve()
    assert "rounds = 2: trajectory_matching acts from round 3 on" in caplog.text


def test_what_cannot_be_evaluated_is_refused(tmp_path):
    with pytest.raises(ff.FlatfedError, match="evaluate = 'active_mean'"):
        Deployment(tmp_path, generic("fedspeed"), evaluate="active_mean").serve()


@pytest.mark.parametrize(
    "mod",
    [fixedclipping_mod, adaptiveclipping_mod, LocalDpMod(1.0, 1.0, 1.0, 1e-5)],
    ids=["fixed clipping", "adaptive clipping", "local"],
)
def test_flowers_differential_privacy_refuses_rather_than_protects_half(mod, tmp_path):
    """As docs/deployment.md says: an error, never a run that is not protected."""
    deployment = Deployment(tmp_path, ff.fedavg(), rounds=1)
    deployment.serve()
    site, message = next(sent for sent in deployment.grid.sent if trained_in(sent[1]) == 0)
    context = Context(1, deployment.grid.ids[site], deployment.grid.nodes[site], RecordDict(), {})
    reply = mod(message, context, deployment.grid.app)
    assert reply.has_error() and "exactly one ArrayRecord" in str(reply.error.reason)
