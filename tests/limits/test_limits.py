"""What the algorithms must become, must keep and must not be, through whole trainings in float64.

Weight decay is on wherever the identity survives it, participation is partial wherever the identity does not
need everybody, and the rate decays, so that a wrong scale or a forgotten state shows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from problems import (
    CLIENTS,
    DEFAULTS,
    FEATURES,
    GENERIC,
    HIDDEN,
    Recorder,
    distance,
    federation,
    flat,
    generic,
    gradient_of,
    mean_over_clients,
    named,
    network,
    pooled_gradient,
    run,
    spied,
    train,
    trajectory,
)
from torch import Tensor, nn

import flatfed as ff
from flatfed import parts
from flatfed.core.algorithm import ImpossibleComposition
from flatfed.core.context import Carry, ClientContext
from flatfed.core.flat import Layout
from flatfed.core.part import Correction, Gradient
from flatfed.core.rounds import ClientResult, client_round
from flatfed.core.sampling import batches
from flatfed.engines import chunks

TOLERANCE = 1e-9
DIFFERENT = 1e-5
EVERYBODY: dict[str, Any] = {"participants": CLIENTS}
NO_DECAY: dict[str, Any] = {"weight_decay": 0.0}
ONE_STEP: dict[str, Any] = {"local_steps": 1}
FULL_BATCH: dict[str, Any] = {"batch_size": None}
STEADY: dict[str, Any] = {"lr_decay": 1.0}
SHARE = DEFAULTS["participants"] / CLIENTS


@cache
def _known(algorithm: ff.Algorithm, settings: tuple[tuple[str, Any], ...]) -> Tensor:
    return trajectory(algorithm, **dict(settings))


def known(algorithm: ff.Algorithm, **settings: Any) -> Tensor:
    """The trajectory of an algorithm that many tests compare with, computed once."""
    return _known(algorithm, tuple(sorted(settings.items()))).clone()


def shifted_fednsam(lookahead: float, radius: float) -> ff.Algorithm:
    """FedNSAM with the look-ahead taken once, at the start of the round."""
    return ff.Algorithm(
        start=parts.LookAhead(lookahead),
        gradient=parts.AlongMomentum(radius),
        server=parts.Momentum(lookahead),
    )


# -- exact reductions --------------------------------------------------------------------------------------


class Reduction(NamedTuple):
    """Two algorithms that must go through the same models, under settings that both get."""

    left: ff.Algorithm
    right: ff.Algorithm
    settings: dict[str, Any] = {}
    right_settings: dict[str, Any] = {}
    """What the right one gets besides."""


REDUCTIONS = {
    # FedAvg
    "fedprox without pull": Reduction(ff.fedprox(0.0), ff.fedavg()),
    "fedsam without radius": Reduction(ff.fedsam(0.0), ff.fedavg()),
    "fedasam without radius": Reduction(ff.fedasam(0.0), ff.fedavg()),
    "fedcm of fresh gradients": Reduction(ff.fedcm(1.0), ff.fedavg()),
    "mimelite without momentum": Reduction(ff.mimelite(0.0), ff.fedavg()),
    "fedavgm without momentum": Reduction(ff.fedavgm(0.0), ff.fedavg()),
    "fedanag without momentum": Reduction(ff.fedanag(0.0), ff.fedavg()),
    "fedlnag without momentum": Reduction(ff.fedlnag(0.0), ff.fedavg()),
    "fedlnag without momentum or traffic": Reduction(ff.fedlnag(0.0, communicate=False), ff.fedavg()),
    "fedlesam without radius": Reduction(ff.fedlesam(0.0), ff.fedavg()),
    "fedlesam without radius, server": Reduction(ff.fedlesam(0.0, memory="server"), ff.fedavg()),
    "fednsam without both": Reduction(ff.fednsam(0.0, 0.0), ff.fedavg()),
    "fedsagd without all three": Reduction(ff.fedsagd(0.0, 0.0, 0.0), ff.fedavg()),
    "fedswa without both": Reduction(ff.fedswa(1.0, 1.0), ff.fedavg()),
    "fedrobust by channel": Reduction(
        generic("fedrobust", shift="channel"), generic("fedrobust", shift="diagonal")
    ),
    "fedrobust without ascent": Reduction(ff.fedrobust(0.0, 0.0, 1.0, 1.0), ff.fedavg()),
    "fedswa at one rate": Reduction(ff.fedswa(1.0, 1.4), ff.fedavg(server_rate=1.4)),
    "fedadam that never adapts": Reduction(ff.fedadam(0.02, 0.0, 1.0, 0.01), ff.fedavg()),
    "fedadam with momentum alone": Reduction(ff.fedadam(0.02 / 0.4, 0.6, 1.0, 0.01), ff.fedavgm(0.6)),
    # The server's rate is the same thing in all of them.
    "fedsam without radius, rate": Reduction(ff.fedsam(0.0, 1.3), ff.fedavg(1.3)),
    "fedasam without radius, rate": Reduction(ff.fedasam(0.0, server_rate=1.3), ff.fedavg(1.3)),
    "fedcm of fresh gradients, rate": Reduction(ff.fedcm(1.0, 1.3), ff.fedavg(1.3)),
    "mofedsam, rate": Reduction(ff.mofedsam(0.2, 1.0, 1.3), ff.fedsam(0.2, 1.3)),
    "fedavgm without momentum, rate": Reduction(ff.fedavgm(0.0, 1.3), ff.fedavg(1.3)),
    "fedanag without momentum, rate": Reduction(ff.fedanag(0.0, 1.3), ff.fedavg(1.3)),
    "fedlnag damped": Reduction(
        ff.fedlnag(0.6, damped=True, server_rate=1.3),
        ff.fedlnag(0.6, server_rate=1.3),
        {"lr": 0.2},
        {"lr": 0.08},
    ),
    "fedswa as released": Reduction(ff.build({"name": "fedswa", "variant": "released"}), ff.fedswa(0.0, 1.0)),
    "fedmoswa as released": Reduction(
        ff.build({"name": "fedmoswa", "variant": "released"}), ff.fedmo(momentum_rate=0.4)
    ),
    "fedlnag without momentum, rate": Reduction(ff.fedlnag(0.0, server_rate=1.3), ff.fedavg(1.3)),
    "fedlesam without radius, rate": Reduction(ff.fedlesam(0.0, server_rate=1.3), ff.fedavg(1.3)),
    "fedsagd without all three, rate": Reduction(ff.fedsagd(0.0, 0.0, 0.0, 1.3), ff.fedavg(1.3)),
    "fedgamma without radius, rate": Reduction(ff.fedgamma(0.0, 1.3), ff.scaffold(server_rate=1.3)),
    "fedcm, rate in gradient units": Reduction(
        ff.fedcm(0.4, 1.3 * 3 * 0.2, units="gradient"), ff.fedcm(0.4, 1.3), STEADY
    ),
    "mofedsam, rate in gradient units": Reduction(
        ff.mofedsam(0.2, 0.4, 1.3 * 3 * 0.2, units="gradient"), ff.mofedsam(0.2, 0.4, 1.3), STEADY
    ),
    "fedsynsam without radius": Reduction(generic("fedsynsam", radius=0.0), ff.fedavg(1.3)),
    "dynafed before it distils": Reduction(ff.dynafed(), ff.fedavg()),
    "dynafed_syn_only before it distils": Reduction(ff.dynafed_syn_only(), ff.fedavg()),
    # FedSAM and FedCM
    "fedsynsam of local gradients": Reduction(generic("fedsynsam", local_weight=1.0), ff.fedsam(0.2, 1.3)),
    "fedsynsam before it distils": Reduction(generic("fedsynsam", warm_rounds=4), ff.fedsam(0.2, 1.3)),
    "mofedsam of fresh gradients": Reduction(ff.mofedsam(0.2, 1.0), ff.fedsam(0.2)),
    "mofedsam without radius": Reduction(ff.mofedsam(0.0, 0.4), ff.fedcm(0.4)),
    # SCAFFOLD
    "fedgamma without radius": Reduction(ff.fedgamma(0.0), ff.scaffold()),
    "fedlesam_s without radius": Reduction(ff.fedlesam_s(0.0), ff.scaffold()),
    "fednsam_s without both": Reduction(ff.fednsam_s(0.0, 0.0), ff.scaffold()),
    "fedlesam_s without control": Reduction(ff.fedlesam_s(0.3, control_weight=0.0), ff.fedlesam(0.3)),
    # FedDyn
    "fedlesam_d without radius": Reduction(ff.fedlesam_d(0.0, 0.2), ff.feddyn(0.2)),
    "fedsmoo without radius": Reduction(ff.fedsmoo(0.0, 0.2), ff.feddyn(0.2)),
    "fednsam_d without both": Reduction(ff.fednsam_d(0.0, 0.0, 0.2), ff.feddyn(0.2)),
    "fedspeed without radius": Reduction(ff.fedspeed(0.0, 0.7, 0.2), ff.feddyn(0.2), EVERYBODY),
    "fedspeed without mix": Reduction(ff.fedspeed(0.3, 0.0, 0.2), ff.feddyn(0.2), EVERYBODY),
    "fedspeed dyn without radius": Reduction(ff.fedspeed(0.0, 0.7, 0.2, duals="server"), ff.feddyn(0.2)),
    "fedspeed dyn without mix": Reduction(ff.fedspeed(0.3, 0.0, 0.2, duals="server"), ff.feddyn(0.2)),
    "fedspeed rules with everybody": Reduction(
        ff.fedspeed(0.3, 0.7, 0.2), ff.fedspeed(0.3, 0.7, 0.2, duals="server"), EVERYBODY
    ),
    # Look-ahead and momentum
    "fedacg without momentum": Reduction(ff.fedacg(0.0, 0.3), ff.fedprox(0.3)),
    "fednsam without radius": Reduction(ff.fednsam(0.6, 0.0), ff.fedacg(0.6, 0.0), NO_DECAY),
    "fednsam shifted once": Reduction(ff.fednsam(0.6, 0.3), shifted_fednsam(0.6, 0.3), NO_DECAY),
    "fednsam in one vector": Reduction(
        ff.fednsam(0.6, 0.3, single_vector=True), ff.fednsam(0.6, 0.3), NO_DECAY
    ),
    "fednsam without look-ahead": Reduction(ff.fednsam(0.0, 0.3), ff.fedlesam(0.3, memory="server")),
    "fednsam without look-ahead, everybody": Reduction(ff.fednsam(0.0, 0.3), ff.fedlesam(0.3), EVERYBODY),
    "fednsam_s without look-ahead": Reduction(ff.fednsam_s(0.0, 0.3), ff.fedlesam_s(0.3, memory="server")),
    "fednsam_s without look-ahead, everybody": Reduction(
        ff.fednsam_s(0.0, 0.3), ff.fedlesam_s(0.3), EVERYBODY
    ),
    "fednsam_d without look-ahead, dual inside": Reduction(
        ff.fednsam_d(0.0, 0.3, 0.2, dual_in_momentum=True), ff.fedlesam_d(0.3, 0.2, memory="server")
    ),
    "fednsam_d without look-ahead, dual inside, everybody": Reduction(
        ff.fednsam_d(0.0, 0.3, 0.2, dual_in_momentum=True), ff.fedlesam_d(0.3, 0.2), EVERYBODY
    ),
    # FedMoSWA
    "fedmoswa at one rate": Reduction(ff.fedmoswa(1.0, 1.0, 0.4), ff.fedmo(0.4)),
    "fedmoswa at one rate, option I": Reduction(
        ff.fedmoswa(1.0, 1.0, 0.4, option="I"), ff.fedmo(0.4, option="I")
    ),
    "fedmoswa at one rate, warm": Reduction(
        ff.fedmoswa(1.0, 1.0, 0.4, warm_start=True), ff.fedmo(0.4, warm_start=True)
    ),
    "fedmoswa as scaffold": Reduction(ff.fedmoswa(1.0, 1.0, 1.0), ff.scaffold(), EVERYBODY),
    "fedmoswa as scaffold, rate": Reduction(
        ff.fedmoswa(1.0, 1.3, 1.0), ff.scaffold(server_rate=1.3), EVERYBODY
    ),
    "fedmo as scaffold, option I": Reduction(ff.fedmo(1.0, option="I"), ff.scaffold(option="I"), EVERYBODY),
    "fedmo of rate 1 is always warm": Reduction(ff.fedmo(1.0), ff.fedmo(1.0, warm_start=True)),
    # FedExP and FedGloSS
    "fedexp of one participant": Reduction(ff.fedexp(0.0), ff.fedavg(), {"participants": 1}),
    "fedexp that never extrapolates": Reduction(ff.fedexp(1e9), ff.fedavg()),
    "fedgloss without radii": Reduction(ff.fedgloss(0.0, 0.0, 0.2), ff.feddyn(0.2)),
    "fedgloss without the server's radius": Reduction(
        ff.fedgloss(0.0, 0.3, 0.2), ff.fedspeed(0.3, 1.0, 0.2, duals="server")
    ),
    "fedgloss without local radius and duals": Reduction(
        ff.Algorithm(start=parts.PerturbedStart(0.3)), ff.fedlesam(0.3, memory="server"), NO_DECAY
    ),
    # FedAdamW and FedMuon
    "fedadamw that never adapts": Reduction(
        ff.fedadamw(0.4, beta1=0.0, eps=1e12),
        ff.Algorithm(correct=parts.GlobalMomentum(1.0, 0.4)),
        {**NO_DECAY, "lr": 0.2e12},
        {"lr": 0.2},
    ),
    "fedmuon without memory": Reduction(
        ff.fedmuon(0.0, 0.0), ff.Algorithm(optimizer=parts.Muon(0.0)), {"lr": 0.05}
    ),
    "fedmuon of old directions alone": Reduction(
        ff.fedmuon(1.0), ff.Algorithm(correct=parts.GlobalMomentum(0.0, 1.0))
    ),
    # Optimizers
    "momentum, reset": Reduction(
        ff.Algorithm(optimizer=parts.LocalMomentum(0.6, nesterov=True)), ff.fedlnag(0.6, communicate=False)
    ),
    "momentum, averaged": Reduction(
        ff.Algorithm(optimizer=parts.LocalMomentum(0.6, nesterov=True, state="averaged")), ff.fedlnag(0.6)
    ),
    "momentum of one step, kept by all": Reduction(
        ff.Algorithm(optimizer=parts.LocalMomentum(0.6, state="kept")),
        ff.fedavgm(0.6),
        {**EVERYBODY, **ONE_STEP, **NO_DECAY, **STEADY},
    ),
    # FedSAGD
    "fedsagd with pull alone": Reduction(ff.fedsagd(0.0, 0.3, 0.0), ff.fedprox(0.3)),
    "fedsagd with decay alone": Reduction(
        ff.fedsagd(0.0, 0.0, 0.05), ff.fedavg(), right_settings={"weight_decay": 0.01 + 0.05}
    ),
}


@pytest.mark.parametrize("row", REDUCTIONS)
def test_reduction(row: str) -> None:
    left, right, settings, more = REDUCTIONS[row]
    one = trajectory(left, **settings)
    other = known(right, **{**settings, **more})
    assert distance(one, other) < TOLERANCE
    # The rate, the decay and the participants must have mattered.
    assert distance(one[:-1], one[1:]) > DIFFERENT


@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_every_algorithm_has_a_limit(name: str) -> None:
    """A row above in which the algorithm becomes another one, or another one becomes it."""
    assert name in {side.name for row in REDUCTIONS.values() for side in (row.left, row.right)}


class Named(nn.Module):
    """The network with parameters of which all, or none, are called weights."""

    def __init__(self, name: str) -> None:
        super().__init__()
        for number, value in enumerate(network().parameters()):
            self.register_parameter(f"{name}{number}", nn.Parameter(value.detach().clone()))

    def forward(self, inputs: Tensor) -> Tensor:
        first, bias, second, last = self.parameters()
        return torch.tanh(inputs @ first.T + bias) @ second.T + last


def test_fedasam_without_scaling_is_fedsam() -> None:
    unscaled = trajectory(ff.fedasam(0.3, 0.2), model=Named("kernel"))
    assert distance(unscaled, known(ff.fedsam(0.3))) < TOLERANCE
    scaled = trajectory(ff.fedasam(0.3, 0.2), model=Named("weight"))
    assert distance(scaled, unscaled) > DIFFERENT


def test_fedasam_with_one_scale_is_fedsam_of_a_scaled_radius() -> None:
    # |y| + c is c to within rounding for a huge c; the radius undoes its size.
    huge = 1e12
    adaptive = trajectory(ff.fedasam(0.3 / huge, huge), model=Named("weight"))
    assert distance(adaptive, known(ff.fedsam(0.3))) < TOLERANCE


def test_fedasam_may_leave_out_weights_of_one_dimension() -> None:
    model = Named("weight")
    partly = trajectory(ff.fedasam(0.3, 0.2, scale_norms=False), model=model)
    # In the network of linear layers exactly the tensors with two dimensions are called weights.
    assert distance(partly, trajectory(ff.fedasam(0.3, 0.2))) < TOLERANCE
    assert distance(partly, trajectory(ff.fedasam(0.3, 0.2), model=model)) > DIFFERENT


# -- small cases -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [0.1, 2.0])
def test_one_local_step_hides_the_proximal_term(weight: float) -> None:
    proximal = trajectory(ff.fedprox(weight), **ONE_STEP)
    assert distance(proximal, known(ff.fedavg(), **ONE_STEP)) < TOLERANCE


@pytest.mark.parametrize(
    ("controlled", "plain"),
    [
        (ff.scaffold(), ff.fedavg()),
        (ff.scaffold(option="I"), ff.fedavg()),
        (ff.fedgamma(0.2), ff.fedsam(0.2)),
        (ff.fedlesam_s(0.2), ff.fedlesam(0.2)),
        (ff.fednsam_s(0.6, 0.2), ff.fednsam(0.6, 0.2)),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_one_local_step_of_everybody_cancels_control_variates(
    controlled: ff.Algorithm, plain: ff.Algorithm
) -> None:
    expected = known(plain, **ONE_STEP, **EVERYBODY)
    assert distance(trajectory(controlled, **ONE_STEP, **EVERYBODY), expected) < TOLERANCE
    # With more steps they act.
    assert distance(known(controlled, **EVERYBODY), known(plain, **EVERYBODY)) > DIFFERENT


def test_one_local_step_of_everybody_is_gradient_descent_on_the_mean_loss() -> None:
    data = federation()
    decay = DEFAULTS["weight_decay"]
    x, expected = flat(network()), []
    for t in range(DEFAULTS["rounds"]):
        eta = DEFAULTS["lr"] * DEFAULTS["lr_decay"] ** t
        x = x - eta * (pooled_gradient(data, x) + decay * x)
        expected.append(x)
    found = trajectory(ff.fedavg(), data=data, **ONE_STEP, **EVERYBODY, **FULL_BATCH)
    assert distance(found, torch.stack(expected)) < TOLERANCE


@pytest.mark.parametrize("algorithm", [ff.fednsam(0.6, 0.0), ff.fedacg(0.6, 0.0)], ids=lambda a: a.name)
def test_one_local_step_of_everybody_is_nesterovs_method(algorithm: ff.Algorithm) -> None:
    data = federation()
    x, m, expected = flat(network()), torch.zeros_like(flat(network())), []
    for t in range(DEFAULTS["rounds"]):
        eta = DEFAULTS["lr"] * DEFAULTS["lr_decay"] ** t
        m = 0.6 * m - eta * pooled_gradient(data, x + 0.6 * m)
        x = x + m
        expected.append(x)
    found = trajectory(algorithm, data=data, **ONE_STEP, **EVERYBODY, **FULL_BATCH, **NO_DECAY)
    assert distance(found, torch.stack(expected)) < TOLERANCE


def _stateless(algorithm: ff.Algorithm) -> bool:
    return not algorithm.client_vectors


@pytest.mark.parametrize("name", [name for name in GENERIC if _stateless(generic(name))])
def test_identical_clients_make_their_number_irrelevant(name: str) -> None:
    data = federation(alike=True)
    few, many = (
        trajectory(generic(name), data=data, participants=size, rounds=4, **FULL_BATCH) for size in (2, 5)
    )
    assert distance(few, many) < TOLERANCE
    assert distance(few[:-1], few[1:]) > DIFFERENT


@pytest.mark.parametrize(
    ("controlled", "plain"),
    [(ff.scaffold(), ff.fedavg()), (ff.fedmoswa(0.3, 1.3, 1.0), ff.fedswa(0.3, 1.3))],
    ids=lambda algorithm: algorithm.name,
)
def test_identical_clients_make_corrections_vanish(controlled: ff.Algorithm, plain: ff.Algorithm) -> None:
    settings = {"data": federation(alike=True), **FULL_BATCH, **EVERYBODY}
    assert distance(trajectory(controlled, **settings), trajectory(plain, **settings)) < TOLERANCE
    assert distance(known(controlled, **EVERYBODY), known(plain, **EVERYBODY)) > DIFFERENT


# -- invariants --------------------------------------------------------------------------------------------

SAMPLING: dict[str, dict[str, Any]] = {
    "fixed": {},
    "bernoulli": {"sampling": "bernoulli"},
    "samples": {"weighting": "samples", "local_epochs": 1},
}


@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize(
    ("algorithm", "vector"),
    [
        (generic("scaffold"), "control"),
        (generic("scaffold", option="I"), "control"),
        (generic("fedgamma"), "control"),
        (generic("fedlesam_s"), "control"),
        (generic("fednsam_s"), "control"),
        (generic("feddyn"), "dual"),
        (generic("fedsmoo"), "dual"),
        (generic("fedlesam_d"), "dual"),
        (generic("fednsam_d"), "dual"),
        (generic("fednsam_d", dual_in_momentum=True), "dual"),
        (generic("fedspeed", duals="server"), "dual"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_server_vector_is_the_mean_over_all_clients(
    algorithm: ff.Algorithm, vector: str, sampling: str
) -> None:
    data = federation(unequal=True)
    result = run(algorithm, data=data, rounds=4, **SAMPLING[sampling])
    sizes = [len(data.client(number)) for number in range(CLIENTS)]
    mean = mean_over_clients(result, vector, CLIENTS, sizes if sampling == "samples" else None)
    assert 0 < len(result.clients.clients()) <= CLIENTS
    assert distance(named(result.server)[vector], mean) < 1e-12
    assert float(mean.abs().max()) > 1e-3


def test_clients_remember_only_what_they_lived_through() -> None:
    recorder = Recorder()
    result = run(generic("scaffold"), recorder=recorder, rounds=2)
    assert result.clients.clients() == sorted(set(recorder.cohorts[0]) | set(recorder.cohorts[1]))
    never = next(client for client in range(CLIENTS) if client not in result.clients.clients())
    assert not named(result.clients.read(never, result.server["model"]))["control"].any()


@pytest.mark.parametrize(
    "algorithm",
    [generic(name) for name in ("scaffold", "fedgamma", "fedlesam_s", "fednsam_s", "fedmo", "fedmoswa")],
    ids=lambda algorithm: algorithm.name,
)
def test_control_variate_is_the_mean_gradient_weighted_by_step_size(algorithm: ff.Algorithm) -> None:
    watched, log = spied(algorithm)
    recorder = Recorder()
    result = run(watched, recorder=recorder, **NO_DECAY)
    last = DEFAULTS["rounds"] - 1
    steps = log.of_round(last)
    assert len(steps) == DEFAULTS["local_steps"]
    total = sum(step.rate for step in steps)
    mean = sum(step.rate * step.direction for step in steps) / total
    for row, client in enumerate(recorder.cohorts[last]):
        control = named(result.clients.read(client, result.server["model"]))["control"]
        assert distance(control, mean[row]) < TOLERANCE


def test_control_variate_acts_with_its_weight() -> None:
    weight, rounds = 0.4, DEFAULTS["rounds"]
    algorithm = ff.fedlesam_s(0.3, control_weight=weight)
    before = run(algorithm, rounds=rounds - 1, **NO_DECAY)
    watched, log = spied(algorithm)
    recorder = Recorder()
    after = run(watched, recorder=recorder, **NO_DECAY)
    steps = log.of_round(rounds - 1)
    for row, client in enumerate(recorder.cohorts[-1]):
        own = named(before.clients.read(client, before.server["model"]))["control"]
        mean = torch.stack([step.direction[row] for step in steps]).mean(0)
        direction = mean + weight * (named(before.server)["control"] - own)
        moved = -steps[0].rate * len(steps) * direction
        assert distance(log.ends[-1][row] - log.starts[-1], moved) < TOLERANCE
        # What is remembered is the gradient, whatever the weight.
        assert distance(named(after.clients.read(client, after.server["model"]))["control"], mean) < TOLERANCE


@pytest.mark.parametrize(
    "algorithm",
    [generic("scaffold", option="I"), generic("fedmoswa", option="I")],
    ids=lambda algorithm: algorithm.name,
)
def test_control_variate_of_option_one_is_the_full_gradient_at_the_received_model(
    algorithm: ff.Algorithm,
) -> None:
    data, recorder = federation(unequal=True), Recorder()
    result = run(algorithm, data=data, recorder=recorder)
    received = recorder.models[-2]
    for client in recorder.cohorts[-1]:
        own = data.client(client)
        expected = gradient_of(network(), received, *own.batch(torch.arange(len(own))))
        found = named(result.clients.read(client, result.server["model"]))["control"]
        assert distance(found, expected) < TOLERANCE


@pytest.mark.parametrize("warm", [False, True])
def test_momentum_control_variate_is_a_running_mean_of_the_participants(warm: bool) -> None:
    for rounds in (1, 2, 3):
        recorder = Recorder()
        result = run(generic("fedmo", warm_start=warm), recorder=recorder, rounds=rounds)
        fresh = torch.stack(
            [
                named(result.clients.read(client, result.server["model"]))["control"]
                for client in recorder.cohorts[-1]
            ]
        ).mean(0)
        before = recorder.servers[-2]["control"] if rounds > 1 else torch.zeros_like(fresh)
        rate = 1.0 if warm and rounds == 1 else GENERIC["fedmo"]["momentum_rate"]
        assert distance(named(result.server)["control"], (1 - rate) * before + rate * fresh) < TOLERANCE


def test_fedacg_model_is_the_mean_of_the_local_models() -> None:
    watched, log = spied(generic("fedacg"))
    recorder = Recorder()
    run(watched, recorder=recorder)
    assert distance(recorder.models, torch.stack([ends.mean(0) for ends in log.ends])) < TOLERANCE
    # They did start at the look-ahead, not at the model.
    before = recorder.servers[1]
    assert distance(log.starts[2], before["model"] + 0.6 * before["momentum"]) < TOLERANCE


def federation_with_test() -> ff.Federation:
    """The same clients, and the first one's data for a test."""
    data = federation()
    samples = [data.client(number).batch(torch.arange(12)) for number in range(CLIENTS)]
    return ff.Federation.from_tensors(samples, test=samples[0])


def _test_loss(algorithm: ff.Algorithm, evaluate: str, **settings: Any) -> list[float]:
    history = run(algorithm, data=federation_with_test(), evaluate=evaluate, **settings).history
    return [float(record["test_loss"]) for record in history]


def test_fedacg_is_evaluated_alike_at_its_model_and_at_the_mean_of_the_local_models() -> None:
    broadcast, mean = (_test_loss(generic("fedacg"), which) for which in ("broadcast", "active_mean"))
    assert broadcast == pytest.approx(mean, rel=TOLERANCE)


def test_fedspeed_is_evaluated_at_the_mean_of_the_local_models_like_feddyn() -> None:
    speed, dyn = (
        _test_loss(algorithm, "active_mean", **EVERYBODY)
        for algorithm in (ff.fedspeed(0.0, 0.7, 0.2), ff.feddyn(0.2))
    )
    assert speed == pytest.approx(dyn, rel=TOLERANCE)
    assert dyn != pytest.approx(_test_loss(ff.feddyn(0.2), "broadcast", **EVERYBODY), rel=DIFFERENT)


def _fedcm_memory() -> tuple[float, float]:
    alpha = GENERIC["fedcm"]["fresh_weight"]
    return 1 - alpha, alpha


def _fedsagd_memory() -> tuple[float, float]:
    beta = GENERIC["fedsagd"]["momentum_decay"]
    return 2 * beta / (1 + beta), 1 / (1 + beta)


@pytest.mark.parametrize(
    ("algorithm", "kept", "fresh"),
    [
        (generic("fedanag"), GENERIC["fedanag"]["momentum_decay"], 1.0),
        (generic("fedcm"), *_fedcm_memory()),
        (generic("mofedsam"), *_fedcm_memory()),
        (generic("fedsagd", proximal_weight=0.0, decay_weight=0.0), *_fedsagd_memory()),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_momentum_remembers_mean_gradients(algorithm: ff.Algorithm, kept: float, fresh: float) -> None:
    watched, log = spied(algorithm)
    recorder = Recorder()
    run(watched, recorder=recorder, **NO_DECAY)
    old = torch.zeros_like(recorder.models[0])
    for t, server in enumerate(recorder.servers):
        mean = torch.stack([step.direction for step in log.of_round(t)]).mean((0, 1))
        old = kept * old + fresh * mean
        assert distance(server["momentum_gradient"], old) < TOLERANCE


@pytest.mark.parametrize("name", ["fedcm", "mofedsam"])
def test_server_steps_along_the_momentum_in_gradient_units(name: str) -> None:
    recorder = Recorder()
    run(generic(name, server_rate=0.4, units="gradient"), recorder=recorder)
    x = flat(network())
    for server in recorder.servers:
        assert distance(server["model"], x - 0.4 * server["momentum_gradient"]) < TOLERANCE
        x = server["model"]


def test_mimelite_momentum_remembers_full_gradients() -> None:
    data, recorder, beta = federation(unequal=True), Recorder(), GENERIC["mimelite"]["momentum_decay"]
    run(generic("mimelite"), data=data, recorder=recorder)
    received, old = flat(network()), torch.zeros_like(flat(network()))
    for server, members in zip(recorder.servers, recorder.cohorts, strict=True):
        owned = [data.client(client) for client in members]
        full = [gradient_of(network(), received, *own.batch(torch.arange(len(own)))) for own in owned]
        old = (1 - beta) * torch.stack(full).mean(0) + beta * old
        assert distance(server["momentum_gradient"], old) < TOLERANCE
        received = server["model"]


def test_fedrobust_climbs_on_a_full_matrix() -> None:
    rates, penalties = (0.3, 0.2), (0.1, 0.3)
    data, model = federation(clients=1), network()
    inputs, targets = data.client(0).batch(torch.arange(12))
    y = flat(model)
    matrix, offset = torch.eye(FEATURES, dtype=y.dtype), torch.zeros(FEATURES, dtype=y.dtype)
    for _ in range(6):
        nn.utils.vector_to_parameters(y, model.parameters())
        shift = [matrix.clone().requires_grad_(), offset.clone().requires_grad_()]
        objective = F.cross_entropy(model(inputs @ shift[0].T + shift[1]), targets)
        objective = objective - penalties[0] * (shift[0] - torch.eye(FEATURES)).square().sum()
        objective = objective - penalties[1] * shift[1].square().sum()
        *slopes, by_matrix, by_offset = torch.autograd.grad(objective, [*model.parameters(), *shift])
        y = y - 0.2 * torch.cat([slope.flatten() for slope in slopes])
        matrix, offset = matrix + rates[0] * by_matrix, offset + rates[1] * by_offset
    settings = {"rounds": 2, "participants": 1, **FULL_BATCH, **STEADY, **NO_DECAY}
    result = run(ff.fedrobust(*rates, *penalties, shift="full"), data=data, **settings)
    kept = named(result.clients.read(0, y))
    assert distance(result.server["model"], y) < TOLERANCE
    assert distance(kept["scale"].view(FEATURES, FEATURES), matrix - torch.eye(FEATURES)) < TOLERANCE
    assert distance(kept["offset"], offset) < TOLERANCE
    assert float((matrix - matrix.diag().diag()).abs().max()) > DIFFERENT


def no_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    return 0.0 * outputs.sum()


def test_fedsagd_contracts_by_the_known_factor_where_there_is_no_gradient() -> None:
    eta, steps, pull, decay = 0.3, 5, 0.7, 0.4
    settings = {"loss": no_loss, "rounds": 1, "lr": eta, "local_steps": steps, **NO_DECAY}
    found = trajectory(ff.fedsagd(0.5, pull, decay), **settings)[0]
    gamma = decay / (pull + decay) * (1 - (1 - eta * (pull + decay)) ** steps)
    start = flat(network())
    assert 0.1 < gamma < 0.9
    assert distance(found, (1 - gamma) * start) < 1e-12
    # The other sign of the decay, which would expand, cannot be had.
    assert float(found.norm()) < float(start.norm())
    with pytest.raises(ff.FlatfedError, match="decay_weight"):
        ff.fedsagd(0.5, pull, decay_weight=-decay)


def test_fedsagd_displacement_unrolls() -> None:
    beta, pull, decay = 0.5, 0.3, 0.05
    watched, log = spied(ff.fedsagd(beta, pull, decay))
    recorder = Recorder()
    run(watched, recorder=recorder, **NO_DECAY)
    last = DEFAULTS["rounds"] - 1
    steps, count = log.of_round(last), DEFAULTS["local_steps"]
    eta = steps[0].rate
    v = recorder.servers[last - 1]["momentum_gradient"]
    shrunk = 1 - eta * pull
    expected = -beta * v * (1 - shrunk**count) / pull
    for k, step in enumerate(steps):
        expected = expected - eta * shrunk ** (count - 1 - k) * (step.direction + decay * step.point)
    assert distance(log.ends[last] - log.starts[last], expected) < TOLERANCE


def test_local_nesterov_visits_the_look_ahead_points_of_the_other_form() -> None:
    beta, eta, rounds, steps = 0.6, 0.5, 3, 4
    data = federation(clients=1)
    own = data.client(0)
    batch, model = own.batch(torch.arange(len(own))), network()
    x, m, expected = flat(model), torch.zeros_like(flat(model)), []
    for _ in range(rounds * steps):
        ahead = x - eta * beta * m
        expected.append(ahead)
        m = beta * m + (1 - beta) * gradient_of(model, ahead, *batch)
        x = x - eta * m
    watched, log = spied(ff.fedlnag(beta))
    run(
        watched,
        data=data,
        lr=(1 - beta) * eta,
        rounds=rounds,
        local_steps=steps,
        participants=1,
        **{**FULL_BATCH, **STEADY, **NO_DECAY},
    )
    assert distance(torch.cat([step.point for step in log.steps]), torch.stack(expected)) < TOLERANCE


@pytest.mark.parametrize(("steps", "final"), [(1, 0.1), (4, 0.3), (50, 0.1), (7, 1.0)])
def test_falling_step_sizes(steps: int, final: float) -> None:
    eta = 0.2
    rates = parts.LinearDecay(final).rates(eta, steps)
    assert len(rates) == steps
    assert rates[0] == pytest.approx(eta, rel=1e-14)
    assert rates[-1] == pytest.approx(eta * (1 / steps + final * (1 - 1 / steps)), rel=1e-14)
    assert sum(rates) == pytest.approx(eta * ((steps + 1) + final * (steps - 1)) / 2, rel=1e-14)
    # One step more, as the loop is printed, would have another sum.
    literal = sum(eta * ((1 - k / steps) + final * k / steps) for k in range(steps + 1))
    assert literal == pytest.approx(eta * (steps + 1) * (1 + final) / 2, rel=1e-14)


def test_falling_step_sizes_start_again_every_round() -> None:
    watched, log = spied(generic("fedswa"))
    run(watched)
    for t in range(DEFAULTS["rounds"]):
        eta = DEFAULTS["lr"] * DEFAULTS["lr_decay"] ** t
        steps = log.of_round(t)
        expected = parts.LinearDecay(0.3).rates(eta, len(steps))
        assert [step.rate for step in steps] == pytest.approx(expected, rel=1e-14)
        for before, after in itertools.pairwise(steps):
            moved = before.point - before.rate * (before.direction + 0.01 * before.point)
            assert distance(after.point, moved) < 1e-12


@pytest.mark.parametrize(
    ("algorithm", "plain", "factor"),
    [
        (ff.fedcm(0.4), ff.fedavg(), 0.4),
        (ff.mofedsam(0.2, 0.4), ff.fedsam(0.2), 0.4),
        (ff.fedanag(0.5), ff.fedavg(), 1.5),
        (ff.mimelite(0.6), ff.fedavg(), 0.4),
        (ff.fedsagd(0.5, 0.0, 0.0), ff.fedavg(), 1.0),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_first_round_only_scales_the_steps(
    algorithm: ff.Algorithm, plain: ff.Algorithm, factor: float
) -> None:
    found = trajectory(algorithm, rounds=1, **NO_DECAY)
    scaled = trajectory(plain, rounds=1, lr=factor * DEFAULTS["lr"], **NO_DECAY)
    assert distance(found, scaled) < TOLERANCE


@pytest.mark.parametrize("name", GENERIC)
def test_results_do_not_depend_on_how_the_work_is_done(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = known(generic(name))[:3]
    by_client = trajectory(generic(name), rounds=3, path="client", workers=2)
    assert distance(by_client, expected) < TOLERANCE
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 2)
    in_chunks = trajectory(generic(name), rounds=3, workers=3)
    assert distance(in_chunks, expected) < TOLERANCE


def test_workers_do_not_get_in_each_others_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 1)
    settings = {"data": federation(12), "participants": 12}
    expected = trajectory(ff.fedavg(), workers=1, **settings)
    patience = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        found = trajectory(ff.fedavg(), workers=4, **settings)
    finally:
        sys.setswitchinterval(patience)
    assert torch.equal(found, expected)


class Moody(nn.Module):
    """A network that gives something else in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs) if self.training else 3 * self.inner(inputs)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_evaluation_leaves_training_alone(path: str) -> None:
    found = trajectory(ff.scaffold(), model=Moody(), data=federation_with_test(), path=path)
    assert distance(found, known(ff.scaffold())) < TOLERANCE


@pytest.mark.parametrize("name", GENERIC)
def test_results_do_not_depend_on_the_order_of_clients(name: str) -> None:
    data = federation(clients=4)
    samples = [data.client(number).batch(torch.arange(12)) for number in (3, 0, 1, 2)]
    settings = {"rounds": 3, "participants": 4, **FULL_BATCH}
    expected = trajectory(generic(name), data=data, **settings)
    turned = trajectory(generic(name), data=ff.Federation.from_tensors(samples), **settings)
    assert distance(turned, expected) < TOLERANCE


# -- perturbations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedsam", "mofedsam", "fedgamma", "fedspeed", "fedsmoo"])
def test_every_ascent_has_the_radius_for_its_length(name: str) -> None:
    radius = GENERIC[name]["radius"]
    watched, log = spied(generic(name))
    run(watched)
    assert len(log.steps) == DEFAULTS["rounds"] * DEFAULTS["local_steps"]
    for step in log.steps:
        here, there = step.evaluated
        assert torch.equal(here, step.point)
        lengths = (there - here).norm(dim=1)
        assert lengths.shape == (DEFAULTS["participants"],)
        torch.testing.assert_close(lengths, torch.full_like(lengths, radius), rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", ["fedsam", "mofedsam", "fedgamma", "fedspeed"])
def test_ascent_follows_the_uncorrected_gradient(name: str) -> None:
    radius = GENERIC[name]["radius"]
    watched, log = spied(generic(name))
    run(watched)
    for step in log.steps:
        here, there = step.evaluated
        slope = step.gradients[0]
        expected = radius * slope / slope.norm(dim=1, keepdim=True)
        assert distance(there - here, expected) < TOLERANCE


def test_fedspeed_ascends_by_the_raw_gradient_if_asked_to() -> None:
    watched, log = spied(generic("fedspeed", normalize=False))
    run(watched)
    for step in log.steps:
        here, there = step.evaluated
        assert distance(there - here, 0.2 * step.gradients[0]) < TOLERANCE
        mixed = 0.3 * step.gradients[0] + 0.7 * step.gradients[1]
        assert distance(step.direction, mixed) < TOLERANCE


@pytest.mark.parametrize("name", ["fednsam", "fednsam_s", "fednsam_d"])
def test_fednsam_shifts_everybody_alike_against_the_momentum(name: str) -> None:
    watched, log = spied(generic(name))
    recorder = Recorder()
    run(watched, recorder=recorder)
    for step in log.steps:
        (there,) = step.evaluated
        if step.round == 0:
            assert distance(there, step.point) < TOLERANCE
            continue
        momentum = recorder.servers[step.round - 1]["momentum"]
        climb = there - step.point - 0.6 * momentum
        assert distance(climb, (-0.3 * momentum / momentum.norm()).expand_as(climb)) < TOLERANCE


@pytest.mark.parametrize("memory", ["client", "server"])
@pytest.mark.parametrize("name", ["fedlesam", "fedlesam_s", "fedlesam_d"])
def test_fedlesam_shifts_towards_the_remembered_model(name: str, memory: str) -> None:
    watched, log = spied(generic(name, memory=memory))
    recorder = Recorder()
    run(watched, recorder=recorder)
    received = [flat(network()), *recorder.models]
    shifts = {"none": 0, "some": 0}
    for step in log.steps:
        (there,) = step.evaluated
        for row, client in enumerate(recorder.cohorts[step.round]):
            rounds = [t for t in range(step.round) if memory == "server" or client in recorder.cohorts[t]]
            if not rounds:
                assert distance(there[row], step.point[row]) < TOLERANCE
                shifts["none"] += 1
                continue
            back = received[rounds[-1]] - received[step.round]
            assert distance(there[row] - step.point[row], 0.3 * back / back.norm()) < TOLERANCE
            shifts["some"] += 1
    assert min(shifts.values()) > 0


class Watched:
    """A fake oracle for a chunk of clients that keeps the points it is asked about."""

    def __init__(self, clients: int, size: int) -> None:
        generator = torch.Generator().manual_seed(17)
        self.slopes = torch.randn(clients, size, generator=generator, dtype=torch.float64)
        self.points: list[Tensor] = []

    def __call__(self, point: Tensor) -> Tensor:
        self.points.append(point.clone())
        return torch.sin(point) + self.slopes * (1 + len(self.points))


def _vector(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


PLAIN = ff.Training(rounds=1)


def one_round(
    algorithm: ff.Algorithm, rates: list[float], clients: int = 3, training: ff.Training = PLAIN
) -> tuple[ClientResult, Watched, ClientContext]:
    """A round of a chunk of clients on a fake oracle, with every state vector away from zero."""
    layout = Layout(network())
    size = layout.size
    received = {name: 0.3 * _vector(k, size) for k, name in enumerate(algorithm.broadcast)}
    context = ClientContext(
        round=2,
        received=received,
        client={
            vector.name: 0.3 * _vector(50 + k, clients, size)
            for k, vector in enumerate(algorithm.client_vectors)
        },
        rates=rates,
        layout=layout,
        input_shape=(FEATURES,),
        full_gradient=lambda: _vector(99, clients, size),
        displacement=torch.zeros(clients, size, dtype=torch.float64),
    )
    oracle = Watched(clients, size)
    point = received["model"].expand(clients, -1).clone()
    return client_round(algorithm, context, [oracle] * len(rates), training, point), oracle, context


class Remembering(Correction):
    """A correction that is no affine map: Nesterov's momentum as a link of the pipeline."""

    def begin(self, context: ClientContext) -> Carry:
        return {"buffer": torch.zeros_like(context.displacement)}

    def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> tuple[Tensor, Carry]:
        buffer = direction + 0.8 * carry["buffer"]
        return direction + 0.8 * buffer, {"buffer": buffer}


CORRECTIONS: list[Correction] = [
    parts.Proximal(0.3),
    parts.HybridProximal(0.2, 0.1),
    parts.ControlVariate(weight=0.7),
    parts.DynamicRegulariser(0.4),
    parts.GlobalMomentum(0.6, 0.5),
    parts.FullGradientMomentum(0.6),
    Remembering(),
]
PIPELINES = [
    chosen
    for chosen in (*itertools.permutations(CORRECTIONS, 2), *itertools.permutations(CORRECTIONS, 3))
    # Of three only those with one in the middle that cannot be folded.
    if len(chosen) == 2 or chosen[1] is CORRECTIONS[-1]
]


@pytest.mark.parametrize("gradient", [Gradient(), parts.LastModel(0.3)], ids=repr)
@pytest.mark.parametrize("correct", PIPELINES, ids=repr)
def test_folded_corrections_are_the_corrections_one_by_one(
    correct: tuple[Correction, ...], gradient: Gradient
) -> None:
    algorithm = ff.Algorithm(gradient=gradient, correct=correct)
    rates = [0.3, 0.1, 0.2, 0.25]
    folded, at, _ = one_round(algorithm, rates, training=ff.Training(rounds=1, weight_decay=0.2))
    # A limit on their sum, which is never reached, asks for the direction of every step.
    unreached = ff.Training(rounds=1, weight_decay=0.2, clip=1e9, clip_stage="total")
    one_by_one, there, _ = one_round(algorithm, rates, training=unreached)
    for ours, theirs in zip(at.points, there.points, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)
    for ours, theirs in zip(
        (folded.client, folded.upload), (one_by_one.client, one_by_one.upload), strict=True
    ):
        torch.testing.assert_close(dict(ours), dict(theirs), rtol=1e-11, atol=1e-12)


def test_a_spring_too_weak_to_divide_by_changes_nothing() -> None:
    weak = parts.Proximal(0.1)
    object.__setattr__(weak, "weight", 1e-200)  # in double precision it takes what no user can write
    ours, _, _ = one_round(ff.Algorithm(correct=(parts.ControlVariate(), weak)), [0.1] * 3)
    plain, _, _ = one_round(ff.Algorithm(correct=parts.ControlVariate()), [0.1] * 3)
    assert torch.equal(ours.displacement, plain.displacement)


def test_decay_before_the_corrections_is_at_the_unperturbed_model() -> None:
    """A buffer that remembers nothing changes nothing, also about where weights are decayed."""
    perturbed, training = parts.LastModel(0.3), ff.Training(rounds=1, weight_decay=0.2)
    first, _, _ = one_round(
        ff.Algorithm(gradient=perturbed, optimizer=parts.LocalMomentum(0.0, nesterov=True)),
        [0.3, 0.1],
        training=training,
    )
    last, _, _ = one_round(ff.Algorithm(gradient=perturbed), [0.3, 0.1], training=training)
    torch.testing.assert_close(first.displacement, last.displacement, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("shift", ["channel", "diagonal", "full"])
def test_fedrobust_shifts_inputs_by_what_is_stored(shift: Any) -> None:
    """Λ is stored as Λ − I; with the opposite sign training would be the same and the state wrong."""
    channels, side = 2, 3
    size = {"channel": channels, "diagonal": channels * side, "full": channels * side}[shift]
    inputs, offset = _vector(1, 4, channels, side), _vector(2, size)
    scale = _vector(3, size * size if shift == "full" else size)
    seen: list[Tensor] = []

    class Shows:
        def shifted(self, point: Tensor, shift: Callable[..., Tensor], parameters: tuple[Tensor, ...]) -> Any:
            seen.append(shift(inputs, *parameters))
            return point, parameters

    part = parts.ShiftedInputs(0.1, 0.1, 1.0, 1.0, shift=shift)
    part.gradient(_vector(4, 5), Shows(), None, {"scale": scale, "offset": offset})  # type: ignore[arg-type]
    if shift == "channel":
        expected = inputs * (1 + scale[:, None]) + offset[:, None]
    elif shift == "diagonal":
        expected = inputs * (1 + scale.view(channels, side)) + offset.view(channels, side)
    else:
        matrix = torch.eye(size, dtype=torch.float64) + scale.view(size, size)
        expected = (inputs.flatten(1) @ matrix.T + offset).view(inputs.shape)
    torch.testing.assert_close(seen[0], expected, rtol=1e-12, atol=1e-14)


def test_a_correction_that_overrides_direction_is_asked_for_it() -> None:
    class Twice(parts.Proximal):
        def direction(self, direction: Tensor, context: ClientContext, carry: Carry) -> tuple[Tensor, Carry]:
            return 2 * direction, carry

    ours, _, _ = one_round(ff.Algorithm(correct=Twice(0.3)), [0.1])
    plain, _, _ = one_round(ff.Algorithm(), [0.2])
    torch.testing.assert_close(ours.displacement, plain.displacement, rtol=1e-12, atol=0)


STANDING = [0.0] * 4
"""Step sizes at which nobody moves, so that only the perturbation tells evaluated points apart."""


@pytest.mark.parametrize(
    "algorithm",
    [generic("fednsam"), generic("fednsam_d"), ff.fednsam(0.0, 0.3), ff.fedlesam(0.3, memory="server")],
    ids=lambda algorithm: algorithm.name,
)
def test_shift_is_bit_identical_for_all_steps_and_clients(algorithm: ff.Algorithm) -> None:
    _, oracle, context = one_round(algorithm, STANDING)
    assert len(oracle.points) == len(STANDING)
    for points in oracle.points:
        assert torch.equal(points, oracle.points[0][0].expand_as(points))
    assert not torch.equal(oracle.points[0][0], context.origin)


def test_fedlesam_shift_is_bit_identical_for_all_steps_and_each_clients_own() -> None:
    _, oracle, context = one_round(ff.fedlesam(0.3), STANDING)
    first = oracle.points[0]
    for points in oracle.points:
        assert torch.equal(points, first)
    lengths = (first - context.origin).norm(dim=1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.3), rtol=1e-11, atol=0)
    assert not torch.equal(first[0], first[1])


@pytest.mark.parametrize(
    "gradient",
    [parts.SharpnessAware(0.3), parts.ConsensusPerturbation(0.3), parts.SharpnessAware(0.3, mix=0.5)],
    ids=lambda part: type(part).__name__,
)
def test_ascent_of_a_part_has_the_radius_for_its_length(gradient: Any) -> None:
    _, oracle, context = one_round(ff.Algorithm(gradient=gradient), STANDING)
    assert len(oracle.points) == 2 * len(STANDING)
    for here, there in zip(oracle.points[::2], oracle.points[1::2], strict=True):
        assert torch.equal(here, context.origin.expand_as(here))
        lengths = (there - here).norm(dim=1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, 0.3), rtol=1e-11, atol=0)


def test_adaptive_ascent_has_the_radius_for_its_scaled_length() -> None:
    _, oracle, context = one_round(ff.fedasam(0.3, 0.2), STANDING)
    scale = torch.ones_like(context.origin)
    first, second = FEATURES * HIDDEN, FEATURES * HIDDEN + HIDDEN
    for piece in (slice(0, first), slice(second, second + HIDDEN * 3)):
        scale[piece] = context.origin[piece].abs() + 0.2
    for here, there in zip(oracle.points[::2], oracle.points[1::2], strict=True):
        lengths = ((there - here) / scale).norm(dim=1)
        torch.testing.assert_close(lengths, torch.full_like(lengths, 0.3), rtol=1e-11, atol=0)


def test_no_direction_means_no_perturbation() -> None:
    class Still(Watched):
        def __call__(self, point: Tensor) -> Tensor:
            super().__call__(point)
            return torch.zeros_like(point)

    layout = Layout(network())
    origin = _vector(1, layout.size)
    moved = torch.zeros_like(origin)
    context = ClientContext(0, {"model": origin}, {}, [0.1], layout, (FEATURES,), lambda: origin, moved)
    oracle = Still(1, layout.size)
    client_round(ff.fedsam(0.3), context, [oracle], PLAIN, origin.clone())
    assert torch.equal(oracle.points[1], origin)


@pytest.mark.parametrize("before", [False, True], ids=["kept before", "zero before"])
def test_tiny_numbers_are_zero_during_a_round_and_then_as_before(before: bool) -> None:
    class Tiny(Watched):
        seen: list[float] = []

        def __call__(self, point: Tensor) -> Tensor:
            self.seen.append(sys.float_info.min / 2)
            if len(self.seen) == 3:
                raise KeyboardInterrupt
            return torch.full_like(point, sys.float_info.min) / 2

    layout = Layout(network())
    origin = torch.zeros(layout.size, dtype=torch.float64)
    context = ClientContext(0, {"model": origin}, {}, [1.0], layout, (FEATURES,), lambda: origin, origin + 0)
    if not torch.set_flush_denormal(before):
        pytest.skip("this processor has no such switch")
    try:
        oracle = Tiny(1, layout.size)
        result = client_round(ff.fedsam(0.0), context, [oracle], PLAIN, origin.clone())
        between = sys.float_info.min / 2
        with pytest.raises(KeyboardInterrupt):
            client_round(ff.fedavg(), context, [oracle], PLAIN, origin.clone())
        after = sys.float_info.min / 2
    finally:
        torch.set_flush_denormal(False)
    assert set(oracle.seen) == {0.0} and torch.equal(result.displacement, origin)
    assert (between == 0) == (after == 0) == before


def test_consensus_perturbation_keeps_its_length_on_the_server() -> None:
    for upload in ("residual", "dual"):
        server = run(generic("fedsmoo", upload=upload)).server
        assert float(named(server)["perturbation"].norm()) == pytest.approx(0.2, rel=1e-10)


# -- must differ -------------------------------------------------------------------------------------------


def test_feddyn_without_regularisation_sums_displacements() -> None:
    watched, log = spied(ff.feddyn(0.0))
    recorder = Recorder()
    run(watched, recorder=recorder)
    assert distance(recorder.models, known(ff.fedavg())) > DIFFERENT
    x, h = flat(network()), torch.zeros_like(flat(network()))
    for t, found in enumerate(recorder.models):
        moved = (log.ends[t] - log.starts[t]).mean(0)
        h = h + SHARE * moved
        x = x + moved + h
        assert distance(found, x) < TOLERANCE


DIFFERENCES: dict[str, tuple[ff.Algorithm, ff.Algorithm, dict[str, Any]]] = {
    "fedmoswa is not scaffold": (ff.fedmoswa(1.0, 1.0, 1.0), ff.scaffold(), {}),
    "fedmoswa at the share is not scaffold": (ff.fedmoswa(1.0, 1.0, SHARE), ff.scaffold(), {}),
    "fedspeed's rules": (ff.fedspeed(0.3, 0.7, 0.2), ff.fedspeed(0.3, 0.7, 0.2, duals="server"), {}),
    "fedlesam's memories": (ff.fedlesam(0.3), ff.fedlesam(0.3, memory="server"), {}),
    "fedlesam_s's memories": (ff.fedlesam_s(0.3), ff.fedlesam_s(0.3, memory="server"), {}),
    "fedlesam_d's memories": (ff.fedlesam_d(0.3, 0.2), ff.fedlesam_d(0.3, 0.2, memory="server"), {}),
    "fednsam_d with its dual outside": (
        ff.fednsam_d(0.0, 0.3, 0.2),
        ff.fedlesam_d(0.3, 0.2, memory="server"),
        EVERYBODY,
    ),
    "fednsam_d's places for the dual": (
        generic("fednsam_d"),
        generic("fednsam_d", dual_in_momentum=True),
        {},
    ),
    "scaffold's options": (ff.scaffold(), ff.scaffold(option="I"), {}),
    "fedmo's first round": (ff.fedmo(0.4), ff.fedmo(0.4, warm_start=True), {}),
    "fedsmoo's uploads": (generic("fedsmoo"), generic("fedsmoo", upload="dual"), {}),
    "fedlnag's buffers": (generic("fedlnag"), generic("fedlnag", communicate=False), {}),
    "fedspeed's ascents": (generic("fedspeed"), generic("fedspeed", normalize=False), {}),
    "fedlesam_s's weights": (ff.fedlesam_s(0.3), ff.fedlesam_s(0.3, control_weight=0.1), {}),
    "fednsam with weight decay, shifted once": (ff.fednsam(0.6, 0.3), shifted_fednsam(0.6, 0.3), {}),
    "fedcm's units": (generic("fedcm"), generic("fedcm", units="gradient"), {}),
    "mofedsam's units": (generic("mofedsam"), generic("mofedsam", units="gradient"), {}),
}


@pytest.mark.parametrize("case", DIFFERENCES)
def test_difference(case: str) -> None:
    left, right, settings = DIFFERENCES[case]
    assert distance(known(left, **settings), known(right, **settings)) > DIFFERENT


def test_no_two_algorithms_coincide() -> None:
    assert set(GENERIC) == set(ff.ALGORITHMS)
    finals = {name: known(generic(name))[-1] for name in GENERIC}
    for left, right in itertools.combinations(finals, 2):
        assert distance(finals[left], finals[right]) > DIFFERENT, (left, right)


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("fedsynsam", ff.fedsam(0.2, 1.3)),
        ("dynafed", ff.fedavg()),
        ("dynafed_syn_only", ff.fedavg()),
    ],
)
def test_synthetic_samples_act_as_soon_as_there_are_enough_models(name: str, plain: ff.Algorithm) -> None:
    found, expected = known(generic(name)), known(plain)
    assert distance(found[:2], expected[:2]) < TOLERANCE
    assert distance(found[2], expected[2]) > DIFFERENT


@pytest.mark.parametrize("name", [name for name, options in GENERIC.items() if "server_rate" in options])
def test_server_rate_scales_the_first_step_of_the_server(name: str) -> None:
    start = flat(network())
    one, other = (trajectory(generic(name, server_rate=rate), rounds=1)[0] - start for rate in (1.0, 0.7))
    assert distance(other, 0.7 * one) < 1e-12
    assert float(one.abs().max()) > DIFFERENT


@pytest.mark.parametrize(
    ("name", "plain"),
    [
        ("scaffold", ff.fedavg()),
        ("fedprox", ff.fedavg()),
        ("feddyn", ff.fedavg()),
        ("fedacg", ff.fedavg()),
        ("fedgamma", ff.fedsam(0.15)),
        ("fedspeed", ff.Algorithm(gradient=parts.SharpnessAware(0.2, 0.7))),
        ("fedmo", ff.fedavg()),
        ("fedcm", ff.fedavg()),
        ("fedanag", ff.fedavg()),
        ("fedsagd", ff.fedavg()),
        ("fedlnag", ff.fedavg()),
        ("mimelite", ff.fedavg()),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_corrections_act_on_the_local_steps(name: str, plain: ff.Algorithm) -> None:
    corrected, _, _ = one_round(generic(name), [0.1, 0.2, 0.1])
    uncorrected, _, _ = one_round(plain, [0.1, 0.2, 0.1])
    moved, reference = corrected.upload["displacement"], uncorrected.upload["displacement"]
    if name == "fedspeed":
        moved = moved - corrected.client["dynamic_regulariser.dual"]
    assert distance(moved, reference) > 1e-3


# -- composition -------------------------------------------------------------------------------------------

COMPOSED: dict[str, tuple[ff.Algorithm, ff.Algorithm]] = {
    "fedavg": (ff.Algorithm(), ff.fedavg()),
    "fedgamma": (
        ff.Algorithm(gradient=parts.SharpnessAware(0.15), correct=parts.ControlVariate()),
        ff.fedgamma(0.15),
    ),
    "fedacg": (
        ff.Algorithm(start=parts.LookAhead(0.6), correct=parts.Proximal(0.3), server=parts.Momentum(0.6)),
        ff.fedacg(0.6, 0.3),
    ),
    "fedmoswa": (
        ff.Algorithm(
            correct=(parts.MomentumControlVariate(rate=0.4),),
            schedule=parts.LinearDecay(0.3),
            server=parts.Average(1.3),
        ),
        generic("fedmoswa"),
    ),
    "fednsam_d": (
        ff.Algorithm(
            gradient=parts.AlongMomentum(0.3, 0.6),
            correct=parts.DynamicRegulariser(0.2),
            server=parts.Momentum(0.6),
        ),
        generic("fednsam_d"),
    ),
    "fedsmoo": (
        ff.Algorithm(gradient=parts.ConsensusPerturbation(0.2), correct=parts.DynamicRegulariser(0.2)),
        generic("fedsmoo"),
    ),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_unnamed_composition_is_the_named_algorithm(name: str) -> None:
    composed, named = COMPOSED[name]
    assert composed.name == "custom"
    expected = known(named)
    assert torch.equal(trajectory(composed), expected)
    # And once more through plain data, as it stands in a file.
    again = ff.build(composed.describe())
    assert again == composed
    assert torch.equal(trajectory(again), expected)


@pytest.mark.parametrize("name", GENERIC)
def test_description_builds_the_same_algorithm(name: str) -> None:
    algorithm = generic(name)
    described = algorithm.describe()
    assert described["name"] == name
    assert {key: described[key] for key in GENERIC[name]} == GENERIC[name]
    assert ff.build(described) == algorithm
    assert ff.build({"name": name, **GENERIC[name]}) == algorithm
    assert ff.build({"name": name.replace("_", "-").upper(), **GENERIC[name]}) == algorithm


def test_corrections_add_up_in_any_order() -> None:
    pull, control = parts.Proximal(0.3), parts.ControlVariate()
    one, other = (
        trajectory(ff.Algorithm(correct=corrections)) for corrections in ((pull, control), (control, pull))
    )
    assert distance(one, other) < TOLERANCE
    for alone in (pull, control):
        assert distance(one, trajectory(ff.Algorithm(correct=alone))) > DIFFERENT


def test_fedexp_extrapolates_by_half_the_number_of_orthogonal_clients() -> None:
    """Each of four clients moves along an axis of its own, all equally far."""
    size = 4
    axes = torch.eye(size, dtype=torch.float64)
    data = ff.Federation.from_tensors([(axis[None], torch.zeros(1)) for axis in axes])

    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.position = nn.Parameter(torch.zeros(size, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return inputs @ self.position

    options = {"rounds": 1, "local_steps": 3, "batch_size": None, "lr": 0.1, "workers": 1}
    result = train(Slopes(), data, ff.fedexp(0.0), loss=lambda out, _: out.mean(), **options)
    # Δ̄ is −0.3/4 along every axis, and η_g = 4/2.
    torch.testing.assert_close(result.server["model"], torch.full((size,), -0.15, dtype=torch.float64))


def test_two_momenta_of_one_name_are_kept_side_by_side() -> None:
    """d ← 0.7 (0.4 g + 0.6 a) + 0.3 b, with a from displacements and b from full gradients."""
    correct = (parts.GlobalMomentum(0.4, 0.6), parts.FullGradientMomentum(0.3))
    recorder = Recorder()
    data = federation()
    run(ff.Algorithm(correct=correct), data=data, recorder=recorder, rounds=4, **EVERYBODY, **ONE_STEP)
    model, x = network(), flat(network())
    a = b = torch.zeros_like(x)
    for t, server in enumerate(recorder.servers):
        rate = DEFAULTS["lr"] * DEFAULTS["lr_decay"] ** t
        training = ff.Training(**{key: value for key, value in DEFAULTS.items() if key != "workers"})
        training = training.replaced(**EVERYBODY, **ONE_STEP)
        moved, full = [], []
        for client in range(CLIENTS):
            own = data.client(client)
            (chosen,) = batches(training, len(own), t, client)
            fresh = gradient_of(model, x, *own.batch(chosen))
            direction = 0.7 * (0.4 * fresh + 0.6 * a) + 0.3 * b + DEFAULTS["weight_decay"] * x
            moved.append(-rate * direction)
            full.append(gradient_of(model, x, *own.batch(torch.arange(len(own)))))
        mean = torch.stack(moved).mean(0)
        a, b = -mean / rate, 0.7 * torch.stack(full).mean(0) + 0.3 * b
        x = x + mean
        assert distance(server["model"], x) < TOLERANCE
        assert distance(server["global_momentum.momentum_gradient"], a) < TOLERANCE
        assert distance(server["full_gradient_momentum.momentum_gradient"], b) < TOLERANCE


def test_two_parts_of_one_kind_are_kept_side_by_side() -> None:
    correct = (parts.GlobalMomentum(0.4, 0.6), parts.GlobalMomentum(0.9, 0.1, memory=0.5, gain=0.5))
    server = run(ff.Algorithm(correct=correct), rounds=3).server
    first, second = (server[f"global_momentum{n}.momentum_gradient"] for n in ("", "_2"))
    assert distance(first, second) > DIFFERENT


IMPOSSIBLE: dict[str, tuple[Callable[[], ff.Algorithm], str]] = {
    "no momentum to look along": (
        lambda: ff.Algorithm(gradient=parts.AlongMomentum(0.1)),
        r"along_momentum needs the server vector 'momentum'.*set server to momentum",
    ),
    "no momentum to look ahead": (
        lambda: ff.Algorithm(start=parts.LookAhead(0.5)),
        r"look_ahead needs the server vector 'momentum'.*set server to momentum",
    ),
    "another's momentum to look along": (
        lambda: ff.Algorithm(gradient=parts.AlongMomentum(0.1), server=parts.Adam(0.1)),
        r"along_momentum needs the server vector 'momentum' of momentum; that of adam is something else; set",
    ),
    "another's momentum to look ahead": (
        lambda: ff.Algorithm(start=parts.LookAhead(0.1), server=parts.Adam(0.1)),
        r"look_ahead needs the server vector 'momentum' of momentum; that of adam is something else; set",
    ),
    "two duals": (
        lambda: ff.Algorithm(correct=(parts.DynamicRegulariser(0.1), parts.DynamicRegulariser(0.2))),
        r"dynamic_regulariser and dynamic_regulariser both shift the new model; use one of them",
    ),
    "two altered displacements": (
        lambda: ff.Algorithm(correct=(parts.DynamicRegulariser(0.1, "participants"),) * 2),
        r"dynamic_regulariser and dynamic_regulariser both replace the displacement; use one of them",
    ),
    "a displacement that is not one to extrapolate": (
        lambda: ff.Algorithm(
            correct=parts.DynamicRegulariser(0.1, "participants"), server=parts.Extrapolate(1e-3)
        ),
        r"dynamic_regulariser changes the uploaded displacement, which extrapolate takes for a sum of",
    ),
    "displacement that is not one": (
        lambda: ff.Algorithm(
            correct=(parts.DynamicRegulariser(0.1, "participants"), parts.GlobalMomentum(0.1, 0.9))
        ),
        r"dynamic_regulariser changes the uploaded displacement, which global_momentum takes",
    ),
    "no samples to mix in": (
        lambda: ff.Algorithm(gradient=parts.SyntheticMix(0.1)),
        r"synthetic_mix needs the server vector 'synthetic_inputs'.*set synthetic to trajectory_matching",
    ),
    "no samples to train on": (
        lambda: ff.Algorithm(server=parts.FineTune()),
        r"fine_tune needs the server vector 'synthetic_inputs'.*set synthetic to trajectory_matching",
    ),
    "a part in another's place": (
        lambda: ff.Algorithm(server=parts.Proximal(0.1)),  # type: ignore[arg-type]
        r"server: .*Proximal.* is not a Server part",
    ),
}


@pytest.mark.parametrize("case", IMPOSSIBLE)
def test_impossible_composition_is_refused_with_the_reason(case: str) -> None:
    compose, reason = IMPOSSIBLE[case]
    with pytest.raises(ImpossibleComposition, match=reason):
        compose()


MISDESCRIBED: dict[str, tuple[Any, str]] = {
    "need": ({"start": {"part": "look_ahead", "weight": 0.5}}, "set server to momentum"),
    "two": ({"correct": [{"part": "dynamic_regulariser", "weight": 0.1}] * 2}, "both shift"),
    "spelling": ({"gradient": "sharpnes_aware"}, "sharpness_aware"),
    "missing": ({"gradient": {"part": "sharpness_aware"}}, "radius: missing"),
    "slot": ({"corect": ["control_variate"]}, "did you mean 'correct'"),
    "range": ({"name": "fedsam", "radius": -0.1}, "fedsam.radius = -0.1"),
    "name": ("scafold", "did you mean 'scaffold'"),
}


@pytest.mark.parametrize("case", MISDESCRIBED)
def test_impossible_description_is_refused_in_one_line(case: str) -> None:
    description, reason = MISDESCRIBED[case]
    with pytest.raises(ff.FlatfedError) as raised:
        ff.build(description)
    assert reason in str(raised.value)
    assert "\n" not in str(raised.value)


def test_refusal_names_an_option_that_was_given_by_its_position() -> None:
    with pytest.raises(ff.FlatfedError, match=r"fedsagd\.decay_weight = -0\.4"):
        ff.fedsagd(0.5, 0.3, -0.4)
