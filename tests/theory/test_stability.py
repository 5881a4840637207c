"""Bounds on stability against values computed by hand, and against trainings that try to exceed them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from problems import GENERIC, Point, Quadratics, Recorder, generic, mean_output, train
from torch import nn

import flatfed as ff
from flatfed.core.context import ClientContext, MergeContext
from flatfed.core.flat import Layout
from flatfed.core.rounds import broadcast, client_round, reduced_uploads, server_round
from flatfed.core.state import Dimensions, initial_state
from flatfed.theory import fedsagd
from flatfed.theory.stability import local_bound, stability_bound


def near(value: object, digits: float = 1e-6) -> object:
    return pytest.approx(value, rel=digits)


def bound(
    algorithm: ff.Algorithm, rounds: int = 3, steps: int = 4, longest: float = 2.0, **options
) -> list | None:
    settings = ff.Training(rounds=1, **{"lr": 0.1, **options})
    return stability_bound(algorithm, settings, steps, longest, rounds)


# -- by hand -----------------------------------------------------------------------------------------------


def test_fedavg_grows_by_two_path_lengths_a_round():
    # 2 η K Θ = 2 · 0.1 · 4 · 2
    assert bound(ff.fedavg()) == near([1.6, 3.2, 4.8])
    assert bound(ff.fedavg(server_rate=1.5)) == near([2.4, 4.8, 7.2])
    assert bound(ff.fedavg(), lr_decay=0.5) == near([1.6, 2.4, 2.8])
    assert bound(ff.fedavg(), clip=0.5) == near([0.4, 0.8, 1.2])
    assert bound(ff.fedsam()) == bound(ff.fedavg())


def test_clipping_the_whole_direction_leaves_the_mean_of_clipped_steps():
    assert bound(ff.fedcm(), clip=0.5, clip_stage="total") == near([0.4, 0.8, 1.2])
    assert bound(ff.fedlnag(), clip=0.5, clip_stage="total") == near([0.4, 0.8, 1.2])
    assert bound(ff.feddyn(), clip=0.5, clip_stage="total") is None
    assert bound(ff.fedadam(), clip=0.5, clip_stage="total", weight_decay=0.1) is None


def test_weight_decay_alone_bounds_fedavg_for_ever():
    assert bound(ff.fedavg(), rounds=2000, weight_decay=0.5)[-1] == near(2 * 2.0 / 0.5)


def test_a_proximal_term_shortens_the_path_but_does_not_contract():
    length = 0.1 * (1 + 0.9 + 0.81 + 0.729)  # steps shrink by 1 − η λ = 0.9
    assert bound(ff.fedprox(proximal_weight=1.0)) == near([4 * length, 8 * length, 12 * length])


def test_adam_on_the_server_steps_as_far_as_without_a_second_moment():
    # rate/τ · Σ (1 − β₁ᵗ) times 2 η K Θ
    shares = [1 - 0.9, 1 - 0.9**2, 1 - 0.9**3]
    expected = [10 * 1.6 * sum(shares[:count]) for count in (1, 2, 3)]
    found = bound(ff.fedadam(server_rate=0.01, stability=0.001))
    assert found == near(expected)
    # Weight decay belongs to the gradients, and then changes nothing.
    assert bound(ff.fedadam(server_rate=0.01, stability=0.001), weight_decay=0.1) == near(expected)


def test_a_composition_without_a_name_has_the_bound_of_its_parts():
    composed = replace(ff.fedavg(), server=ff.parts.Momentum(0.5))
    assert bound(composed) == bound(ff.fedavgm(0.5)) == near([1.6, 4.0, 6.8])


def test_methods_beyond_the_argument_have_no_bound():
    for algorithm in (
        ff.fedexp(),
        ff.fedrobust(),
        ff.dynafed(),
        ff.fedmuon(),
        ff.fedadamw(),
        replace(ff.fedavg(), optimizer=ff.parts.AdamW()),
        replace(ff.fedavg(), compress=ff.parts.TopK(0.2)),
        replace(ff.fedavg(), aggregate=ff.parts.TrimmedMean()),
        # Two duals that answer each other grow without end.
        replace(ff.feddyn(), correct=(ff.parts.DynamicRegulariser(0.1), ff.parts.ControlVariate())),
    ):
        assert bound(algorithm) is None and local_bound(algorithm, ff.Training(rounds=1), 4, 2.0) is None


# The worst cases of the linear round, from its matrices written by hand: η 0.1, K 25, Θ 1.
WORST_CASES = {
    "fedsagd": (
        ff.fedsagd(0.9, 0.01, 0.001),
        0.0,
        {1: 4.934553, 10: 136.1796, 51: 1260.304, 200: 2020.554, 2000: 2027.949},
    ),
    "fedavg": (ff.fedavg(), 0.001, {2000: 1986.527}),
    "fedavgm": (ff.fedavgm(0.9), 0.001, {51: 1457.869, 2000: 2000.000}),
    "fedacg": (ff.fedacg(0.9, 0.0), 0.001, {51: 1438.660, 2000: 2000.000}),
    "fedanag": (ff.fedanag(0.9), 0.001, {51: 1740.705, 2000: 3800.000}),
    "fedcm": (ff.fedcm(0.1), 0.001, {51: 144.8578, 2000: 200.0000}),
}


@pytest.mark.parametrize("name", WORST_CASES)
def test_worst_cases_under_weight_decay(name):
    algorithm, decay, expected = WORST_CASES[name]
    found = bound(algorithm, max(expected), 25, 1.0, weight_decay=decay)
    assert [found[rounds - 1] for rounds in expected] == near(list(expected.values()))


def test_what_clients_remember_has_a_bound_of_its_own():
    # ‖c_i‖ ≤ Θ, so a step is three gradients long at most.
    for algorithm in (ff.scaffold(), ff.scaffold(option="I"), ff.fedgamma(), ff.fedlesam_s()):
        assert bound(algorithm) == near([4.8, 9.6, 14.4])
    # ‖h_i‖ ≤ Θ/α.
    dual = fedsagd.dual_bound(2.0, 0.1, 4, 3, 0.2).value
    assert bound(ff.feddyn(0.2))[-1] == near(dual)
    assert bound(ff.feddyn(0.01), 2000, 25, 1.0)[-1] == near(419761.8)
    # The control variate is the momentum of the means, which has yet to build up.
    moswa = bound(ff.fedmo(momentum_rate=0.2), rounds=100)
    assert moswa[0] == near(3.2) and moswa[-1] < 4.8 * 100 and moswa[-1] - moswa[-2] == near(4.8)


def test_where_clients_remember_weight_decay_counts_as_a_part_of_gradients():
    plain = bound(ff.scaffold())
    assert bound(ff.scaffold(), weight_decay=0.1) == near(plain)
    assert bound(ff.feddyn(0.2), weight_decay=0.1) == near(bound(ff.feddyn(0.2)))
    # A clip is of gradients without it, so it says nothing about those with it.
    assert bound(ff.scaffold(), weight_decay=0.1, clip=0.5) == near(plain)
    assert bound(ff.scaffold(), clip=0.5) == near([0.25 * most for most in plain])
    # A decay that belongs to the rule cannot be counted so.
    correct = (ff.parts.ControlVariate(), ff.parts.HybridProximal(0.1, 0.1))
    assert bound(replace(ff.scaffold(), correct=correct)) is None
    # Nor can it behind a factor.
    correct = (ff.parts.GlobalMomentum(0.5, 0.0), ff.parts.ControlVariate())
    assert bound(ff.Algorithm(correct=correct)) is not None
    assert bound(ff.Algorithm(correct=correct), weight_decay=0.1) is None


# -- inside a round ----------------------------------------------------------------------------------------

SPRING = 0.2 * (1 + 0.98 + 0.98**2)  # 2 φ_3(0.2) at η 0.1
LOCAL = {
    "fedavg": (ff.fedavg(), 0.6),
    "fedprox": (ff.fedprox(0.2), SPRING),
    "scaffold": (ff.scaffold(), 1.2),
    "feddyn": (ff.feddyn(0.2), 2 * SPRING),
    "fedadam": (ff.fedadam(), 0.6),
    "fedcm": (ff.fedcm(0.1), 0.06),
    "mimelite": (ff.mimelite(0.9), 0.06),
    "fedanag": (ff.fedanag(0.9), 0.6 * 1.9),
    "fedacg": (ff.fedacg(0.9, 0.0), 0.6),
    "fedsagd": (ff.fedsagd(0.9, 0.15, 0.05), SPRING),
    # Heavy ball: 2ηΘ Σ_j (1 − β^j)/(1 − β), and Nesterov's form of it one power on.
    "heavy ball": (ff.Algorithm(optimizer=ff.parts.LocalMomentum(0.5)), 0.2 * (1 + 1.5 + 1.75)),
    "fedlnag": (ff.fedlnag(0.5, communicate=False), 0.2 * (1.5 + 1.75 + 1.875)),
}


@pytest.mark.parametrize("name", LOCAL)
def test_clients_of_one_round(name):
    algorithm, expected = LOCAL[name]
    found = local_bound(algorithm, ff.Training(rounds=1, lr=0.1), 3, 1.0)
    assert len(found) == 4 and found[0] == 0 and found[-1] == near(expected)


# -- trainings that try ------------------------------------------------------------------------------------


class Simulation:
    """One parameter, and gradients that are given."""

    def __init__(self, algorithm: ff.Algorithm, settings: ff.Training, steps: int, clients: int = 1) -> None:
        self.algorithm, self.settings, self.steps, self.clients = algorithm, settings, steps, clients
        module = nn.Linear(1, 1, bias=False).double()
        self.layout = Layout(module)
        self.dimensions = Dimensions(1, (1,), 2, 1)

    def distance(self, one: torch.Tensor, other: torch.Tensor) -> float:
        """How far apart the models of two trainings end, by their gradients [rounds, steps]."""
        return abs(self.model(one) - self.model(other))

    def model(self, gradients: torch.Tensor) -> float:
        """Clients take part in turn, one in a round."""
        model = torch.zeros(1, dtype=torch.float64)
        server = {"model": model, **initial_state(self.algorithm.server_vectors, self.dimensions, model)}
        states = [
            initial_state(self.algorithm.client_vectors, self.dimensions, model) for _ in range(self.clients)
        ]
        for number, row in enumerate(gradients):
            sent = broadcast(self.algorithm, server, {}).vectors
            context = ClientContext(
                round=number,
                received=sent,
                client=states[number % self.clients],
                rates=self.algorithm.schedule.rates(self.settings.rate(number), self.steps),
                layout=self.layout,
                input_shape=(1,),
                full_gradient=lambda row=row: row[-1:].clone(),
                displacement=torch.zeros_like(model),
            )
            oracles = [lambda point, value=value: value[None].clone() for value in row]
            result = client_round(self.algorithm, context, oracles, self.settings, sent["model"].clone())
            states[number % self.clients] = result.client
            mean = reduced_uploads(self.algorithm, result.upload)
            merge = MergeContext(number, 1 / self.clients, context.total_rate)
            server = server_round(self.algorithm, server, mean, merge)
        return float(server["model"])


ROUNDS, STEPS = 7, 3
WITHOUT_MEMORY = [
    "fedacg",
    "fedanag",
    "fedavg",
    "fedavgm",
    "fedcm",
    "fedlesam",
    "fedlnag",
    "fednsam",
    "fedprox",
    "fedsagd",
    "fedsam",
    "fedswa",
    "mofedsam",
]
REMEMBERING = [
    "feddyn",
    "fedgamma",
    "fedgloss",
    "fedlesam_d",
    "fedlesam_s",
    "fedmo",
    "fedmoswa",
    "fednsam_d",
    "fednsam_s",
    "fedsmoo",
    "fedspeed",
    "scaffold",
]
SETTINGS = ff.Training(rounds=ROUNDS, lr=0.2, lr_decay=0.9, weight_decay=0.05)


@pytest.mark.parametrize("name", WITHOUT_MEMORY)
def test_the_worst_gradients_attain_the_bound(name):
    simulation = Simulation(generic(name), SETTINGS, STEPS)
    # Every gradient acts on the last model by itself; the worst have the signs of that.
    impulses = torch.eye(ROUNDS * STEPS, dtype=torch.float64).view(-1, ROUNDS, STEPS)
    signs = (
        torch.tensor([simulation.model(impulse) for impulse in impulses]).sign().view(ROUNDS, STEPS).double()
    )
    found = stability_bound(simulation.algorithm, SETTINGS, STEPS, 1.0, ROUNDS)[-1]
    assert simulation.distance(signs, -signs) == near(found, 1e-9)


@pytest.mark.parametrize("name", [*REMEMBERING, "fedadam", "mimelite"])
@pytest.mark.parametrize("clients", [1, 2])
def test_no_gradients_exceed_the_bound(name, clients):
    settings = SETTINGS.replaced(weight_decay=0.0)
    simulation = Simulation(generic(name), settings, STEPS, clients)
    found = stability_bound(simulation.algorithm, settings, STEPS, 1.0, ROUNDS)[-1]
    generator = torch.Generator().manual_seed(0)
    worst = 0.0
    for number in range(12):
        signs = torch.randn(ROUNDS, STEPS, generator=generator, dtype=torch.float64).sign()
        if number < 4:  # constant, falling into two halves, by turns, and from step to step
            pattern = (
                torch.ones(ROUNDS),
                torch.arange(ROUNDS) < 3,
                torch.arange(ROUNDS) % 2,
                torch.ones(ROUNDS),
            )
            signs = (2 * pattern[number].double() - 1)[:, None].expand(-1, STEPS).clone()
        worst = max(worst, simulation.distance(signs, -signs))
    least = 0.02 if name == "fedadam" else 0.05  # whose second moment soon shortens the steps
    assert least * found < worst <= found * (1 + 1e-9)


def test_every_algorithm_is_bounded_exceeded_or_said_to_have_none():
    without = {"dynafed", "dynafed_syn_only", "fedadamw", "fedexp", "fedmuon", "fedrobust"}
    bounded = {name for name in ff.ALGORITHMS if bound(generic(name)) is not None}
    assert bounded == set(ff.ALGORITHMS) - without
    assert {
        *WITHOUT_MEMORY,
        *REMEMBERING,
        "fedadam",
        "mimelite",
        "fedasam",
        "fedsynsam",
    } == bounded
    assert set(GENERIC) == set(ff.ALGORITHMS)


@pytest.mark.parametrize("name", ["fedsagd", "feddyn"])
def test_bounds_as_printed_are_exceeded_by_linear_losses(name):
    """One client, whose loss is ⟨a, x⟩ in one training and −⟨a, x⟩ in the other, ‖a‖ = 1."""
    algorithm = ff.fedsagd(0.9, 0.01, 0.001) if name == "fedsagd" else ff.feddyn(0.01)
    rounds, steps = 51, 25
    settings = ff.Training(rounds=rounds, lr=0.1)
    slopes = torch.ones(rounds, steps, dtype=torch.float64)
    apart = Simulation(algorithm, settings, steps).distance(slopes, -slopes)
    row = fedsagd.table_row(algorithm, 1.0, 0.1, steps, rounds)
    assert row.label == "as printed"
    if name == "fedsagd":
        assert apart == near(1260.304) and row.terms["Theorem C.12"] == near(449.8187)
        # Nor does a larger Θ help, as the σ_g and Z of these losses make it.
        assert apart > 1.3 * 2 * row.terms["Theorem C.12"]
    else:
        assert apart > 5 * row.value
    assert apart <= stability_bound(algorithm, settings, steps, 1.0, rounds)[-1] * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted({*WITHOUT_MEMORY, *REMEMBERING} - {"fedsagd"}))
def test_a_bound_holds_for_trainings_with_nothing_in_common(name):
    """Quadratics whose clients differ in curvature and minimum, some of which take part."""
    recorders = Recorder(), Recorder()
    settings = {"rounds": 12, "participants": 2, "local_steps": 4, "lr": 0.1, "clip": 1.0}  # the clip is Θ
    for recorder, clients in zip(recorders, (3, 5), strict=True):
        problem = Quadratics.random(clients=clients, size=2)
        start = Point(torch.full((2,), 3.0, dtype=torch.float64))
        options = {**settings, "loss": mean_output, "batch_size": None, "workers": 1, "metrics": {}}
        train(start, problem.federation, generic(name), callbacks=[recorder], **options)
    distances = (recorders[0].models - recorders[1].models).norm(dim=1)
    found = stability_bound(generic(name), ff.Training(**settings), 4, 1.0, 12)
    assert float(distances[-1]) > 0
    assert all(
        distance <= most * (1 + 1e-9) for distance, most in zip(distances.tolist(), found, strict=True)
    )


def test_a_rule_that_is_linear_near_zero_only_has_no_bound():
    class Saturating(ff.parts.Average):
        def update(self, server, mean, shift, context):
            return {"model": server["model"] + mean["displacement"].clamp(-50, 50)}

    assert bound(replace(ff.fedavg(), server=Saturating())) is None
    assert math.isfinite(bound(ff.fedavg())[-1])
