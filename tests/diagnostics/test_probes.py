"""Drift, stability, sharpness, perturbations and generalization against hand-computed cases."""

from __future__ import annotations

import math
import statistics
from dataclasses import replace

import pytest
import torch
from problems import (
    Quadratics,
    Recorder,
    federation,
    generic,
    gradient_of,
    mean_output,
    named,
    network,
    run,
    spied,
)
from torch import Tensor

import flatfed as ff
from flatfed.core.flat import unit
from flatfed.core.sampling import cohort
from flatfed.diagnostics import clients as per_client
from flatfed.diagnostics import (
    drift,
    flatness_distance,
    generalization,
    global_stability,
    inspect,
    local_stability,
    perturbation,
    sharpness,
)
from flatfed.diagnostics.generalization import seen_clients
from flatfed.diagnostics.global_stability import with_client_replaced
from flatfed.training.task import accuracy


def local_models(algorithm: ff.Algorithm, path: str, **settings) -> tuple[dict, list[Tensor], Tensor]:
    """A run's history, the models of its last round's participants after every step, and their origin."""
    algorithm, log = spied(algorithm)
    result = run(algorithm, path=path, **settings)
    last = result.training.rounds - 1
    steps = [step.point for step in log.of_round(last)]
    if path == "client":
        many = result.training.participants
        steps = [torch.stack(steps[start :: result.training.local_steps]) for start in range(3)]
        end, origin = torch.stack(log.ends[-many:]), log.starts[-1]
    else:
        end, origin = log.ends[-1], log.starts[-1]
    return result.history[-1], [*steps, end], origin


@pytest.mark.parametrize("path", ["matrix", "client"])
@pytest.mark.parametrize("name", ["fedavg", "fedspeed", "fednsam", "fedacg", "feddyn", "compressed"])
def test_the_history_has_the_participants_flatness_distance_and_drift(name, path):
    compressed = replace(ff.fedavg(), compress=ff.parts.TopK(0.2))
    line, steps, origin = local_models(compressed if name == "compressed" else generic(name), path)
    end = steps[-1]
    naive = sum(float((x - end.mean(0)) @ (x - end.mean(0))) for x in end) / len(end)
    assert line["flatness_distance"] == pytest.approx(naive, rel=1e-9)
    squares = [float((x - origin) @ (x - origin)) for points in steps[1:] for x in points]
    assert line["client_drift"] == pytest.approx(statistics.fmean(squares), rel=1e-9)


def test_the_history_weighs_clients_as_the_aggregation_does():
    data = federation(3, unequal=True)
    algorithm, log = spied(ff.fedavg())
    result = run(algorithm, data=data, participants=3, rounds=1, weighting="samples", path="client")
    weights = torch.tensor([len(data.client(number)) for number in range(3)], dtype=torch.float64)
    end = torch.stack(log.ends)
    mean = (weights[:, None] * end).sum(0) / weights.sum()
    naive = float((weights * (end - mean).square().sum(1)).sum() / weights.sum())
    assert result.history[0]["flatness_distance"] == pytest.approx(naive, rel=1e-9)


def test_the_history_has_the_norms_of_the_servers_vectors():
    recorder = Recorder()
    result = run(generic("fedadam"), recorder=recorder)
    for line, server in zip(result.history, recorder.servers, strict=True):
        for name, value in server.items():
            assert line[f"state_norm_{name}"] == pytest.approx(math.sqrt(float(value @ value)))
    assert set(recorder.servers[0]) == {"model", "momentum", "second_moment"}


def test_flatness_distance_by_hand_and_under_a_common_shift():
    models = torch.tensor([[0.0, 0], [2, 0], [1, 3]])  # mean (1, 1)
    assert flatness_distance(models) == pytest.approx((2 + 2 + 4) / 3)
    assert flatness_distance(models + 5) == pytest.approx((2 + 2 + 4) / 3)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_the_drift_probe_is_what_the_next_round_records(path):
    settings = {"participants": 8, "path": path}
    shorter = run(generic("fedmoswa"), rounds=2, **settings)
    longer = run(generic("fedmoswa"), rounds=3, **settings)
    before = [shorter.clients.row(client).clone() for client in range(8)]
    with inspect(ff.Task(network(), federation()), run=shorter) as subject:
        found = drift(subject, clients=None)
        assert found == drift(subject, clients=None)
    assert all(torch.equal(shorter.clients.row(client), before[client]) for client in range(8))
    line = longer.history[-1]
    assert found["flatness_distance"] == pytest.approx(line["flatness_distance"], rel=1e-9)
    assert found["client_drift"] == pytest.approx(line["client_drift"], rel=1e-9)
    assert found["steps"] == [1, 2, 3]
    assert statistics.fmean(found["drift_by_step"]) == pytest.approx(line["client_drift"], rel=1e-9)


def test_local_stability_of_quadratics_by_hand():
    problem = Quadratics.random(clients=3, size=2)
    result = problem.train(ff.fedavg(), rounds=1)
    rate, start = 0.2, result.server["model"]
    with inspect(ff.Task(result.model, problem.federation, mean_output), run=result) as subject:
        found = local_stability(subject, clients=None)
    models = [start.clone() for _ in range(3)]
    assert found["steps"] == list(range(6))
    for step in range(6):
        apart = max(float((a - b).norm()) for a in models for b in models)
        assert found["discrepancy"][step] == pytest.approx(apart, abs=1e-12)
        models = [x - rate * problem.curvatures[i] @ (x - problem.minima[i]) for i, x in enumerate(models)]


@pytest.mark.parametrize("name", ["fedavg", "fedexp", "scaffold"])
def test_global_stability_is_the_distance_of_two_trainings(name):
    model, data = network(), federation()
    settings = {"participants": 3, "local_steps": 3, "batch_size": 5, "rounds": 4}
    with inspect(ff.Task(model, data), generic(name), ff.Training(**settings)) as subject:
        found = global_stability(subject, replacements=2, points=10)
        first = cohort(subject.training, 8, 0)
    assert found["rounds"] == [1, 2, 3, 4]
    options = {"weight_decay": 0, "lr_decay": 1.0, "lr": 0.1, "rounds": 4}
    base, naive = Recorder(), []
    run(generic(name), recorder=base, **options)
    for pair in found["replaced"]:
        assert pair["client"] in first and pair["by"] != pair["client"]
        samples = [data.client(pair["by"] if i == pair["client"] else i) for i in range(8)]
        pairs = [own.batch(torch.arange(len(own))) for own in samples]
        other = Recorder()
        run(generic(name), recorder=other, data=ff.Federation.from_tensors(pairs), **options)
        naive.append((base.models - other.models).norm(dim=1))
    assert len(naive) == 2
    assert torch.allclose(torch.tensor(found["replacements"]).double(), torch.stack(naive), atol=1e-12)
    assert found["discrepancy"] == pytest.approx(torch.stack(naive).amax(0).tolist())
    assert found["discrepancy"][0] > 0
    if name == "fedexp":
        assert found["bound"] is None
    else:
        assert all(b > d for b, d in zip(found["bound"], found["discrepancy"], strict=True))


def test_what_is_trained_again_is_executed_alike(monkeypatch):
    executions = []

    def trained(task, algorithm, training, execution, **others):
        executions.append(execution)
        return ff.train(task, algorithm, training, execution, **others)

    monkeypatch.setattr("flatfed.diagnostics.subject.train", trained)
    execution = ff.Execution(workers=1, client_memory=0.001)
    task, training = ff.Task(network(), federation()), ff.Training(rounds=2, local_steps=1)
    with inspect(task, ff.scaffold(), training, execution) as subject:
        assert subject.engine.workers == 1
        global_stability(subject, replacements=1)
    assert executions == [execution] * 2


def test_a_replaced_client_has_the_others_data_and_nobody_else_changes():
    pooled = federation(4, unequal=True)

    def load(number: int) -> tuple[Tensor, Tensor]:
        own = pooled.client(number)
        return own.batch(torch.arange(len(own)))

    loaded = ff.Federation.from_function(4, load)
    for data in (pooled, loaded):
        changed = with_client_replaced(data, 1, by=3)
        for number, source in enumerate([0, 3, 2, 3]):
            own, expected = changed.client(number), pooled.client(source)
            assert len(own) == len(expected)
            everything = torch.arange(len(own))
            assert torch.equal(own.batch(everything)[0], expected.batch(everything)[0])


def test_sharpness_is_the_rise_along_the_gradient():
    data = federation()
    result = run(generic("fedsam"), data=data)
    with inspect(ff.Task(network(), data), run=result) as subject:
        found = sharpness(subject, samples=None, clients=2, radius=0.2)
        usual = sharpness(subject, samples=None, clients=1)["radius"]
        cases = [(found["global"], subject.training_data(None))]
        cases += [(each["sharpness"], subject.data(each["client"])) for each in found["clients"]]
        model = subject.model
    # One radius for all algorithms, whatever their own is.
    assert found["radius"] == 0.2 and usual == 0.1
    for value, (inputs, targets) in cases:
        slope = gradient_of(network(), model, inputs, targets)
        losses = []
        for at in (model + 0.2 * slope / slope.norm(), model):
            net = network()
            torch.nn.utils.vector_to_parameters(at, net.parameters())
            losses.append(torch.nn.functional.cross_entropy(net(inputs), targets).item())
        assert value == pytest.approx(losses[0] - losses[1], abs=1e-9)


@pytest.mark.parametrize(
    ("name", "estimates"),
    [
        ("fedsam", {"local"}),
        ("fedlesam", {"local", "lesam"}),
        ("fednsam", {"local", "momentum"}),
        ("mofedsam", {"local", "momentum"}),
    ],
)
def test_perturbation_cosines(name, estimates):
    data = federation()
    result = run(generic(name), data=data, rounds=2, batch_size=None, local_steps=2)
    with inspect(ff.Task(network(), data), run=result) as subject:
        found = perturbation(subject, samples=None, clients=None)
        origin, pooled = subject.received["model"], subject.training_data(None)
        own = [gradient_of(network(), origin, *subject.data(client)) for client in range(8)]
    truth = unit(gradient_of(network(), origin, *pooled))
    assert found["clients"] == list(range(8)) and set(found["cosine"]) == estimates
    # With full batches the local estimate is the client's own gradient.
    assert found["cosine"]["local"] == pytest.approx([float(unit(slope) @ truth) for slope in own])
    if name == "fednsam":
        expected = float(unit(-named(result.server)["momentum"]) @ truth)
        assert found["cosine"]["momentum"] == pytest.approx([expected] * 8)
        assert expected > 0
    if name == "fedlesam":
        taken_part = set(result.clients.clients())
        for client, value in enumerate(found["cosine"]["lesam"]):
            if client not in taken_part:
                assert value is None
            else:
                last = named(result.clients.read(client, origin))["last_model"]
                assert value == pytest.approx(float(unit(last - origin) @ truth))


def test_the_synthetic_estimate_mixes_the_gradient_on_synthetic_samples():
    data = federation()
    algorithm = ff.fedsynsam(
        local_weight=0.3, warm_rounds=2, samples_per_class=2, iterations=3, span=1, synthetic_batch=4
    )
    result = run(algorithm, data=data, rounds=5, batch_size=None, local_steps=2)
    with inspect(ff.Task(network(), data), run=result) as subject:
        found = perturbation(subject, samples=None, clients=2)["cosine"]
        not_ready = {"trajectory_matching.synthetic_ready": torch.zeros(1)}
        early = perturbation(replace(subject, server=subject.server | not_ready))
        members, origin, pooled = subject.some_clients(2), subject.model, subject.training_data(None)
        own = [gradient_of(network(), origin, *subject.data(client)) for client in members]
        inputs = subject.server["trajectory_matching.synthetic_inputs"].view(6, 4)[:4]
        labels = subject.server["trajectory_matching.synthetic_labels"].long()[:4]
    truth = unit(gradient_of(network(), origin, *pooled))
    there = gradient_of(network(), origin, inputs, labels)
    expected = [float(unit(0.3 * slope + 0.7 * there) @ truth) for slope in own]
    assert found["synthetic"] == pytest.approx(expected)
    assert set(early["cosine"]) == {"local"}


def test_estimates_are_compared_along_local_steps():
    data = federation()
    result = run(ff.fedsam(), data=data, rounds=2, batch_size=None, local_steps=3)
    with inspect(ff.Task(network(), data), run=result) as subject:
        cosines = perturbation(subject, samples=None, clients=2, points=3)["cosine"]["local"]
        ends = perturbation(subject, samples=None, clients=2, points=2)["cosine"]["local"]
        members, pooled, visited = subject.some_clients(2), subject.training_data(None), {}
        subject.local_models(members, lambda client, step, model: visited.update({(client, step): model}))
        own = {client: subject.data(client) for client in members}

    def cosine(client, step):
        model = visited[client, step]
        slope, truth = (gradient_of(network(), model, *samples) for samples in (own[client], pooled))
        return float(unit(slope) @ unit(truth))

    for place, client in enumerate(members):
        every = [cosine(client, step) for step in range(3)]
        assert cosines[place] == pytest.approx(sum(every) / 3)
        assert ends[place] == pytest.approx((every[0] + every[2]) / 2)


def labelled() -> ff.Federation:
    data = federation()
    pairs = [data.client(number).batch(torch.arange(12)) for number in range(8)]
    return ff.Federation.from_tensors(pairs, test=pairs[3])


def accuracy_of(model: Tensor, inputs: Tensor, targets: Tensor) -> float:
    net = network()
    torch.nn.utils.vector_to_parameters(model, net.parameters())
    return float((net(inputs).argmax(1) == targets).double().mean())


def test_generalization_tells_seen_from_unseen_clients():
    data, recorder = labelled(), Recorder()
    result = run(ff.fedavg(), data=data, rounds=2, participants=2, recorder=recorder)
    seen = sorted({client for members in recorder.cohorts for client in members})
    unseen = sorted(set(range(8)) - set(seen))
    with inspect(ff.Task(network(), data, metrics={"accuracy": accuracy}), run=result) as subject:
        assert seen_clients(subject) == seen
        found = generalization(subject)
        model = subject.model
        of_seen, of_unseen = (subject.training_data(None, members) for members in (seen, unseen))
    assert len(of_seen[0]) == 12 * len(seen) and len(of_unseen[0]) == 12 * len(unseen)
    train, test, others = (accuracy_of(model, *pair) for pair in (of_seen, data.test, of_unseen))
    assert found["train"]["accuracy"] == pytest.approx(train)
    assert found["test"]["accuracy"] == pytest.approx(test)
    assert found["unseen_clients"]["accuracy"] == pytest.approx(others)
    assert found["gap"]["accuracy"] == pytest.approx(train - test)
    assert found["gap"]["unseen_accuracy"] == pytest.approx(train - others)
    assert found["gap"]["loss"] == pytest.approx(found["test"]["loss"] - found["train"]["loss"])


def test_without_unseen_clients_there_is_no_gap_to_them():
    data = labelled()
    result = run(ff.fedavg(), data=data, rounds=1, participants=8)
    with inspect(ff.Task(network(), data, metrics={"accuracy": accuracy}), run=result) as subject:
        found = generalization(subject)
    assert found["unseen_clients"] is None
    assert set(found["gap"]) == {"loss", "accuracy"}


def test_per_client_accuracy_and_its_floor():
    data = federation(unequal=True)
    with inspect(ff.Task(network(), data)) as subject:
        found = per_client(subject)
        naive = [accuracy_of(subject.model, *subject.data(client)) for client in range(8)]
    assert found["accuracy"] == pytest.approx(naive)
    assert found["mean"] == pytest.approx(sum(naive) / 8)
    variance = sum((value - sum(naive) / 8) ** 2 for value in naive) / 8
    assert found["deviation"] == pytest.approx(math.sqrt(variance))
    sizes = [5 + 3 * (number % 4) for number in range(8)]
    assert found["samples"] == sizes
    floor = sum(found["mean"] * (1 - found["mean"]) / size for size in sizes) / 8
    assert found["binomial_floor"] == pytest.approx(math.sqrt(floor))


def test_samples_are_drawn_without_repetition_and_always_the_same():
    with inspect(ff.Task(network(), federation(unequal=True))) as subject:
        whole, some = subject.training_data(None), subject.training_data(20)
        assert torch.equal(some[0], subject.training_data(20)[0])
        rows = [int((whole[0] == row).all(1).nonzero()) for row in some[0]]
        assert len(set(rows)) == 20
        assert torch.equal(whole[1][rows], some[1])


def test_a_run_brings_its_own_algorithm():
    result = run(ff.fedavg(), rounds=1)
    with (
        pytest.raises(ff.FlatfedError, match="run: it has its own"),
        inspect(ff.Task(network(), federation()), ff.fedavg(), run=result),
    ):
        pass


def test_a_run_is_measured_with_the_loss_and_metrics_of_its_task():
    data = [torch.randn(8, 3, generator=torch.Generator().manual_seed(number)) for number in range(3)]
    numbers = ff.Federation.from_tensors([(inputs, inputs.sum(1, keepdim=True)) for inputs in data])
    model = torch.nn.Linear(3, 1)
    error = torch.nn.functional.l1_loss
    task = ff.Task(model, numbers, torch.nn.functional.mse_loss, {"error": error})
    result = ff.train(task, ff.fedavg(), ff.Training(rounds=1))
    everything = torch.cat(data)
    outputs, targets = result.model(everything), everything.sum(1, keepdim=True)
    with inspect(task, run=result) as subject:
        found = subject.evaluate(subject.model, subject.training_data(None))
    assert found == pytest.approx(
        {"loss": float((outputs - targets).square().mean()), "error": float((outputs - targets).abs().mean())}
    )
    with inspect(ff.Task(model, numbers, error), run=result) as subject:
        other = subject.evaluate(subject.model, subject.training_data(None))
    assert other == pytest.approx({"loss": found["error"]})


def test_a_run_with_a_loss_of_its_own_is_not_silently_measured_with_cross_entropy():
    result = Quadratics.random(clients=3, size=2).train(ff.fedavg(), rounds=1)
    task = ff.Task(network(), federation())
    with (
        pytest.warns(ff.FlatfedWarning, match="the run was trained with another"),
        inspect(task, run=result),
    ):
        pass
