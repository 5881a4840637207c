"""Curvature against dense Hessians and known spectra."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import Point, Quadratics, federation, flat, mean_output, network
from torch import nn
from torch.func import functional_call

import flatfed as ff
from flatfed.diagnostics import hessian, inspect
from flatfed.diagnostics.hessian import lanczos, spectrum, top_eigenvalues


def symmetric(values: np.ndarray, seed: int = 0) -> np.ndarray:
    """A matrix with these eigenvalues."""
    generator = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(generator.standard_normal((len(values), len(values))))
    return basis @ np.diag(values) @ basis.T


def dense_hessian(inputs: torch.Tensor, targets: torch.Tensor) -> np.ndarray:
    """By torch.func, from a loss that is written out here."""
    model = network()
    names = [name for name, _ in model.named_parameters()]
    shapes = [value.shape for value in model.parameters()]

    def loss(vector: torch.Tensor) -> torch.Tensor:
        pieces = vector.split([shape.numel() for shape in shapes])
        parameters = {n: p.view(s) for n, p, s in zip(names, pieces, shapes, strict=True)}
        return F.cross_entropy(functional_call(model, parameters, (inputs,)), targets)

    return torch.func.hessian(loss)(flat(model)).detach().numpy()


def test_products_are_those_of_the_dense_hessian():
    data = federation()
    with inspect(ff.Task(network(), data)) as subject:
        samples = subject.data(2)
        matrix = dense_hessian(*samples)
        for seed in range(3):
            direction = torch.randn(
                len(matrix), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
            )
            found = subject.hessian_product(subject.model, samples, direction)
            assert torch.allclose(found, torch.from_numpy(matrix) @ direction, atol=1e-12)


def test_slices_add_up_to_the_whole(monkeypatch):
    monkeypatch.setattr("flatfed.diagnostics.subject.GRADIENT_SLICE", 5)
    with inspect(ff.Task(network(), federation(unequal=True))) as subject:
        pooled = subject.training_data(None)
        matrix = dense_hessian(*pooled)
        direction = torch.ones(len(matrix), dtype=torch.float64)
        found = subject.hessian_product(subject.model, pooled, direction)
        assert torch.allclose(found, torch.from_numpy(matrix) @ direction, atol=1e-12)


def test_global_and_client_spectra_are_those_of_dense_hessians():
    data = federation()
    with inspect(ff.Task(network(), data)) as subject:
        found = hessian(subject, clients=2, eigenvalues=4, probes=40, steps=2)
        cases = [(found["global"], dense_hessian(*subject.training_data(None)))]
        cases += [(each, dense_hessian(*subject.data(each["client"]))) for each in found["clients"]]
    assert len(cases) == 3
    for spectrum_found, matrix in cases:
        true = np.linalg.eigvalsh(matrix)[::-1]
        assert np.allclose(spectrum_found["eigenvalues"], true[:4], atol=1e-9)
        assert abs(spectrum_found["trace"] - true.sum()) < 4 * spectrum_found["trace_error"]
        # Hutchinson's variance for signs: twice the squares off the diagonal.
        off_diagonal = matrix - np.diag(np.diag(matrix))
        expected = np.sqrt(2 * np.square(off_diagonal).sum() / 40)
        assert spectrum_found["trace_error"] == pytest.approx(expected, rel=0.5)


def test_a_quadratic_has_the_mean_of_its_clients_curvatures():
    problem = Quadratics.random(clients=4, size=90)
    true = torch.linalg.eigvalsh(problem.curvatures.mean(0)).flip(0)
    start = torch.full_like(problem.minima[0], 3.0)
    task = ff.Task(Point(start), problem.federation, mean_output)
    with inspect(task, training=ff.Training(rounds=1, batch_size=None)) as subject:
        found = hessian(subject, clients=1, eigenvalues=5, probes=3, steps=5)
    assert np.allclose(found["global"]["eigenvalues"], true[:5], rtol=1e-3)
    (client,) = found["clients"]
    own = torch.linalg.eigvalsh(problem.curvatures[client["client"]]).flip(0)
    assert np.allclose(client["eigenvalues"], own[:5], rtol=1e-3)


@pytest.mark.parametrize("size", [20, 100])  # dense, Lanczos
def test_the_largest_eigenvalue_is_not_the_largest_magnitude(size):
    values = np.concatenate([[-50.0], np.linspace(-1, 3, size - 1)])
    matrix = symmetric(values)
    found = top_eigenvalues(lambda vector: matrix @ vector, size, 2)
    assert np.allclose(found, sorted(values)[::-1][:2], rtol=1e-3)


@pytest.mark.parametrize("size", [20, 100])
def test_more_eigenvalues_than_there_are_can_be_asked_for(size):
    values = np.linspace(1, 2, size)
    matrix = symmetric(values)
    found = top_eigenvalues(lambda vector: matrix @ vector, size, size + 1)
    assert len(found) >= size - 1
    assert np.allclose(found, values[::-1][: len(found)], rtol=1e-3)


def test_a_large_operator_may_be_zero():
    assert top_eigenvalues(np.zeros_like, 100, 3) == [0.0, 0.0, 0.0]


def test_lanczos_finds_a_whole_spectrum_without_ghosts():
    values = np.array([-2.0, 0.5, 1.0, 4.0, 9.0])
    matrix = symmetric(values)
    diagonal, beside = lanczos(lambda vector: matrix @ vector, np.ones(5), 30)
    assert len(diagonal) == 5
    tridiagonal = np.diag(diagonal) + np.diag(beside, 1) + np.diag(beside, -1)
    assert np.allclose(np.linalg.eigvalsh(tridiagonal), values)


def test_the_density_has_area_one_and_its_mass_where_the_eigenvalues_are():
    values = np.concatenate([np.zeros(70), np.full(30, 10.0)])
    matrix = symmetric(values)
    found = spectrum(lambda vector: matrix @ vector, 100, 1, probes=50, steps=10)
    grid, density = map(np.array, (found["density"]["values"], found["density"]["density"]))
    width = grid[1] - grid[0]
    assert density.sum() * width == pytest.approx(1, abs=1e-3)
    assert density[grid < 5].sum() * width == pytest.approx(0.7, abs=0.05)
    assert found["trace"] == pytest.approx(300, abs=4 * found["trace_error"])


def test_a_model_that_is_linear_in_its_loss_has_no_curvature():
    model = nn.Linear(3, 1).double()
    data = torch.ones(4, 3, dtype=torch.float64), torch.zeros(4)
    task = ff.Task(model, ff.Federation.from_tensors([data]), mean_output)
    with inspect(task, training=ff.Training(rounds=1, local_steps=1)) as subject:
        found = hessian(subject, probes=2, steps=1)
    assert found["global"]["eigenvalues"] == [0, 0, 0]
    assert found["global"]["trace"] == 0


def test_clients_have_densities_if_asked_for():
    with inspect(ff.Task(network(), federation())) as subject:
        without = hessian(subject, clients=2, probes=2, steps=3)
        found = hessian(subject, clients=2, probes=2, steps=3, client_steps=20)
    assert [each["density"] for each in without["clients"]] == [None, None]
    for each in found["clients"]:
        values, density = each["density"]["values"], each["density"]["density"]
        assert np.trapezoid(density, values) == pytest.approx(1, abs=0.05)
        assert min(values) < each["eigenvalues"][0] < max(values)
