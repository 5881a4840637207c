"""Control variates and momenta are made of gradients as the steps use them: clipped, if they are."""

import math
from typing import Any

import pytest
import torch
from problems import Quadratics
from torch import Tensor

import flatfed as ff
from flatfed import parts
from flatfed.core.rounds import clipped

STEEP = Quadratics(
    torch.stack([scale * torch.eye(3, dtype=torch.float64) for scale in (40.0, 60.0, 80.0, 50.0)]),
    torch.tensor([[9.0, -4, 2], [-7, 8, 1], [3, -9, -5], [-4, 4, 6]], dtype=torch.float64),
)
"""Losses whose gradients are longer than the clipped steps allow for."""
CASES: dict[str, ff.Algorithm] = {
    "scaffold": ff.scaffold(option="I"),
    "fedmo": ff.fedmo(option="I"),
    "fedmoswa": ff.fedmoswa(option="I"),
    "fedmoswa, warm": ff.fedmoswa(option="I", warm_start=True),
    "mimelite": ff.mimelite(),
    "scaffold, perturbed": ff.Algorithm(
        gradient=parts.SharpnessAware(0.1), correct=parts.ControlVariate("I")
    ),
    "scaffold with mimelite": ff.Algorithm(
        correct=(parts.ControlVariate("I"), parts.FullGradientMomentum(0.5))
    ),
}


@pytest.mark.parametrize("path", ["matrix", "client"])
@pytest.mark.parametrize("name", CASES)
def test_full_gradients_are_as_long_as_the_clipped_steps_at_most(name: str, path: str) -> None:
    settings: dict[str, Any] = {"rounds": 30, "participants": 2, "lr": 0.1, "clip": 1.0, "path": path}
    run = STEEP.train(CASES[name], **settings)
    for client in run.clients.clients():
        for vector in run.clients.read(client, run.server["model"]).values():
            assert float(vector.norm()) <= 1 + 1e-9
    for vector in (value for key, value in run.server.items() if key != "model"):
        assert float(vector.norm()) <= 1 + 1e-9
    assert float((run.server["model"] - STEEP.optimum).norm()) < 30, "clipped steps cannot run away"


@pytest.mark.parametrize("name", ["scaffold", "fedmoswa"])
def test_both_options_of_a_control_variate_stay_together_under_clip(name: str) -> None:
    errors = {
        option: STEEP.error(ff.ALGORITHMS[name](option=option), rounds=60, lr=0.01, clip=1.0)
        for option in ("I", "II")
    }
    assert errors["I"] < 2 * errors["II"] + 1


def test_without_clip_full_gradients_are_whole() -> None:
    run = STEEP.train(ff.scaffold(option="I"), rounds=1, lr=1e-4)
    start = torch.full((3,), 3.0, dtype=torch.float64)
    for client in run.clients.clients():
        (control,) = run.clients.read(client, start).values()
        expected = STEEP.curvatures[client] @ (start - STEEP.minima[client])
        assert torch.allclose(control, expected, rtol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e15, 1e25, 1e37])
def test_clipping_keeps_the_direction_of_a_gradient_of_any_length(size: float, dtype: torch.dtype) -> None:
    direction = torch.tensor([[3.0, 0, 4], [0, 0, 5]], dtype=dtype) / 5
    cut: Tensor = clipped(size * direction, 0.5)
    assert torch.allclose(cut, min(size, 0.5) * direction, rtol=1e-6, atol=0)
    assert torch.equal(clipped(torch.zeros(2, 3, dtype=dtype), 0.5), torch.zeros(2, 3, dtype=dtype))
    assert not math.isfinite(float(clipped(torch.tensor([math.inf, 1.0], dtype=dtype), 0.5).sum()))
