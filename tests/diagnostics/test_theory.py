"""Bounds against values computed by hand, and constants against naive estimates."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problems import Quadratics, federation, gradient_of, mean_output, network, run

import flatfed as ff
from flatfed.core.sampling import batches
from flatfed.diagnostics import global_stability, inspect, theory
from flatfed.diagnostics.theory import (
    estimated_constants,
    fedswa_generalization_order,
    gradient_bound,
    stability_bound,
)


def bound(algorithm: ff.Algorithm, rounds: int = 3, **options) -> list[float] | None:
    settings = ff.Training(rounds=1, **{"lr": 0.1, **options})
    return stability_bound(algorithm, settings, 4, 2.0, rounds)


def test_fedavg_grows_by_two_path_lengths_a_round():
    # 2 η K Θ = 2 · 0.1 · 4 · 2
    assert bound(ff.fedavg()) == pytest.approx([1.6, 3.2, 4.8])
    assert bound(ff.fedavg(server_rate=1.5)) == pytest.approx([2.4, 4.8, 7.2])
    assert bound(ff.fedavg(), lr_decay=0.5) == pytest.approx([1.6, 2.4, 2.8])
    assert bound(ff.fedavg(), clip=0.5) == pytest.approx([0.4, 0.8, 1.2])
    assert bound(ff.fedsam()) == bound(ff.fedavg())
    assert bound(ff.fedcm()) == pytest.approx(bound(ff.fedavg()))


def test_fedsagd_is_the_closed_form():
    beta, pull, decay = 0.9, 0.3, 0.2
    found = bound(ff.fedsagd(beta, pull, decay), rounds=50)
    gamma = decay / (pull + decay) * (1 - (1 - 0.1 * (pull + decay)) ** 4)
    for rounds in (1, 2, 50):
        closed = (2 + 2 * beta) * 2.0 / decay * (1 - (1 - gamma) ** rounds)
        assert found[rounds - 1] == pytest.approx(closed)


def test_weight_decay_alone_bounds_fedavg_for_ever():
    found = bound(ff.fedavg(), rounds=2000, weight_decay=0.5)
    assert found[-1] == pytest.approx(2 * 2.0 / 0.5)
    sagd = bound(ff.fedsagd(0.9, 0.0, 0.5), rounds=2000)
    assert sagd[-1] == pytest.approx(1.9 * found[-1])


def test_a_proximal_term_shortens_the_path_but_does_not_contract():
    length = 0.1 * (1 + 0.9 + 0.81 + 0.729)  # steps shrink by 1 − η λ = 0.9
    assert bound(ff.fedprox(proximal_weight=1.0)) == pytest.approx([4 * length, 8 * length, 12 * length])


def test_momentum_lengthens_the_step():
    assert bound(ff.fedavgm(momentum_decay=0.75)) == pytest.approx([6.4, 12.8, 19.2])
    assert bound(ff.fedlnag(momentum_decay=0.5), weight_decay=0.1) == pytest.approx([3.2, 6.4, 9.6])
    assert bound(ff.fedadam(server_rate=0.01, stability=0.001)) == pytest.approx([16, 32, 48])


def test_a_composition_without_a_name_has_the_bound_of_its_parts():
    composed = replace(ff.fedavg(), server=ff.parts.Momentum(0.5))
    assert bound(composed) == bound(ff.fedavgm(0.5)) == pytest.approx([3.2, 6.4, 9.6])


def test_methods_beyond_the_argument_have_no_bound():
    assert bound(ff.feddyn()) is None
    assert bound(ff.scaffold()) is None
    assert bound(ff.fedcm(), weight_decay=0.1) is None
    assert bound(replace(ff.fedavg(), compress=ff.parts.TopK(0.2))) is None


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedsam", "fedavgm", "fedacg", "fedlnag", "fednsam"])
def test_a_bound_holds_for_trainings_with_nothing_in_common(name):
    one, other = Quadratics.random(clients=3, size=2), Quadratics.random(clients=5, size=2)
    settings = {"rounds": 12, "local_steps": 4, "lr": 0.1, "clip": 1.0}  # the clip is Θ
    apart = one.train(ff.ALGORITHMS[name](), **settings).server["model"]
    apart = float((apart - other.train(ff.ALGORITHMS[name](), **settings).server["model"]).norm())
    checked = ff.Training(**settings)
    assert 0 < apart < stability_bound(ff.ALGORITHMS[name](), checked, 4, 1.0, 12)[-1]


def test_the_generalization_order_by_hand():
    constants = {"lipschitz": 2.0, "smoothness": 4.0, "heterogeneity": 3.0, "gradient_deviation": 0.5}
    values = {"constants": constants, "clients": 10, "samples": 5, "steps": 3, "rounds": 2}
    factor = 1 + (2 + 1 / 6) ** 2 / 2
    front = 2 / (10 * 5 * 4) * math.exp(1.5)
    swa = fedswa_generalization_order(**values, momentum=False)
    assert swa == pytest.approx(front * factor * (2 + 3 + 0.5))
    moswa = fedswa_generalization_order(**values, momentum=True)
    assert moswa == pytest.approx(front * (factor * 2 + 3 + factor * 0.5))
    assert fedswa_generalization_order(**{**values, "steps": 5000}, momentum=True) == math.inf


def test_constants_are_those_of_naive_estimates():
    data = federation()
    result = run(ff.fedavg(), data=data, rounds=2)
    with inspect(ff.Task(network(), data), run=result) as subject:
        found = estimated_constants(subject, clients=None, count=2)
        settings, model = subject.training, subject.model
        samples = [subject.data(client) for client in range(8)]
    full = torch.stack([gradient_of(network(), model, *pair) for pair in samples])
    spread, longest = [], 0.0
    for client, (inputs, targets) in enumerate(samples):
        chosen = batches(settings, 12, 2, client)
        small = [gradient_of(network(), model, inputs[each], targets[each]) for each in chosen[:2]]
        spread.append(sum(float((slope - full[client]).square().sum()) for slope in small) / 2)
        for at in (torch.nn.utils.parameters_to_vector(network().parameters()).detach(), model):
            for each in chosen[:3]:
                slope = gradient_of(network(), at, inputs[each], targets[each]) + settings.weight_decay * at
                longest = max(longest, float(slope.norm()))
    assert found["gradient_bound"] == pytest.approx(longest)
    assert found["lipschitz"] == pytest.approx(float(full.norm(dim=1).max()))
    assert found["gradient_deviation"] == pytest.approx(math.sqrt(sum(spread) / 8))
    apart = (full - full.mean(0)).norm(dim=1)
    assert found["heterogeneity"] == pytest.approx(math.sqrt(float((apart**2).mean())))


def test_smoothness_is_the_largest_curvature_of_a_client():
    problem = Quadratics.random(clients=3, size=4)
    result = problem.train(ff.fedmoswa(), rounds=2)
    with inspect(ff.Task(result.model, problem.federation, mean_output), run=result) as subject:
        found = theory(subject, clients=None)
    assert found["constants"]["smoothness"] == pytest.approx(
        float(torch.linalg.eigvalsh(problem.curvatures).max())
    )
    assert set(found["bounds"]) == {"generalization (order of growth)"}


def test_unequal_clients_have_one_bound_in_both_diagnostics():
    data = federation(unequal=True)
    options = {"local_epochs": 1, "batch_size": 2, "rounds": 3}
    with inspect(ff.Task(network(), data), ff.fedavg(), ff.Training(**options)) as subject:
        bounds = theory(subject)["bounds"]["stability"]["y"]
        assert bounds == global_stability(subject, replacements=1)["bound"]
        sizes = [len(data.client(client)) for client in range(len(data))]
        # The first client is not the largest, and the bound is that of the largest.
        assert sizes[0] < max(sizes)
        steps = len(batches(subject.training, max(sizes), 0, 0))
        assert bounds == stability_bound(
            subject.algorithm, subject.training, steps, gradient_bound(subject), rounds=3
        )
