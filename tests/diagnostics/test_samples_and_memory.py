"""Single samples, margins, perturbations and what clients remember, against hand-computed cases."""

from __future__ import annotations

import math

import pytest
import torch
from problems import Point, Quadratics, Recorder, federation, gradient_of, mean_output, network, run
from torch import nn

import flatfed as ff
from flatfed.diagnostics import (
    control_lag,
    inspect,
    local_stability,
    margin,
    perturbation_difference,
    sample_gradients,
    sample_stability,
)
from flatfed.diagnostics.sample_stability import with_sample_replaced
from flatfed.theory.margins import LayerNorms
from flatfed.theory.stability import local_bound

PROBLEM = Quadratics.random(clients=3, size=2)
START = torch.full((2,), 3.0, dtype=torch.float64)


def unit(vector: torch.Tensor) -> torch.Tensor:
    return vector / vector.norm()


def slope(client: int, point: torch.Tensor) -> torch.Tensor:
    return PROBLEM.curvatures[client] @ (point - PROBLEM.minima[client])


def quadratic_subject(algorithm: ff.Algorithm, **options):
    task = ff.Task(Point(START), PROBLEM.federation, mean_output, metrics={})
    return inspect(task, algorithm, ff.Training(**{"rounds": 1, "batch_size": None, **options}))


@pytest.mark.parametrize("name", ["scaffold", "feddyn"])
def test_after_one_step_memory_lags_by_one_step(name):
    # Control variates, and duals times −α, are the gradients at the model before.
    options = {"option": "I"} if name == "scaffold" else {"regularisation": 10.0}
    result = PROBLEM.train(ff.ALGORITHMS[name](**options), rounds=1, local_steps=1, lr=0.1)
    task = ff.Task(Point(START), PROBLEM.federation, mean_output, metrics={})
    with inspect(task, run=result) as subject:
        found = control_lag(subject, clients=None)
    model = result.server["model"]
    lags = [(slope(client, START) - slope(client, model)).square().sum() for client in range(3)]
    sizes = [slope(client, model).square().sum() for client in range(3)]
    assert found["lag"] == pytest.approx(float(sum(lags) / 3))
    assert found["relative"] == pytest.approx(float(sum(lags) / sum(sizes)))
    assert [client["lag"] for client in found["clients"]] == pytest.approx([float(lag) for lag in lags])


def test_methods_without_memory_have_no_lag():
    with quadratic_subject(ff.fedavg(), local_steps=1) as subject:
        assert control_lag(subject) == {"lag": None, "relative": None, "clients": []}


def test_perturbations_change_as_the_local_model_does():
    with quadratic_subject(ff.fedsam(radius=0.5), local_steps=3, lr=0.1) as subject:
        found = perturbation_difference(subject, clients=None)
        assert perturbation_difference(subject, radius=0.25)["radius"] == 0.25
    whole = 0.5 * unit(sum(slope(client, START) for client in range(3)))
    first = [0.5 * unit(slope(client, START)) for client in range(3)]
    points, expected = [START] * 3, []
    for _ in range(3):
        now = [0.5 * unit(slope(client, points[client])) for client in range(3)]
        changed = sum(float((one - other).square().sum()) for one, other in zip(now, first, strict=True)) / 3
        expected.append((changed, sum(float((one - whole).square().sum()) for one in now) / 3))
        points = [points[client] - 0.1 * slope(client, points[client] + now[client]) for client in range(3)]
    assert found["steps"] == [0, 1, 2] and found["radius"] == 0.5
    assert found["from_first"] == pytest.approx([changed for changed, _ in expected])
    assert found["from_global"] == pytest.approx([apart for _, apart in expected])
    assert found["from_first"][0] == 0 < found["from_first"][2]


def test_samples_by_themselves():
    data = federation()
    with inspect(ff.Task(network(), data), ff.fedavg(), ff.Training(rounds=1)) as subject:
        found, model = sample_gradients(subject, clients=None, samples=12), subject.model
    norms, squares = [], []
    for client in range(8):
        inputs, targets = data.client(client).whole()
        whole = gradient_of(network(), model, inputs, targets)
        for place in range(12):
            alone = gradient_of(network(), model, inputs[[place]], targets[[place]])
            norms.append(float(alone.norm()))
            squares.append(float((alone - whole).square().sum()))
    assert found["norms"] == pytest.approx(norms)
    assert found["deviation"] == pytest.approx(math.sqrt(sum(squares) / 96))


def test_margins_of_the_perturbed_model():
    data = federation()
    with inspect(ff.Task(network(), data), ff.fedsam(radius=0.4), ff.Training(rounds=1)) as subject:
        found, model = margin(subject, clients=None), subject.model
    shares, plain, largest = torch.zeros(21), torch.zeros(21), 0.0
    for client in range(8):
        inputs, targets = data.client(client).whole()
        climbed = model + 0.4 * unit(gradient_of(network(), model, inputs, targets))
        for point, into in ((climbed, shares), (model, plain)):
            module = network()
            nn.utils.vector_to_parameters(point, module.parameters())
            outputs = module(inputs).softmax(1).detach()
            for row, label in zip(outputs, targets.tolist(), strict=True):
                others = max(value for place, value in enumerate(row.tolist()) if place != label)
                into.add_(
                    torch.tensor([float(row[label]) - others <= gamma / 20 for gamma in range(21)]) / 96
                )
        largest = max(largest, float(inputs.norm(dim=1).max()))
    assert found["loss"] == pytest.approx(shares.tolist(), abs=1e-6)
    assert found["unperturbed"] == pytest.approx(plain.tolist(), abs=1e-6)
    assert found["loss"][0] > found["unperturbed"][0] and found["radius"] == 0.4
    assert found["largest_input"] == pytest.approx(largest)
    weights = [parameter.detach() for name, parameter in network().named_parameters() if "weight" in name]
    norms = LayerNorms(
        [float(torch.linalg.svdvals(weight)[0]) for weight in weights],
        [float(weight.norm()) for weight in weights],
    )
    assert found["complexity"] == pytest.approx(norms.complexity)
    assert found["squared_complexity"] == pytest.approx(norms.squared_complexity)
    assert found["log10_bound"] > 0 and found["excluded"] == []


def test_margins_need_class_labels_and_dense_layers():
    with quadratic_subject(ff.fedavg()) as subject, pytest.raises(ff.FlatfedError, match="one class label"):
        margin(subject)
    convolution = nn.Sequential(nn.Unflatten(1, (1, 2, 2)), nn.Conv2d(1, 3, 2), nn.Flatten()).double()
    with inspect(ff.Task(convolution, federation()), ff.fedavg(), ff.Training(rounds=1)) as subject:
        found = margin(subject, clients=2)
    assert found["layers"] == [] and found["complexity"] is None and found["excluded"] == ["1.weight"]


def test_one_sample_replaced_is_all_that_differs():
    data, settings = (
        federation(),
        {"participants": 3, "local_steps": 3, "batch_size": 5, "rounds": 3, "lr": 0.1},
    )
    with inspect(ff.Task(network(), data), ff.fedsam(), ff.Training(**settings)) as subject:
        found = sample_stability(subject, replacements=2)
    base = Recorder()
    run(ff.fedsam(), recorder=base, weight_decay=0, lr_decay=1.0, **settings)
    expected = []
    for pair in found["replaced"]:
        (client, place), (other, other_place) = pair["sample"], pair["by"]
        samples = [data.client(number).whole() for number in range(8)]
        inputs, targets = (tensor.clone() for tensor in samples[client])
        inputs[place], targets[place] = samples[other][0][other_place], samples[other][1][other_place]
        samples[client] = (inputs, targets)
        changed = Recorder()
        neighbour = ff.Federation.from_tensors(samples)
        run(ff.fedsam(), recorder=changed, data=neighbour, weight_decay=0, lr_decay=1.0, **settings)
        expected.append((base.models - changed.models).norm(dim=1))
    assert torch.allclose(torch.tensor(found["replacements"]).double(), torch.stack(expected), atol=1e-12)
    assert found["discrepancy"] == pytest.approx(torch.stack(expected).amax(0).tolist())
    assert found["discrepancy"][-1] > 0
    with quadratic_subject(ff.fedavg()) as subject:
        assert len(sample_stability(subject, replacements=1, rounds=1)["discrepancy"]) == 1


def test_a_replaced_sample_in_data_from_a_function():
    pooled = federation(3, unequal=True)
    loaded = ff.Federation.from_function(3, lambda number: pooled.client(number).whole())
    for number in range(3):
        one, other = (
            with_sample_replaced(made, (1, 2), (2, 4)).client(number).whole() for made in (pooled, loaded)
        )
        assert torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
        same = [
            torch.equal(row, old) for row, old in zip(one[0], pooled.client(number).whole()[0], strict=True)
        ]
        assert same == [number != 1 or place != 2 for place in range(len(same))]


def test_local_stability_has_the_bound_of_its_round():
    with quadratic_subject(ff.fedsagd(), local_steps=3, clip=1.0, lr=0.1) as subject:
        found = local_stability(subject, clients=None)
        assert found["bound"] == local_bound(subject.algorithm, subject.training, 3, 1.0)
        assert "bound" in found and local_stability(subject, bound=False)["bound"] is None
    assert all(most >= apart for most, apart in zip(found["bound"], found["discrepancy"], strict=True))
    assert found["discrepancy"][-1] > 0.1 * found["bound"][-1]
    with quadratic_subject(ff.fedrobust(), local_steps=1) as subject:
        assert local_stability(subject)["bound"] is None
