"""Training with compressed uploads: every algorithm, every path, counted bytes, resumption, convergence."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from problems import (
    CLIENTS,
    DEFAULTS,
    Quadratics,
    Recorder,
    distance,
    federation,
    flat,
    generic,
    mean_over_clients,
    named,
    network,
    run,
    trajectory,
)
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.algorithm import ImpossibleComposition
from flatfed.core.part import Compressor
from flatfed.engines import chunks, threads, worker
from flatfed.parts import ErrorFeedback, ErrorFeedback21, Quantize, Sign, TopK
from flatfed.runs import environment as record

NAMES = sorted(ff.ALGORITHMS)
PARAMETERS = len(flat(network()))
ROUNDS, PARTICIPANTS = DEFAULTS["rounds"], DEFAULTS["participants"]
COMPRESSORS: dict[str, Compressor] = {
    "quantized": Quantize(8),
    "top-k with feedback": ErrorFeedback(of=TopK(0.3)),
}

every_algorithm = pytest.mark.parametrize("name", NAMES)
both_compressors = pytest.mark.parametrize("kind", COMPRESSORS)
both_paths = pytest.mark.parametrize("path", ["matrix", "client"])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A round of three participants is more than one chunk of the matrix path."""
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 2)
    monkeypatch.setattr(record, "source_commit", lambda: None)
    with threads.single_threaded():
        yield


def compressed(name: str, compress: Compressor, *uncompressed: str) -> ff.Algorithm:
    return replace(generic(name), compress=compress, uncompressed=uncompressed)


@functools.cache
def finished(name: str, kind: str, path: str) -> ff.Run:
    return run(compressed(name, COMPRESSORS[kind]), path=path)


def state(result: ff.Run) -> dict[str, Tensor]:
    rows = {f"client {client}": result.clients.row(client) for client in result.clients.clients()}
    return {**result.server, **rows}


def lines(result: ff.Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]


def same_bits(left: ff.Run, right: ff.Run) -> bool:
    ours, theirs = state(left), state(right)
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in ours)
        and lines(left) == lines(right)
    )


# -- every algorithm ---------------------------------------------------------------------------------------


def pooled_loss(model: nn.Module) -> float:
    data = federation()
    with torch.no_grad():
        losses = [
            F.cross_entropy(model(own.inputs), own.targets)
            for own in (data.client(client) for client in range(len(data)))
        ]
    return float(torch.stack(losses).mean())


@every_algorithm
@both_compressors
def test_it_trains(name, kind):
    result = finished(name, kind, "matrix")
    assert len(result.history) == ROUNDS
    assert all(bool(torch.isfinite(value).all()) for value in state(result).values())
    assert pooled_loss(result.model) < pooled_loss(network())
    # What travelled was not what an uncompressed run sends.
    assert distance(result.server["model"], run(generic(name)).server["model"]) > 1e-6


@every_algorithm
@both_compressors
@both_paths
def test_workers_do_not_change_a_bit(name, kind, path):
    together = run(compressed(name, COMPRESSORS[kind]), path=path, workers=3)
    assert same_bits(finished(name, kind, path), together)


@every_algorithm
@both_compressors
def test_the_matrix_and_the_client_path_agree(name, kind):
    """In double precision the paths differ far below the singles that travel, so draws fall alike too.

    In single precision a last bit may send a number to the other level, or another of two near equals.
    """
    matrix, client = (state(finished(name, kind, path)) for path in ("matrix", "client"))
    assert matrix.keys() == client.keys()
    assert [key for key in matrix if distance(matrix[key], client[key]) > 1e-9] == []


@every_algorithm
@both_paths
def test_bytes_are_those_of_the_payloads(name, path):
    declared = generic(name).declared_uploads
    sizes = [declared[key].size for key in generic(name).uploads]
    # What is not as long as the model travels as it is: a number for each of its four tensors, or one.
    plain = sum({"tensors": 4 * 8, "one": 8}[size] for size in sizes if size != "model")
    quantized = math.ceil((8 * PARAMETERS + 32) / 8) + 4
    kept = math.ceil(0.3 * PARAMETERS)
    index_bits = math.ceil(math.log2(PARAMETERS))
    top = math.ceil(min(kept * index_bits, PARAMETERS) / 8) + 4 * kept + 4
    for kind, size in (("quantized", quantized), ("top-k with feedback", top)):
        counted = [line["bytes_up"] for line in finished(name, kind, path).history]
        assert counted == [PARTICIPANTS * (sizes.count("model") * size + plain)] * ROUNDS


@every_algorithm
@both_compressors
def test_a_run_goes_on_where_it_stopped(name, kind, tmp_path):
    algorithm = compressed(name, COMPRESSORS[kind])
    options = {"path": "matrix", "folder": tmp_path, "checkpoint_every": 2}
    run(algorithm, rounds=ROUNDS - 2, **options)
    assert same_bits(run(algorithm, **options), finished(name, kind, "matrix"))


@every_algorithm
@pytest.mark.parametrize(
    "compress",
    [Quantize(3, None, "max"), TopK(0.2), Sign(7), ErrorFeedback(of=Sign()), ErrorFeedback21(of=Quantize(5))],
    ids=str,
)
def test_it_survives_its_description(name, compress):
    statistics = {upload.of for upload in generic(name).declared_uploads.values() if upload.of}
    for uncompressed in ((), generic(name).uploads[-1:]):
        if compress.estimates and statistics - set(uncompressed):
            with pytest.raises(ImpossibleComposition, match="is a statistic of the whole"):
                compressed(name, compress, *uncompressed)
            continue
        algorithm = compressed(name, compress, *uncompressed)
        described = json.loads(json.dumps(algorithm.describe()))
        again = ff.build(described)
        assert described["name"] == name
        assert again == algorithm
        assert (again.compressed, again.uncompressed) == (algorithm.compressed, uncompressed)
        unnamed = replace(algorithm, name="custom", options={})
        assert ff.build(json.loads(json.dumps(unnamed.describe()))) == unnamed


# -- what is counted and kept ------------------------------------------------------------------------------


class Watched(TopK):
    """Notes the length of every payload."""

    lengths: list[int]

    def encode(self, vector: Tensor, generator: torch.Generator) -> bytes:
        payload = super().encode(vector, generator)
        self.lengths.append(len(payload))
        return payload


@both_paths
def test_uncompressed_uploads_and_buffers_are_counted_in_full(path):
    compress = Watched(0.1)
    object.__setattr__(compress, "lengths", [])
    model = nn.Sequential(network()[0], *([nn.BatchNorm1d(5)] if path == "client" else []), nn.Linear(5, 3))
    model.double()
    parameters, buffers = len(flat(model)), 8 * (5 + 5 + 1) if path == "client" else 0
    result = run(compressed("scaffold", compress, "control_variate.control_change"), model=model, path=path)
    assert len(compress.lengths) == ROUNDS * PARTICIPANTS
    for number, line in enumerate(result.history):
        payloads = sum(compress.lengths[number * PARTICIPANTS :][:PARTICIPANTS])
        assert line["bytes_up"] == payloads + PARTICIPANTS * (8 * parameters + buffers)


@both_paths
def test_the_population_misses_only_what_clients_remember(path):
    """SCAFFOLD's c is the mean of all c_i; with error feedback, of all c_i less what was not yet sent."""
    for weighting in ("uniform", "samples"):
        data = federation(unequal=True)
        sizes = [len(data.client(client)) for client in range(len(data))]
        shares = sizes if weighting == "samples" else None
        algorithm = compressed("scaffold", ErrorFeedback(of=TopK(0.2)))
        result = run(algorithm, data=data, weighting=weighting, path=path, rounds=8)
        own, late = (
            mean_over_clients(result, name, CLIENTS, shares) for name in ("control", "control_change_memory")
        )
        assert float(late.abs().max()) > 1e-3
        assert distance(named(result.server)["control"], own - late) < 1e-12


@both_paths
@pytest.mark.parametrize(("name", "vector"), [("scaffold", "control"), ("feddyn", "dual")])
@pytest.mark.parametrize("remember", ["sent", "exact"])
def test_server_and_clients_remember_the_same(name, vector, remember, path):
    """c and h stay the means of all c_i and h_i if clients keep what the server received."""
    algorithm = replace(generic(name), compress=TopK(0.2), remember=remember)
    result = run(algorithm, path=path, rounds=8)
    gap = distance(named(result.server)[vector], mean_over_clients(result, vector, CLIENTS, None))
    assert gap < 1e-12 if remember == "sent" else gap > 1e-3
    assert ff.algorithms.build(algorithm.describe()).remember == remember


@both_paths
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_ef21_estimates_are_the_mean_of_all_memories(path, weighting):
    data = federation(unequal=True)
    sizes = [len(data.client(client)) for client in range(len(data))]
    shares = sizes if weighting == "samples" else None
    algorithm = compressed("scaffold", ErrorFeedback21(of=TopK(0.2)))
    result = run(algorithm, data=data, weighting=weighting, path=path)
    assert algorithm.compressed == ("displacement", "control_variate.control_change")
    for name in ("displacement", "control_change"):
        expected = mean_over_clients(result, f"{name}_memory", CLIENTS, shares)
        assert float(expected.abs().max()) > 1e-3
        assert distance(result.server[f"error_feedback21.{name}_estimate"], expected) < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_ef21_around_nothing_is_no_compression_when_all_take_part(name):
    everybody = {"participants": CLIENTS, "rounds": 8}
    exact = compressed(name, ErrorFeedback21(of=Compressor()))
    assert distance(trajectory(exact, **everybody), trajectory(generic(name), **everybody)) < 1e-13
    # With few, the server goes on believing what others sent long ago.
    assert distance(trajectory(exact), trajectory(generic(name))) > 1e-3


# -- the streams of training -------------------------------------------------------------------------------


@every_algorithm
@both_paths
def test_error_feedback_around_nothing_does_not_change_a_bit(name, path):
    plain = run(generic(name), path=path)
    wrapped = run(compressed(name, ErrorFeedback(of=Compressor())), path=path)
    assert all(torch.equal(plain.server[key], wrapped.server[key]) for key in plain.server)
    assert lines(plain) == lines(wrapped)


@both_paths
def test_clients_and_batches_are_those_of_an_uncompressed_run(path, monkeypatch):
    drawn: list[tuple[Any, ...]] = []
    original = worker.batches

    def watched(settings: Any, samples: int, number: int, client: int) -> Any:
        positions = original(settings, samples, number, client)
        drawn.append((number, client, [chosen.tolist() for chosen in positions]))
        return positions

    monkeypatch.setattr(worker, "batches", watched)
    seen = []
    for compress in (Compressor(), Quantize(2), ErrorFeedback(of=TopK(0.1))):
        recorder = Recorder()
        drawn.clear()
        first = run(compressed("scaffold", compress), recorder=recorder, path=path).history[0]["train_loss"]
        seen.append((recorder.cohorts, list(drawn), first))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0][1]) == ROUNDS * PARTICIPANTS


# -- convergence -------------------------------------------------------------------------------------------

PROBLEM = Quadratics.random(size=6)


def error(compress: Compressor, lr: float) -> float:
    """The mean distance from the optimum late in a training by single steps with whole gradients."""
    recorder, rounds = Recorder(), round(12 / lr)
    algorithm = replace(ff.fedavg(), compress=compress)
    PROBLEM.train(algorithm, local_steps=1, lr=lr, rounds=rounds, callbacks=[recorder])
    return float((recorder.models[-rounds // 4 :] - PROBLEM.optimum).norm(dim=1).mean())


@pytest.mark.parametrize("inner", [TopK(0.15), Sign()], ids=str)
def test_feedback_finds_the_optimum_that_bias_misses(inner):
    # Clients disagree at the optimum, so what each of them leaves out does not cancel, at any rate.
    assert min(error(inner, lr) for lr in (0.4, 0.1)) > 1
    # Error feedback wanders about the optimum at a distance that falls with the rate; EF21 gets there.
    coarse, fine = (error(ErrorFeedback(of=inner), lr) for lr in (0.4, 0.1))
    assert fine < 0.4 * coarse
    assert error(ErrorFeedback21(of=inner), 0.1) < 0.01 * fine


def test_unbiased_noise_shrinks_with_the_rate():
    coarse, fine = (error(Quantize(2), lr) for lr in (0.4, 0.1))
    assert fine < 0.7 * coarse


# -- what is refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wire", "complaint"),
    [
        ({"compress": {"part": "quantize", "bits": 9}}, "algorithm.compress.quantize.bits = 9: "),
        ({"compress": {"part": "quantize", "bits": 1}}, "algorithm.compress.quantize.bits = 1: "),
        ({"compress": {"part": "quantize", "bits": 4.0}}, "algorithm.compress.quantize.bits = 4.0: "),
        ({"compress": {"part": "quantize", "bucket": 0}}, "algorithm.compress.quantize.bucket = 0: "),
        ({"compress": {"part": "quantize", "norm": "l1"}}, "algorithm.compress.quantize.norm = 'l1': "),
        ({"compress": {"part": "top_k", "ratio": 0}}, "algorithm.compress.top_k.ratio = 0: "),
        ({"compress": {"part": "top_k", "ratio": 1.1}}, "algorithm.compress.top_k.ratio = 1.1: "),
        ({"compress": {"part": "top_k", "k": 3}}, "algorithm.compress.top_k.k: unknown"),
        ({"compress": {"part": "top_k", "of": "sign"}}, "algorithm.compress.top_k.of: unknown"),
        ({"remember": "received"}, "algorithm: remember = 'received': give 'sent' or 'exact'"),
        ({"compress": "topk"}, "algorithm.compress.part = 'topk': unknown; did you mean 'top_k'?"),
        ({"compress": "momentum"}, "algorithm.compress.part = 'momentum': unknown"),
        ({"compress": "error_feedback"}, "algorithm.compress.error_feedback.of: missing"),
        ({"compress": {"part": "error_feedback", "of": "tpo_k"}}, "algorithm.compress.of.part = 'tpo_k': "),
        (
            {"compress": {"part": "error_feedback", "of": 3}},
            "algorithm.compress.of = 3: give the name of a part",
        ),
        (
            {"compress": {"part": "error_feedback", "of": {"part": "top_k", "ratio": 2}}},
            "algorithm.compress.of.top_k.ratio = 2: ",
        ),
        (
            {"compress": {"part": "error_feedback", "of": {"part": "error_feedback21", "of": "sign"}}},
            "algorithm.compress.error_feedback.of: error feedback cannot be put into error feedback",
        ),
        (
            {"compress": "sign", "uncompressed": "control"},
            "algorithm: uncompressed: there is no upload 'control'; there are displacement, "
            "control_variate.control_change",
        ),
    ],
    ids=str,
)
def test_bad_values_are_one_clear_line(wire, complaint):
    for described in ({"name": "scaffold", **wire}, {"correct": ["control_variate"], **wire}):
        with pytest.raises(ff.FlatfedError) as caught:
            ff.build(described)
        assert str(caught.value).startswith(complaint)
        assert "\n" not in str(caught.value)


@both_paths
@pytest.mark.parametrize("lr", [2e38, 3.4e38], ids=str)
def test_an_upload_that_cannot_travel_is_divergence(path, lr):
    with pytest.raises(ff.DivergedError, match="lower lr"):
        run(compressed("fedavg", Quantize(8)), lr=lr, rounds=2, path=path)


def test_none_is_no_compression():
    assert ff.build({"name": "scaffold", "compress": "none"}).compressed == ()
    wrapped = replace(ff.fedavg(), compress=ErrorFeedback(of=Compressor()))
    described = wrapped.describe()
    assert described["compress"] == {"part": "error_feedback", "of": {"part": "none"}}
    assert ff.build(described).describe() == described


def test_ef21_records_the_norm_of_the_update_itself():
    algorithm = replace(ff.fedavg(), compress=ErrorFeedback21(of=TopK(0.2)))
    recorder = Recorder()
    finished = run(algorithm, recorder=recorder, rounds=3)
    models = [flat(network()), *recorder.models]
    moved = [float((after - before).norm()) for before, after in itertools.pairwise(models)]
    assert [line["update_norm"] for line in finished.history] == pytest.approx(moved)
