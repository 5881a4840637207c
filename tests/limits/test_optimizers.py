"""Local optimizers: torch's own steps, and every algorithm with every optimizer against a naive loop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from problems import (
    DEFAULTS,
    GENERIC,
    Recorder,
    distance,
    federation,
    generic,
    gradient_of,
    named,
    network,
    run,
    train,
    trajectory,
)
from reference import naive
from test_reference import Replay, assert_same
from torch import Tensor, nn

import flatfed as ff
from flatfed import parts
from flatfed.core.flat import Layout
from flatfed.core.part import Optimizer
from flatfed.core.sampling import batches
from flatfed.parts.optimizer import orthogonalized

TOLERANCE = 1e-9
STATES = ("reset", "kept", "averaged")
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"beta1": 0.8, "beta2": 0.95, "eps": 0.01},
    "heavy ball": {"part": "local_momentum", "decay": 0.7},
    "muon": {"momentum": 0.8},
    "nesterov": {"part": "local_momentum", "decay": 0.7, "nesterov": True},
}
OWN = {"fedadamw": "adamw", "fedlnag": "local_momentum", "fedmuon": "muon"}
"""Algorithms that are made of an optimizer; a second one is refused."""


def described(optimizer: str, state: str) -> dict[str, Any]:
    return {"part": optimizer, **OPTIMIZERS[optimizer], "state": state}


# -- every algorithm with every optimizer ------------------------------------------------------------------


@dataclass
class Memory:
    """What a naive optimizer remembers."""

    vectors: dict[str, naive.Vector]
    unfilled: tuple[float, float] = (1.0, 1.0)
    moments: dict[int, naive.Moments] = field(default_factory=dict)
    """Muon's, of what is no matrix; they start at zero in every round."""


class Optimized(Replay):
    """The federation of the references, with an optimizer where they ask for one."""

    def __init__(self, data: ff.Federation, settings: ff.Training, optimizer: str, state: str) -> None:
        super().__init__(data, settings)
        self.optimizer, self.state = optimizer, state
        self.memories: dict[tuple[int, int], Memory] = {}
        self.kept: dict[int, Memory] = {}
        # Momentum accumulates decayed gradients; elsewhere weight decay is no business of the optimizer.
        self.coupled = "local_momentum" in OPTIMIZERS[optimizer].values()
        self.decay, self.weight_decay = settings.weight_decay, 0.0 if self.coupled else settings.weight_decay

    def _first(self, round: int, client: int) -> Memory:
        fresh = Memory({name: np.zeros_like(self.start) for name in ("first", "second")})
        if self.state == "kept":
            fresh = self.kept.get(client, fresh)
        elif self.state == "averaged" and round > 0:
            last = [self.memories[round - 1, member] for member in self.cohorts[round - 1]]
            means = {name: naive.mean([memory.vectors[name] for memory in last]) for name in fresh.vectors}
            one, two = (sum(memory.unfilled[which] for memory in last) / len(last) for which in (0, 1))
            fresh = Memory(means, (one, two))
        return replace(fresh, moments={})

    def optimized(
        self, round: int, client: int, step: int, point: naive.Vector, gradient: naive.Vector
    ) -> naive.Vector:
        memory = self._first(round, client) if step == 0 else self.memories[round, client]
        options, vectors = OPTIMIZERS[self.optimizer], memory.vectors
        if self.coupled:
            gradient = gradient + self.decay * point
            buffer = options["decay"] * vectors["first"] + gradient
            after = Memory({**vectors, "first": buffer})
            step_taken = gradient + options["decay"] * buffer if "nesterov" in options else buffer
        elif self.optimizer == "muon":
            step_taken, momentum = naive.muon(
                self.shapes, gradient, vectors["first"], options["momentum"], memory.moments
            )
            after = Memory({**vectors, "first": momentum}, moments=memory.moments)
        else:
            betas = (options["beta1"], options["beta2"], options["eps"])
            before = (vectors["first"], vectors["second"], *memory.unfilled)
            step_taken, first, second, *unfilled = naive.adamw(*before, gradient, betas)
            after = Memory({"first": first, "second": second}, (unfilled[0], unfilled[1]))
        self.memories[round, client] = self.kept[client] = after
        return step_taken


VARIANTS = {"scaffold": [{"option": "I"}], "fedmoswa": [{"option": "I"}], "fedmo": [{"option": "I"}]}
"""Where control variates are full gradients, they correct gradients."""
IN_EVERY_STATE = {"fedavg", "scaffold", "fedsagd", "fedspeed"}
"""The others take turns, because an optimizer's state knows nothing of the algorithm."""
CASES = [
    pytest.param(name, {**GENERIC.get(name, {}), **variant}, optimizer, state)
    for turn, name in enumerate(sorted(set(ff.ALGORITHMS) - set(OWN)))
    for variant in [{}, *VARIANTS.get(name, [])]
    for place, optimizer in enumerate(OPTIMIZERS)
    for state in (STATES if name in IN_EVERY_STATE else [STATES[(turn + place) % len(STATES)]])
]


@pytest.mark.parametrize(("name", "options", "optimizer", "state"), CASES)
def test_every_algorithm_takes_every_optimizer(
    name: str, options: dict[str, Any], optimizer: str, state: str
) -> None:
    data, recorder = federation(unequal=True), Recorder()
    settings = {"rounds": 4, "lr": 0.05, "lr_decay": 0.8, "weight_decay": 0.03, "seed": 1}
    algorithm = ff.build({"name": name, **options, "optimizer": described(optimizer, state)})
    result = run(algorithm, data=data, recorder=recorder, local_epochs=2, batch_size=4, **settings)
    problem = Optimized(data, result.training, optimizer, state)
    trace = getattr(naive, name)(problem, **options)
    for t, server in enumerate(recorder.servers):
        assert_same(server["model"], trace.models[t + 1], f"the model after round {t + 1}")
    kept = named({key: value for key, value in result.server.items() if "adamw." not in key})
    for vector in trace.server.keys() & kept.keys():
        assert_same(kept[vector], trace.server[vector], f"the server's {vector}")
    plain = trajectory(ff.build({"name": name, **options}), **{**settings, "rounds": 1})
    assert distance(recorder.models[:1], plain) > 1e-4


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", sorted(OWN))
def test_an_algorithm_has_one_optimizer(name: str, optimizer: str) -> None:
    with pytest.raises(ff.FlatfedError) as raised:
        ff.build({"name": name, "optimizer": described(optimizer, "reset")})
    reason = f"{name} has a local optimizer of its own, {OWN[name]}; leave this out, or compose parts"
    assert reason in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("name", sorted(set(ff.ALGORITHMS) - set(OWN)))
def test_an_optimizer_that_remembers_nothing_changes_nothing(name: str) -> None:
    """Also where it changes the order of corrections."""
    plain = generic(name)
    same = replace(plain, optimizer=parts.LocalMomentum(0.0))
    settings = {"weight_decay": 0.0, "rounds": 4}
    assert distance(trajectory(same, **settings), trajectory(plain, **settings)) < TOLERANCE


# -- where it stands ---------------------------------------------------------------------------------------


def test_what_is_measured_in_steps_comes_after_the_optimizer() -> None:
    momentum, pull = parts.GlobalMomentum(1.0, 0.5), parts.HybridProximal(0.1, 0.2)
    control, full = parts.ControlVariate(), parts.ControlVariate("I")
    corrections = (momentum, pull, control, full)
    assert ff.Algorithm(correct=corrections).corrections == corrections
    adamw = parts.AdamW()
    pipeline = ff.Algorithm(correct=corrections, optimizer=adamw).corrections
    assert pipeline == (pull, full, adamw, momentum, control)


def test_control_variates_of_steps_are_their_mean_step() -> None:
    """With everybody and one step, those of SCAFFOLD cancel, as they do without an optimizer."""
    one = {"participants": 8, "local_steps": 1, "lr": 0.02}
    plain, controlled = (
        ff.build({"name": name, "optimizer": {"part": "adamw", "eps": 0.1}})
        for name in ("fedavg", "scaffold")
    )
    assert distance(trajectory(controlled, **one), trajectory(plain, **one)) < TOLERANCE
    several = {**one, "local_steps": 3}
    assert distance(trajectory(controlled, **several), trajectory(plain, **several)) > 1e-5


@pytest.mark.parametrize("name", ["adamw", {"part": "muon", "momentum": 0.5, "state": "kept"}])
@pytest.mark.parametrize("algorithm", ["scaffold", "fedlesam_d", "fedavg"])
def test_an_optimizer_is_part_of_the_description(algorithm: str, name: Any) -> None:
    built = ff.build({"name": algorithm, "optimizer": name})
    assert built.describe()["name"] == algorithm
    assert ff.build(built.describe()) == built != ff.build(algorithm)
    plain = ff.build({"name": algorithm, "optimizer": "none"})
    assert plain.describe() == ff.build(algorithm).describe()


def test_a_replaced_optimizer_takes_the_name_with_it() -> None:
    replaced = replace(ff.fedlnag(), optimizer=parts.AdamW())
    assert "name" not in replaced.describe()
    assert ff.build(replaced.describe()).optimizer == parts.AdamW()
    without = replace(ff.fedlnag(), optimizer=Optimizer())
    assert "name" not in without.describe() and "optimizer" not in without.describe()


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ("adam", "algorithm.optimizer.part = 'adam': unknown; did you mean 'adamw'?"),
        ({"part": "adamw", "beta2": 1.0}, "algorithm.optimizer.adamw.beta2 = 1.0: input should be less than"),
        ({"part": "adamw", "eps": 0}, "algorithm.optimizer.adamw.eps = 0: input should be greater than 0"),
        ({"part": "muon", "decay": 0.1}, "algorithm.optimizer.muon.decay: unknown"),
        ({"part": "muon", "state": "blocks"}, "algorithm.optimizer.muon.state = 'blocks': input should be"),
        ({"part": "proximal", "weight": 1}, "algorithm.optimizer.part = 'proximal': unknown"),
        (0.1, "algorithm.optimizer = 0.1: give the name of a part"),
    ],
)
def test_a_bad_optimizer_is_refused_in_one_line(optimizer: Any, message: str) -> None:
    with pytest.raises(ff.FlatfedError) as raised:
        ff.build({"name": "fedavg", "optimizer": optimizer})
    assert str(raised.value).startswith(message) and "\n" not in str(raised.value)


def test_an_optimizer_is_no_correction() -> None:
    with pytest.raises(ff.FlatfedError, match=r"algorithm.correct.part = 'adamw': unknown"):
        ff.build({"correct": ["adamw"]})
    with pytest.raises(ff.FlatfedError, match=r"correct: .*AdamW.* is not a Correction part"):
        ff.Algorithm(correct=parts.AdamW())


# -- torch's own steps -------------------------------------------------------------------------------------


class Pictures(nn.Module):
    """A convolution that the flat vector holds channels-last, a matrix, a norm and biases."""

    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.Conv2d(2, 3, 2)
        self.norm = nn.GroupNorm(1, 3)
        self.head = nn.Linear(12, 3)
        generator = torch.Generator().manual_seed(4)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.6, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.norm(self.filters(inputs)).tanh().flatten(1))


def pictures() -> ff.Federation:
    generator = torch.Generator().manual_seed(6)
    inputs = torch.randn(12, 2, 3, 3, generator=generator, dtype=torch.float64)
    return ff.Federation.from_tensors([(inputs, torch.arange(12) % 3)])


def alone(optimizer: Optimizer, path: str, settings: dict[str, Any]) -> Tensor:
    """One client that takes part in every round, by the library."""
    chosen = {"batch_size": 5, "workers": 1, "path": path, **settings}
    result = train(Pictures().double(), pictures(), ff.Algorithm(optimizer=optimizer), metrics={}, **chosen)
    return result.server["model"]


def by_torch(make: Any, settings: dict[str, Any], reset: bool) -> Tensor:
    """The same by torch's optimizers, made anew in every round or once."""
    model, data, training = Pictures().double(), pictures().client(0), ff.Training(batch_size=5, **settings)
    optimizers: list[torch.optim.Optimizer] = []
    for t in range(training.rounds):
        if reset or not optimizers:
            optimizers = make(model, training.lr, training.weight_decay)
        for positions in batches(training, len(data), t, 0):
            inputs, targets = data.batch(positions)
            for optimizer in optimizers:
                optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            for optimizer in optimizers:
                optimizer.step()
    return Layout(model).vector(model)


WORK = {"rounds": 3, "local_steps": 4, "lr": 0.03, "weight_decay": 0.1}


@pytest.mark.parametrize("path", ["matrix", "client"])
@pytest.mark.parametrize("state", STATES)
def test_adamw_is_torchs(state: Any, path: str) -> None:
    def make(model: nn.Module, rate: float, decay: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.AdamW(model.parameters(), rate, (0.8, 0.95), 1e-5, decay)]

    expected = by_torch(make, WORK, reset=state == "reset")
    found = alone(parts.AdamW(0.8, 0.95, 1e-5, state), path, WORK)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("state", STATES)
def test_momentum_is_torchs(state: Any, nesterov: bool) -> None:
    def make(model: nn.Module, rate: float, decay: float) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(model.parameters(), rate, 0.8, weight_decay=decay, nesterov=nesterov)]

    expected = by_torch(make, WORK, reset=state == "reset")
    found = alone(parts.LocalMomentum(0.8, nesterov, state), "client", WORK)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)


class Flattened(torch.optim.Muon):
    """torch's Muon, which takes matrices alone, on filters as the matrices that they are."""

    def __init__(self, parameters: list[nn.Parameter], *options: Any, **named: Any) -> None:
        self.originals = parameters
        self.matrices = [nn.Parameter(value.detach().flatten(1).clone()) for value in parameters]
        super().__init__(self.matrices, *options, **named)

    def step(self, closure: Any = None) -> None:
        for original, matrix in zip(self.originals, self.matrices, strict=True):
            assert original.grad is not None
            matrix.grad = original.grad.flatten(1)
        super().step()
        with torch.no_grad():
            for original, matrix in zip(self.originals, self.matrices, strict=True):
                original.copy_(matrix.view_as(original))
                original.grad = None


@pytest.mark.parametrize("path", ["matrix", "client"])
@pytest.mark.parametrize("scale", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_is_torchs(path: str, scale: Any, nesterov: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # torch rounds to 8 bits on the way, which nobody could tell from a mistake.
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)

    def make(model: nn.Module, rate: float, decay: float) -> list[torch.optim.Optimizer]:
        matrices = [value for value in model.parameters() if value.dim() > 1]
        others = [value for value in model.parameters() if value.dim() < 2]
        options = {"momentum": 0.8, "nesterov": nesterov, "adjust_lr_fn": scale}
        return [
            Flattened(matrices, rate, decay, **options),
            torch.optim.AdamW(others, rate, (0.9, 0.95), 1e-10, decay),
        ]

    muon = parts.Muon(0.8, nesterov, scale)
    torch.testing.assert_close(alone(muon, path, WORK), by_torch(make, WORK, True), rtol=1e-10, atol=1e-11)
    # The matrices' momentum may go on; the others' moments start anew in every round.
    once = {**WORK, "rounds": 1, "local_steps": 9}
    for state in STATES:
        found = alone(replace(muon, state=state), path, once)
        torch.testing.assert_close(found, by_torch(make, once, False), rtol=1e-10, atol=1e-11)


def test_muon_of_matrices_alone_goes_on_as_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    data, settings = federation(1), {**DEFAULTS, "participants": 1, "lr_decay": 1.0, "rounds": 3}
    model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3, bias=False)).double()
    first = [value.detach().clone() for value in model.parameters()]
    training = ff.Training(**{key: value for key, value in settings.items() if key != "workers"})
    expected = torch.optim.Muon(model.parameters(), 0.2, 0.01, 0.9)
    own = data.client(0)
    for t in range(3):
        for positions in batches(training, len(own), t, 0):
            inputs, targets = own.batch(positions)
            expected.zero_grad()
            nn.functional.cross_entropy(model(inputs), targets).backward()
            expected.step()
    last = torch.cat([value.detach().flatten() for value in model.parameters()])
    with torch.no_grad():
        for value, start in zip(model.parameters(), first, strict=True):
            value.copy_(start)
    for algorithm in (
        ff.Algorithm(optimizer=parts.Muon(0.9, state="kept")),
        ff.Algorithm(optimizer=parts.Muon(0.9, state="averaged")),
        ff.fedmuon(0.0, 0.9),
    ):
        found = run(algorithm, data=data, model=model, **settings).server["model"]
        torch.testing.assert_close(found, last, rtol=1e-10, atol=1e-11)


def test_adamw_has_its_published_numbers() -> None:
    """Two steps that were worked out elsewhere: torch gives the same."""
    carry = {name: torch.zeros(2, dtype=torch.float64) for name in ("first_moment", "second_moment")}
    carry |= {name: torch.zeros(1, dtype=torch.float64) for name in ("first_filled", "second_filled")}
    point = torch.ones(2, dtype=torch.float64)
    expected = [(0.890000002, 1.089999996), (0.8007959063646517, 1.0514886976643527)]
    for gradient, known in zip([(0.5, -0.25), (0.1, 0.4)], expected, strict=True):
        step, carry = parts.AdamW().direction(torch.tensor(gradient, dtype=torch.float64), None, carry)  # type: ignore[arg-type]
        point = point - 0.1 * (step + 0.1 * point)
        torch.testing.assert_close(point, torch.tensor(known, dtype=torch.float64), rtol=0, atol=1e-9)


def test_orthogonalization_has_its_known_numbers() -> None:
    cases = {
        ((3.0, 0.0), (0.0, 4.0)): ((0.722876168617, 0.0), (0.0, 1.119203929916)),
        ((1.0, 2.0), (3.0, 4.0)): ((-0.680661000122, 0.825539607471), (0.741295409453, 0.259440010032)),
        ((1.0, 2.0), (3.0, 4.0), (5.0, 6.0)): (
            (-0.467518576533, 0.573473312546),
            (0.072432281221, 0.409452619681),
            (0.612383138976, 0.245431926817),
        ),
    }
    for given, known in cases.items():
        found = orthogonalized(torch.tensor(given, dtype=torch.float64))
        torch.testing.assert_close(found, torch.tensor(known, dtype=torch.float64), rtol=0, atol=1e-11)
    stack = torch.randn(4, 6, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(orthogonalized(stack)[2], orthogonalized(stack[2]), rtol=1e-13, atol=1e-13)
    values = torch.linalg.svdvals(orthogonalized(stack))
    assert bool(((values > 0.68) & (values < 1.14)).all())
    assert bool((orthogonalized(torch.zeros(2, 3)) == 0).all())


def test_the_order_of_columns_does_not_matter_to_muon() -> None:
    """So that convolutions may be stored channels-last."""
    matrix = torch.randn(3, 8, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(3))
    torch.testing.assert_close(orthogonalized(matrix[:, order]), orthogonalized(matrix)[:, order])


# -- shared moments ----------------------------------------------------------------------------------------


def test_tensor_means_and_their_spread() -> None:
    layout = Layout(network())
    vectors = torch.arange(2.0 * layout.size, dtype=torch.float64).view(2, -1)
    means = layout.tensor_means(vectors)
    expected = [piece.mean(1) for piece in vectors.split([20, 5, 15, 3], 1)]
    assert torch.equal(means, torch.stack(expected, 1))
    spread = layout.spread(means)
    assert torch.equal(layout.tensor_means(spread), means) and torch.equal(layout.spread(means[0]), spread[0])


def test_blocks_and_whole_second_moments_differ() -> None:
    whole = ff.Algorithm(optimizer=parts.AdamW(beta1=0.0, eps=0.01, state="averaged"))
    blocks = ff.Algorithm(optimizer=parts.AdamW(beta1=0.0, eps=0.01, state="blocks"))
    ours, theirs = trajectory(whole, lr=0.02), trajectory(blocks, lr=0.02)
    assert torch.equal(ours[0], theirs[0])
    assert distance(ours[1:], theirs[1:]) > 1e-4


def test_fedadamw_begins_as_fedavg_with_adamw() -> None:
    ours, theirs = trajectory(ff.fedadamw()), trajectory(ff.build({"name": "fedavg", "optimizer": "adamw"}))
    assert distance(ours[:1], theirs[:1]) < TOLERANCE
    assert distance(ours[1:], theirs[1:]) > 1e-3


def test_gradients_of_adamw_are_not_decayed() -> None:
    """Coupled weight decay under AdamW would be another method."""
    model, data = network(), federation(1)
    own = data.client(0)
    settings = {"rounds": 1, "local_steps": 1, "batch_size": None, "participants": 1, "lr": 0.1}
    start = torch.cat([value.detach().flatten() for value in model.parameters()])
    gradient = gradient_of(network(), start, *own.batch(torch.arange(len(own))))
    algorithm = ff.build({"name": "fedavg", "optimizer": "adamw"})
    found = run(algorithm, data=data, weight_decay=0.3, **settings).server["model"]
    expected = start - 0.1 * (gradient / (gradient.abs() + 1e-8) + 0.3 * start)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
