"""Every algorithm against its naive version: one client after another, one formula per line, plain numpy.

The two share the initial model, the data, and who trains on what when. Everything else is separate: the
reference gets its gradients from plain autograd and keeps its own state.
"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import torch.nn.functional as F
from problems import (
    CLASSES,
    CLIENTS,
    FEATURES,
    GENERIC,
    Recorder,
    federation,
    flat,
    gradient_of,
    named,
    network,
    run,
)
from reference import naive
from torch import Tensor

import flatfed as ff
from flatfed.core import random
from flatfed.core.algorithm import short_names
from flatfed.core.sampling import batches, cohort
from flatfed.core.settings import Training

TOLERANCE = 1e-9

WORK: dict[str, dict[str, Any]] = {
    "steps": {"local_steps": 3, "batch_size": 5, "weight_decay": 0.0},
    "decay": {"local_steps": 3, "batch_size": 5, "weight_decay": 0.03},
    "epochs": {"local_epochs": 2, "batch_size": 4, "weight_decay": 0.03, "unequal": True},
    "clip": {"local_steps": 3, "batch_size": 5, "weight_decay": 0.03, "clip": 0.2},
}
"""Equal steps without and with weight decay; epochs over clients of unequal size with partial batches; all
gradients clipped."""

UNCLIPPED = {"fedsmoo", "fedspeed", "fedsynsam"}
"""These add a gradient to something else before the step, and only what drives the step is clipped."""

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "fedlesam": [{"memory": "server"}],
    "fedlesam_d": [{"memory": "server"}],
    "fedlesam_s": [{"memory": "server"}],
    "fedlnag": [{"communicate": False}, {"damped": True}],
    "fedmo": [{"option": "I"}],
    "fedmoswa": [{"option": "I"}, {"warm_start": True}, {"option": "I", "warm_start": True}],
    "fednsam": [{"single_vector": True}],
    "fednsam_d": [{"dual_in_momentum": True}],
    "fedsmoo": [{"upload": "dual"}],
    "fedsynsam": [{"inner_rate": 0.3}, {"sample_optimizer": "sgd"}, {"descent_mix": 0.3}],
    "fedspeed": [{"duals": "server"}, {"normalize": False}, {"mix": 0.5}, {"mix": 1.0}],
    "scaffold": [{"option": "I"}],
}
"""Options beside the generic ones."""

UNCHECKED: dict[str, set[str]] = {
    "dynafed": {"augment"},  # only images are augmented
    "dynafed_syn_only": {"augment"},
    "fedasam": {"scale_norms"},  # the same thing for linear layers
    "fedcm": {"units"},
    "fedlesam_s": {"control_weight"},
    "fedmo": {"warm_start"},  # as in FedMoSWA
    "fedrobust": {"shift"},  # the reference has the diagonal one
    "fedsynsam": {"initial", "momentum", "normalise"},  # the reference has noise and the normalised loss
    "mofedsam": {"units"},
}
"""Options that the references do not have."""

OWN_COPY = {"last_model", "previous_model"}
"""Vectors that the references keep to themselves."""

CASES = [
    pytest.param(name, {**GENERIC.get(name, {}), **variant}, id="-".join([name, *map(str, variant.values())]))
    for name in sorted(ff.ALGORITHMS)
    for variant in [{}, *VARIANTS.get(name, [])]
]


class Replay:
    """The federation as the references see it."""

    def __init__(self, data: ff.Federation, settings: Training) -> None:
        self.data, self.settings, self.model = data, settings, network()
        self.start = flat(self.model).numpy().copy()
        self.clients, self.inputs = len(data), FEATURES
        self.cohorts = [cohort(settings, self.clients, t) for t in range(settings.rounds)]
        self.weight_decay = settings.weight_decay
        named = list(self.model.named_parameters())
        self.weight_mask: npt.NDArray[np.bool_] = np.concatenate(
            [np.full(value.numel(), "weight" in name) for name, value in named]
        )
        self.shapes = [tuple(value.shape) for _, value in named]
        self._batches: dict[tuple[int, int], list[Tensor]] = {}

    def _positions(self, round: int, client: int) -> list[Tensor]:
        key = (round, client)
        if key not in self._batches:
            self._batches[key] = batches(self.settings, len(self.data.client(client)), round, client)
        return self._batches[key]

    def _batch(self, round: int, client: int, step: int) -> tuple[Tensor, Tensor]:
        return self.data.client(client).batch(self._positions(round, client)[step])

    def steps(self, round: int, client: int) -> int:
        return len(self._positions(round, client))

    def rate(self, round: int) -> float:
        return self.settings.rate(round)

    def clipped(self, gradient: naive.Vector) -> naive.Vector:
        limit, length = self.settings.clip, float(np.sqrt(np.sum(gradient * gradient)))
        return gradient if limit is None or length <= limit else gradient * (limit / length)

    def gradient(self, round: int, client: int, step: int, point: naive.Vector) -> naive.Vector:
        batch = self._batch(round, client, step)
        return self.clipped(gradient_of(self.model, torch.from_numpy(point.copy()), *batch).numpy())

    def optimized(
        self, round: int, client: int, step: int, point: naive.Vector, gradient: naive.Vector
    ) -> naive.Vector:
        return gradient

    def full_gradient(self, client: int, point: naive.Vector) -> naive.Vector:
        own = self.data.client(client)
        everything = own.batch(torch.arange(len(own)))
        return self.clipped(gradient_of(self.model, torch.from_numpy(point.copy()), *everything).numpy())

    def shifted_gradient(
        self,
        round: int,
        client: int,
        step: int,
        point: naive.Vector,
        scale: naive.Vector,
        offset: naive.Vector,
    ) -> tuple[naive.Vector, naive.Vector, naive.Vector]:
        inputs, targets = self._batch(round, client, step)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(point.copy()), self.model.parameters())
        shift = [torch.from_numpy(value.copy()).requires_grad_() for value in (scale, offset)]
        loss = F.cross_entropy(self.model(shift[0] * inputs + shift[1]), targets)
        *pieces, by_scale, by_offset = torch.autograd.grad(loss, [*self.model.parameters(), *shift])
        gradient = torch.cat([piece.flatten() for piece in pieces]).numpy()
        return self.clipped(gradient), by_scale.numpy(), by_offset.numpy()

    def made_up(self, per_class: int, soft: bool) -> tuple[naive.Vector, naive.Vector]:
        generator = random.torch_generator(self.settings.seed, "synthetic noise")
        noise = torch.randn(per_class * CLASSES, FEATURES, generator=generator).double().numpy()
        classes = np.tile(np.arange(CLASSES), per_class)
        return noise, 5.0 * np.eye(CLASSES)[classes] if soft else classes.astype(float)

    def _made_up_gradient(self, point: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
        targets = labels.long() if labels.dim() == 1 else labels.softmax(1)
        sizes = [value.numel() for value in self.model.parameters()]
        names = [name for name, _ in self.model.named_parameters()]
        pieces = {
            name: piece.view_as(self.model.get_parameter(name))
            for name, piece in zip(names, point.split(sizes), strict=True)
        }
        loss = F.cross_entropy(torch.func.functional_call(self.model, pieces, (inputs,)), targets)
        return torch.autograd.grad(loss, point, create_graph=True)[0]

    def made_up_gradient(
        self, point: naive.Vector, inputs: naive.Vector, labels: naive.Vector
    ) -> naive.Vector:
        leaves = [torch.from_numpy(value.copy()).requires_grad_() for value in (point, inputs, labels)]
        return self._made_up_gradient(*leaves).detach().numpy()

    def made_up_slopes(
        self, point: naive.Vector, inputs: naive.Vector, labels: naive.Vector, along: naive.Vector
    ) -> tuple[naive.Vector, naive.Vector, naive.Vector]:
        leaves = [torch.from_numpy(value.copy()).requires_grad_() for value in (point, inputs, labels)]
        product = self._made_up_gradient(*leaves) @ torch.from_numpy(along.copy())
        slopes = torch.autograd.grad(product, leaves, allow_unused=True, materialize_grads=True)
        return slopes[0].numpy(), slopes[1].numpy(), slopes[2].numpy()


def assert_same(found: Tensor, expected: naive.Vector, what: str) -> None:
    size = max(float(np.abs(expected).max()), 1e-3)
    assert found.shape == expected.shape, what
    assert float(np.abs(found.numpy() - expected).max()) / size < TOLERANCE, what


def test_every_algorithm_has_a_reference() -> None:
    assert {name for name in ff.ALGORITHMS if not hasattr(naive, name)} == set()
    assert set(ff.ALGORITHMS) == set(GENERIC)


@pytest.mark.parametrize("name", sorted(ff.ALGORITHMS))
def test_every_option_is_checked(name: str) -> None:
    offered = set(inspect.signature(ff.ALGORITHMS[name]).parameters)
    used = set(GENERIC[name]).union(*VARIANTS.get(name, []))
    assert offered - used == UNCHECKED.get(name, set())
    assert used <= set(inspect.signature(getattr(naive, name)).parameters)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(("name", "options"), CASES)
def test_agrees_with_the_naive_version(name: str, options: dict[str, Any], work: str) -> None:
    if work == "clip" and name in UNCLIPPED:
        pytest.skip("the naive version has one place to clip at")
    settings = {"rounds": 4, "participants": 3, "lr": 0.2, "lr_decay": 0.8, "seed": 1, **WORK[work]}
    data = federation(unequal=settings.pop("unequal", False))
    recorder = Recorder()
    result = run(ff.ALGORITHMS[name](**options), data=data, recorder=recorder, **settings)
    problem = Replay(data, result.training)
    trace = getattr(naive, name)(problem, **options)

    assert recorder.cohorts == problem.cohorts
    for t, server in enumerate(recorder.servers):
        assert_same(server["model"], trace.models[t + 1], f"the model after round {t + 1}")

    kept_by_server = named(result.server)
    assert set(kept_by_server) - {"model"} - OWN_COPY == set(trace.server)
    for vector, expected in trace.server.items():
        assert_same(kept_by_server[vector], expected, f"the server's {vector}")

    def kept_by(client: int) -> dict[str, Tensor]:
        return named(result.clients.read(client, result.server["model"]))

    kept = set(short_names(vector.name for vector in result.algorithm.client_vectors).values())
    assert kept - OWN_COPY == set(trace.clients)
    took_part = sorted({client for members in problem.cohorts for client in members})
    assert result.clients.clients() == (took_part if kept else [])
    for vector, owners in trace.clients.items():
        assert sorted(owners) == took_part
        for client, expected in owners.items():
            assert_same(kept_by(client)[vector], expected, f"client {client}'s {vector}")

    # What the references do not show: the models of earlier rounds that FedLESAM remembers.
    if "previous_model" in kept_by_server:
        assert_same(kept_by_server["previous_model"], trace.models[-2], "the model of the round before")
    for client in took_part if "last_model" in kept else []:
        last = max(t for t, members in enumerate(problem.cohorts) if client in members)
        assert_same(
            kept_by(client)["last_model"], trace.models[last], f"the model that client {client} received"
        )


def test_cases_are_as_awkward_as_intended() -> None:
    for work, settings in WORK.items():
        chosen = dict(settings)
        data = federation(unequal=chosen.pop("unequal", False))
        problem = Replay(data, Training(rounds=4, participants=3, seed=1, **chosen))
        members = [client for each in problem.cohorts for client in each]
        assert max(members.count(client) for client in members) > 1, "somebody comes back"
        assert len(set(members)) < CLIENTS, "somebody never comes"
        sizes = {
            len(positions)
            for t, each in enumerate(problem.cohorts)
            for client in each
            for positions in problem._positions(t, client)
        }
        steps = {problem.steps(t, client) for t, each in enumerate(problem.cohorts) for client in each}
        assert (len(sizes) > 1) == (len(steps) > 1) == (work == "epochs")
        if "clip" in settings:
            lengths = [
                np.linalg.norm(problem.full_gradient(client, problem.start)) for client in range(CLIENTS)
            ]
            assert np.allclose(lengths, settings["clip"]), "every gradient is cut"
