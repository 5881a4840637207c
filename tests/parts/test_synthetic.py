"""Samples made up from the server's models: the matching itself, its uses, resuming, and what is refused."""

from __future__ import annotations

import itertools
import json
import math
import os
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from problems import (
    CLASSES,
    CLIENTS,
    DEFAULTS,
    FEATURES,
    GENERIC,
    Recorder,
    distance,
    federation,
    flat,
    generic,
    named,
    network,
    train,
)
from torch import Tensor, nn

import flatfed as ff
from flatfed import parts
from flatfed.core import random
from flatfed.core.context import ClientContext, ServerContext, TaskStep
from flatfed.core.flat import Layout
from flatfed.core.state import Dimensions, State, initial_state
from flatfed.engines import threads
from flatfed.runs import checkpoint, environment
from flatfed.runs.train import run_config
from flatfed.training import loop
from flatfed.training.config import Config, with_assignments

SIZE = len(flat(network()))
DIMENSIONS = Dimensions(SIZE, (FEATURES,), CLASSES)
WITH_SAMPLES = ["fedsynsam", "dynafed", "dynafed_syn_only"]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Problems as small as these only wait for torch's own threads."""
    with threads.single_threaded():
        yield


@pytest.fixture(autouse=True)
def quick_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is killed for good here, so nothing need reach the disk."""
    monkeypatch.setattr(environment, "source_commit", lambda: None)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def loss_of(point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The cross-entropy of the two-layer network, written out."""
    first, offset, second, last = point.split([5 * FEATURES, 5, 5 * CLASSES, CLASSES])
    hidden = torch.tanh(inputs @ first.view(5, FEATURES).T + offset)
    outputs = hidden @ second.view(CLASSES, 5).T + last
    shares = F.one_hot(targets, CLASSES).double() if targets.dim() == 1 else targets
    return -(shares * outputs.log_softmax(1)).sum(1).mean()


def context(round_number: int, loss: Callable[..., Tensor] = loss_of) -> ServerContext:
    return ServerContext(round=round_number, seed=1, dimensions=DIMENSIONS, total_rate=0.6, loss=loss)


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def models_of(count: int) -> Tensor:
    """Some models [count, P] that are not far from each other."""
    return flat(network()) + 0.3 * draw(2, count, SIZE).cumsum(0)


def server_with(part: parts.TrajectoryMatching, models: Tensor) -> dict[str, Tensor]:
    """The server when the last of the models has just been reached."""
    server = {"model": models[-1], **initial_state(part.server_vectors, DIMENSIONS, models[-1])}
    return {**server, "trajectory": torch.cat([models[:-1], torch.zeros(1, SIZE)]).flatten()}


def distilled(part: parts.TrajectoryMatching, models: Tensor, **options: Any) -> dict[str, Tensor]:
    server = server_with(part, models)
    for work in part.before_round(server, context(len(models) - 1, **options)):
        server = server | work.server
    return server


def matching_loss(
    path: Tensor, inputs: Tensor, targets: Tensor, step: Tensor, steps: int, normalise: bool = True
) -> Tensor:
    """From the first model of a path [span + 1, P] to the last."""
    point = path[0].clone().requires_grad_()
    for _ in range(steps):
        point = (
            point - step * torch.autograd.grad(loss_of(point, inputs, targets), point, create_graph=True)[0]
        )
    gap = (point - path[-1]).square().sum()
    return gap / (path[0] - path[-1]).square().sum() if normalise else gap


# -- the matching ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("soft", [True, False], ids=["soft", "hard"])
def test_slopes_of_the_matching_loss_are_finite_differences(soft: bool, normalise: bool) -> None:
    # Plain gradient descent leaves the slope in its moment.
    part = parts.TrajectoryMatching(
        models=3,
        steps=2,
        samples_per_class=2,
        iterations=1,
        optimizer="sgd",
        soft_labels=soft,
        normalise=normalise,
    )
    server = server_with(part, models_of(3)) | {"trajectory": models_of(3).flatten()}
    server |= part._first(server, context(2))
    found = part._iteration(server, 0, context(2))
    learned = ["synthetic_inputs", "synthetic_step", *(["synthetic_labels"] if soft else [])]
    assert {f"{name}_first" for name in learned} == {name for name in found if name.endswith("_first")}
    for name in learned:
        slopes = []
        for entry in range(len(server[name])):
            moved = [server[name].clone(), server[name].clone()]
            moved[0][entry] += 1e-5
            moved[1][entry] -= 1e-5
            after = [part._iteration(server | {name: value}, 0, context(2)) for value in moved]
            slopes.append((after[0]["matching_losses"][0] - after[1]["matching_losses"][0]) / 2e-5)
        expected = torch.stack(slopes)
        assert float(expected.abs().max()) > 1e-3
        torch.testing.assert_close(found[f"{name}_first"], expected, rtol=1e-6, atol=1e-9)


def save_samples(path: Path, **arrays: Any) -> str:
    np.savez(path, **arrays)
    return str(path)


def classes(per_class: int) -> Tensor:
    return torch.arange(CLASSES).repeat(per_class)


def test_samples_that_made_the_trajectory_match_it(tmp_path: Path) -> None:
    inputs, models, rate = draw(3, 2 * CLASSES, FEATURES), [flat(network())], 0.4
    for _ in range(4):
        point = models[-1].clone().requires_grad_()
        (slope,) = torch.autograd.grad(loss_of(point, inputs, classes(2)), point)
        models.append(models[-1] - rate * slope)
    made = save_samples(tmp_path / "made.npz", inputs=inputs.numpy(), targets=classes(2).numpy())
    # A rate near nothing, so that all iterations look at the same samples.
    options = {"models": 5, "samples_per_class": 2, "inner_rate": rate, "sample_rate": 1e-12}
    for steps in (1, 3):
        part = parts.TrajectoryMatching(
            steps=steps, iterations=12, inner_rate_rate=0.0, initial=made, **options
        )
        assert float(distilled(part, torch.stack(models))["matching_losses"].max()) < 1e-15
    noise = parts.TrajectoryMatching(steps=3, iterations=12, inner_rate_rate=0.0, **options)
    assert float(distilled(noise, torch.stack(models))["matching_losses"].min()) > 0.1


@pytest.mark.parametrize(
    ("optimizer", "momentum", "soft", "normalise"),
    [
        ("adam", 0.0, True, True),
        ("adam", 0.0, False, False),
        ("sgd", 0.0, False, True),
        ("sgd", 0.6, True, True),
    ],
)
def test_distillation_is_the_optimizer_of_torch(
    optimizer: str, momentum: float, soft: bool, normalise: bool, tmp_path: Path
) -> None:
    inputs, models = draw(4, 2 * CLASSES, FEATURES), models_of(4)
    rate, rate_of_step = (0.05, 0.02) if optimizer == "adam" else (0.3, 0.004)
    part = parts.TrajectoryMatching(
        models=4,
        steps=3,
        samples_per_class=2,
        iterations=6,
        inner_rate=0.2,
        sample_rate=rate,
        inner_rate_rate=rate_of_step,
        optimizer=optimizer,
        momentum=momentum,
        soft_labels=soft,
        normalise=normalise,
        initial=save_samples(tmp_path / "first.npz", inputs=inputs.numpy(), targets=classes(2).numpy()),
    )
    found = distilled(part, models)

    samples, step = inputs.clone().requires_grad_(), torch.tensor([0.2], dtype=torch.float64).requires_grad_()
    logits = (5.0 * F.one_hot(classes(2), CLASSES)).double().requires_grad_()
    groups = [
        {"params": [samples, logits] if soft else [samples], "lr": rate},
        {"params": [step], "lr": rate_of_step},
    ]
    chosen = torch.optim.Adam(groups) if optimizer == "adam" else torch.optim.SGD(groups, momentum=momentum)
    losses = []
    for _ in range(6):
        chosen.zero_grad()
        targets = logits.softmax(1) if soft else classes(2)
        loss = matching_loss(models, samples, targets, step, 3, normalise)
        losses.append(loss.detach())
        loss.backward()
        chosen.step()
    assert distance(found["matching_losses"], torch.stack(losses)) < 1e-9
    assert distance(found["synthetic_inputs"].view(-1, FEATURES), samples.detach()) < 1e-9
    assert distance(found["synthetic_step"], step.detach()) < 1e-9
    expected = logits.detach().flatten() if soft else classes(2).double()
    assert distance(found["synthetic_labels"], expected) < 1e-9
    assert distance(samples.detach(), inputs) > 1e-3


@pytest.mark.parametrize(("stretch", "halvings"), [(1.0, 1), (0.01, None)])
def test_inner_step_size_starts_at_a_round_or_where_the_first_samples_lead_nowhere_far(
    stretch: float, halvings: int | None
) -> None:
    # The shorter the trajectory, the further astray a step on noise leads.
    models = flat(network()) + stretch * (models_of(3) - flat(network()))
    options = {"models": 3, "steps": 2, "samples_per_class": 1}
    part = parts.TrajectoryMatching(iterations=1, inner_rate_rate=0.0, **options)
    found = distilled(part, models)

    def first_loss(rate: float) -> float:
        noise = part._first(server_with(part, models), context(2))["synthetic_inputs"]
        step = torch.tensor([rate], dtype=torch.float64)
        return float(matching_loss(models, noise.view(-1, FEATURES), classes(1), step, 2).detach())

    rate, expected = 0.6, 0
    while first_loss(rate) > 1.1:
        rate, expected = rate / 2, expected + 1
    assert float(found["synthetic_step"]) == rate
    assert expected == halvings if halvings is not None else expected > 3


def test_inner_step_size_stays_above_zero() -> None:
    options = {"models": 3, "steps": 2, "samples_per_class": 1}
    part = parts.TrajectoryMatching(iterations=1, inner_rate_rate=100.0, inner_rate=50.0, **options)
    # Matching with far too large a step wants a smaller one; a whole stride would go below zero.
    assert float(distilled(part, models_of(3))["synthetic_step"]) == 1e-6


def test_samples_that_learnt_nothing_are_reported() -> None:
    options = {"models": 3, "steps": 2, "samples_per_class": 1, "iterations": 1, "inner_rate_rate": 0.0}
    with pytest.warns(ff.FlatfedWarning, match=r"matching loss is .* after 1 iterations, where 1 is nothing"):
        distilled(parts.TrajectoryMatching(inner_rate=50.0, **options), models_of(3))


def test_a_loss_that_is_no_share_says_nothing_of_what_was_learnt() -> None:
    options = {"models": 3, "steps": 2, "samples_per_class": 1, "iterations": 1, "inner_rate_rate": 0.0}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distilled(parts.TrajectoryMatching(inner_rate=50.0, normalise=False, **options), models_of(3))


def test_samples_stay_as_they_start_at_rate_zero() -> None:
    part = parts.TrajectoryMatching(models=3, steps=2, samples_per_class=1, iterations=2, sample_rate=0.0)
    first = part._first(server_with(part, models_of(3)), context(2))
    assert torch.equal(distilled(part, models_of(3))["synthetic_inputs"], first["synthetic_inputs"])


def test_starts_and_targets_are_drawn_from_the_whole_trajectory() -> None:
    models, seen = models_of(6), []

    def watched(point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(point.detach())
        return loss_of(point, inputs, targets)

    part = parts.TrajectoryMatching(models=6, steps=1, span=3, samples_per_class=1, iterations=60)
    distilled(part, models, loss=watched)
    starts = [int((models - point).abs().amax(1).argmin()) for point in seen]
    assert all(torch.equal(models[start], point) for start, point in zip(starts, seen, strict=True))
    assert set(starts) == {0, 1, 2}
    assert min(starts.count(each) for each in (0, 1, 2)) > 8


def test_averaged_targets_are_means_of_two_or_more_models_of_the_window() -> None:
    part = parts.TrajectoryMatching(models=8, steps=3, average_targets=True)
    window = models_of(3)
    subsets = [
        window[list(chosen)].mean(0) for size in (2, 3) for chosen in itertools.combinations(range(3), size)
    ]
    hits = [0] * len(subsets)
    for number in range(80):
        target = part._target(window, random.torch_generator(number, "targets"))
        near = [float((target - each).abs().max()) for each in subsets]
        assert min(near) < 1e-12
        hits[near.index(min(near))] += 1
    assert min(hits) > 0
    assert torch.equal(part._target(window[:1], random.torch_generator(0, "targets")), window[0])
    plain = parts.TrajectoryMatching(models=8, steps=3)
    assert torch.equal(plain._target(window, random.torch_generator(0, "targets")), window[2])


def test_inner_batches_go_through_all_samples_before_any_comes_twice() -> None:
    seen: list[Tensor] = []

    def watched(point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        seen.append(inputs.detach())
        return loss_of(point, inputs, targets)

    part = parts.TrajectoryMatching(
        models=4,
        steps=3,
        samples_per_class=2,
        inner_batch=2,
        iterations=2,
        sample_rate=1e-12,
        inner_rate=0.6,
    )
    samples = distilled(part, models_of(4), loss=watched)["synthetic_inputs"].view(-1, FEATURES)
    assert [len(batch) for batch in seen] == [2] * 6
    orders = []
    for iteration in (seen[:3], seen[3:]):
        rows = torch.cat(iteration)
        orders.append([int((samples - row).abs().amax(1).argmin()) for row in rows])
        assert sorted(orders[-1]) == list(range(6))
    assert orders[0] != orders[1]


def digits_config(**assigned: Any) -> dict[str, Any]:
    base = {
        "data": {"dataset": "digits", "clients": 10},
        "partition": {"name": "dirichlet_client", "concentration": 0.5},
        "model": {"name": "mlp", "hidden": [32]},
        "training": {"rounds": 9, "participants": 5, "local_steps": 5, "batch_size": 20, "lr": 0.1},
    }
    return with_assignments(base, [f"{key}={value}" for key, value in assigned.items()])


@pytest.mark.parametrize(
    "algorithm",
    [
        {"name": "fedsynsam", "warm_rounds": 6, "iterations": 80, "samples_per_class": 5},
        {
            "name": "dynafed",
            "models": 8,
            "iterations": 80,
            "samples_per_class": 5,
            "steps": 5,
            "inner_rate": 0.3,
        },
    ],
    ids=lambda options: options["name"],
)
def test_distillation_comes_closer_to_digits_models_than_standing_still(
    algorithm: dict[str, Any], tmp_path: Path
) -> None:
    config = Config.checked({**digits_config(), "algorithm": algorithm})
    finished = run_config(config, tmp_path / "run")
    losses = named(finished.server)["matching_losses"]
    assert len(losses) == 80
    found = [line["matching_loss"] for line in finished.history if "matching_loss" in line]
    assert found == [pytest.approx(float(losses[-20:].mean()), rel=1e-6)]
    assert found[0] < 0.9
    assert found[0] < float(losses[:5].mean())


# -- the mix -----------------------------------------------------------------------------------------------


class Watched:
    """An oracle that notes where it was asked for what; its gradients are made up too."""

    def __init__(self) -> None:
        self.own: list[Tensor] = []
        self.batches: list[tuple[Tensor, Tensor]] = []

    def __call__(self, point: Tensor) -> Tensor:
        self.own.append(point.clone())
        return draw(len(self.own), *point.shape)

    def on_samples(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        self.batches.append((inputs, targets))
        return draw(100 + len(self.batches), *point.shape)


def client_context(round_number: int, steps: int, received: State) -> ClientContext:
    return ClientContext(
        round=round_number,
        received=received,
        client={},
        rates=[0.1] * steps,
        layout=Layout(network()),
        input_shape=(FEATURES,),
        full_gradient=lambda: torch.zeros(SIZE),
        displacement=torch.zeros(SIZE),
    )


def sent(per_class: int, ready: float = 1.0) -> dict[str, Tensor]:
    return {
        "model": flat(network()),
        "synthetic_inputs": draw(7, per_class * CLASSES * FEATURES),
        "synthetic_labels": classes(per_class).double(),
        "synthetic_ready": torch.tensor([ready]),
    }


@pytest.mark.parametrize(("batch", "steps"), [(4, 2), (6, 3), (5, 1), (50, 2)])
def test_batches_of_the_mix_are_balanced_and_use_every_sample(batch: int, steps: int) -> None:
    part, received = parts.SyntheticMix(0.1, 0.6, batch), sent(4)
    oracle = Watched()
    for round_number in range(9):
        context_now = client_context(round_number, steps, received)
        carry = part.begin(context_now)
        for _ in range(steps):
            _, carry = part.gradient(received["model"], oracle, context_now, carry)
    samples = received["synthetic_inputs"].view(-1, FEATURES)
    assert len(oracle.batches) == 9 * steps
    used: set[int] = set()
    for inputs, targets in oracle.batches:
        assert len(inputs) == len(targets) == min(batch, 12)
        counts = targets.bincount(minlength=CLASSES)
        assert int(counts.max() - counts.min()) <= 1
        rows = [int((samples == row).all(1).nonzero()) for row in inputs]
        assert torch.equal(targets, torch.tensor(rows) % CLASSES)
        assert [(after - before) % 12 for before, after in itertools.pairwise(rows)] == [1] * (len(rows) - 1)
        used |= set(rows)
    assert used == set(range(12))


def test_mix_climbs_along_both_gradients_and_descends_on_its_own() -> None:
    part, received, oracle = parts.SyntheticMix(0.3, 0.6, 4), sent(2), Watched()
    point = draw(9, SIZE)
    now = client_context(0, 1, received)
    found, _ = part.gradient(point, oracle, now, part.begin(now))
    mixed = 0.6 * draw(1, SIZE) + 0.4 * draw(101, SIZE)
    assert torch.equal(oracle.own[0], point)
    assert distance(oracle.own[1], point + 0.3 * mixed / mixed.norm()) < 1e-12
    assert torch.equal(found, draw(2, SIZE))
    assert math.isclose(float((oracle.own[1] - point).norm()), 0.3, rel_tol=1e-12)


def test_mix_without_samples_is_sharpness_aware() -> None:
    part, oracle = parts.SyntheticMix(0.3, 0.6, 4), Watched()
    now = client_context(0, 1, sent(2, ready=0.0))
    part.gradient(draw(9, SIZE), oracle, now, part.begin(now))
    slope = draw(1, SIZE)
    assert oracle.batches == []
    assert distance(oracle.own[1], draw(9, SIZE) + 0.3 * slope / slope.norm()) < 1e-12


# -- whole runs --------------------------------------------------------------------------------------------


class Busy(nn.Module):
    """Buffers that change and random draws in every step."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, CLASSES)
        ).double()
        generator = torch.Generator().manual_seed(8)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.6, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(inputs)


def trained(
    algorithm: ff.Algorithm | str,
    folder: Path | None = None,
    model: nn.Module | None = None,
    data: ff.Federation | None = None,
    **options: Any,
) -> ff.Run:
    return train(
        network() if model is None else model,
        federation() if data is None else data,
        generic(algorithm) if isinstance(algorithm, str) else algorithm,
        folder=folder,
        **{**DEFAULTS, **options},
    )


def lines(finished: ff.Run) -> list[dict[str, Any]]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in finished.history]


def assert_same(left: ff.Run, right: ff.Run) -> None:
    ours, theirs = (each.server | each.model.state_dict() for each in (left, right))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert lines(left) == lines(right)


class Killed(BaseException):
    """What gives nobody a chance to save anything."""


class Stopper:
    """A callback that stops a run at a piece of the server's work, or at the end of a round."""

    def __init__(self, kind: type[BaseException], at_work: int = 0, at_round: int = 0) -> None:
        self.kind, self.at_work, self.at_round, self.pieces = kind, at_work, at_round, 0

    def __call__(self, progress: ff.Progress) -> None:
        if progress.round == self.at_round:
            raise self.kind

    def task_step(self, step: TaskStep) -> None:
        self.pieces += 1
        if self.pieces == self.at_work:
            raise self.kind


PIECES = 2 + GENERIC["fedsynsam"]["iterations"] + 1
"""A model to remember before each of the first two rounds, the iterations, and that they are done."""


@pytest.mark.parametrize("name", ["fedsynsam", "dynafed"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, Killed])
@pytest.mark.parametrize("always", [False, True], ids=["rarely saved", "always saved"])
def test_a_distillation_goes_on_where_it_stopped(
    name: str, kind: type[BaseException], always: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if always:
        monkeypatch.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
    whole = trained(name, model=Busy(), rounds=4)
    stops = [{"at_work": number} for number in range(1, PIECES + 1)] + [{"at_round": 3}, {"at_round": 4}]
    for number, stop in enumerate(stops):
        folder, stopper = tmp_path / str(number), Stopper(kind, **stop)
        with pytest.raises(kind):
            trained(name, folder, Busy(), rounds=4, callbacks=[stopper], checkpoint_every=2)
        going_on = Stopper(kind)
        resumed = trained(name, folder, Busy(), rounds=4, callbacks=[going_on], checkpoint_every=2)
        assert_same(resumed, whole)
        if always or kind is KeyboardInterrupt:
            assert going_on.pieces <= PIECES - stopper.pieces + 1, "finished iterations were done again"
        written = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
        assert [line["bytes_down"] for line in written] == [line["bytes_down"] for line in whole.history]


@pytest.mark.parametrize("writes", range(1, 8))
def test_a_kill_between_two_files_of_a_checkpoint_loses_nothing(
    writes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several checkpoints of one round must not take each other's files away."""
    whole = trained("fedsynsam", rounds=4)
    with monkeypatch.context() as patched:
        patched.setattr(loop, "CHECKPOINT_SECONDS", -1.0)
        real, seen = checkpoint.write_sealed, [0]

        def write_sealed(path: Path, value: Any) -> None:
            seen[0] += path.name == "manifest.json"
            if seen[0] == writes:
                raise Killed
            real(path, value)

        patched.setattr(checkpoint, "write_sealed", write_sealed)
        with pytest.raises(Killed):
            trained("fedsynsam", tmp_path, rounds=4)
    assert_same(trained("fedsynsam", tmp_path, rounds=4), whole)


def test_workers_do_not_change_a_bit() -> None:
    for name in WITH_SAMPLES:
        one, three = (trained(name, model=Busy(), participants=5, workers=count) for count in (1, 3))
        assert_same(one, three)


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_a_run_that_ends_before_its_samples_are_made_says_so(name: str) -> None:
    needed = generic(name).synthetic.models
    with pytest.warns(ff.FlatfedWarning) as warned:
        trained(name, rounds=needed - 1)
    expected = f"rounds = {needed - 1}: trajectory_matching acts from round {needed} on"
    assert expected in str(warned[0].message)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="rounds = ")
        finished = trained(name, rounds=needed)
    assert bool(named(finished.server)["synthetic_ready"])


def test_samples_travel_once_to_all_clients() -> None:
    per_class = GENERIC["fedsynsam"]["samples_per_class"]
    history = trained("fedsynsam", participants=2).history
    always = 2 * SIZE * 8
    samples = (per_class * CLASSES * (FEATURES + 1) + 1) * 8
    assert [line["bytes_down"] for line in history] == [
        always,
        always,
        always + CLIENTS * samples,
        always,
        always,
    ]


@pytest.mark.parametrize("name", ["dynafed", "dynafed_syn_only"])
def test_samples_that_stay_on_the_server_are_no_traffic(name: str) -> None:
    assert {line["bytes_down"] for line in trained(name, participants=2).history} == {2 * SIZE * 8}


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_gradients_are_counted_as_they_are_taken(path: str) -> None:
    steps = DEFAULTS["participants"] * DEFAULTS["local_steps"]
    found = [line["gradient_evaluations"] for line in trained("fedsynsam", path=path).history]
    assert found == [2 * steps, 2 * steps, 3 * steps, 3 * steps, 3 * steps]
    plain = trained(generic("fedsynsam", local_weight=1.0), path=path).history
    assert [line["gradient_evaluations"] for line in plain] == [2 * steps] * 5


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_buffers_and_random_layers(name: str) -> None:
    torch.manual_seed(1)
    first = trained(name, model=Busy())
    torch.manual_seed(2)
    assert_same(first, trained(name, model=Busy()))
    assert all(bool(torch.isfinite(value).all()) for value in first.server.values())
    # Only the first gradient of a local step moves the statistics, and nothing on the server does.
    counted = first.model.state_dict()["layers.1.num_batches_tracked"]
    assert int(counted) == DEFAULTS["rounds"] * DEFAULTS["local_steps"]


def test_fine_tuning_sees_the_statistics_of_the_model_it_tunes(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Tensor]] = []
    real = loop.server_loss

    def watched(plan: Any, model: nn.Module, buffers: State) -> Callable[..., Tensor]:
        seen.append(dict(buffers))
        return real(plan, model, buffers)

    monkeypatch.setattr(loop, "server_loss", watched)
    last = trained("dynafed", model=Busy()).model.state_dict()
    assert [name for name, value in seen[-1].items() if not torch.equal(value, last[name])] == []
    assert not torch.equal(seen[-1]["layers.1.running_mean"], seen[0]["layers.1.running_mean"])


class Attentive(nn.Module):
    """Attention over the features, each a token of one number."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens, self.outputs = nn.Linear(1, 12), nn.Linear(4, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        query, key, value = self.tokens(inputs[:, None, :, None]).chunk(3, -1)
        return self.outputs(F.scaled_dot_product_attention(query, key, value).mean((1, 2)))


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_attention_is_differentiated_twice(name: str) -> None:
    finished = trained(name, model=Attentive(), path="client")
    assert bool((named(finished.server)["matching_losses"] >= 0).all())
    assert finished.history[2]["matching_loss"] > 0


def test_unequal_clients_and_compression() -> None:
    algorithm = ff.build({**generic("fedsynsam").describe(), "compress": {"part": "top_k", "ratio": 0.5}})
    finished = trained(
        algorithm, data=federation(unequal=True), local_steps=None, local_epochs=2, weighting="samples"
    )
    assert [line["bytes_up"] < 3 * SIZE * 8 for line in finished.history] == [True] * 5
    assert all(bool(torch.isfinite(value).all()) for value in finished.server.values())


# -- fine-tuning -------------------------------------------------------------------------------------------


def tuned_by_torch(finished: ff.Run, start: Tensor, round_number: int, batch: int) -> Tensor:
    """A plain loop of torch's Adam over the synthetic samples, in the order of the documented stream."""
    options, module = GENERIC["dynafed"], network()
    inputs = named(finished.server)["synthetic_inputs"].view(-1, FEATURES)
    labels = named(finished.server)["synthetic_labels"].view(-1, CLASSES).softmax(1)
    nn.utils.vector_to_parameters(start.clone(), module.parameters())
    optimizer = torch.optim.Adam(module.parameters(), lr=options["fine_tuning_rate"])
    generator = random.torch_generator(finished.training.seed, "fine tuning", round_number)
    for _ in range(options["epochs"]):
        order = torch.randperm(len(inputs), generator=generator)
        for begin in range(0, len(order), batch):
            chosen = order[begin : begin + batch]
            optimizer.zero_grad()
            F.cross_entropy(module(inputs[chosen]), labels[chosen]).backward()
            optimizer.step()
    return flat(module)


@pytest.mark.parametrize("batch", [4, 256])
@pytest.mark.parametrize("aggregate", [True, False], ids=["refined", "alone"])
def test_fine_tuning_is_torchs_adam(aggregate: bool, batch: int) -> None:
    algorithm = ff.Algorithm(
        server=parts.FineTune(
            epochs=GENERIC["dynafed"]["epochs"],
            rate=GENERIC["dynafed"]["fine_tuning_rate"],
            batch=batch,
            aggregate=aggregate,
        ),
        synthetic=generic("dynafed").synthetic,
    )
    recorder = Recorder()
    finished = trained(algorithm, callbacks=[recorder])
    for number in (2, 3, 4):
        before = recorder.models[number - 1]
        if aggregate:
            # What FedAvg would make of this round, from the same model, clients and batches.
            before = one_averaging(before, number)
        expected = tuned_by_torch(finished, before, number, batch)
        assert distance(recorder.models[number], expected) < 1e-12
        assert distance(before, expected) > 1e-3


def one_averaging(start: Tensor, number: int) -> Tensor:
    """The model after a round of plain averaging, from any model before it."""

    class Restarted(parts.Average):
        def update(self, server: State, mean: State, shift: Tensor | None, context: Any) -> dict[str, Tensor]:
            # Every round before ends at the given start.
            moved = super().update(server, mean, shift, context)["model"]
            return {"model": moved if context.round == number else start.clone()}

    return trained(ff.Algorithm(server=Restarted(1.0)), rounds=number + 1).server["model"]


def test_alone_the_server_hears_nobody_after_the_distillation() -> None:
    """Other client data in the later rounds change nothing, though they do where clients are heard."""

    def changed(name: str) -> float:
        models = []
        for sign in (1, -1):
            recorder, clients = Recorder(), []
            plain = federation()
            for number in range(CLIENTS):
                clients.append(plain.client(number).batch(torch.arange(12)))
            late = {"now": False}

            def load(number: int, sign: int = sign, clients: Any = clients, late: Any = late) -> Any:
                inputs, targets = clients[number]
                return (sign * inputs if late["now"] else inputs), targets

            def after(progress: ff.Progress, late: Any = late) -> None:
                late["now"] = progress.round >= 2

            data = ff.Federation.from_function(CLIENTS, load)
            trained(name, data=data, callbacks=[recorder, after])
            models.append(recorder.models)
        assert torch.equal(models[0][:2], models[1][:2])
        return distance(*models)

    assert changed("dynafed_syn_only") == 0.0
    assert changed("dynafed") > 1e-3


# -- refusals ----------------------------------------------------------------------------------------------


def refusal(call: Callable[[], object], kind: type[Exception] = ff.FlatfedError) -> str:
    with pytest.raises(kind) as raised:
        call()
    message = str(raised.value)
    assert "\n" not in message
    return message


def never(progress: ff.Progress) -> None:
    pytest.fail("a round was trained before the refusal")


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_targets_must_be_class_labels(name: str) -> None:
    regression = [(inputs, inputs[:, :1]) for inputs in draw(1, 3, 8, FEATURES)]
    with_floats = ff.Federation.from_tensors(regression)
    model = nn.Linear(FEATURES, 1).double()
    message = refusal(
        lambda: train(model, with_floats, ff.ALGORITHMS[name](), loss=F.mse_loss, rounds=1, callbacks=[never])
    )
    assert f"{name} makes up samples of every class" in message
    assert "targets [1] float64" in message


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_inputs_must_be_floats(name: str) -> None:
    words = ff.Federation.from_tensors([(torch.arange(12).view(6, 2) % 5, torch.arange(6) % 3)] * 3)
    model = nn.Sequential(nn.Embedding(5, 4), nn.Flatten(), nn.Linear(8, 3))
    message = refusal(lambda: train(model, words, ff.ALGORITHMS[name](), rounds=1, callbacks=[never]))
    assert f"{name} changes or makes up inputs, which must be floats" in message
    assert "int64" in message


def test_soft_labels_need_a_loss_that_takes_them() -> None:
    model = nn.Sequential(network(), nn.LogSoftmax(1))
    # Only at the third round would there be samples.
    message = refusal(lambda: trained("dynafed", model=model, loss=F.nll_loss, callbacks=[never]))
    assert "the loss on made-up inputs and probabilities cannot be differentiated" in message
    assert len(trained("fedsynsam", model=model, loss=F.nll_loss).history) == 5


def good_samples() -> dict[str, Any]:
    return {"inputs": draw(1, 2 * CLASSES, FEATURES).numpy(), "targets": classes(2).numpy()}


SAMPLES: dict[str, tuple[Callable[[Path], object], str]] = {
    "missing": (lambda path: None, "No such file"),
    "empty": (lambda path: path.write_bytes(b""), "cannot be read as .npz with inputs and targets"),
    "text": (lambda path: path.write_text("inputs"), "cannot be read as .npz with inputs and targets"),
    "one array": (
        lambda path: np.save(path.open("wb"), np.zeros(3)),
        "cannot be read as .npz with inputs and targets",
    ),
    "cut": (
        lambda path: (np.savez(path, **good_samples()), path.write_bytes(path.read_bytes()[:300])),
        "cannot be read as .npz with inputs and targets",
    ),
    "no targets": (lambda path: np.savez(path, inputs=good_samples()["inputs"]), "targets"),
    "objects": (
        lambda path: np.savez(path, inputs=np.array([None]), targets=np.arange(3)),
        "cannot be read as .npz",
    ),
    "too few": (
        lambda path: np.savez(path, **{**good_samples(), "inputs": good_samples()["inputs"][:5]}),
        f"its inputs are [5, {FEATURES}] float64; give finite floats [{2 * CLASSES}, {FEATURES}]",
    ),
    "whole numbers": (
        lambda path: np.savez(
            path, **{**good_samples(), "inputs": np.zeros((2 * CLASSES, FEATURES), np.uint8)}
        ),
        "uint8; give finite floats",
    ),
    "words": (
        lambda path: np.savez(path, **{**good_samples(), "inputs": np.full((2 * CLASSES, FEATURES), "a")}),
        "give finite floats",
    ),
    "not finite": (
        lambda path: np.savez(path, **{**good_samples(), "inputs": good_samples()["inputs"] / 0.0}),
        "give finite floats",
    ),
    "in another order": (
        lambda path: np.savez(path, **{**good_samples(), "targets": np.sort(good_samples()["targets"])}),
        f"its targets must run 0, 1, …, {CLASSES - 1}, 0, 1, …",
    ),
}


@pytest.mark.filterwarnings("ignore:divide by zero")
@pytest.mark.parametrize("case", SAMPLES)
def test_bad_samples_are_refused_before_the_first_round(case: str, tmp_path: Path) -> None:
    write, complaint = SAMPLES[case]
    path = tmp_path / "samples.npz"
    write(path)
    message = refusal(lambda: trained(generic("fedsynsam", initial=str(path)), callbacks=[never]))
    assert message.startswith(f"synthetic.initial = {str(path)!r}: ")
    assert complaint in message


def test_good_samples_are_where_the_distillation_starts(tmp_path: Path) -> None:
    initial = save_samples(tmp_path / "good.npz", **good_samples())
    still = {"sample_rate": 1e-12, "inner_rate_rate": 0.0}
    finished = trained(generic("fedsynsam", initial=initial, **still))
    found = named(finished.server)["synthetic_inputs"].view(-1, FEATURES)
    assert distance(found, torch.from_numpy(good_samples()["inputs"])) < 1e-9


@pytest.mark.parametrize(
    "make",
    [
        lambda: ff.fedsynsam(warm_rounds=1, span=3),
        lambda: ff.dynafed(models=3, span=3),
        lambda: ff.dynafed_syn_only(models=3, span=3),
        lambda: ff.build({"synthetic": {"part": "trajectory_matching", "models": 3, "steps": 3}}),
    ],
)
def test_a_span_longer_than_the_trajectory_is_refused(make: Callable[[], object]) -> None:
    message = refusal(make)
    assert "models = 3: matching over 3 rounds needs at least 4" in message


# The samples leave the finite numbers while the loss is still one of them; the loss itself does.
@pytest.mark.parametrize("options", [{"sample_rate": 1.7e308}, {"inner_rate": 1e200}])
def test_a_diverging_distillation_says_what_to_lower(options: dict[str, Any], tmp_path: Path) -> None:
    algorithm = generic("fedsynsam")
    for option, value in options.items():
        # Double precision has to be brought to its end; no user can write such a number.
        object.__setattr__(algorithm.synthetic, option, value)
    message = refusal(lambda: trained(algorithm, tmp_path), ff.DivergedError)
    assert "of the distillation is not finite" in message
    assert "lower sample_rate (now " in message and "or inner_rate (now " in message
    manifest = json.loads((tmp_path / "checkpoint" / "manifest.json").read_text())
    assert manifest["round"] == 2


def invoke(*arguments: str) -> tuple[int, str]:
    from typer.testing import CliRunner

    from flatfed import cli

    result = CliRunner().invoke(cli.app, list(arguments))
    return result.exit_code, result.stderr


@pytest.mark.parametrize(
    ("assigned", "code", "complaint"),
    [
        (["algorithm.warm_rounds=1", "algorithm.span=3"], 2, "matching over 3 rounds needs at least 4"),
        (["algorithm.initial=nowhere.npz"], 2, "synthetic.initial = 'nowhere.npz': cannot be read"),
        (["algorithm.warm_rounds=3", "algorithm.sample_rate=1e38"], 1, "lower sample_rate (now 1e+38)"),
        (["algorithm.sample_optimizer=lion"], 2, "fedsynsam.sample_optimizer = 'lion'"),
    ],
)
def test_the_command_line_complains_in_one_line(
    assigned: list[str], code: int, complaint: str, tmp_path: Path
) -> None:
    example = Path(__file__).parents[2] / "examples" / "digits.toml"
    values = ["algorithm.name=fedsynsam", "training.rounds=8", "execution.workers=1", *assigned]
    options = [word for value in values for word in ("--set", value)]
    found, error = invoke("run", str(example), *options, "--folder", str(tmp_path / "run"))
    assert found == code
    said = [line for line in error.splitlines() if line.startswith("error:")]
    assert len(said) == 1
    assert complaint in said[0]
    assert "Traceback" not in error


# -- the picture and the bar -------------------------------------------------------------------------------


def png_of(content: bytes) -> np.ndarray:
    import io

    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(content)))


@pytest.mark.parametrize("channels", [1, 3])
def test_picture_has_a_class_per_row_and_a_sample_per_column(channels: int) -> None:
    from flatfed.report.pictures import ENLARGED, GAP, synthetic_picture

    height, width, several, per_class = 4, 5, 3, 2
    # Sample j is all of one shade, which grows with j; class j mod 3.
    shades = torch.arange(float(several * per_class))
    inputs = shades.view(-1, 1, 1, 1).expand(-1, channels, height, width)
    server = {"synthetic_inputs": inputs.flatten(), "synthetic_labels": shades % several}
    content = synthetic_picture(server, (channels, height, width), several)
    assert content is not None
    picture = png_of(content)
    tall, wide = height * ENLARGED + 2 * GAP, width * ENLARGED + 2 * GAP
    size = (several * tall, per_class * wide)
    assert picture.shape == (size if channels == 1 else (*size, 3))
    found = [
        picture[row * tall + tall // 2, column * wide + wide // 2].max()
        for column, row in itertools.product(range(per_class), range(several))
    ]
    assert found == [round(255 * number / 5) for number in range(6)]
    # Each tile is one shade inside a white frame.
    inside = picture[tall + GAP : 2 * tall - GAP, GAP : wide - GAP]
    assert np.unique(inside).tolist() == [51]
    assert picture[0].min() == 255


def test_only_images_have_a_picture() -> None:
    from flatfed.report.pictures import synthetic_picture

    def picture(*shape: int) -> bytes | None:
        server = {"synthetic_inputs": draw(1, 4 * math.prod(shape)), "synthetic_labels": torch.zeros(4)}
        return synthetic_picture(server, shape, 2)

    assert picture(7) is None
    assert picture(2, 6, 6) is None
    assert picture(3, 1, 6, 6) is None
    assert png_of(picture(6, 6) or b"").shape == png_of(picture(1, 6, 6) or b"").shape


def images(count: int = 4) -> ff.Federation:
    return ff.Federation.from_tensors(
        [(draw(number, 9, 1, 6, 6).float(), torch.arange(9) % CLASSES) for number in range(count)]
    )


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, CLASSES))


@pytest.mark.parametrize("name", WITH_SAMPLES)
def test_images_are_distilled_augmented_and_drawn(name: str, tmp_path: Path) -> None:
    """The same bits for any number of workers, with convolutions and, in DynaFed, augmentation."""
    from flatfed.report.pictures import SyntheticPicture

    one, three = (
        trained(
            name,
            None,
            convolutional(),
            images(),
            rounds=4,
            workers=count,
            callbacks=[SyntheticPicture(tmp_path / str(count))],
        )
        for count in (1, 3)
    )
    assert_same(one, three)
    contents = [(tmp_path / str(count) / "synthetic.png").read_bytes() for count in (1, 3)]
    assert zlib.crc32(contents[0]) == zlib.crc32(contents[1])
    assert png_of(contents[0]).shape == (CLASSES * 20, GENERIC[name]["samples_per_class"] * 20)
    if name != "fedsynsam":
        plain = trained(generic(name, augment=False), None, convolutional(), images(), rounds=4)
        assert distance(named(plain.server)["synthetic_inputs"], named(one.server)["synthetic_inputs"]) > 1e-4


def test_the_servers_work_has_a_bar_of_its_own() -> None:
    from rich.console import Console
    from rich.progress import Progress

    from flatfed.training.progress import Watcher, round_progress

    with round_progress() as columns:
        progress = Progress(*columns.columns, console=Console(quiet=True))
    task = progress.add_task("rounds", total=4, note="", unit="rounds")
    seen: list[list[tuple[str, float, float | None]]] = []

    class Watching(Watcher):
        def task_step(self, step: TaskStep) -> None:
            super().task_step(step)
            seen.append([(each.description, each.completed, each.total) for each in progress.tasks])

    trained("fedsynsam", callbacks=[Watching(progress, task, before=0)], rounds=4)
    iterations = GENERIC["fedsynsam"]["iterations"]
    assert seen[:2] == [[("rounds", 0, 4)], [("rounds", 1, 4)]]
    bars = [[("rounds", 2, 4), ("server", number, iterations)] for number in range(1, iterations + 1)]
    assert seen[2:] == [*bars, bars[-1]]
    assert [(each.description, each.completed) for each in progress.tasks] == [("rounds", 4)]


def test_samples_from_a_pipe_or_a_bomb_are_refused(tmp_path: Path) -> None:
    pipe, bomb, array = tmp_path / "pipe.npz", tmp_path / "bomb.npz", tmp_path / "array.npz"
    os.mkfifo(pipe)
    np.savez_compressed(bomb, inputs=np.zeros((1000, 1000)), targets=np.zeros(3))
    with array.open("wb") as file:
        np.save(file, np.zeros(3))
    for path, reason in ((pipe, "no archive"), (bomb, "bytes where at most"), (array, "no archive")):
        message = refusal(
            lambda path=path: trained(generic("fedsynsam", initial=str(path)), tmp_path / path.stem)
        )
        assert reason in message and str(path) in message and "\n" not in message
