"""What every registered algorithm promises, whatever it is: one suite, and no exceptions by name."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from problems import Shared, generic, train
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.algorithm import short_names
from flatfed.core.state import Dimensions, Vector, initial_state
from flatfed.data.pool import ClientData
from flatfed.data.samples import Samples
from flatfed.engines import chunks, threads
from flatfed.runs import environment as record

NAMES = sorted(ff.ALGORITHMS)
CLIENTS, PARTICIPANTS, SAMPLES, FEATURES, CLASSES = 12, 5, 12, 5, 3
ROUNDS, STEPS, BATCH = 3, 2, 4

every_algorithm = pytest.mark.parametrize("name", NAMES)
both_paths = pytest.mark.parametrize("path", ["matrix", "client"])
both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Problems as small as these only wait for torch's own threads."""
    with threads.single_threaded():
        yield


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A round of five participants is more than one chunk of the matrix path."""
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 3)


def samples(sizes: list[int], dtype: torch.dtype = torch.float64) -> list[Samples]:
    """Clients whose inputs lie around centres of their own, with one noisy linear rule for the labels."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    rule, clients = 2 * draw(FEATURES, CLASSES), []
    for size in sizes:
        inputs = draw(size, FEATURES) + 0.5 * draw(FEATURES)
        clients.append((inputs.to(dtype), (inputs @ rule + 0.5 * draw(size, CLASSES)).argmax(1)))
    return clients


@functools.cache
def federation(dtype: torch.dtype = torch.float64, unequal: bool = False) -> ff.Federation:
    sizes = [4 + 3 * (number % 3) if unequal else SAMPLES for number in range(CLIENTS)]
    return ff.Federation.from_tensors(samples(sizes, dtype))


class Network(nn.Sequential):
    """Two layers that note the size of every batch they are trained on."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))
        self.to(dtype)
        self.seen = Shared()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.normal_(0, 0.6, generator=generator)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.seen.append(len(inputs))
        return super().forward(inputs)


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


PARAMETERS = len(flat(Network()))


class WatchedData(ClientData):
    """A client's samples that note which of them are asked for."""

    log: list[tuple[int, ...]]

    def batch(self, positions: Tensor) -> Samples:
        self.log.append(tuple(positions.tolist()))
        return super().batch(positions)


class WatchedFederation(ff.Federation):
    """Notes the batches of every (round, client)."""

    test = None
    total_samples = CLIENTS * SAMPLES
    common_size = SAMPLES

    def __init__(self, dtype: torch.dtype) -> None:
        self.clients, self.round = samples([SAMPLES] * CLIENTS, dtype), 0
        self.log: dict[tuple[int, int], list[tuple[int, ...]]] = {}

    def __len__(self) -> int:
        return CLIENTS

    def client(self, number: int) -> ClientData:
        data = WatchedData(*self.clients[number])
        data.log = self.log.setdefault((self.round, number), [])
        return data

    def to(self, device: torch.device) -> WatchedFederation:
        return self


@dataclass
class Observed:
    """A run and what could be seen from outside while it was under way."""

    run: ff.Run
    cohorts: list[list[int]]
    batches: dict[tuple[int, int], list[tuple[int, ...]]]
    """The positions that each client asked for in each round."""
    evaluations: list[int]
    """Forward passes in training mode up to the end of each round."""


def settings(**options: Any) -> dict[str, Any]:
    return {
        "rounds": ROUNDS,
        "participants": PARTICIPANTS,
        "local_steps": STEPS,
        "batch_size": BATCH,
        "workers": 1,
        **options,
    }


def observe(algorithm: ff.Algorithm, dtype: torch.dtype = torch.float64, **options: Any) -> Observed:
    model, data = Network(dtype), WatchedFederation(dtype)
    cohorts: list[list[int]] = []
    evaluations: list[int] = []

    def finished(progress: ff.Progress) -> None:
        data.round = progress.round
        cohorts.append(list(progress.cohort))
        evaluations.append(len(model.seen))

    # The model and the data write down what they see, so that nothing but their version tells them apart.
    version = {"name": "watched", "version": "1"}
    run = train(model, data, algorithm, callbacks=[finished], **version, **settings(**options))
    return Observed(run, cohorts, data.log, evaluations)


@functools.cache
def observed(name: str, path: str, dtype: torch.dtype = torch.float64) -> Observed:
    return observe(generic(name), dtype, path=path)


@functools.cache
def plain_averaging(path: str) -> Observed:
    return observe(ff.Algorithm(), path=path)


def state(run: ff.Run) -> dict[str, Tensor]:
    """Everything that a run remembers: the server's vectors and each known client's row."""
    rows = {f"client {client}": run.clients.row(client) for client in run.clients.clients()}
    return {**run.server, **rows}


def is_finite(run: ff.Run) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in state(run).values())


def without_clock(line: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "seconds"}


def same_bits(left: ff.Run, right: ff.Run) -> bool:
    """Whether two runs agree in all state and, but for the clock, in their history."""
    ours, theirs = state(left), state(right)
    return (
        ours.keys() == theirs.keys()
        and all(torch.equal(ours[key], theirs[key]) for key in ours)
        and list(map(without_clock, left.history)) == list(map(without_clock, right.history))
    )


# -- training ----------------------------------------------------------------------------------------------


@every_algorithm
def test_it_trains_with_defaults(name):
    model = Network(torch.float32)
    run = train(model, federation(torch.float32), ff.ALGORITHMS[name](), rounds=2)
    assert [line["round"] for line in run.history] == [1, 2]
    assert is_finite(run)
    assert not torch.equal(flat(model), run.server["model"])
    assert torch.equal(flat(run.model), run.server["model"])


@functools.cache
def convex_problem() -> tuple[nn.Module, ff.Federation, float]:
    """Softmax regression from zero, tested on all clients' samples, and its first loss."""
    clients = samples([SAMPLES] * 6)
    everything = (
        torch.cat([inputs for inputs, _ in clients]),
        torch.cat([targets for _, targets in clients]),
    )
    model = nn.Linear(FEATURES, CLASSES).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
        first = float(F.cross_entropy(model(everything[0]), everything[1]))
    return model, ff.Federation.from_tensors(clients, test=everything), first


@every_algorithm
def test_it_decreases_a_convex_loss(name):
    model, data, first = convex_problem()
    run = train(
        model, data, ff.build(name), rounds=10, local_steps=2, batch_size=6, lr=0.1, workers=1, metrics={}
    )
    losses = [line["test_loss"] for line in run.history]
    assert losses[-1] < 0.8 * first
    assert losses[-1] < losses[4] < first


@every_algorithm
@both_paths
def test_one_participant_a_round_is_enough(name, path):
    run = train(Network(), federation(), generic(name), **settings(participants=1, path=path))
    assert [line["participants"] for line in run.history] == [1] * ROUNDS
    assert is_finite(run)
    assert all(line["update_norm"] > 0 for line in run.history)


SITUATIONS: dict[str, dict[str, Any]] = {
    "epochs": {"local_steps": None, "local_epochs": 2, "weighting": "samples", "clip": 0.5},
    "whole": {"batch_size": None, "sampling": "bernoulli", "clip": 0.5, "clip_stage": "total"},
    "steps": {"weighting": "samples", "weight_decay": 0.1, "lr_decay": 0.5, "clip": 0.5},
}


@every_algorithm
@pytest.mark.parametrize("situation", SITUATIONS)
def test_it_stays_finite_with_unequal_clients(name, situation):
    data = federation(unequal=True)
    run = train(Network(), data, generic(name), **settings(**SITUATIONS[situation]))
    assert data.common_size is None
    assert run.path == ("matrix" if situation == "steps" else "client")
    assert len(run.history) == ROUNDS
    assert is_finite(run)
    assert all(line["update_norm"] > 0 for line in run.history)


# -- state and traffic -------------------------------------------------------------------------------------

DIMENSIONS = Dimensions(PARAMETERS, (FEATURES,), CLASSES, tensors=4)


@every_algorithm
@both_dtypes
@both_paths
def test_server_state_is_kept_as_declared(name, dtype, path):
    run, algorithm = observed(name, path, dtype).run, generic(name)
    first = initial_state(algorithm.server_vectors, DIMENSIONS, flat(Network(dtype)))
    shapes = {vector.name: (DIMENSIONS.length(vector),) for vector in algorithm.server_vectors}
    assert {key: tuple(value.shape) for key, value in run.server.items()} == {
        "model": (PARAMETERS,),
        **shapes,
    }
    assert {value.dtype for value in run.server.values()} == {dtype}
    assert {parameter.dtype for parameter in run.model.parameters()} == {dtype}
    assert [key for key, value in first.items() if torch.equal(run.server[key], value)] == []


@every_algorithm
@both_dtypes
@both_paths
def test_client_state_is_kept_as_declared(name, dtype, path):
    seen, algorithm = observed(name, path, dtype), generic(name)
    took_part = {client for cohort in seen.cohorts for client in cohort}
    assert len(took_part) < CLIENTS
    store, received = seen.run.clients, seen.run.server["model"]
    assert set(store.clients()) == (took_part if algorithm.client_vectors else set())
    untouched = initial_state(algorithm.client_vectors, DIMENSIONS, received)
    for client in store.clients():
        vectors = store.read(client, received)
        assert {key: value.shape for key, value in vectors.items()} == {
            vector.name: (DIMENSIONS.length(vector),) for vector in algorithm.client_vectors
        }
        assert {value.dtype for value in vectors.values()} == {dtype}
        assert [key for key, value in vectors.items() if torch.equal(value, untouched[key])] == []


@every_algorithm
def test_traffic_is_the_declared_vectors(name):
    """Participants get what is sent in every round; all clients get what is sent once, in a single round."""
    algorithm, history = generic(name), observed(name, "client", torch.float32).run.history
    lengths = {"model": PARAMETERS} | {
        vector.name: DIMENSIONS.length(vector) for vector in algorithm.server_vectors
    }
    always = sum(lengths[key] for key in set(algorithm.broadcast) - set(algorithm.sent_once))
    once = sum(lengths[key] for key in algorithm.sent_once) * 4 * CLIENTS
    extra = [line["bytes_down"] - always * 4 * PARTICIPANTS for line in history]
    assert sorted(extra) == [0] * (ROUNDS - 1) + [once]
    sizes = [algorithm.declared_uploads[key].size for key in algorithm.uploads]
    up = sum(DIMENSIONS.length(Vector("", size)) for size in sizes)
    for line in history:
        assert line["bytes_up"] == up * 4 * PARTICIPANTS


@every_algorithm
def test_work_is_the_declared_gradients(name):
    """Until the samples that are sent once have come, a step does without the gradient on them."""
    algorithm, seen = generic(name), observed(name, "client")
    history, passes = seen.run.history, algorithm.full_gradients
    came = history.index(max(history, key=lambda line: line["bytes_down"])) if algorithm.sent_once else 0
    in_steps = [STEPS * (algorithm.gradient_evaluations - (number < came)) for number in range(ROUNDS)]
    # The whole of a client's data is one forward pass, and it is worth as many batches as it holds.
    made = [after - before for before, after in itertools.pairwise(seen.evaluations)]
    assert made == [PARTICIPANTS * (steps + passes) for steps in in_steps[1:]]
    counted = [line["gradient_evaluations"] for line in history]
    assert counted == [PARTICIPANTS * (steps + passes * SAMPLES // BATCH) for steps in in_steps]


# -- randomness --------------------------------------------------------------------------------------------


@every_algorithm
def test_a_seed_decides_every_bit(name):
    first = observed(name, "matrix").run.history[0]
    same, other = (observe(generic(name), path="matrix", rounds=1, seed=seed).run for seed in (0, 1))
    assert without_clock(same.history[0]) == without_clock(first)
    assert all(other.history[0][key] != first[key] for key in ("train_loss", "update_norm"))


@every_algorithm
@both_paths
def test_clients_and_batches_are_those_of_every_other_algorithm(name, path):
    seen, plain = observed(name, path), plain_averaging(path)
    assert seen.cohorts == plain.cohorts
    # A pass over all samples, which only some algorithms make, is longer than a batch.
    found, expected = (
        {key: [batch for batch in own if len(batch) == BATCH] for key, own in each.batches.items()}
        for each in (seen, plain)
    )
    assert found == expected
    assert len(set(map(tuple, seen.cohorts))) == ROUNDS
    later = [own for (number, client), own in found.items() if number > 0 and (0, client) in found]
    earlier = [found[0, client] for number, client in found if number > 0 and (0, client) in found]
    assert later
    assert not any(batch in before for before, own in zip(earlier, later, strict=True) for batch in own)
    # The engine tries the model on client 0 before the first round.
    assert sum(map(len, found.values())) == ROUNDS * PARTICIPANTS * STEPS + 1


# -- engines -----------------------------------------------------------------------------------------------


@every_algorithm
@both_paths
def test_workers_do_not_change_a_bit(name, path):
    alone, together = observed(name, path).run, observe(generic(name), path=path, workers=4).run
    assert alone.path == together.path == path
    assert same_bits(alone, together)


@every_algorithm
def test_the_matrix_and_the_client_path_agree(name):
    matrix, client = (state(observed(name, path).run) for path in ("matrix", "client"))
    assert matrix.keys() == client.keys()
    apart = [key for key in matrix if not torch.allclose(matrix[key], client[key], rtol=1e-9, atol=1e-9)]
    assert apart == []


@every_algorithm
def test_a_run_goes_on_where_it_stopped(name, tmp_path, monkeypatch):
    monkeypatch.setattr(record, "source_commit", lambda: None)
    options = {"path": "matrix", "folder": tmp_path, "checkpoint_every": 2}
    observe(generic(name), rounds=ROUNDS - 1, **options)
    resumed = observe(generic(name), **options)
    assert resumed.cohorts == observed(name, "matrix").cohorts[ROUNDS - 1 :]
    assert same_bits(resumed.run, observed(name, "matrix").run)


# -- descriptions ------------------------------------------------------------------------------------------


@every_algorithm
def test_it_survives_its_description(name):
    algorithm = ff.ALGORITHMS[name]()
    described = json.loads(json.dumps(algorithm.describe()))
    again = ff.build(described)
    assert described["name"] == name
    assert again == algorithm
    assert again.describe() == algorithm.describe()
    unnamed = replace(algorithm, name="custom", options={})
    composed = ff.build(json.loads(json.dumps(unnamed.describe())))
    assert composed == unnamed
    assert composed.broadcast == algorithm.broadcast
    assert composed.uploads == algorithm.uploads


class Cost(NamedTuple):
    """Vectors down and up per participant and round, those sent once, gradients per local step and round."""

    down: int = 1
    once: int = 0
    up: int = 1
    evaluations: int = 1
    full_passes: int = 0
    server: tuple[str, ...] = ()
    client: tuple[str, ...] = ()


DISTILLATION = (
    "matching_losses",
    "synthetic_inputs",
    "synthetic_inputs_first",
    "synthetic_inputs_second",
    "synthetic_labels",
    "synthetic_ready",
    "synthetic_step",
    "synthetic_step_first",
    "synthetic_step_second",
    "trajectory",
)
SOFT_LABELS = ("synthetic_labels_first", "synthetic_labels_second")

COSTS = {
    "dynafed": Cost(server=tuple(sorted(DISTILLATION + SOFT_LABELS))),
    "dynafed_syn_only": Cost(server=tuple(sorted(DISTILLATION + SOFT_LABELS))),
    "fedacg": Cost(server=("momentum",)),
    "fedadam": Cost(server=("momentum", "second_moment")),
    "fedadamw": Cost(down=4, up=3, server=("momentum_gradient", "second_filled", "second_moment")),
    "fedanag": Cost(down=2, server=("momentum_gradient",)),
    "fedasam": Cost(evaluations=2),
    "fedavg": Cost(),
    "fedavgm": Cost(server=("momentum",)),
    "fedcm": Cost(down=2, server=("momentum_gradient",)),
    "feddyn": Cost(server=("dual",), client=("dual",)),
    "fedexp": Cost(),
    "fedgamma": Cost(down=2, up=2, evaluations=2, server=("control",), client=("control",)),
    "fedgloss": Cost(evaluations=2, server=("dual", "last_displacement"), client=("dual",)),
    "fedlesam": Cost(client=("last_model",)),
    "fedlesam_d": Cost(server=("dual",), client=("dual", "last_model")),
    "fedlesam_s": Cost(down=2, up=2, server=("control",), client=("control", "last_model")),
    "fedlnag": Cost(down=2, up=2, server=("buffer",)),
    "fedmo": Cost(down=2, up=2, server=("control",), client=("control",)),
    "fedmoswa": Cost(down=2, up=2, server=("control",), client=("control",)),
    "fedmuon": Cost(down=3, up=2, server=("momentum", "momentum_gradient")),
    "fednsam": Cost(down=2, server=("momentum",)),
    "fednsam_d": Cost(down=2, server=("dual", "momentum"), client=("dual",)),
    "fednsam_s": Cost(down=3, up=2, server=("control", "momentum"), client=("control",)),
    "fedprox": Cost(),
    "fedrobust": Cost(client=("offset", "scale")),
    "fedsagd": Cost(down=2, server=("momentum_gradient",)),
    "fedsam": Cost(evaluations=2),
    "fedsmoo": Cost(
        down=2,
        up=2,
        evaluations=2,
        server=("dual", "perturbation"),
        client=("dual", "perturbation_dual"),
    ),
    "fedspeed": Cost(evaluations=2, client=("dual",)),
    "fedswa": Cost(),
    "fedsynsam": Cost(once=3, evaluations=3, server=DISTILLATION),
    "mimelite": Cost(down=2, up=2, full_passes=1, server=("momentum_gradient",)),
    "mofedsam": Cost(down=2, evaluations=2, server=("momentum_gradient",)),
    "scaffold": Cost(down=2, up=2, server=("control",), client=("control",)),
}
"""Written down from the papers' algorithm boxes, at the default options."""


def test_every_algorithm_is_in_the_table_of_costs():
    assert set(COSTS) == set(NAMES)


def declared(algorithm: ff.Algorithm) -> Cost:
    return Cost(
        down=len(algorithm.broadcast) - len(algorithm.sent_once),
        once=len(algorithm.sent_once),
        up=len(algorithm.uploads),
        evaluations=algorithm.gradient_evaluations,
        full_passes=algorithm.full_gradients,
        server=tuple(sorted(short_names(vector.name for vector in algorithm.server_vectors).values())),
        client=tuple(sorted(short_names(vector.name for vector in algorithm.client_vectors).values())),
    )


@pytest.mark.parametrize("name", sorted(COSTS))
def test_declared_costs(name):
    assert declared(ff.build(name)) == COSTS[name]


def test_options_change_what_is_declared():
    assert declared(ff.fedlesam(memory="server")) == Cost(down=2, server=("previous_model",))
    assert declared(ff.fedlnag(communicate=False)) == Cost()
    assert declared(ff.fednsam(single_vector=True)) == COSTS["fednsam"]._replace(down=1)
    assert declared(ff.scaffold(option="I")) == COSTS["scaffold"]._replace(full_passes=1)
    assert declared(ff.fedmoswa(option="I")) == COSTS["fedmoswa"]._replace(full_passes=1)
    assert declared(ff.fedsynsam(local_weight=1.0)) == COSTS["fedsynsam"]._replace(once=0, evaluations=2)
    without_second = tuple(name for name in DISTILLATION if not name.endswith("_second"))
    assert declared(ff.fedsynsam(sample_optimizer="sgd")) == COSTS["fedsynsam"]._replace(
        server=without_second
    )
    assert declared(ff.fedspeed(duals="server")) == COSTS["fedspeed"]._replace(server=("dual",))
