"""The naive references checked against each other, against closed forms and against centralised methods."""

from __future__ import annotations

import inspect
import itertools
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import pytest
import torch

from . import naive
from .naive import Trace, Vector, mean, unit

TOLERANCE = 1e-9
DIFFERENT = 1e-6
HIDDEN = 3
SAMPLES = 8
BATCH = 3
EQUAL_STEPS = (3,)
UNEQUAL_STEPS = (2, 4, 1)


@dataclass(frozen=True)
class Call:
    """One gradient a method asked for."""

    step: int
    point: Vector
    value: Vector


@cache
def draw(key: str) -> list[int]:
    """The samples of a minibatch, a fixed function of its key."""
    random = np.random.default_rng(zlib.crc32(key.encode()))
    return [int(sample) for sample in random.choice(SAMPLES, size=BATCH, replace=False)]


@dataclass
class Toy:
    """Regression with a small tanh network; every client has its own inputs and its own target function."""

    local_steps: tuple[int, ...] = UNEQUAL_STEPS
    participants: int = 3
    clients: int = 5
    rounds: int = 6
    first_rate: float = 0.2
    decay: float = 0.9
    weight_decay: float = 0.0
    alike: bool = False
    backwards: bool = False
    inputs: int = 3
    start: Vector = field(init=False)
    weight_mask: npt.NDArray[np.bool_] = field(init=False)
    shapes: list[tuple[int, ...]] = field(init=False)
    cohorts: list[list[int]] = field(init=False)
    calls: dict[tuple[int, int], list[Call]] = field(init=False)

    def __post_init__(self) -> None:
        random = np.random.default_rng(7)
        sizes = [HIDDEN * self.inputs, HIDDEN, HIDDEN]
        self.start = random.normal(size=sum(sizes)) * 0.7
        self.weight_mask = np.repeat([True, False, True], sizes)
        self.shapes = [(HIDDEN, self.inputs), (HIDDEN,), (HIDDEN,)]
        self.data = []
        for client in range(self.clients):
            inputs = random.normal(loc=0.5 * client - 1.0, size=(SAMPLES, self.inputs))
            targets = np.sin(inputs @ random.normal(size=self.inputs)) + 0.3 * client
            self.data.append((inputs, targets))
        self.cohorts = []
        for t in range(self.rounds):
            order = np.random.default_rng([11, t]).permutation(self.clients)[: self.participants]
            self.cohorts.append([int(i) for i in (order[::-1] if self.backwards else order)])
        self.calls = {}

    def until(self, rounds: int) -> Toy:
        """The same problem, stopped early and with an empty log."""
        return replace(self, rounds=rounds)

    def steps(self, round: int, client: int) -> int:
        return self.local_steps[(round + client) % len(self.local_steps)]

    def rate(self, round: int) -> float:
        return self.first_rate * self.decay**round

    def batch(self, round: int, client: int, step: int) -> tuple[Vector, Vector]:
        source = 0 if self.alike else client
        inputs, targets = self.data[source]
        chosen = draw(f"{round}/{source}/{step}")
        return inputs[chosen], targets[chosen]

    def gradient(self, round: int, client: int, step: int, point: Vector) -> Vector:
        value = backward(point, *self.batch(round, client, step))[0]
        self.calls.setdefault((round, client), []).append(Call(step, point, value))
        return value

    def optimized(self, round: int, client: int, step: int, point: Vector, gradient: Vector) -> Vector:
        return gradient

    def full_gradient(self, client: int, point: Vector) -> Vector:
        return backward(point, *self.data[0 if self.alike else client])[0]

    def shifted_gradient(
        self, round: int, client: int, step: int, point: Vector, scale: Vector, offset: Vector
    ) -> tuple[Vector, Vector, Vector]:
        return backward(point, *self.batch(round, client, step), scale, offset)

    def made_up(self, per_class: int, soft: bool) -> tuple[Vector, Vector]:
        random = np.random.default_rng(13)
        return random.normal(size=(2 * per_class, self.inputs)), random.normal(size=2 * per_class)

    def made_up_gradient(self, point: Vector, inputs: Vector, labels: Vector) -> Vector:
        return backward(point, inputs, labels)[0]

    def made_up_slopes(
        self, point: Vector, inputs: Vector, labels: Vector, along: Vector
    ) -> tuple[Vector, Vector, Vector]:
        leaves = [torch.from_numpy(value.copy()).requires_grad_() for value in (point, inputs, labels)]
        weights, bias, last = leaves[0].split([HIDDEN * self.inputs, HIDDEN, HIDDEN])
        output = torch.tanh(leaves[1] @ weights.view(HIDDEN, -1).T + bias) @ last
        half_error = 0.5 * (output - leaves[2]).square().mean()
        (slope,) = torch.autograd.grad(half_error, leaves[0], create_graph=True)
        slopes = torch.autograd.grad(slope @ torch.from_numpy(along.copy()), leaves)
        return slopes[0].numpy(), slopes[1].numpy(), slopes[2].numpy()


@dataclass
class Flat(Toy):
    """The same gradient everywhere, so that trajectories have closed forms."""

    slope: float = 0.0

    def gradient(self, round: int, client: int, step: int, point: Vector) -> Vector:
        return np.full_like(point, self.slope)

    def shifted_gradient(
        self, round: int, client: int, step: int, point: Vector, scale: Vector, offset: Vector
    ) -> tuple[Vector, Vector, Vector]:
        return np.zeros_like(point), np.full_like(scale, self.slope), np.full_like(offset, 2 * self.slope)


def forward(
    point: Vector, inputs: Vector, scale: Vector | float, offset: Vector | float
) -> tuple[Vector, Vector, Vector, Vector]:
    """First-layer weights, shifted inputs, hidden activations and predictions of the network."""
    width = inputs.shape[1]
    weights = point[: HIDDEN * width].reshape(HIDDEN, width)
    bias = point[HIDDEN * width : HIDDEN * width + HIDDEN]
    shifted = scale * inputs + offset
    hidden = np.tanh(shifted @ weights.T + bias)
    return weights, shifted, hidden, hidden @ point[-HIDDEN:]


def loss(
    point: Vector, inputs: Vector, targets: Vector, scale: Vector | float = 1.0, offset: Vector | float = 0.0
) -> float:
    """Half the mean squared error."""
    return float(0.5 * np.mean((forward(point, inputs, scale, offset)[-1] - targets) ** 2))


def backward(
    point: Vector, inputs: Vector, targets: Vector, scale: Vector | float = 1.0, offset: Vector | float = 0.0
) -> tuple[Vector, Vector, Vector]:
    """Gradients of the loss with respect to the parameters, the input scale and the input offset."""
    weights, shifted, hidden, output = forward(point, inputs, scale, offset)
    residual = (output - targets) / len(targets)
    back = np.outer(residual, point[-HIDDEN:]) * (1 - hidden**2)
    parameters = np.concatenate([(back.T @ shifted).ravel(), back.sum(axis=0), hidden.T @ residual])
    at_inputs = back @ weights
    return parameters, (at_inputs * inputs).sum(axis=0), at_inputs.sum(axis=0)


def gap(left: Trace, right: Trace) -> float:
    """Largest difference between the server models of two runs."""
    assert len(left.models) == len(right.models)
    pairs = zip(left.models, right.models, strict=True)
    return max(float(np.abs(a - b).max()) for a, b in pairs)


def assert_same(left: Trace, right: Trace) -> None:
    assert np.isfinite(left.models[-1]).all()
    assert gap(left, right) < TOLERANCE


def assert_close(left: Vector, right: Vector) -> None:
    np.testing.assert_allclose(left, right, rtol=0, atol=TOLERANCE)


Method = Callable[[Toy], Trace]

DISTILLATION = {
    "samples_per_class": 3,
    "iterations": 4,
    "span": 2,
    "sample_rate": 0.1,
    "inner_rate": 0.3,
    "inner_rate_rate": 0.05,
}
FINE_TUNING = {"models": 3, "steps": 3, "epochs": 3, "fine_tuning_rate": 0.02}

# Every method with hyper-parameters at which all of its terms act.
GENERIC: dict[str, Method] = {
    "fedavg": naive.fedavg,
    "fedprox": partial(naive.fedprox, proximal_weight=0.4),
    "fedexp": partial(naive.fedexp, stability=0.001, stability_decay=0.9),
    "feddyn": partial(naive.feddyn, regularisation=0.3),
    "fedgloss": partial(naive.fedgloss, server_radius=0.2, radius=0.1, regularisation=0.3),
    "scaffold": naive.scaffold,
    "fedavgm": partial(naive.fedavgm, momentum_decay=0.6),
    "fedadam": partial(naive.fedadam, first_decay=0.5, second_decay=0.9, stability=0.05, server_rate=0.1),
    "fedcm": partial(naive.fedcm, fresh_weight=0.3),
    "mimelite": partial(naive.mimelite, momentum_decay=0.6),
    "fedacg": partial(naive.fedacg, lookahead=0.7, proximal_weight=0.2),
    "fedanag": partial(naive.fedanag, momentum_decay=0.5),
    "fedlnag": partial(naive.fedlnag, momentum_decay=0.5),
    "fedadamw": partial(naive.fedadamw, global_weight=0.4, beta1=0.8, beta2=0.95, eps=0.01),
    "fedmuon": partial(naive.fedmuon, global_weight=0.4, momentum=0.8, ratio=0.7),
    "fedsam": partial(naive.fedsam, radius=0.2),
    "mofedsam": partial(naive.mofedsam, radius=0.2, fresh_weight=0.3),
    "fedasam": partial(naive.fedasam, radius=0.3, offset=0.1),
    "fedgamma": partial(naive.fedgamma, radius=0.2),
    "fedspeed": partial(naive.fedspeed, radius=0.2, mix=0.7, proximal_weight=0.3),
    "fedsmoo": partial(naive.fedsmoo, radius=0.2, regularisation=0.3),
    "fedlesam": partial(naive.fedlesam, radius=0.2),
    "fedlesam_s": partial(naive.fedlesam_s, radius=0.2),
    "fedlesam_d": partial(naive.fedlesam_d, radius=0.2, regularisation=0.3),
    "fedrobust": partial(
        naive.fedrobust, scale_rate=0.05, offset_rate=0.1, scale_penalty=0.5, offset_penalty=0.3
    ),
    "fedswa": partial(naive.fedswa, final_rate=0.1, server_rate=1.5),
    "fedmo": partial(naive.fedmo, momentum_rate=0.3),
    "fedmoswa": partial(naive.fedmoswa, final_rate=0.1, server_rate=1.5, momentum_rate=0.3),
    "fednsam": partial(naive.fednsam, lookahead=0.7, radius=0.2),
    "fednsam_s": partial(naive.fednsam_s, lookahead=0.7, radius=0.2),
    "fednsam_d": partial(naive.fednsam_d, lookahead=0.7, radius=0.2, regularisation=0.3),
    "fedsagd": partial(naive.fedsagd, momentum_decay=0.6, proximal_weight=0.3, decay_weight=0.02),
    "nesterov_sam": partial(naive.nesterov_sam, lookahead=0.7, radius=0.2),
    "fedsynsam": partial(
        naive.fedsynsam,
        radius=0.2,
        local_weight=0.6,
        warm_rounds=1,
        synthetic_batch=4,
        **DISTILLATION,
    ),
    "dynafed": partial(naive.dynafed, **DISTILLATION, **FINE_TUNING),
    "dynafed_syn_only": partial(naive.dynafed_syn_only, **DISTILLATION, **FINE_TUNING),
}

STATES: dict[str, tuple[set[str], set[str]]] = {
    "feddyn": ({"dual"}, {"dual"}),
    "fedgloss": ({"dual", "last_displacement"}, {"dual"}),
    "scaffold": ({"control"}, {"control"}),
    "fedavgm": ({"momentum"}, set()),
    "fedadam": ({"momentum", "second_moment"}, set()),
    "fedcm": ({"momentum_gradient"}, set()),
    "mimelite": ({"momentum_gradient"}, set()),
    "fedacg": ({"momentum"}, set()),
    "fedanag": ({"momentum_gradient"}, set()),
    "fedlnag": ({"buffer"}, set()),
    "fedadamw": ({"second_moment", "second_filled", "momentum_gradient"}, set()),
    "fedmuon": ({"momentum", "momentum_gradient"}, set()),
    "mofedsam": ({"momentum_gradient"}, set()),
    "fedgamma": ({"control"}, {"control"}),
    "fedspeed": (set(), {"dual"}),
    "fedsmoo": ({"dual", "perturbation"}, {"dual", "perturbation_dual"}),
    "fedlesam_s": ({"control"}, {"control"}),
    "fedlesam_d": ({"dual"}, {"dual"}),
    "fedrobust": (set(), {"scale", "offset"}),
    "fedmo": ({"control"}, {"control"}),
    "fedmoswa": ({"control"}, {"control"}),
    "fednsam": ({"momentum"}, set()),
    "fednsam_s": ({"momentum", "control"}, {"control"}),
    "fednsam_d": ({"momentum", "dual"}, {"dual"}),
    "fedsagd": ({"momentum_gradient"}, set()),
    "nesterov_sam": ({"momentum"}, set()),
}


SHORT = {("fedadamw", "second_moment"): (3,), ("fedadamw", "second_filled"): (1,)}
"""Vectors with a number for each tensor, or for all of them."""


# ---------------------------------------------------------------------------------------------------------
# The toy problem and the shape of the answers


def test_analytic_gradients_match_finite_differences() -> None:
    toy = Toy()
    inputs, targets = toy.batch(2, 1, 0)
    random = np.random.default_rng(3)
    point, scale, offset = toy.start, 1 + 0.2 * random.normal(size=3), 0.2 * random.normal(size=3)
    arguments = [point, scale, offset]
    for which, analytic in enumerate(backward(point, inputs, targets, scale, offset)):
        for entry in range(len(arguments[which])):
            values = []
            for sign in (1, -1):
                moved = [a.copy() for a in arguments]
                moved[which][entry] += sign * 1e-6
                values.append(loss(moved[0], inputs, targets, moved[1], moved[2]))
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(analytic[entry], abs=1e-8)


def test_slopes_of_made_up_samples_match_finite_differences() -> None:
    toy = Toy()
    along = np.random.default_rng(4).normal(size=len(toy.start))
    arguments = [toy.start, *toy.made_up(2, soft=True)]
    for which, analytic in enumerate(toy.made_up_slopes(*arguments, along)):
        for entry in range(arguments[which].size):
            values = []
            for sign in (1, -1):
                moved = [a.copy() for a in arguments]
                moved[which].flat[entry] += sign * 1e-6
                values.append(along @ toy.made_up_gradient(*moved))
            assert (values[0] - values[1]) / 2e-6 == pytest.approx(analytic.flat[entry], abs=1e-8)


def test_toy_problem_is_as_awkward_as_intended() -> None:
    toy = Toy()
    assert {len(cohort) for cohort in toy.cohorts} == {3}
    assert len({tuple(cohort) for cohort in toy.cohorts}) == toy.rounds
    assert len({toy.steps(0, i) for i in toy.cohorts[0]}) > 1
    first, second = (toy.gradient(0, 0, step, toy.start) for step in (0, 1))
    assert np.abs(first - second).max() > DIFFERENT
    assert_close(first, toy.gradient(0, 0, 0, toy.start))
    assert np.abs(toy.full_gradient(0, toy.start) - toy.full_gradient(1, toy.start)).max() > DIFFERENT


def test_unit_vectors() -> None:
    assert_close(unit(np.array([3.0, 4.0])), np.array([0.6, 0.8]))
    assert_close(unit(np.zeros(4)), np.zeros(4))
    assert np.linalg.norm(unit(np.full(5, 1e-9))) == pytest.approx(1.0, abs=1e-12)


HELPERS = {"unit", "mean", "adam", "adamw", "distil", "fine_tuned", "muon", "orthogonal"}


def test_every_method_is_exercised() -> None:
    functions = inspect.getmembers(naive, inspect.isfunction)
    methods = {name for name, f in functions if f.__module__ == naive.__name__} - HELPERS
    assert methods == set(GENERIC)


@pytest.mark.parametrize("name", GENERIC)
def test_trace_layout(name: str) -> None:
    toy = Toy(weight_decay=0.01, rounds=2, clients=8)
    trace = GENERIC[name](toy)
    server, clients = STATES.get(name, (set(), set()))
    assert len(trace.models) == 3
    assert_close(trace.models[0], toy.start)
    assert set(trace.server) == server
    assert set(trace.clients) == clients
    for vector in trace.models:
        assert vector.shape == toy.start.shape
        assert vector.dtype == np.float64
    for kept, vector in trace.server.items():
        assert vector.shape == SHORT.get((name, kept), toy.start.shape)
        assert vector.dtype == np.float64
    for states in trace.clients.values():
        assert set(states) == set(itertools.chain(*toy.cohorts))


@pytest.mark.parametrize("name", GENERIC)
def test_inputs_are_left_alone_and_runs_repeat(name: str) -> None:
    toy = Toy(weight_decay=0.01)
    before = toy.start.copy()
    assert gap(GENERIC[name](toy), GENERIC[name](toy)) == 0
    assert np.array_equal(toy.start, before)


@pytest.mark.parametrize("name", GENERIC)
def test_order_of_clients_does_not_matter(name: str) -> None:
    forwards, backwards = Toy(weight_decay=0.01), Toy(weight_decay=0.01, backwards=True)
    assert forwards.cohorts != backwards.cohorts
    assert_same(GENERIC[name](forwards), GENERIC[name](backwards))


@pytest.mark.parametrize(
    "name", [n for n in GENERIC if "server_rate" in inspect.signature(GENERIC[n]).parameters]
)
def test_server_rate_scales_the_first_round(name: str) -> None:
    toy = Toy(rounds=1)
    once, more = (GENERIC[name](toy, server_rate=rate).models for rate in (1.0, 1.7))  # type: ignore[call-arg]
    assert_close(more[1] - more[0], 1.7 * (once[1] - once[0]))


# ---------------------------------------------------------------------------------------------------------
# Exact reductions


def plain(server_rate: float = 1.0) -> Method:
    return partial(naive.fedavg, server_rate=server_rate)


def scaffold(server_rate: float = 1.0) -> Method:
    return partial(naive.scaffold, server_rate=server_rate)


def dyn(problem: Toy) -> Trace:
    return naive.feddyn(problem, regularisation=0.3)


def sam(radius: float) -> Method:
    return partial(naive.fedsam, radius=radius)


def unmasked(method: Method) -> Method:
    """Run with no tensor counted as a weight."""

    def run(problem: Toy) -> Trace:
        problem = replace(problem)
        problem.weight_mask = np.zeros_like(problem.weight_mask)
        return method(problem)

    return run


def all_masked(method: Method) -> Method:
    """Run with every tensor counted as a weight."""

    def run(problem: Toy) -> Trace:
        problem = replace(problem)
        problem.weight_mask = np.ones_like(problem.weight_mask)
        return method(problem)

    return run


def decayed(amount: float) -> Method:
    return lambda problem: naive.fedavg(replace(problem, weight_decay=problem.weight_decay + amount))


# Hold for any participation, any step counts and any weight decay.
REDUCTIONS: dict[str, tuple[Method, Method]] = {
    "fedprox": (partial(naive.fedprox, proximal_weight=0.0), plain()),
    "fedsam": (sam(0.0), plain()),
    "fedasam": (partial(naive.fedasam, radius=0.0, offset=0.1), plain()),
    "fedcm": (partial(naive.fedcm, fresh_weight=1.0), plain()),
    "mimelite": (partial(naive.mimelite, momentum_decay=0.0), plain()),
    "fedavgm": (partial(naive.fedavgm, momentum_decay=0.0), plain()),
    "fedavgm-rate": (partial(naive.fedavgm, momentum_decay=0.0, server_rate=0.7), plain(server_rate=0.7)),
    "fedanag": (partial(naive.fedanag, momentum_decay=0.0), plain()),
    "fedexp": (partial(naive.fedexp, stability=1e9), plain()),
    "fedgloss": (
        partial(naive.fedgloss, server_radius=0.0, radius=0.0, regularisation=0.3),
        partial(naive.feddyn, regularisation=0.3),
    ),
    "fedgloss-local": (
        partial(naive.fedgloss, server_radius=0.0, radius=0.2, regularisation=0.3),
        partial(naive.fedspeed, radius=0.2, mix=1.0, proximal_weight=0.3, duals="server"),
    ),
    "fedlnag": (partial(naive.fedlnag, momentum_decay=0.0), plain()),
    "fedlnag-damped": (partial(naive.fedlnag, momentum_decay=0.0, damped=True), plain()),
    "fedlnag-reset": (partial(naive.fedlnag, momentum_decay=0.0, communicate=False), plain()),
    "fedlesam-client": (partial(naive.fedlesam, radius=0.0), plain()),
    "fedlesam-server": (partial(naive.fedlesam, radius=0.0, memory="server"), plain()),
    "fednsam": (partial(naive.fednsam, lookahead=0.0, radius=0.0), plain()),
    "fedsagd": (
        partial(naive.fedsagd, momentum_decay=0.0, proximal_weight=0.0, decay_weight=0.0),
        plain(),
    ),
    "fedswa": (partial(naive.fedswa, final_rate=1.0), plain()),
    "fedswa-rate": (partial(naive.fedswa, final_rate=1.0, server_rate=1.5), plain(server_rate=1.5)),
    "fedrobust": (
        partial(naive.fedrobust, scale_rate=0.0, offset_rate=0.0, scale_penalty=0.5, offset_penalty=0.3),
        plain(),
    ),
    "fedacg": (partial(naive.fedacg, lookahead=0.0, proximal_weight=0.0), plain()),
    "fedadam-fedavg": (
        partial(naive.fedadam, first_decay=0.0, second_decay=1.0, stability=0.01, server_rate=0.02),
        plain(),
    ),
    "fedadam-fedavgm": (
        partial(naive.fedadam, first_decay=0.6, second_decay=1.0, stability=0.01, server_rate=0.02 / 0.4),
        partial(naive.fedavgm, momentum_decay=0.6),
    ),
    "mofedsam-fedsam": (partial(naive.mofedsam, radius=0.2, fresh_weight=1.0), sam(0.2)),
    "mofedsam-fedcm": (
        partial(naive.mofedsam, radius=0.0, fresh_weight=0.3, server_rate=1.2),
        partial(naive.fedcm, fresh_weight=0.3, server_rate=1.2),
    ),
    "fedasam-identity": (unmasked(partial(naive.fedasam, radius=0.2, offset=0.1)), sam(0.2)),
    "fedasam-constant": (all_masked(partial(naive.fedasam, radius=2e-14, offset=1e13)), sam(0.2)),
    "fedsynsam-radius": (partial(GENERIC["fedsynsam"], radius=0.0), plain()),
    "fedsynsam-weight": (partial(GENERIC["fedsynsam"], local_weight=1.0), sam(0.2)),
    "fedgamma": (partial(naive.fedgamma, radius=0.0), scaffold()),
    "fedgamma-rate": (partial(naive.fedgamma, radius=0.0, server_rate=0.8), scaffold(server_rate=0.8)),
    "fedlesam_s-client": (partial(naive.fedlesam_s, radius=0.0), scaffold()),
    "fedlesam_s-server": (partial(naive.fedlesam_s, radius=0.0, memory="server"), scaffold()),
    "fednsam_s": (partial(naive.fednsam_s, lookahead=0.0, radius=0.0), scaffold()),
    "fedlesam_d-client": (partial(naive.fedlesam_d, radius=0.0, regularisation=0.3), dyn),
    "fedlesam_d-server": (partial(naive.fedlesam_d, radius=0.0, regularisation=0.3, memory="server"), dyn),
    "fedsmoo": (partial(naive.fedsmoo, radius=0.0, regularisation=0.3), dyn),
    "fedsmoo-dual": (partial(naive.fedsmoo, radius=0.0, regularisation=0.3, upload="dual"), dyn),
    "fednsam_d": (partial(naive.fednsam_d, lookahead=0.0, radius=0.0, regularisation=0.3), dyn),
    "fedspeed-radius": (
        partial(naive.fedspeed, radius=0.0, mix=0.7, proximal_weight=0.3, duals="server"),
        dyn,
    ),
    "fedspeed-mix": (
        partial(naive.fedspeed, radius=0.2, mix=0.0, proximal_weight=0.3, duals="server"),
        dyn,
    ),
    "fedacg-fedprox": (
        partial(naive.fedacg, lookahead=0.0, proximal_weight=0.4),
        partial(naive.fedprox, proximal_weight=0.4),
    ),
    "fednsam-fedlesam": (
        partial(naive.fednsam, lookahead=0.0, radius=0.2),
        partial(naive.fedlesam, radius=0.2, memory="server"),
    ),
    "fednsam_s-fedlesam_s": (
        partial(naive.fednsam_s, lookahead=0.0, radius=0.2),
        partial(naive.fedlesam_s, radius=0.2, memory="server"),
    ),
    "fednsam_d-fedlesam_d": (
        partial(naive.fednsam_d, lookahead=0.0, radius=0.2, regularisation=0.3, dual_in_momentum=True),
        partial(naive.fedlesam_d, radius=0.2, regularisation=0.3, memory="server"),
    ),
    "fedmoswa-fedmo": (
        partial(naive.fedmoswa, final_rate=1.0, momentum_rate=0.3),
        partial(naive.fedmo, momentum_rate=0.3),
    ),
    "fedmoswa-fedmo-full-gradient": (
        partial(naive.fedmoswa, final_rate=1.0, momentum_rate=0.3, option="I"),
        partial(naive.fedmo, momentum_rate=0.3, option="I"),
    ),
    "fedmoswa-warm-start": (
        partial(naive.fedmoswa, final_rate=0.1, momentum_rate=1.0, warm_start=True),
        partial(naive.fedmoswa, final_rate=0.1, momentum_rate=1.0),
    ),
    "fedsagd-fedprox": (
        partial(naive.fedsagd, momentum_decay=0.0, proximal_weight=0.4, decay_weight=0.0),
        partial(naive.fedprox, proximal_weight=0.4),
    ),
    "fedsagd-decay": (
        partial(naive.fedsagd, momentum_decay=0.0, proximal_weight=0.0, decay_weight=0.05),
        decayed(0.05),
    ),
    "nesterov_sam-fedsam": (partial(naive.nesterov_sam, lookahead=0.0, radius=0.2), sam(0.2)),
    "nesterov_sam-fedacg": (
        partial(naive.nesterov_sam, lookahead=0.7, radius=0.0),
        partial(naive.fedacg, lookahead=0.7, proximal_weight=0.0),
    ),
}

# Hold when every client takes part in every round.
FULL_REDUCTIONS: dict[str, tuple[Method, Method]] = {
    "fedspeed-radius": (partial(naive.fedspeed, radius=0.0, mix=0.7, proximal_weight=0.3), dyn),
    "fedspeed-mix": (partial(naive.fedspeed, radius=0.2, mix=0.0, proximal_weight=0.3), dyn),
    "fedspeed-duals": (
        partial(naive.fedspeed, radius=0.2, mix=0.7, proximal_weight=0.3),
        partial(naive.fedspeed, radius=0.2, mix=0.7, proximal_weight=0.3, duals="server"),
    ),
    "fednsam-fedlesam": (
        partial(naive.fednsam, lookahead=0.0, radius=0.2),
        partial(naive.fedlesam, radius=0.2, memory="client"),
    ),
    "fednsam_s-fedlesam_s": (
        partial(naive.fednsam_s, lookahead=0.0, radius=0.2),
        partial(naive.fedlesam_s, radius=0.2, memory="client"),
    ),
    "fedlesam_d-memory": (
        partial(naive.fedlesam_d, radius=0.2, regularisation=0.3, memory="client"),
        partial(naive.fedlesam_d, radius=0.2, regularisation=0.3, memory="server"),
    ),
    "fedmoswa-scaffold": (partial(naive.fedmoswa, final_rate=1.0, momentum_rate=1.0), scaffold()),
    "fedmo-scaffold": (partial(naive.fedmo, momentum_rate=1.0), scaffold()),
    "fedmo-scaffold-full-gradient": (
        partial(naive.fedmo, momentum_rate=1.0, option="I"),
        partial(naive.scaffold, option="I"),
    ),
}


@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
@pytest.mark.parametrize("local_steps", [EQUAL_STEPS, UNEQUAL_STEPS])
@pytest.mark.parametrize("name", REDUCTIONS)
def test_reductions(name: str, local_steps: tuple[int, ...], weight_decay: float) -> None:
    toy = Toy(local_steps=local_steps, weight_decay=weight_decay)
    left, right = REDUCTIONS[name]
    assert_same(left(toy), right(toy))


@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
@pytest.mark.parametrize("local_steps", [EQUAL_STEPS, UNEQUAL_STEPS])
@pytest.mark.parametrize("name", FULL_REDUCTIONS)
def test_reductions_with_full_participation(
    name: str, local_steps: tuple[int, ...], weight_decay: float
) -> None:
    left, right = FULL_REDUCTIONS[name]
    full = Toy(local_steps=local_steps, weight_decay=weight_decay, participants=5)
    assert_same(left(full), right(full))
    partly = replace(full, participants=3)
    assert gap(left(partly), right(partly)) > DIFFERENT


def test_fednsam_without_perturbation_is_fedacg_without_proximal_term() -> None:
    """True for unequal steps too, but only without weight decay, which acts at different points."""
    left = partial(naive.fednsam, lookahead=0.7, radius=0.0)
    right = partial(naive.fedacg, lookahead=0.7, proximal_weight=0.0)
    assert_same(left(Toy()), right(Toy()))
    assert gap(left(Toy(weight_decay=0.03)), right(Toy(weight_decay=0.03))) > DIFFERENT


def shifted_fednsam(problem: Toy, lookahead: float, radius: float) -> Trace:
    """FedNSAM with clients that start at the look-ahead model instead of adding it at every step."""
    x, m = problem.start, np.zeros_like(problem.start)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        phi, deltas = x + lookahead * m, []
        for i in cohort:
            y = phi
            for k in range(problem.steps(t, i)):
                y = y - problem.rate(t) * problem.gradient(t, i, k, y - radius * unit(m))
            deltas.append(y - phi)
        m = lookahead * m + mean(deltas)
        x = x + m
        models.append(x)
    return Trace(models)


def test_fednsam_equals_its_shifted_form() -> None:
    assert_same(naive.fednsam(Toy(), lookahead=0.7, radius=0.2), shifted_fednsam(Toy(), 0.7, 0.2))


def gradient_unit_feddyn(problem: Toy, weight: float) -> Trace:
    """FedDyn as first published: linear terms in gradient units, the server state divided by the weight."""
    x = problem.start
    linear = {i: np.zeros_like(x) for i in range(problem.clients)}
    state = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        results = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y) - linear[i] + weight * (y - x)
                y = y - problem.rate(t) * d
            linear[i] = linear[i] - weight * (y - x)
            results.append(y)
        state = state - weight * np.sum([y - x for y in results], axis=0) / problem.clients
        x = mean(results) - state / weight
        models.append(x)
    return Trace(models)


def test_feddyn_equals_its_gradient_unit_form() -> None:
    assert_same(naive.feddyn(Toy(), regularisation=0.3), gradient_unit_feddyn(Toy(), 0.3))


# ---------------------------------------------------------------------------------------------------------
# Small cases


def single(**options: float) -> Toy:
    """One local step, all clients."""
    return Toy(local_steps=(1,), participants=5, **options)  # type: ignore[arg-type]


def mean_gradient(problem: Toy, round: int, point: Vector) -> Vector:
    return mean([problem.gradient(round, i, 0, point) for i in range(problem.clients)])


@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
def test_one_local_step_hides_the_proximal_term(weight_decay: float) -> None:
    toy = Toy(local_steps=(1,), weight_decay=weight_decay)
    assert_same(naive.fedprox(toy, proximal_weight=3.0), naive.fedavg(toy))


@pytest.mark.parametrize("weight_decay", [0.0, 0.03])
def test_one_local_step_and_all_clients_cancel_control_variates(weight_decay: float) -> None:
    toy = single(weight_decay=weight_decay)
    assert_same(naive.scaffold(toy), naive.fedavg(toy))
    assert_same(naive.scaffold(toy, option="I"), naive.fedavg(toy))
    assert_same(naive.fedgamma(toy, radius=0.2), naive.fedsam(toy, radius=0.2))
    client_memory = naive.fedlesam(toy, radius=0.2)
    assert_same(naive.fedlesam_s(toy, radius=0.2), client_memory)
    accelerated = naive.fednsam(toy, lookahead=0.7, radius=0.2)
    assert_same(naive.fednsam_s(toy, lookahead=0.7, radius=0.2), accelerated)


def test_one_local_step_and_all_clients_give_centralised_sgd() -> None:
    toy = single()
    x = toy.start
    models = [x]
    for t in range(toy.rounds):
        x = x - toy.rate(t) * mean_gradient(toy, t, x)
        models.append(x)
    assert_same(naive.fedavg(toy), Trace(models))


def test_one_local_step_and_all_clients_give_centralised_nesterov() -> None:
    toy = single()
    x, m = toy.start, np.zeros_like(toy.start)
    models = [x]
    for t in range(toy.rounds):
        m = 0.7 * m - toy.rate(t) * mean_gradient(toy, t, x + 0.7 * m)
        x = x + m
        models.append(x)
    assert_same(naive.fedacg(toy, lookahead=0.7, proximal_weight=0.0), Trace(models))
    assert_same(naive.fednsam(toy, lookahead=0.7, radius=0.0), Trace(models))


def test_one_local_step_and_all_clients_give_centralised_averaged_gradients() -> None:
    toy = single()
    x, m = toy.start, np.zeros_like(toy.start)
    models = [x]
    for t in range(toy.rounds):
        m = 0.3 * mean_gradient(toy, t, x) + 0.7 * m
        x = x - toy.rate(t) * m
        models.append(x)
    assert_same(naive.fedcm(toy, fresh_weight=0.3), Trace(models))


def test_one_local_step_makes_global_and_local_nesterov_agree() -> None:
    toy = Toy(local_steps=(1,))
    left = naive.fedanag(toy, momentum_decay=0.5)
    right = naive.fedlnag(toy, momentum_decay=0.5)
    assert_same(left, right)
    assert_close(left.server["momentum_gradient"], right.server["buffer"])


def test_one_local_step_with_a_fresh_buffer_only_lengthens_the_step() -> None:
    toy = Toy(local_steps=(1,), weight_decay=0.03)
    left = naive.fedlnag(toy, momentum_decay=0.5, communicate=False)
    assert_same(left, naive.fedavg(toy, server_rate=1.5))


COHORT_FREE = [
    *(
        "fedavg",
        "fedprox",
        "fedavgm",
        "fedadam",
        "fedcm",
        "mimelite",
        "fedacg",
        "fedanag",
        "fedlnag",
        "fedsam",
    ),
    *("mofedsam", "fedasam", "fedswa", "fednsam", "fedsagd", "nesterov_sam"),
]


@pytest.mark.parametrize("name", COHORT_FREE)
def test_identical_clients_make_the_cohort_size_irrelevant(name: str) -> None:
    one, all_ = (Toy(local_steps=(3,), alike=True, participants=size) for size in (1, 5))
    assert_same(GENERIC[name](one), GENERIC[name](all_))


def test_identical_clients_make_corrections_vanish() -> None:
    toy = Toy(local_steps=(3,), alike=True, participants=5)
    assert_same(naive.scaffold(toy), naive.fedavg(toy))
    left = naive.fedmoswa(toy, final_rate=0.1, server_rate=1.5, momentum_rate=1.0)
    assert_same(left, naive.fedswa(toy, final_rate=0.1, server_rate=1.5))


# ---------------------------------------------------------------------------------------------------------
# Invariants


@pytest.mark.parametrize(
    "method",
    [
        naive.scaffold,
        partial(naive.scaffold, option="I"),
        GENERIC["fedgamma"],
        GENERIC["fedlesam_s"],
        partial(naive.fedlesam_s, radius=0.2, memory="server"),
        GENERIC["fednsam_s"],
    ],
)
def test_server_control_is_the_mean_over_all_clients(method: Method) -> None:
    trace = method(Toy(weight_decay=0.03, clients=8))
    total = np.sum(list(trace.clients["control"].values()), axis=0)
    assert_close(trace.server["control"], total / 8)


@pytest.mark.parametrize(
    "method",
    [
        GENERIC["feddyn"],
        GENERIC["fedsmoo"],
        GENERIC["fedlesam_d"],
        GENERIC["fednsam_d"],
        partial(naive.fednsam_d, lookahead=0.7, radius=0.2, regularisation=0.3, dual_in_momentum=True),
        partial(naive.fedspeed, radius=0.2, mix=0.7, proximal_weight=0.3, duals="server"),
    ],
)
def test_server_dual_is_the_mean_over_all_clients(method: Method) -> None:
    trace = method(Toy(weight_decay=0.03, clients=8))
    total = np.sum(list(trace.clients["dual"].values()), axis=0)
    assert_close(trace.server["dual"], total / 8)


def last_calls(toy: Toy, client: int) -> tuple[int, list[Call]]:
    """Round of the client's latest participation and what it asked for then."""
    latest = max(t for t, i in toy.calls if i == client)
    return latest, toy.calls[latest, client]


@pytest.mark.parametrize(
    ("name", "per_step"),
    [("scaffold", 1), ("fedmo", 1), ("fedgamma", 2), ("fedlesam_s", 1), ("fednsam_s", 1)],
)
def test_client_control_is_the_mean_descent_gradient(name: str, per_step: int) -> None:
    toy = Toy()
    trace = GENERIC[name](toy)
    for client, control in trace.clients["control"].items():
        used = last_calls(toy, client)[1][per_step - 1 :: per_step]
        assert_close(control, mean([call.value for call in used]))


def test_fedmoswa_client_control_is_the_mean_weighted_by_step_size() -> None:
    toy = Toy()
    trace = GENERIC["fedmoswa"](toy)
    for client, control in trace.clients["control"].items():
        t, calls = last_calls(toy, client)
        weights = [1 - (1 - 0.1) * call.step / toy.steps(t, client) for call in calls]
        weighted = [w * call.value for w, call in zip(weights, calls, strict=True)]
        assert_close(control, np.sum(weighted, axis=0) / sum(weights))


@pytest.mark.parametrize("name", ["scaffold", "fedmo", "fedmoswa"])
def test_option_one_stores_the_full_gradient_at_the_received_model(name: str) -> None:
    toy = Toy(weight_decay=0.03)
    trace = GENERIC[name](toy, option="I")  # type: ignore[call-arg]
    for client, control in trace.clients["control"].items():
        t = last_calls(toy, client)[0]
        assert_close(control, toy.full_gradient(client, trace.models[t]))


@pytest.mark.parametrize("warm_start", [False, True])
def test_fedmoswa_server_control_is_a_moving_average(warm_start: bool) -> None:
    method = partial(naive.fedmoswa, final_rate=0.1, momentum_rate=0.3, warm_start=warm_start)
    toy = Toy()
    old = np.zeros_like(toy.start)
    for t, cohort in enumerate(toy.cohorts):
        after = method(toy.until(t + 1))
        fresh = mean([after.clients["control"][i] for i in cohort])
        gamma = 1.0 if warm_start and t == 0 else 0.3
        assert_close(after.server["control"], (1 - gamma) * old + gamma * fresh)
        old = after.server["control"]


@pytest.mark.parametrize(
    ("name", "per_step", "fresh", "kept"),
    [
        ("fedcm", 1, 0.3, 0.7),
        ("mofedsam", 2, 0.3, 0.7),
        ("fedanag", 1, 1.0, 0.5),
        ("fedsagd", 1, 1 / 1.6, 1.2 / 1.6),
    ],
)
def test_momentum_recursion(name: str, per_step: int, fresh: float, kept: float) -> None:
    """The momentum moves to a mix of itself and the mean gradient over all steps of all participants."""
    method = GENERIC[name]
    if name == "fedsagd":
        method = partial(naive.fedsagd, momentum_decay=0.6, proximal_weight=0.0, decay_weight=0.0)
    old = np.zeros_like(Toy().start)
    for t in range(Toy().rounds):
        toy = Toy(rounds=t + 1)
        new = method(toy).server["momentum_gradient"]
        used = [call.value for i in toy.cohorts[t] for call in toy.calls[t, i][per_step - 1 :: per_step]]
        assert_close(new, fresh * mean(used) + kept * old)
        old = new


@pytest.mark.parametrize(
    ("name", "per_step", "fresh", "kept"),
    [("fedcm", 1, 0.3, 0.7), ("mofedsam", 2, 0.3, 0.7), ("mimelite", 1, 0.4, 0.6), ("fedanag", 1, 1.5, 0.25)],
)
def test_local_steps_mix_in_the_frozen_momentum(name: str, per_step: int, fresh: float, kept: float) -> None:
    toy = Toy(local_steps=(3,))
    GENERIC[name](toy)
    for t in range(1, toy.rounds):
        momentum = GENERIC[name](toy.until(t)).server["momentum_gradient"]
        for i in toy.cohorts[t]:
            starts, used = toy.calls[t, i][::per_step], toy.calls[t, i][per_step - 1 :: per_step]
            for k in range(2):
                moved = (starts[k].point - starts[k + 1].point) / toy.rate(t)
                assert_close(moved, fresh * used[k].value + kept * momentum)


@pytest.mark.parametrize("name", ["fedcm", "mofedsam"])
def test_server_step_follows_the_momentum(name: str) -> None:
    for t in range(Toy().rounds):
        toy = Toy(rounds=t + 1, weight_decay=0.03)
        trace = GENERIC[name](toy, server_rate=1.3)  # type: ignore[call-arg]
        length = toy.rate(t) * np.mean([toy.steps(t, i) for i in toy.cohorts[t]])
        step = -1.3 * length * trace.server["momentum_gradient"]
        assert_close(trace.models[t + 1] - trace.models[t], step)


@pytest.mark.parametrize(
    ("name", "factor"),
    [("fedcm", 0.3), ("mofedsam", 0.3), ("fedanag", 1.5), ("mimelite", 0.4), ("fedlnag", 1.5)],
)
def test_first_local_step_only_rescales_the_gradient(name: str, factor: float) -> None:
    toy = Toy(local_steps=(2,), rounds=1)
    GENERIC[name](toy)
    for i in toy.cohorts[0]:
        used = [call for call in toy.calls[0, i] if call.step == 0][-1]
        second = next(call.point for call in toy.calls[0, i] if call.step == 1)
        assert_close(toy.start - second, factor * toy.rate(0) * used.value)


def test_mimelite_momentum_averages_full_gradients() -> None:
    toy = Toy(weight_decay=0.03)
    old = np.zeros_like(toy.start)
    for t, cohort in enumerate(toy.cohorts):
        trace = GENERIC["mimelite"](toy.until(t + 1))
        full = mean([toy.full_gradient(i, trace.models[t]) for i in cohort])
        old = 0.4 * full + 0.6 * old
        assert_close(trace.server["momentum_gradient"], old)


def test_fedadam_first_moments() -> None:
    toy = Toy(rounds=1)
    delta = naive.fedavg(toy).models[1] - toy.start
    trace = GENERIC["fedadam"](toy)
    assert_close(trace.server["momentum"], 0.5 * delta)
    assert_close(trace.server["second_moment"], 0.9 * 0.05**2 + 0.1 * delta**2)
    root = np.sqrt(trace.server["second_moment"])
    assert_close(trace.models[1] - toy.start, 0.1 * 0.5 * delta / (root + 0.05))


def test_fedacg_model_is_the_mean_local_model() -> None:
    momentum = np.zeros_like(Toy().start)
    for t in range(Toy().rounds):
        toy = Toy(rounds=t + 1)
        trace = naive.fedacg(toy, lookahead=0.7, proximal_weight=0.2)
        phi = trace.models[t] + 0.7 * momentum
        finals = []
        for i in toy.cohorts[t]:
            first, last = toy.calls[t, i][0], toy.calls[t, i][-1]
            assert_close(first.point, phi)
            finals.append(last.point - toy.rate(t) * (last.value + 0.2 * (last.point - phi)))
        assert_close(trace.models[t + 1], mean(finals))
        momentum = trace.server["momentum"]


def test_feddyn_without_regularisation_integrates_displacements() -> None:
    toy = Toy()
    trace = naive.feddyn(toy, regularisation=0.0)
    total = np.zeros_like(toy.start)
    for t in range(toy.rounds):
        deltas = []
        for i in toy.cohorts[t]:
            deltas.append(-toy.rate(t) * np.sum([call.value for call in toy.calls[t, i]], axis=0))
        total = total + toy.participants / toy.clients * mean(deltas)
        assert_close(trace.models[t + 1], trace.models[t] + mean(deltas) + total)
    assert gap(trace, naive.fedavg(toy)) > DIFFERENT


def test_fedspeed_averages_models_corrected_by_the_new_dual() -> None:
    toy = Toy(participants=1, rounds=10, weight_decay=0.03)
    old: dict[int, Vector] = {}
    for t, (i,) in enumerate(toy.cohorts):
        trace = GENERIC["fedspeed"](toy.until(t + 1))
        new = trace.clients["dual"]
        displacement = new[i] - old.get(i, np.zeros_like(toy.start))
        assert_close(trace.models[t + 1], trace.models[t] + displacement + new[i])
        old = new


def test_fedspeed_without_normalisation_ascends_along_the_raw_gradient() -> None:
    toy = Toy()
    naive.fedspeed(toy, radius=0.2, mix=0.7, proximal_weight=0.3, normalize=False)
    for calls in toy.calls.values():
        for first, second in zip(calls[::2], calls[1::2], strict=True):
            assert_close(second.point - first.point, 0.2 * first.value)


@pytest.mark.parametrize("upload", ["residual", "dual"])
def test_fedsmoo_perturbations(upload: str) -> None:
    """The local perturbation, its dual and the server's estimate, rebuilt from the recorded gradients."""
    method = partial(naive.fedsmoo, radius=0.2, regularisation=0.3, upload=upload)  # type: ignore[arg-type]
    server = np.zeros_like(Toy().start)
    duals: dict[int, Vector] = {}
    for t in range(Toy().rounds):
        toy = Toy(rounds=t + 1)
        trace = method(toy)
        uploads = []
        for i in toy.cohorts[t]:
            dual = duals.get(i, np.zeros_like(server))
            shift = np.zeros_like(server)
            for first, second in zip(toy.calls[t, i][::2], toy.calls[t, i][1::2], strict=True):
                shift = second.point - first.point
                assert_close(shift, 0.2 * unit(first.value - dual - server))
                dual = dual + shift - server
            assert_close(trace.clients["perturbation_dual"][i], dual)
            uploads.append(dual - shift if upload == "residual" else dual)
        server = trace.server["perturbation"]
        assert_close(server, 0.2 * unit(mean(uploads)))
        duals = trace.clients["perturbation_dual"]
    assert np.linalg.norm(server) == pytest.approx(0.2)


@pytest.mark.parametrize("name", ["fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsmoo", "nesterov_sam"])
def test_two_gradient_perturbations_have_the_given_length(name: str) -> None:
    toy = Toy(weight_decay=0.03)
    GENERIC[name](toy)
    for calls in toy.calls.values():
        for first, second in zip(calls[::2], calls[1::2], strict=True):
            assert first.step == second.step
            shift = second.point - first.point
            assert np.linalg.norm(shift) == pytest.approx(0.2, abs=1e-12)
            if name != "fedsmoo":
                assert_close(shift, 0.2 * unit(first.value))


def test_fedasam_perturbation_has_the_given_length_in_the_scaled_norm() -> None:
    toy = Toy()
    GENERIC["fedasam"](toy)
    for calls in toy.calls.values():
        for first, second in zip(calls[::2], calls[1::2], strict=True):
            scale = np.where(toy.weight_mask, np.abs(first.point) + 0.1, 1.0)
            shift = second.point - first.point
            assert np.linalg.norm(shift / scale) == pytest.approx(0.3, abs=1e-12)
            assert_close(unit(shift / scale), unit(scale * first.value))


def recorded_shifts(toy: Toy, trace: Trace, round: int, client: int) -> list[Vector]:
    """Evaluation point minus local iterate, for methods whose steps are the plain gradients there."""
    iterate, shifts = trace.models[round], []
    for call in toy.calls[round, client]:
        shifts.append(call.point - iterate)
        iterate = iterate - toy.rate(round) * call.value
    return shifts


@pytest.mark.parametrize("memory", ["client", "server"])
def test_fedlesam_perturbs_towards_the_remembered_model(memory: str) -> None:
    toy = Toy()
    trace = naive.fedlesam(toy, radius=0.2, memory=memory)  # type: ignore[arg-type]
    seen: dict[int, int] = {}
    for t, cohort in enumerate(toy.cohorts):
        for i in cohort:
            source = seen.get(i) if memory == "client" else (t - 1 if t else None)
            expected = np.zeros_like(toy.start)
            if source is not None:
                expected = 0.2 * unit(trace.models[source] - trace.models[t])
                assert np.linalg.norm(expected) == pytest.approx(0.2)
            for shift in recorded_shifts(toy, trace, t, i):
                assert_close(shift, expected)
            seen[i] = t


def test_fednsam_perturbs_against_the_momentum() -> None:
    momentum = np.zeros_like(Toy().start)
    for t in range(Toy().rounds):
        toy = Toy(rounds=t + 1)
        trace = GENERIC["fednsam"](toy)
        for i in toy.cohorts[t]:
            for shift in recorded_shifts(toy, trace, t, i):
                push = shift - 0.7 * momentum
                assert_close(push, -0.2 * unit(momentum))
                assert np.linalg.norm(push) == pytest.approx(0.2 if t else 0.0)
        momentum = trace.server["momentum"]
        assert_close(trace.models[t + 1] - trace.models[t], momentum)


@pytest.mark.parametrize("name", ["fednsam", "fednsam_s", "fednsam_d"])
def test_fednsam_variants_share_the_first_evaluation_point(name: str) -> None:
    momentum = np.zeros_like(Toy().start)
    for t in range(Toy().rounds):
        toy = Toy(rounds=t + 1, weight_decay=0.03)
        trace = GENERIC[name](toy)
        for i in toy.cohorts[t]:
            ahead = trace.models[t] + 0.7 * momentum - 0.2 * unit(momentum)
            assert_close(toy.calls[t, i][0].point, ahead)
        momentum = trace.server["momentum"]


@pytest.mark.parametrize("inside", [False, True])
def test_fednsam_d_server_step(inside: bool) -> None:
    """Client displacements are the changes of the duals; the server dual enters once, where it is told to."""
    method = partial(naive.fednsam_d, lookahead=0.7, radius=0.2, regularisation=0.3, dual_in_momentum=inside)
    toy = Toy(weight_decay=0.03)
    zero = np.zeros_like(toy.start)
    momentum, old = zero, dict[int, Vector]()
    for t, cohort in enumerate(toy.cohorts):
        trace = method(toy.until(t + 1))
        new, dual = trace.clients["dual"], trace.server["dual"]
        momentum = 0.7 * momentum + mean([new[i] - old.get(i, zero) for i in cohort])
        if inside:
            momentum = momentum + dual
        assert_close(trace.server["momentum"], momentum)
        step = momentum if inside else momentum + dual
        assert_close(trace.models[t + 1] - trace.models[t], step)
        old = new


def test_fedswa_step_sizes_fall_linearly() -> None:
    """With a unit slope the displacement is the sum of the step sizes."""
    toy = Flat(slope=1.0, participants=1, local_steps=(7,), rounds=3)
    trace = naive.fedswa(toy, final_rate=0.1, server_rate=1.5)
    for t in range(toy.rounds):
        total = toy.rate(t) * ((7 + 1) + 0.1 * (7 - 1)) / 2
        assert_close(trace.models[t] - trace.models[t + 1], np.full_like(toy.start, 1.5 * total))


def test_fedsagd_without_gradients_contracts_by_the_known_factor() -> None:
    toy = Flat(local_steps=(4,))
    trace = naive.fedsagd(toy, momentum_decay=0.0, proximal_weight=0.3, decay_weight=0.05)
    flipped = naive.fedsagd(toy, momentum_decay=0.0, proximal_weight=0.3, decay_weight=-0.05)
    for t in range(toy.rounds):
        factor = 0.05 / 0.35 * (1 - (1 - toy.rate(t) * 0.35) ** 4)
        assert_close(trace.models[t + 1], (1 - factor) * trace.models[t])
        assert np.linalg.norm(flipped.models[t + 1]) > np.linalg.norm(flipped.models[t])


def test_fedsagd_displacement_has_a_closed_form() -> None:
    momentum = np.zeros_like(Toy().start)
    for t in range(4):
        toy = Toy(rounds=t + 1, participants=1)
        trace = GENERIC["fedsagd"](toy)
        eta, (i,) = toy.rate(t), toy.cohorts[t]
        shrink, steps = 1 - eta * 0.3, toy.steps(t, i)
        expected = -0.6 * momentum * (1 - shrink**steps) / 0.3
        for k, call in enumerate(toy.calls[t, i]):
            expected = expected - eta * shrink ** (steps - 1 - k) * (call.value + 0.02 * call.point)
        assert_close(trace.models[t + 1] - trace.models[t], expected)
        momentum = trace.server["momentum_gradient"]


def test_local_nesterov_matches_its_look_ahead_form() -> None:
    """The look-ahead points are the iterates of the buffer form with a shorter step."""
    beta, toy = 0.6, Toy(local_steps=(7,), participants=1, rounds=1)
    naive.fedlnag(toy, momentum_decay=beta)
    (i,) = toy.cohorts[0]
    eta = toy.rate(0) / (1 - beta)
    x, m = toy.start, np.zeros_like(toy.start)
    for call in list(toy.calls[0, i]):
        ahead = x - eta * beta * m
        assert_close(ahead, call.point)
        m = beta * m + (1 - beta) * toy.gradient(0, i, call.step, ahead)
        x = x - eta * m


def test_fedlnag_buffer_contains_weight_decay() -> None:
    """Decay inside the gradient: the same as a problem whose loss includes the quadratic term."""

    class Ridge(Toy):
        def gradient(self, round: int, client: int, step: int, point: Vector) -> Vector:
            return super().gradient(round, client, step, point) + 0.03 * point

    left = naive.fedlnag(Toy(weight_decay=0.03), momentum_decay=0.5)
    right = naive.fedlnag(Ridge(), momentum_decay=0.5)
    assert_same(left, right)
    assert_close(left.server["buffer"], right.server["buffer"])


@pytest.mark.parametrize(
    "name", ["fedcm", "fedanag", "mimelite", "mofedsam", "fedsam", "fednsam", "fedlesam"]
)
def test_weight_decay_acts_at_the_local_iterate_unscaled(name: str) -> None:
    """The second local iterate differs between runs with and without decay by exactly one decayed step."""
    toys = [Toy(local_steps=(2,), rounds=1, weight_decay=decay) for decay in (0.0, 0.03)]
    for toy in toys:
        GENERIC[name](toy)
    for i in toys[0].cohorts[0]:
        without, with_ = (next(c.point for c in toy.calls[0, i] if c.step == 1) for toy in toys)
        assert_close(without - with_, toys[0].rate(0) * 0.03 * toys[0].start)


def test_fedrobust_first_step_ascends_the_shift() -> None:
    toy = Toy(local_steps=(1,), rounds=1)
    trace = GENERIC["fedrobust"](toy)
    for i in toy.cohorts[0]:
        ones, zeros = np.ones(toy.inputs), np.zeros(toy.inputs)
        _, scale, offset = toy.shifted_gradient(0, i, 0, toy.start, ones, zeros)
        assert_close(trace.clients["scale"][i], 0.05 * scale)
        assert_close(trace.clients["offset"][i], 0.1 * offset)
    assert_same(trace, naive.fedavg(toy))


def test_fedrobust_penalties_bound_the_shift() -> None:
    """A constant ascent direction gives a geometric approach to slope / (2 penalty), across rounds."""
    toy = Flat(slope=0.4, local_steps=(3,), participants=5)
    trace = GENERIC["fedrobust"](toy)
    steps = 3 * toy.rounds
    scale = 0.4 / (2 * 0.5) * (1 - (1 - 2 * 0.05 * 0.5) ** steps)
    offset = 0.8 / (2 * 0.3) * (1 - (1 - 2 * 0.1 * 0.3) ** steps)
    for i in range(toy.clients):
        assert_close(trace.clients["scale"][i], np.full(toy.inputs, scale))
        assert_close(trace.clients["offset"][i], np.full(toy.inputs, offset))


# ---------------------------------------------------------------------------------------------------------
# Things that must not coincide


def test_no_two_methods_coincide() -> None:
    traces = {name: method(Toy()) for name, method in GENERIC.items()}
    for left, right in itertools.combinations(traces, 2):
        assert gap(traces[left], traces[right]) > DIFFERENT, (left, right)


OPTIONS: dict[str, tuple[Method, Method]] = {
    "scaffold": (naive.scaffold, partial(naive.scaffold, option="I")),
    "fedmo": (GENERIC["fedmo"], partial(naive.fedmo, momentum_rate=0.3, option="I")),
    "fedmoswa-option": (
        partial(naive.fedmoswa, final_rate=0.1, momentum_rate=0.3),
        partial(naive.fedmoswa, final_rate=0.1, momentum_rate=0.3, option="I"),
    ),
    "fedmoswa-warm-start": (
        partial(naive.fedmoswa, final_rate=0.1, momentum_rate=0.3),
        partial(naive.fedmoswa, final_rate=0.1, momentum_rate=0.3, warm_start=True),
    ),
    "fedlnag": (GENERIC["fedlnag"], partial(naive.fedlnag, momentum_decay=0.5, communicate=False)),
    "fedspeed-duals": (
        GENERIC["fedspeed"],
        partial(naive.fedspeed, radius=0.2, mix=0.7, proximal_weight=0.3, duals="server"),
    ),
    "fedspeed-normalize": (
        GENERIC["fedspeed"],
        partial(naive.fedspeed, radius=0.2, mix=0.7, proximal_weight=0.3, normalize=False),
    ),
    "fedsmoo": (
        GENERIC["fedsmoo"],
        partial(naive.fedsmoo, radius=0.2, regularisation=0.3, upload="dual"),
    ),
    "fedlesam": (GENERIC["fedlesam"], partial(naive.fedlesam, radius=0.2, memory="server")),
    "fedlesam_s": (GENERIC["fedlesam_s"], partial(naive.fedlesam_s, radius=0.2, memory="server")),
    "fedsynsam": (GENERIC["fedsynsam"], partial(GENERIC["fedsynsam"], sample_optimizer="sgd")),
    "fedlesam_d": (
        GENERIC["fedlesam_d"],
        partial(naive.fedlesam_d, radius=0.2, regularisation=0.3, memory="server"),
    ),
    "fednsam_d": (
        GENERIC["fednsam_d"],
        partial(naive.fednsam_d, lookahead=0.7, radius=0.2, regularisation=0.3, dual_in_momentum=True),
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_matter(name: str) -> None:
    left, right = OPTIONS[name]
    assert gap(left(Toy()), right(Toy())) > DIFFERENT


def test_fednsam_d_with_the_dual_outside_the_momentum_is_not_fedlesam_d() -> None:
    left = naive.fednsam_d(Toy(), lookahead=0.0, radius=0.2, regularisation=0.3)
    right = naive.fedlesam_d(Toy(), radius=0.2, regularisation=0.3, memory="server")
    assert gap(left, right) > DIFFERENT


@pytest.mark.parametrize("momentum_rate", [1.0, 3 / 5])
def test_fedmoswa_is_not_scaffold_with_partial_participation(momentum_rate: float) -> None:
    left = naive.fedmoswa(Toy(), final_rate=1.0, momentum_rate=momentum_rate)
    assert gap(left, naive.scaffold(Toy())) > DIFFERENT


def expected_correction(name: str, before: Trace, client: int, point: Vector) -> Vector:
    """What the method adds to the loss gradient at a local iterate, given the state before the round."""
    x = before.models[-1]
    zero = np.zeros_like(x)
    if name == "fedprox":
        return 0.4 * (point - x)
    if name == "feddyn":
        return 0.3 * (point - x + before.clients["dual"].get(client, zero))
    if name == "fedacg":
        return 0.2 * (point - x - 0.7 * before.server["momentum"])
    return before.server["control"] - before.clients["control"].get(client, zero)


@pytest.mark.parametrize("name", ["fedprox", "feddyn", "fedacg", "scaffold", "fedgamma"])
def test_corrections_act_on_the_local_steps(name: str) -> None:
    """Each step leaves the plain gradient step by the correction that the stored state prescribes."""
    toy = Toy(local_steps=(3,))
    GENERIC[name](toy)
    per_step = 2 if name == "fedgamma" else 1
    largest = 0.0
    for t in range(1, toy.rounds):
        before = GENERIC[name](toy.until(t))
        for i in toy.cohorts[t]:
            starts, used = toy.calls[t, i][::per_step], toy.calls[t, i][per_step - 1 :: per_step]
            for k in range(2):
                moved = (starts[k].point - starts[k + 1].point) / toy.rate(t)
                correction = moved - used[k].value
                assert_close(correction, expected_correction(name, before, i, starts[k].point))
                largest = max(largest, float(np.abs(correction).max()))
    assert largest > 1e-3
