"""Statements labelled as bounds, against quadratics whose clients differ, and one that is exceeded."""

from __future__ import annotations

import math

import pytest
import torch
from problems import Point, Quadratics, mean_output
from torch import Tensor

import flatfed as ff
from flatfed import parts
from flatfed.diagnostics import drift, inspect, perturbation_difference
from flatfed.theory import Setting, fednsam, fedsagd, fedsam, fedswa, fedsynsam


def unit(vector: Tensor) -> Tensor:
    return vector / vector.norm()


def problems(count: int) -> list[tuple[Quadratics, Tensor]]:
    """Quadratics of all shapes, and a point of each."""
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = []
    for _ in range(count):
        roots = draw(3, 2, 2)
        made.append((Quadratics(roots @ roots.mT, 3 * draw(3, 2)), 2 * draw(2)))
    return made


def slopes(problem: Quadratics, points: Tensor) -> Tensor:
    """The clients' gradients at a point each, or all at one."""
    return torch.einsum("nij,nj->ni", problem.curvatures, points - problem.minima)


def smoothness(problem: Quadratics) -> float:
    return float(torch.linalg.eigvalsh(problem.curvatures).max())


def spread(problem: Quadratics, points: Tensor) -> float:
    """The largest ‖∇F_i − ∇F‖² over clients at the given points."""
    worst = 0.0
    for point in points:
        own = slopes(problem, point)
        worst = max(worst, float((own - own.mean(0)).square().sum(1).max()))
    return worst


@pytest.mark.parametrize("radius", [0.01, 0.3, 2.0])
def test_perturbed_gradients_of_clients_disagree_as_little_as_lemma_a_5_says(radius):
    closest = 0.0
    for problem, point in problems(50):
        own = slopes(problem, point)
        there = slopes(problem, point + radius * own / own.norm(dim=1, keepdim=True))
        whole = slopes(problem, point + radius * unit(own.mean(0))).mean(0)
        s = Setting(L=smoothness(problem), rho=radius, spread=spread(problem, point[None]))
        share = float((there - whole).square().sum(1).max()) / fedsam.gradient_disagreement(s).value
        assert share <= 1
        closest = max(closest, share)
    assert closest > 0.1


@pytest.mark.parametrize("radius", [0.01, 0.3, 2.0])
def test_mixed_perturbations_disagree_as_little_as_lemma_1_says(radius):
    closest = 0.0
    for problem, point in problems(50):
        own = slopes(problem, point)
        mixed = 0.9 * own + 0.1 * (own.mean(0) + 1.0)
        ascent, ahead = mixed / mixed.norm(dim=1, keepdim=True), unit(own.mean(0))
        points = point + radius * ascent
        difference = slopes(problem, points) - slopes(problem, point + radius * ahead).mean(0)
        for number in range(3):
            s = Setting(
                L=smoothness(problem), rho=radius, spread=spread(problem, points[number : number + 1])
            )
            gamma = fedsynsam.perturbation_disagreement(s, cosine=float(ascent[number] @ ahead))
            share = float(difference[number].square().sum()) / gamma.value
            assert share <= 1
            closest = max(closest, share)
    assert closest > 0.1


def measured(problem: Quadratics, algorithm: ff.Algorithm, point: Tensor, eta: float, steps: int):
    """The drift of one more round from a point, with full gradients, and the visited models."""
    task = ff.Task(Point(point), problem.federation, mean_output, metrics={})
    training = ff.Training(rounds=1, local_steps=steps, batch_size=None, lr=eta)
    with inspect(task, algorithm, training) as subject:
        visited: list[Tensor] = []
        subject.local_models(range(3), lambda client, step, model: visited.append(model.clone()))
        return drift(subject, clients=None), torch.stack(visited)


def test_drift_stays_below_its_lemmas():
    steps, shares = 4, {"D.10": 0.0, "E.4": 0.0, "flatness": 0.0}
    for problem, point in problems(12):
        L = smoothness(problem)
        eta = 1 / (15 * steps * L)
        found, visited = measured(problem, ff.fedavg(), point, eta, steps)
        farthest, gradient = max(found["drift_by_step"]), float(slopes(problem, point).mean(0).norm())
        s = Setting(K=steps, L=L, eta=eta, spread=spread(problem, visited))
        lemma = fedsagd.drift(s, gradient**2, momentum=0.0, decay=0.0)
        assert lemma.holds and lemma.label == "bound"
        # Lemma E.4 is about the distance, and the client that moves farthest is no farther.
        reach = fedswa.drift(s, eta * steps, gradient)
        distances = (visited - point).norm(dim=1)
        assert max(farthest / lemma.value, float(distances.max()) / reach.corrected) <= 1
        shares["D.10"] = max(shares["D.10"], farthest / lemma.value)
        shares["E.4"] = max(shares["E.4"], float(distances.max()) / reach.corrected)
        # A variance is at most the mean square.
        assert found["flatness_distance"] <= found["drift_by_step"][-1]
        small = Setting(K=steps, L=L, eta=1 / (128 * steps * L), rho=0.1, spread=s.spread)
        moved, _ = measured(problem, ff.fednsam(radius=0.1), point, small.eta, steps)
        bound = fednsam.nesterov_flatness_distance(small, gradient**2)
        assert bound.holds and moved["flatness_distance"] <= bound.value
        shares["flatness"] = max(shares["flatness"], moved["flatness_distance"] / bound.value)
    assert shares["D.10"] > 0.02 and shares["E.4"] > 0.3 and shares["flatness"] > 0.01


def test_two_clients_with_orthogonal_gradients_exceed_lemma_b_1():
    level = torch.zeros(2, 2, 2, dtype=torch.float64)
    level[0, 0, 0] = level[1, 1, 1] = 1.0
    problem = Quadratics(level, torch.tensor([[-1.0, 0], [0, -1.0]], dtype=torch.float64))
    task = ff.Task(Point(torch.zeros(2, dtype=torch.float64)), problem.federation, mean_output, metrics={})
    training = ff.Training(rounds=1, local_steps=3, batch_size=None, lr=1e-6)
    with inspect(task, ff.fedsam(radius=0.3), training) as subject:
        found = perturbation_difference(subject, clients=None)
    lemma = fedsam.perturbation_difference(Setting(K=3, L=1, eta=1e-6, rho=0.3))
    assert lemma.holds and lemma.label == "as printed"
    assert found["from_global"][-1] == pytest.approx((2 - math.sqrt(2)) * 0.09)
    assert found["from_global"][-1] > 1e10 * lemma.value


@pytest.mark.parametrize("rate", [1.0, 1.5])
def test_one_sample_replaced_moves_the_model_less_than_the_recursion_says(rate):
    generator = torch.Generator().manual_seed(9)
    curvatures = torch.diag(torch.tensor([1.5, 0.4], dtype=torch.float64))
    minima = torch.randn(3, 4, 2, generator=generator, dtype=torch.float64)
    changed = minima.clone()
    changed[1, 2] += torch.tensor([4.0, -3.0])
    steps, eta, rounds = 3, 0.02, 4

    def trained(centres: Tensor) -> tuple[Tensor, float]:
        """The last model, and the longest gradient on a sample on the way."""
        point, longest = torch.zeros(2, dtype=torch.float64), 0.0
        for _ in range(rounds):
            ends = []
            for client in range(3):
                local = point.clone()
                for _ in range(steps):
                    gradients = (local - centres[client]) @ curvatures
                    longest = max(longest, float(gradients.norm(dim=1).max()))
                    local = local - eta * gradients.mean(0)
                ends.append(local - point)
            point = point + rate * torch.stack(ends).mean(0)
        return point, longest

    (one, longest), (other, also) = trained(minima), trained(changed)
    s = Setting(N=3, S=3, K=steps, T=rounds, eta=eta, L=1.5)
    # With the longest gradient of a sample in place of ‖∇F‖ + σ_g + σ it holds for every draw.
    gradients, losses = [max(longest, also)] * rounds, fedswa.Losses(Z=max(longest, also), n=4)
    bound = math.exp(fedswa.stability_recursion([steps * eta] * rounds, gradients, s, losses, rate))
    apart = float((one - other).norm())
    assert 0.02 * bound < apart <= bound


def test_fresh_batches_turn_perturbations_however_small_the_steps():
    """Signal and noise of one power in ten dimensions: 2ρ²(1 − ‖E u‖²), where lemma B.1 goes to zero."""
    generator = torch.Generator().manual_seed(2)
    batches = math.sqrt(0.1) * torch.randn(200_000, 10, generator=generator, dtype=torch.float64)
    batches[:, 0] += 1
    mean_direction = (batches / batches.norm(dim=1, keepdim=True)).mean(0)
    assert 2 * (1 - float(mean_direction.square().sum())) == pytest.approx(0.988, abs=2e-3)


def test_decaying_steps_shorten_the_drift_of_a_constant_gradient():
    steps = 50

    def drift_of(rates: list[float]) -> float:
        return float(torch.tensor(rates, dtype=torch.float64).cumsum(0).square().mean())

    linear = parts.LinearDecay(0.1).rates(1.0, steps)
    geometric = [((steps - 2) / (steps - 1)) ** step for step in range(steps)]
    constant = drift_of([1.0] * steps)
    assert sum(linear) / steps == pytest.approx((steps + 1 + 0.1 * (steps - 1)) / (2 * steps))
    assert drift_of(linear) / constant == pytest.approx(0.4542, abs=1e-4)
    assert drift_of(geometric) / constant == pytest.approx(0.5018, abs=1e-4)
