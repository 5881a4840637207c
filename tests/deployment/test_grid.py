"""The real ServerApp and ClientApp over a grid inside this process: numbers of the local engine, and traffic.

Equality is that of bits: the sites train client by client in double precision, as the local engine does with
path="client", and the server adds their uploads up in the same order.
"""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from problems import Recorder, federation, generic, network, run
from torch import nn

import flatfed as ff

pytest.importorskip("flwr", reason="needs the extra flower: pip install 'flatfed[flower]'")

from federation_in_process import (
    NAMES,
    REFUSALS,
    Deployment,
    assert_same_bits,
    changed_header,
    local,
    normalised,
    only,
    trained_in,
)
from flwr.app import Context, Message, RecordDict
from flwr.clientapp.mod import LocalDpMod, adaptiveclipping_mod, fixedclipping_mod

from flatfed.deployment import client_app, server_app


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


class Editing(nn.Module):
    """Edits what it is given, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.inner(inputs.sub_(0.5))


def test_inputs_that_a_model_edits_stay_as_they_are_at_the_sites(tmp_path):
    deployment = Deployment(tmp_path, ff.fedsam(), Editing, rounds=2)
    load = deployment.load
    stored = {name: load(Context(1, 1, {"name": name}, RecordDict(), {})) for name in NAMES}
    before = copy.deepcopy(stored)
    deployment.load = lambda context: stored[context.node_config["name"]]  # type: ignore[method-assign]
    deployment.restart()
    assert_same_bits(local(deployment), deployment.serve())
    for name in NAMES:
        assert all(map(torch.equal, stored[name], before[name]))


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
