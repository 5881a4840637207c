"""Heterogeneous quadratics, whose optimum is known: who drifts, and who does not."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from problems import Quadratics

import flatfed as ff
from flatfed.engines.client_store import ClientStore

PROBLEM = Quadratics.random()
RADIUS = 1e-4
"""A perturbation of this length moves the optimum by as much, so that is how close one can get with it."""


@cache
def drift() -> float:
    """How far from the optimum many local steps leave FedAvg."""
    return PROBLEM.error(ff.fedavg())


DRIFTING = {
    "fedavg": ff.fedavg(),
    "fedprox": ff.fedprox(0.1),
    "fedsam": ff.fedsam(RADIUS),
    "fedavgm": ff.fedavgm(0.3),
    "fedcm": ff.fedcm(0.5),
}

CORRECTED = {
    "scaffold": (ff.scaffold(), 1e-9),
    "scaffold I": (ff.scaffold(option="I"), 1e-9),
    "feddyn": (ff.feddyn(1.0), 1e-6),
    "fedmo": (ff.fedmo(0.5), 1e-4),
    "fedmo I": (ff.fedmo(0.5, option="I"), 1e-3),
    "fedmoswa": (ff.fedmoswa(0.1, 1.5, 0.5), 1e-3),
    "fedgamma": (ff.fedgamma(RADIUS), 5 * RADIUS),
    "fedlesam_s": (ff.fedlesam_s(RADIUS), 5 * RADIUS),
    "fedlesam_d": (ff.fedlesam_d(RADIUS, 1.0), 5 * RADIUS),
    "fedspeed": (ff.fedspeed(RADIUS, 0.7, 1.0), 5 * RADIUS),
    "fedsmoo": (ff.fedsmoo(RADIUS, 1.0), 5 * RADIUS),
    "fednsam_s": (ff.fednsam_s(0.3, RADIUS), 5 * RADIUS),
    "fednsam_d": (ff.fednsam_d(0.3, RADIUS, 1.0), 5 * RADIUS),
}

CORRECTED_WITH_FEW = {
    "scaffold": ff.scaffold(),
    "feddyn": ff.feddyn(1.0),
    "fedspeed dyn": ff.fedspeed(RADIUS, 0.7, 1.0, duals="server"),
    "fednsam_s": ff.fednsam_s(0.3, RADIUS),
}
"""Those whose server knows the mean over all clients, so that it does not matter who takes part."""


def test_optimum_is_where_the_mean_gradient_vanishes() -> None:
    gaps = PROBLEM.optimum - PROBLEM.minima
    gradients = torch.einsum("nij,nj->ni", PROBLEM.curvatures, gaps)
    assert float(gradients.mean(0).abs().max()) < 1e-12
    # The clients do disagree there.
    assert float(gradients.norm(dim=1).min()) > 0.1


def test_one_local_step_reaches_the_optimum() -> None:
    assert PROBLEM.error(ff.fedavg(), local_steps=1, lr=0.7) < 1e-9


@pytest.mark.parametrize("name", DRIFTING)
def test_without_correction_local_steps_miss_the_optimum(name: str) -> None:
    assert PROBLEM.error(DRIFTING[name]) > 0.05


@pytest.mark.parametrize("name", CORRECTED)
def test_corrected_local_steps_reach_the_optimum(name: str) -> None:
    algorithm, close = CORRECTED[name]
    assert close < 0.01 * drift()
    assert PROBLEM.error(algorithm) < close


@pytest.mark.parametrize("name", CORRECTED_WITH_FEW)
def test_corrected_local_steps_reach_the_optimum_with_few_participants(name: str) -> None:
    assert PROBLEM.error(CORRECTED_WITH_FEW[name], rounds=50, participants=3) < 0.01 * drift()


def test_few_participants_leave_others_away() -> None:
    for algorithm in (ff.fedavg(), ff.fedmo(0.5), ff.fedspeed(RADIUS, 0.0, 1.0)):
        assert PROBLEM.error(algorithm, participants=3) > drift()


@pytest.mark.parametrize(
    ("algorithm", "rest"),
    [
        (ff.scaffold(), ff.fedavg()),
        (ff.fedmo(0.5), ff.fedavg()),
        (ff.feddyn(1.0), ff.fedprox(1.0)),
    ],
    ids=lambda algorithm: algorithm.name,
)
def test_forgetful_clients_drift(
    algorithm: ff.Algorithm, rest: ff.Algorithm, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = PROBLEM.error(rest)
    assert PROBLEM.error(algorithm) < 0.01 * expected
    load = ClientStore.load
    monkeypatch.setattr(ClientStore, "load", lambda store, slot, received: load(store, None, received))
    # Without its own vector a client is left with what remains of the algorithm.
    assert PROBLEM.error(algorithm) == pytest.approx(expected, rel=0.05)
