"""Uploads and broadcasts that are malformed, late or damaged, over a grid inside this process."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from problems import DEFAULTS, network, run
from torch import nn

import flatfed as ff
from flatfed.core.state import Dimensions

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import (
    NAMES,
    REFUSALS,
    Deployment,
    Fault,
    Single,
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

from flatfed.deployment.wire import decode_payloads, pack_payloads


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
