"""Surfaces, lines and planes against direct evaluation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from problems import federation, flat, network, run
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.flat import Layout
from flatfed.diagnostics import between, inspect, plane, surface
from flatfed.diagnostics.plane import widest_plane
from flatfed.diagnostics.surface import filter_normalised, losses_on_plane, random_directions


def loss_at(vector: Tensor, inputs: Tensor, targets: Tensor) -> float:
    model = network()
    nn.utils.vector_to_parameters(vector, model.parameters())
    return F.cross_entropy(model(inputs), targets).item()


def everything(data: ff.Federation) -> tuple[Tensor, Tensor]:
    owned = [data.client(number) for number in range(len(data))]
    pairs = [own.batch(torch.arange(len(own))) for own in owned]
    return torch.cat([inputs for inputs, _ in pairs]), torch.cat([targets for _, targets in pairs])


def with_test(data: ff.Federation) -> ff.Federation:
    pairs = [data.client(number).batch(torch.arange(12)) for number in range(len(data))]
    return ff.Federation.from_tensors(pairs, test=pairs[0])


def test_directions_are_orthogonal_and_depend_on_the_seed_alone():
    directions = random_directions(1000, 3, seed=4)
    products = directions @ directions.T
    assert torch.allclose(products, torch.diag(products.diagonal()), atol=1e-9)
    assert torch.equal(directions[:2], random_directions(1000, 2, seed=4))
    assert not torch.equal(directions[0], random_directions(1000, 1, seed=5)[0])
    assert directions.std() == pytest.approx(1, abs=0.1)


def test_every_filter_is_as_long_as_the_models_and_short_tensors_do_not_move():
    model = nn.Sequential(nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 2)).double()
    layout = Layout(model)
    vector = layout.vector(model)
    (direction,) = random_directions(layout.size, 1, seed=0)
    moved = layout.views(filter_normalised(layout, direction, vector))
    raw = layout.views(direction)
    for name, weight in model.named_parameters():
        if weight.dim() < 2:
            assert not moved[name].any()
            continue
        for own, drawn, there in zip(moved[name], raw[name], weight, strict=True):
            assert own.norm() == pytest.approx(there.norm().item())
            assert float((own * drawn).sum() / own.norm() / drawn.norm()) == pytest.approx(1)


def test_the_surface_is_the_loss_at_the_points_it_names():
    data = with_test(federation())
    model = network()
    with inspect(ff.Task(model, data)) as subject:
        found = surface(subject, points=5, extent=0.5, seed=7, samples=None)
    assert found["a"] == found["b"] == pytest.approx([-0.5, -0.25, 0, 0.25, 0.5])
    layout, centre = Layout(model), flat(model)
    first, second = (
        filter_normalised(layout, direction, centre) for direction in random_directions(len(centre), 2, 7)
    )
    for i, a in enumerate(found["a"]):
        for j, b in enumerate(found["b"]):
            at = centre + a * first + b * second
            assert found["train"][i][j] == pytest.approx(loss_at(at, *everything(data)), abs=1e-9)
            assert found["test"][i][j] == pytest.approx(loss_at(at, *data.test), abs=1e-9)


def test_a_one_dimensional_surface_is_the_middle_of_the_other():
    with inspect(ff.Task(network(), with_test(federation()))) as subject:
        whole = surface(subject, points=3)
        cut = surface(subject, points=3, dimensions=1)
    assert cut["b"] == [0.0]
    assert [row[0] for row in cut["train"]] == pytest.approx([row[1] for row in whole["train"]])


def test_evaluation_uses_running_statistics_and_leaves_them_alone():
    model = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    with torch.no_grad():
        model[1].running_mean.fill_(0.7)
        model[1].running_var.fill_(2.0)
    data = federation()
    reference = copy.deepcopy(model).eval()
    with inspect(ff.Task(model, data)) as subject:
        samples = subject.training_data(None)
        found = surface(subject, points=3, samples=None)["train"][1][1]
        slope = subject.gradient(subject.model, samples)
        assert subject.buffers["1.running_mean"].tolist() == [0.7] * 5
    loss = F.cross_entropy(reference(samples[0]), samples[1])
    assert found == pytest.approx(loss.item(), abs=1e-12)
    expected = torch.autograd.grad(loss, list(reference.parameters()))
    assert torch.allclose(slope, torch.cat([piece.flatten() for piece in expected]), atol=1e-12)


def test_a_straight_line_takes_the_running_statistics_along():
    def make(seed: int) -> nn.Module:
        generator = torch.Generator().manual_seed(seed)
        made = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Linear(5, 3)).double()
        for value in [*made.parameters(), made[1].running_mean]:
            value.data.normal_(generator=generator)
        return made

    start, end, data = make(1), make(2), with_test(federation())
    with inspect(ff.Task(start, data)) as subject:
        found = between(subject, flat(end), dict(end.named_buffers()), [0.0, 0.25, 1.0])
    middle = make(1)
    for own, there in zip(
        [*middle.parameters(), middle[1].running_mean],
        [*end.parameters(), end[1].running_mean],
        strict=True,
    ):
        own.data.mul_(0.75).add_(there.data, alpha=0.25)
    for number, model in enumerate([start, middle, end]):
        model.eval()
        for name, (inputs, targets) in (("train_loss", everything(data)), ("test_loss", data.test)):
            loss = F.cross_entropy(model(inputs), targets).item()
            assert found[name][number] == pytest.approx(loss, abs=1e-9)
        share = (model(data.test[0]).argmax(1) == data.test[1]).double().mean().item()
        assert found["test_accuracy"][number] == pytest.approx(share)


def test_two_clients_and_the_global_model_lie_in_the_plane():
    data = with_test(federation(2))
    result = run(ff.fedavg(), data=data, participants=2)
    with inspect(ff.Task(network(), data), run=result) as subject:
        found = plane(subject, clients=2, points=4, samples=None)
        models: dict[int, Tensor] = {}
        subject.local_models([0, 1], lambda client, step, model: models.update({client: model}))
        moved = torch.stack([models[0] - subject.model, models[1] - subject.model])
        directions = widest_plane(moved)
        at_corner = subject.model + found["x"][0] * directions[0] + found["y"][3] * directions[1]
        corner = loss_at(at_corner, *everything(data))
    assert torch.allclose(directions @ directions.T, torch.eye(2, dtype=torch.float64), atol=1e-9)
    by_label = {point["label"]: point for point in found["points"]}
    assert by_label["global"]["x"] == by_label["global"]["y"] == 0
    for client in (0, 1):
        point = by_label[f"client {client}"]
        foot = point["x"] * directions[0] + point["y"] * directions[1]
        assert torch.allclose(foot, moved[client], atol=1e-9)
        assert point["loss"] == pytest.approx(loss_at(models[client], *everything(data)), abs=1e-9)
        assert found["x"][0] < point["x"] < found["x"][-1]
    assert found["loss"][0][3] == pytest.approx(corner, abs=1e-9)


def test_a_plane_needs_two_directions():
    with pytest.raises(ff.FlatfedError, match="two clients"):
        widest_plane(torch.tensor([[1.0, 2, 3], [2, 4, 6]]))
    with pytest.raises(ff.FlatfedError, match="two clients"):
        widest_plane(torch.tensor([[1.0, 2, 3]]))


def test_plane_losses_have_the_first_axis_first():
    with inspect(ff.Task(network(), federation())) as subject:
        size = len(subject.model)
        first, second = torch.eye(size, dtype=torch.float64)[:2]
        samples = subject.training_data(None)
        found = losses_on_plane(subject, subject.model, first, second, [0.0, 1.0], [0.0, 2.0, 3.0], samples)
        assert len(found) == 2 and len(found[0]) == 3
        assert found[1][2] == pytest.approx(loss_at(subject.model + first + 3 * second, *samples), abs=1e-9)
