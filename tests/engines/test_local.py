"""The local engine: its paths, random numbers, buffers, layouts, aggregation and manners."""

from __future__ import annotations

import copy
import itertools
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import problems
import pytest
import torch
import torch.nn.functional as F
from problems import Shared
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import flatfed as ff
from flatfed.core.sampling import batches
from flatfed.data.samples import Samples
from flatfed.engines import chunks, local, processes, sums, threads, worker
from flatfed.engines.sums import CohortSums, PairwiseSum, Piece
from flatfed.training.loop import TrainingState
from flatfed.training.start import start_engine

CLASSES = 3
TRIAL_PASSES = 2
"""So often a model is called in training mode before it is trained."""


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Problems as small as these only wait for torch's own threads."""
    with threads.single_threaded():
        yield


@pytest.fixture(autouse=True)
def same_models() -> None:
    torch.manual_seed(0)


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def federation(
    sizes: Sequence[int] = (8, 8, 8, 8), shape: tuple[int, ...] = (5,), test: int = 0
) -> ff.Federation:
    """Random inputs whose first entry is the client's number, with random labels."""
    clients = []
    for number, size in enumerate(sizes):
        inputs = draw(size, *shape, seed=number)
        inputs.flatten(1)[:, 0] = number
        clients.append((inputs, inputs.flatten(1)[:, 1:].sum(1).abs().long() % CLASSES))
    held_out = draw(test, *shape, seed=99)
    labels = torch.arange(test) % CLASSES
    return ff.Federation.from_tensors(clients, test=(held_out, labels) if test else None)


def options(**changed: Any) -> dict[str, Any]:
    return {"rounds": 1, "local_steps": 2, "batch_size": 4, "lr": 0.1, "workers": 1, **changed}


def settings_for(**changed: Any) -> tuple[ff.Training, ff.Execution]:
    chosen = options(**changed)
    execution = {name: chosen.pop(name) for name in list(chosen) if name in ff.Execution.model_fields}
    return ff.Training(**chosen), ff.Execution(**execution)


def train(
    model: nn.Module, data: ff.Federation, algorithm: ff.Algorithm | None = None, **changed: Any
) -> ff.Run:
    chosen = ff.fedavg() if algorithm is None else algorithm
    return problems.train(model, data, chosen, **options(**changed))


def by_name(algorithm: ff.Algorithm) -> str:
    return algorithm.name


def weights(run: ff.Run) -> Tensor:
    return run.server["model"]


class Block(nn.Module):
    """A linear classifier of what a function makes of the inputs while it is trained."""

    def __init__(self, change: Callable[[Tensor], Tensor], features: int = 5) -> None:
        super().__init__()
        self.head, self.change = nn.Linear(features, CLASSES).double(), change

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.change(inputs) if self.training else inputs)


class Attention(nn.Module):
    def __init__(self, dropout: float, need_weights: bool = False) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=dropout, batch_first=True)
        self.head, self.need_weights = nn.Linear(4, CLASSES), need_weights
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        attended, _ = self.attention(inputs, inputs, inputs, need_weights=self.need_weights)
        return self.head(attended.mean(1))


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(4, 6, num_layers=2, dropout=dropout, batch_first=True)
        self.head = nn.Linear(6, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.recurrent(inputs)[0][:, -1])


class Encoder(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=dropout, batch_first=True)
        self.head = nn.Linear(4, CLASSES)
        self.double()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.layer(inputs).mean(1))


def classifier(*before: nn.Module, features: int = 5) -> nn.Sequential:
    return nn.Sequential(*before, nn.Linear(features, CLASSES)).double()


def convolutional() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.Conv2d(4, 6, (1, 3), groups=2, bias=False),
        nn.Flatten(),
        nn.Linear(6 * 5 * 3, CLASSES),
    ).double()


class Constant(nn.Module):
    """Buffers that never change, among them values that arithmetic would not give back."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(5, CLASSES).double()
        self.register_buffer("mask", torch.tensor([0.0, float("-inf"), -0.0, float("inf"), 0.1]))
        self.register_buffer("steps", torch.tensor([7, -3]))
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.where(self.mask.isfinite(), inputs, 0.0))


# -- the path ----------------------------------------------------------------------------------------------


def depends_on_values(inputs: Tensor) -> Tensor:
    return inputs if float(inputs.sum()) > 0 else -inputs


PATHS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str, str]] = {
    "linear": (classifier, {}, "matrix", "at most 262144 parameters and all batches have one shape; its"),
    "constant buffers": (Constant, {}, "matrix", "all batches have one shape"),
    "epochs of equal clients": (classifier, {"local_epochs": 1, "local_steps": None}, "matrix", "one shape"),
    "large": (
        lambda: classifier(nn.Linear(5, 40_000), nn.ReLU(), features=40_000),
        {},
        "client",
        "more than 262144 parameters",
    ),
    "dropout": (lambda: classifier(nn.Dropout()), {}, "client", "draws random numbers"),
    "batch normalisation": (lambda: classifier(nn.BatchNorm1d(5)), {}, "client", "changes its buffers"),
    "control flow": (lambda: Block(depends_on_values), {}, "client", "cannot be vectorised"),
    "asked for": (classifier, {"path": "client"}, "client", "asked for"),
}


@pytest.mark.parametrize("case", PATHS)
def test_the_path_follows_from_the_model(case, tmp_path):
    make, changed, path, reason = PATHS[case]
    run = train(make(), federation(), folder=tmp_path, **changed)
    assert run.path == path
    assert reason in run.path_reason
    recorded = json.loads((tmp_path / "environment.json").read_text())["engine"]
    assert (recorded["path"], recorded["reason"]) == (run.path, run.path_reason)
    assert recorded["parameters"] == len(weights(run))


def test_convolutional_and_recurrent_models_go_client_by_client():
    assert train(convolutional(), federation(shape=(2, 5, 5))).path == "client"
    assert train(Recurrent(), federation(shape=(3, 4))).path == "client"


def test_unequal_batches_go_client_by_client():
    unequal = federation((8, 5))
    for changed in ({"local_steps": None}, {"batch_size": None}):
        run = train(classifier(), unequal, **changed)
        assert run.path == "client"
        assert "different" in run.path_reason
    assert train(classifier(), unequal).path == "matrix"


@pytest.mark.parametrize(
    ("model", "sizes", "reason"),
    [
        (classifier(nn.Dropout()), (8, 8), "draws random numbers"),
        (classifier(nn.BatchNorm1d(5)), (8, 8), "changes its buffers"),
        (classifier(), (8, 5), "different numbers of steps"),
        (Block(depends_on_values), (8, 8), "cannot be vectorised"),
    ],
    ids=["dropout", "batch normalisation", "unequal", "control flow"],
)
def test_an_impossible_matrix_is_refused(model, sizes, reason):
    with pytest.raises(ff.FlatfedError) as refusal:
        train(model, federation(sizes), path="matrix", local_steps=None)
    message = str(refusal.value)
    assert message.startswith("path = 'matrix': ")
    assert reason in message
    assert "\n" not in message


class Pause(nn.Module):
    """Lets other threads run while a model is in the middle of its forward pass."""

    def forward(self, inputs: Tensor) -> Tensor:
        time.sleep(0.001)
        return inputs


def test_chunks_of_the_matrix_path_do_not_disturb_each_other(monkeypatch):
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 2)
    model, data = classifier(nn.Linear(5, 5), Pause(), nn.Linear(5, 5), Pause()), federation([8] * 24)
    alone, together = (train(model, data, path="matrix", workers=workers) for workers in (1, 4))
    assert torch.equal(weights(alone), weights(together))


def test_both_paths_train_in_training_mode():
    """Evaluations in between leave the models that they use in evaluation mode."""
    model, data = Block(lambda inputs: 3 * inputs), federation(test=4)
    matrix, client = (train(model, data, rounds=3, path=path) for path in ("matrix", "client"))
    assert torch.allclose(weights(matrix), weights(client), rtol=0, atol=1e-9)


# -- random numbers ----------------------------------------------------------------------------------------


class SpiedDropout(nn.Module):
    """Dropout of ones that are then multiplied with the inputs; keeps its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks = Shared()

    def forward(self, inputs: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(inputs), 0.5, self.training)
        if self.training:
            self.masks.append(mask.detach().clone())
        return inputs * mask


def masks_of(algorithm: ff.Algorithm, **changed: Any) -> list[Tensor]:
    """The masks of two rounds of three clients with two steps each, after the engine's first try."""
    spy = SpiedDropout()
    tried: list[int] = []
    data = federation((8, 8, 8), shape=(40,))
    fresh = data.client

    def client(number: int) -> Any:
        tried.append(len(spy.masks))
        return fresh(number)

    data.client = client
    train(classifier(spy, features=40), data, algorithm, rounds=2, **changed)
    return spy.masks[tried[1] :]


def test_every_client_round_and_step_has_a_mask_of_its_own():
    masks = masks_of(ff.fedavg())
    assert len(masks) == 2 * 3 * 2
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == len(masks)
    again, other = masks_of(ff.fedavg()), masks_of(ff.fedavg(), seed=1)
    assert all(torch.equal(one, two) for one, two in zip(masks, again, strict=True))
    assert not any(torch.equal(one, two) for one, two in zip(masks, other, strict=True))


def test_both_gradients_of_a_sharpness_aware_step_see_one_mask():
    masks = masks_of(ff.fedsam())
    assert len(masks) == 2 * 2 * 3 * 2
    assert all(torch.equal(first, second) for first, second in zip(masks[::2], masks[1::2], strict=True))
    plain = masks_of(ff.fedavg())
    assert all(torch.equal(one, two) for one, two in zip(masks[::2], plain, strict=True))


@pytest.mark.parametrize("algorithm", [ff.fedavg(), ff.fedsam(), ff.mimelite(), ff.fedrobust()], ids=by_name)
def test_dropout_does_not_depend_on_the_workers(algorithm):
    model, data = classifier(nn.Dropout()), federation([8] * 9)
    alone, together = (train(model, data, algorithm, rounds=2, workers=n) for n in (1, 4))
    assert alone.path == "client"
    assert torch.equal(weights(alone), weights(together))
    assert alone.history[-1]["train_loss"] == together.history[-1]["train_loss"]
    assert not torch.equal(weights(alone), weights(train(model, data, algorithm, rounds=2, seed=1)))


class Noise:
    """An augmentation that adds noise to the training inputs."""

    draws = True

    def __init__(self) -> None:
        self.seen = Shared()

    def train(self, inputs: Tensor, generator: torch.Generator | None) -> Tensor:
        noise = torch.randn(inputs.shape, generator=generator, dtype=inputs.dtype)
        self.seen.append(noise.flatten().tolist())
        return inputs + noise

    def evaluate(self, inputs: Tensor) -> Tensor:
        return inputs


def test_augmentation_follows_the_clients_stream(monkeypatch):
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 2)
    models: dict[str, Tensor] = {}
    draws: list[list[float]] = []
    before = torch.get_rng_state()
    for path in ("matrix", "client"):
        for workers in (1, 4):
            data = federation([8] * 6, test=4)
            data.transform = Noise()
            run = train(classifier(), data, ff.fedsam(), rounds=2, path=path, workers=workers, seed=3)
            models[f"{path} {workers}"] = weights(run)
            draws.append(sorted(data.transform.seen))
            torch.set_rng_state(before)
    assert torch.equal(models["matrix 1"], models["matrix 4"])
    assert torch.equal(models["client 1"], models["client 4"])
    assert torch.allclose(models["matrix 1"], models["client 1"], rtol=0, atol=1e-9)
    # One draw for every round, client and step, both gradients of a step included.
    assert len({tuple(noise) for noise in draws[0]}) == len(draws[0]) == 2 * 6 * 2
    assert all(other == draws[0] for other in draws)


def test_training_neither_reads_nor_moves_the_global_stream():
    model, data = classifier(nn.Dropout()), federation(test=6)
    runs = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        runs.append(train(model, data, ff.mimelite(), rounds=2, workers=3, evaluate_on_clients=True))
        assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(weights(runs[0]), weights(runs[1]))


@pytest.mark.parametrize("always", [True, False], ids=["always", "only in evaluation"])
def test_evaluation_neither_reads_nor_moves_the_global_stream(always):
    class Noisy(nn.Linear):
        def forward(self, inputs: Tensor) -> Tensor:
            noisy = always or not self.training
            return super().forward(inputs + torch.randn_like(inputs) if noisy else inputs)

    model, data = Noisy(5, CLASSES).double(), federation(test=1100)
    losses = []
    for seed, workers in ((1, 1), (2, 4)):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        losses.append(train(model, data, workers=workers).history[-1]["test_loss"])
        assert torch.equal(torch.get_rng_state(), before)
    assert losses[0] == losses[1]


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda inputs: torch.rand(inputs.shape),
    "rand_like": torch.rand_like,
    "randn": lambda inputs: torch.randn(inputs.shape, dtype=inputs.dtype),
    "randn_like": torch.randn_like,
    "randint": lambda inputs: torch.randint(0, 1000, inputs.shape),
    "randint_like": lambda inputs: torch.randint_like(inputs, 1000),
    "randint_like with both ends": lambda inputs: torch.randint_like(inputs, 10, 1000),
    "randperm": lambda inputs: torch.randperm(inputs.shape[1]),
    "normal": lambda inputs: torch.normal(torch.zeros_like(inputs), 1.0),
    "uniform_": lambda inputs: torch.empty_like(inputs).uniform_(),
    "bernoulli": lambda inputs: torch.bernoulli(torch.full_like(inputs, 0.5)),
    "bernoulli_": lambda inputs: torch.empty_like(inputs).bernoulli_(0.5),
    "multinomial": lambda inputs: torch.multinomial(torch.ones(len(inputs), 99), 5),
    "dropout": lambda inputs: F.dropout(torch.ones_like(inputs), 0.5),
    "dropout in place": lambda inputs: F.dropout(torch.ones_like(inputs), 0.5, inplace=True),
    "alpha_dropout": lambda inputs: F.alpha_dropout(torch.ones_like(inputs), 0.5, training=True),
    "dropout1d": lambda inputs: F.dropout1d(torch.ones_like(inputs), 0.5),
    "rrelu": lambda inputs: F.rrelu(-torch.ones_like(inputs), training=True),
    "gumbel_softmax": lambda inputs: F.gumbel_softmax(torch.zeros_like(inputs)),
    "distribution": lambda inputs: torch.distributions.Gamma(1.0, 1.0).sample(inputs.shape),
}


@pytest.mark.parametrize("draw_noise", DRAWS.values(), ids=DRAWS.keys())
def test_random_operations_follow_the_clients_stream(draw_noise):
    def noises(workers: int) -> tuple[list[Any], Tensor]:
        seen = Shared()

        def change(inputs: Tensor) -> Tensor:
            noise = draw_noise(inputs).double()
            seen.append((float(inputs[0, 0]), noise.flatten().tolist()))
            return inputs + noise

        torch.manual_seed(workers)
        model = Block(change)
        with torch.no_grad():
            model.head.weight.fill_(0.1)
            model.head.bias.zero_()
        before = torch.get_rng_state()
        run = train(model, federation(), workers=workers)
        assert torch.equal(torch.get_rng_state(), before)
        assert "draws random numbers" in run.path_reason
        return sorted(seen[TRIAL_PASSES:]), weights(run)

    (alone, first), (together, second) = noises(1), noises(3)
    assert len(alone) == 4 * 2
    assert len({tuple(noise) for _, noise in alone}) > 4
    assert alone == together
    assert torch.equal(first, second)


@pytest.mark.parametrize(
    "model",
    [Attention(0.5), Attention(0.5, need_weights=True), Encoder(0.5), Recurrent(0.5)],
    ids=["attention", "attention with weights", "encoder", "recurrent"],
)
def test_dropout_inside_layers_follows_the_clients_stream(model):
    data = federation(shape=(3, 4))
    before = torch.get_rng_state()
    alone, together = (train(model, data, workers=workers) for workers in (1, 3))
    assert torch.equal(torch.get_rng_state(), before)
    assert "draws random numbers" in alone.path_reason
    assert torch.equal(weights(alone), weights(together))


@pytest.mark.parametrize("model", [Attention(0.0), Encoder(0.0)], ids=["attention", "encoder"])
def test_attention_without_dropout_is_not_random(model):
    run = train(model, federation(shape=(3, 4)), path="client")
    assert not torch.equal(weights(run), nn.utils.parameters_to_vector(model.parameters()))
    assert "random" not in train(model, federation(shape=(3, 4))).path_reason


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_a_model_that_draws_random_numbers_only_later_is_refused(path):
    calls = Shared()

    def change(inputs: Tensor) -> Tensor:
        calls.append(None)
        return F.dropout(inputs, 0.5) if len(calls) > TRIAL_PASSES + 2 else inputs

    with pytest.raises(ff.FlatfedError, match="random") as refusal:
        train(Block(change), federation(), rounds=4, path=path)
    assert "\n" not in str(refusal.value)


def test_activation_checkpoints_give_the_same_gradients_or_are_refused():
    """The recomputation in the backward pass must see the mask of the forward pass."""

    class Deep(nn.Module):
        def __init__(self, saves_memory: bool) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(5, 6), nn.Linear(6, CLASSES)
            self.saves_memory = saves_memory
            self.double()

        def inner(self, inputs: Tensor) -> Tensor:
            return F.dropout(self.first(inputs).tanh(), 0.5, self.training)

        def forward(self, inputs: Tensor) -> Tensor:
            if self.saves_memory:
                return self.head(checkpoint(self.inner, inputs, use_reentrant=False))
            return self.head(self.inner(inputs))

    plain, saving = Deep(False), Deep(True)
    saving.load_state_dict(plain.state_dict())
    expected = weights(train(plain, federation()))
    try:
        saved = weights(train(saving, federation()))
    except ff.FlatfedError as refusal:
        assert "checkpoint" in str(refusal)
    else:
        assert torch.allclose(saved, expected)


# -- buffers -----------------------------------------------------------------------------------------------


def positions_of(data: ff.Federation, client: int, round_number: int = 0, **changed: Any) -> list[Samples]:
    """The batches of a client's round."""
    own = data.client(client)
    training, _ = settings_for(**changed)
    return [own.batch(chosen) for chosen in batches(training, len(own), round_number, client)]


def normalised() -> nn.Sequential:
    """The first layer's statistics are those of the inputs, whatever the parameters do."""
    return classifier(nn.BatchNorm1d(5, momentum=0.3), nn.Linear(5, 4), nn.BatchNorm1d(4), features=4)


@pytest.mark.parametrize("algorithm", [ff.fedavg(), ff.fedsam(), ff.mimelite()], ids=by_name)
@pytest.mark.parametrize("weighting", ["uniform", "samples"])
def test_buffers_move_by_the_mean_change(algorithm, weighting):
    data = federation((12, 6))
    run = train(normalised(), data, algorithm, rounds=2, weighting=weighting)
    shares = [1 / 2, 1 / 2] if weighting == "uniform" else [2 / 3, 1 / 3]
    mean, variance = torch.zeros(5).double(), torch.ones(5).double()
    for number in range(2):
        changes = []
        for client in range(2):
            own_mean, own_variance = mean.clone(), variance.clone()
            for inputs, _ in positions_of(data, client, number):
                own_mean = 0.7 * own_mean + 0.3 * inputs.mean(0)
                own_variance = 0.7 * own_variance + 0.3 * inputs.var(0)
            changes.append((own_mean - mean, own_variance - variance))
        mean = mean + sum(share * change for share, (change, _) in zip(shares, changes, strict=True))
        variance = variance + sum(share * change for share, (_, change) in zip(shares, changes, strict=True))
    first = run.model[0]
    assert torch.allclose(first.running_mean, mean, rtol=0, atol=1e-12)
    assert torch.allclose(first.running_var, variance, rtol=0, atol=1e-12)
    # Two rounds of two steps: a second gradient or a pass over all data is not counted.
    assert first.num_batches_tracked.dtype == torch.int64
    assert int(first.num_batches_tracked) == 4
    assert int(run.model[2].num_batches_tracked) == 4


def numbered_sums(count: int) -> list[CohortSums]:
    """Sums whose order of addition shows in their last bits."""
    generator = torch.Generator().manual_seed(1)
    return [
        CohortSums(
            weight=1.0, uploads={"displacement": torch.randn(50, generator=generator)}, loss=float(place) / 3
        )
        for place in range(count)
    ]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 13])
def test_a_sum_has_the_same_bits_however_its_stretches_are_handed_out(count):
    parts = numbered_sums(count)
    whole = PairwiseSum()
    for place, own in enumerate(parts):
        whole.add(Piece(place, 1, own))
    expected = whole.total()
    assert torch.allclose(
        expected.uploads["displacement"], sum(part.uploads["displacement"] for part in parts)
    )
    assert expected.weight == count
    for first, second in itertools.combinations_with_replacement(range(count + 1), 2):
        merged = PairwiseSum()
        for start, stop in ((0, first), (first, second), (second, count)):
            stretch = PairwiseSum()
            for place in range(start, stop):
                stretch.add(Piece(place, 1, parts[place]))
            assert len(stretch.pieces) <= 2 * max(1, (stop - start).bit_length())
            for piece in stretch.pieces:
                merged.add(piece)
        assert torch.equal(merged.total().uploads["displacement"], expected.uploads["displacement"])
        assert merged.total().loss == expected.loss


def test_counters_are_rounded_to_the_mean():
    data = federation((4, 4, 20))
    run = train(normalised(), data, local_steps=None)
    assert run.model[0].num_batches_tracked.dtype == torch.int64
    assert int(run.model[0].num_batches_tracked) == round((1 + 1 + 5) / 3)


@pytest.mark.parametrize("algorithm", [ff.fedavg(), ff.fedsam()], ids=by_name)
def test_buffers_that_are_replaced_move_too(algorithm):
    class Running(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(5, CLASSES).double()
            self.register_buffer("mean", torch.zeros(5).double())

        def forward(self, inputs: Tensor) -> Tensor:
            if self.training:
                self.mean = self.mean + inputs.mean(0)
            return self.head(inputs)

    data = federation((8, 8))
    run = train(Running(), data, algorithm)
    expected = sum(inputs.mean(0) for client in range(2) for inputs, _ in positions_of(data, client)) / 2
    assert "buffers" in run.path_reason
    assert torch.allclose(run.model.mean, expected)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_constant_buffers_stay_bit_for_bit(path):
    model = Constant()
    run = train(model, federation(), ff.fedsam(), rounds=2, path=path)
    buffers = dict(run.model.named_buffers())
    for name, value in model.named_buffers():
        assert buffers[name].dtype == value.dtype
        assert torch.equal(buffers[name].view(torch.uint8), value.view(torch.uint8))


def test_buffers_travel_with_the_model():
    run = train(normalised(), federation(), participants=3)
    sent = run.history[-1]["bytes_down"], run.history[-1]["bytes_up"]
    buffers = 8 * (2 * 5 + 2 * 4 + 2)
    assert sent == (3 * (8 * len(weights(run)) + buffers),) * 2


# -- parameters --------------------------------------------------------------------------------------------


def trained_by_hand(
    model: nn.Module, data: ff.Federation, shares: Sequence[float], **changed: Any
) -> nn.Module:
    """A round of plain averaging with torch's own optimizer on separate copies of the model."""
    mean = copy.deepcopy(model)
    for parameter in mean.parameters():
        if parameter.requires_grad:
            parameter.data.zero_()
    for client, share in enumerate(shares):
        own = copy.deepcopy(model)
        trainable = [parameter for parameter in own.parameters() if parameter.requires_grad]
        optimizer = torch.optim.SGD(trainable, lr=0.1)
        for inputs, targets in positions_of(data, client, **changed):
            optimizer.zero_grad()
            F.cross_entropy(own(inputs), targets).backward()
            optimizer.step()
        for into, parameter in zip(mean.parameters(), own.parameters(), strict=True):
            if parameter.requires_grad:
                into.data += share * parameter.data
    return mean


def assert_same_parameters(trained: nn.Module, expected: nn.Module, first: nn.Module) -> None:
    expectations = dict(expected.named_parameters())
    for name, parameter in trained.named_parameters():
        assert torch.allclose(parameter, expectations[name], rtol=0, atol=1e-12), name
    assert any(
        not torch.equal(one, two) for one, two in zip(trained.parameters(), first.parameters(), strict=True)
    )


def test_a_convolutional_round_is_that_of_a_plain_loop():
    model, data = convolutional(), federation(shape=(2, 5, 5))
    run = train(model, data, workers=2)
    assert_same_parameters(run.model, trained_by_hand(model, data, [1 / 4] * 4), model)
    assert run.model[0].weight.shape == model[0].weight.shape


def test_convolution_weights_are_bound_channels_last():
    layouts = Shared()

    class Spied(nn.Conv2d):
        def forward(self, inputs: Tensor) -> Tensor:
            layouts.append(self.weight.is_contiguous(memory_format=torch.channels_last))
            return super().forward(inputs)

    model = nn.Sequential(Spied(2, 4, 3), nn.Flatten(), nn.Linear(4 * 3 * 3, CLASSES)).double()
    train(model, federation(shape=(2, 5, 5)), path="client")
    # All but the first tries, which use the model as it was given.
    assert layouts[-8:] == [True] * 8


@pytest.mark.parametrize("path", ["matrix", "client"])
@pytest.mark.parametrize(
    ("weighting", "shares"), [("uniform", [1 / 3] * 3), ("samples", [12 / 24, 8 / 24, 4 / 24])]
)
def test_the_mean_is_weighted_as_asked(path, weighting, shares):
    model, data = classifier(nn.Linear(5, 5), nn.Tanh()), federation((12, 8, 4))
    run = train(model, data, path=path, weighting=weighting)
    assert_same_parameters(run.model, trained_by_hand(model, data, shares), model)
    losses = []
    for client, share in enumerate(shares):
        own = copy.deepcopy(model)
        for inputs, targets in positions_of(data, client):
            loss = F.cross_entropy(own(inputs), targets)
            slopes = torch.autograd.grad(loss, list(own.parameters()))
            with torch.no_grad():
                for parameter, slope in zip(own.parameters(), slopes, strict=True):
                    parameter.sub_(0.1 * slope)
            losses.append(share * float(loss.detach()) / 2)
    assert run.history[0]["train_loss"] == pytest.approx(sum(losses), rel=1e-12)


def test_epochs_of_unequal_clients_are_weighted_as_asked():
    model, data = classifier(), federation((10, 3, 7))
    run = train(model, data, local_steps=None, local_epochs=2, weighting="samples")
    expected = trained_by_hand(model, data, [0.5, 0.15, 0.35], local_steps=None, local_epochs=2)
    assert_same_parameters(run.model, expected, model)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_frozen_parameters_stay_and_do_not_travel(path):
    model, data = classifier(nn.Linear(5, 5), nn.Tanh()), federation()
    model[0].weight.requires_grad_(False)
    run = train(model, data, path=path)
    assert torch.equal(run.model[0].weight, model[0].weight)
    assert not run.model[0].weight.requires_grad
    assert len(weights(run)) == 5 + 5 * CLASSES + CLASSES
    assert run.history[0]["bytes_up"] == 4 * 8 * len(weights(run))
    assert_same_parameters(run.model, trained_by_hand(model, data, [1 / 4] * 4), model)


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_tied_parameters_stay_tied(path):
    model, data = classifier(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)), federation()
    model[2].weight = model[0].weight
    run = train(model, data, path=path)
    assert run.model[2].weight is run.model[0].weight
    assert len(weights(run)) == 25 + 5 + 5 + 5 * CLASSES + CLASSES
    assert_same_parameters(run.model, trained_by_hand(model, data, [1 / 4] * 4), model)


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (nn.ReLU(), "no trainable parameters"),
        (nn.Sequential(nn.Linear(5, 5), classifier()), "several dtypes"),
    ],
    ids=["nothing to train", "two dtypes"],
)
def test_models_that_are_no_vector_are_refused_in_one_line(model, what):
    with pytest.raises(ff.FlatfedError, match=what) as refusal:
        train(model, federation())
    assert "\n" not in str(refusal.value)


# -- other inputs, losses and devices ----------------------------------------------------------------------


def tokens() -> ff.Federation:
    clients = []
    for number in range(4):
        words = torch.randint(0, 11, (8, 6), generator=torch.Generator().manual_seed(number))
        clients.append((words, words[:, -1] % CLASSES))
    return ff.Federation.from_tensors(clients)


class Words(nn.Module):
    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, CLASSES)
        self.recurrent = nn.LSTM(4, 4, batch_first=True) if recurrent else None
        self.double()

    def forward(self, words: Tensor) -> Tensor:
        vectors = self.embedding(words)
        return self.head(vectors.mean(1) if self.recurrent is None else self.recurrent(vectors)[0][:, -1])


def test_whole_number_inputs():
    model, data = Words(recurrent=False), tokens()
    matrix, client = (train(model, data, path=path) for path in ("matrix", "client"))
    assert_same_parameters(matrix.model, trained_by_hand(model, data, [1 / 4] * 4), model)
    assert torch.allclose(weights(matrix), weights(client), rtol=0, atol=1e-12)
    with pytest.raises(ff.FlatfedError, match="must be floats"):
        train(model, data, ff.fedrobust())


def test_a_recurrent_model_learns():
    run = train(Words(recurrent=True), tokens(), rounds=6, local_steps=8, lr=1.0, workers=2)
    assert run.path == "client"
    assert run.history[-1]["train_loss"] < 0.7 * run.history[0]["train_loss"]


@pytest.mark.parametrize("path", ["matrix", "client"])
def test_regression_with_its_own_loss_and_metric(path):
    def absolute(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.squeeze(1) - targets).abs().mean()

    def squared(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.mse_loss(outputs.squeeze(1), targets)

    def halves(seed: int, size: int) -> Samples:
        inputs = draw(size, 5, seed=seed)
        return inputs, inputs.sum(1)

    # More test samples than are evaluated at once, and not a multiple of them.
    data = ff.Federation.from_tensors([halves(seed, 8) for seed in range(4)], test=halves(9, 700))
    run = train(
        nn.Linear(5, 1).double(),
        data,
        path=path,
        rounds=30,
        loss=squared,
        metrics={"absolute": absolute},
        evaluate_on_clients=True,
    )
    with torch.no_grad():
        outputs = run.model(data.test[0])
        own = run.model(data.client(2).batch(torch.arange(8))[0])
    last = run.history[-1]
    assert last["test_loss"] == pytest.approx(float(squared(outputs, data.test[1])), rel=1e-9)
    assert last["test_absolute"] == pytest.approx(float(absolute(outputs, data.test[1])), rel=1e-9)
    assert "test_accuracy" not in last
    assert last["test_loss"] < 0.1 * run.history[0]["test_loss"]
    expected = squared(own, data.client(2).batch(torch.arange(8))[1])
    assert run.per_client[2]["loss"] == pytest.approx(float(expected), rel=1e-9)
    assert len(run.per_client) == 4


def test_the_mean_of_the_participants_can_be_evaluated():
    model, data = classifier(), federation(test=9)
    whole = train(model, data, ff.fedavg())
    half = train(model, data, ff.fedavg(server_rate=0.5), evaluate="active_mean")
    assert half.history[0]["test_loss"] == pytest.approx(whole.history[0]["test_loss"], rel=1e-12)
    assert not torch.equal(weights(half), weights(whole))


def test_the_mean_of_the_participants_is_that_of_their_models():
    """Also where they upload something else than how far they moved."""
    model, data = classifier(), federation(test=9)
    algorithm = ff.Algorithm(correct=ff.parts.DynamicRegulariser(0.0, duals="participants"))
    run = train(model, data, algorithm, evaluate="active_mean")
    mean = trained_by_hand(model, data, [1 / 4] * 4)
    expected = F.cross_entropy(mean(data.test[0]), data.test[1])
    assert run.history[0]["test_loss"] == pytest.approx(float(expected.detach()), rel=1e-12)


def test_evaluation_is_in_evaluation_mode():
    data = federation(test=9)
    run = train(
        nn.Sequential(nn.Dropout(), *normalised()), data, rounds=2, workers=2, evaluate_on_clients=True
    )
    final = run.model.eval()
    with torch.no_grad():
        expected = F.cross_entropy(final(data.test[0]), data.test[1])
        inputs, targets = data.client(1).batch(torch.arange(8))
        own = F.cross_entropy(final(inputs), targets)
    assert run.history[-1]["test_loss"] == pytest.approx(float(expected), rel=1e-12)
    assert run.per_client[1]["loss"] == pytest.approx(float(own), rel=1e-12)


@pytest.mark.parametrize(("limit", "expected"), [(0, [2, 3, 3]), (10**6, [8])])
def test_large_convolutional_models_are_evaluated_in_small_batches(limit, expected, monkeypatch):
    monkeypatch.setattr(threads, "MATRIX_PARAMETERS", limit)
    monkeypatch.setattr(threads, "LARGE_EVALUATION_BATCH", 3)
    sizes: list[int] = []

    def counted(outputs: Tensor, targets: Tensor) -> Tensor:
        sizes.append(len(targets))
        return outputs.sum(1).mean()

    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, CLASSES)).double()
    data = federation(shape=(1, 4, 4), test=8)
    problems.train(model, data, ff.fedavg(), metrics={"counted": counted}, **options())
    assert sorted(sizes) == expected


def test_evaluations_come_as_often_as_asked_and_at_the_end():
    run = train(classifier(), federation(test=9), rounds=5, evaluate_every=2)
    assert [line["round"] for line in run.history if "test_loss" in line] == [2, 4, 5]


def engine_for(model: nn.Module, **changed: Any) -> local.LocalEngine:
    training, execution = settings_for(**changed)
    engine = start_engine(ff.Task(model, federation()), ff.fedavg(), training, execution)
    assert isinstance(engine, local.LocalEngine)
    return engine


def test_the_device_is_passed_on():
    """A device without numbers is enough to see where everything goes."""
    model = classifier()
    tried = engine_for(model)
    tried.close()
    plan = replace(tried.plan, device=torch.device("meta"))
    engine = local.LocalEngine(plan, model, federation(), ff.Execution(workers=2))
    try:
        with engine._threads.worker() as one:
            places = {parameter.device.type for parameter in one.bound.module.parameters()}
            assert one.federation.client(0).inputs.device.type == "meta"
        assert places == {"meta"}
        first = TrainingState.initial(engine.plan, model)
        assert first.server["model"].device.type == "meta"
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("clients", "path", "count"),
    [(3, "client", 3), (4, "matrix", 1), (10, "matrix", 2), (100, "matrix", 15), (2000, "matrix", 32)],
)
def test_clients_are_divided_evenly_into_chunks_for_several_workers(clients, path, count):
    engine = engine_for(classifier(), path=path)
    try:
        divided = chunks.chunks(engine.plan, range(clients))
    finally:
        engine.close()
    assert list(itertools.chain(*divided)) == list(range(clients))
    sizes = [len(chunk) for chunk in divided]
    assert len(sizes) == count
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= chunks.MATRIX_CLIENTS


def test_an_unknown_device_is_refused_in_one_line():
    with pytest.raises(ff.FlatfedError, match="nonsense") as refusal:
        train(classifier(), federation(), device="nonsense")
    assert str(refusal.value).startswith("device")
    assert "\n" not in str(refusal.value)


# -- manners -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("forks", [False, True], ids=["threads", "processes"])
@pytest.mark.parametrize("path", ["matrix", "client"])
def test_uploads_stream_through(path, forks, monkeypatch):
    """However many take part, only a few uploads exist at a time, even when adding them up is slow."""
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 2)
    monkeypatch.setattr(processes, "can_fork", lambda: forks)
    uploads: list[weakref.ref[Tensor]] = []
    alive: list[int] = []
    # Where an upload comes into being in this process.
    owner, name = (CohortSums, "copied") if forks else (worker.Worker, "train")
    original = getattr(owner, name)

    def watched(*arguments: Any) -> Any:
        made = original(*arguments)
        chunk_sums = made if forks else made[0]
        uploads.append(weakref.ref(chunk_sums.uploads["displacement"]))
        return made

    class SlowSum(PairwiseSum):
        def add(self, piece: Piece) -> None:
            time.sleep(0.004)
            alive.append(sum(upload() is not None for upload in uploads))
            super().add(piece)

    monkeypatch.setattr(owner, name, watched)
    monkeypatch.setattr(sums, "PairwiseSum", SlowSum)
    peaks = {}
    for count in (12, 48):
        uploads.clear()
        alive.clear()
        participants = count * (2 if path == "matrix" else 1)
        train(classifier(), federation([4] * participants), local_steps=1, path=path, workers=2)
        assert len(alive) == count
        peaks[count] = max(alive)
    assert 1 < peaks[12] <= 2 * 2 + 2
    assert peaks[48] <= 2 * 2 + 2


def test_what_callbacks_return_lands_in_the_history(tmp_path):
    seen = []

    def norm(progress: ff.Progress) -> dict[str, float]:
        seen.append((progress.round, list(progress.cohort), progress.record["train_loss"]))
        return {"norm": float(progress.server["model"].norm())}

    norms = []
    run = train(
        classifier(),
        federation(),
        rounds=3,
        participants=2,
        folder=tmp_path,
        callbacks=[norm, lambda progress: norms.append(progress.record["norm"])],
    )
    assert [line["norm"] for line in run.history] == norms
    assert run.history[-1]["norm"] == float(weights(run).norm())
    assert [number for number, _, _ in seen] == [1, 2, 3]
    assert all(len(cohort) == 2 for _, cohort, _ in seen)
    assert [loss for _, _, loss in seen] == [line["train_loss"] for line in run.history]
    recorded = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert recorded == run.history


@pytest.mark.parametrize("make", [classifier, normalised, convolutional], ids=lambda make: make.__name__)
def test_the_given_model_is_left_alone(make):
    model = make().eval()
    before = copy.deepcopy(model.state_dict())
    addresses = [parameter.data_ptr() for parameter in model.parameters()]
    shape = (2, 5, 5) if make is convolutional else (5,)
    run = train(model, federation(shape=shape, test=3), workers=2)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert [parameter.data_ptr() for parameter in model.parameters()] == addresses
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module.training for module in model.modules())
    shared = {parameter.data_ptr() for parameter in run.model.parameters()} & set(addresses)
    assert shared == set()


def test_torchs_threads_are_as_before():
    torch.set_num_threads(2)
    try:
        train(classifier(nn.Dropout()), federation(test=3), workers=3)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("path", ["matrix", "client"])
@pytest.mark.parametrize("workers", [1, 3])
def test_an_exception_in_a_worker_surfaces(path, workers, monkeypatch):
    monkeypatch.setattr(chunks, "MATRIX_CLIENTS", 2)
    calls = Shared()

    def change(inputs: Tensor) -> Tensor:
        calls.append(None)
        if len(calls) == 7:
            raise ArithmeticError("the seventh call")
        return inputs

    caught = []

    def attempt() -> None:
        try:
            train(Block(change), federation([8] * 20), rounds=3, path=path, workers=workers)
        except ff.FlatfedError as error:
            caught.append(str(error))

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    thread.join(timeout=30)
    assert not thread.is_alive()
    assert len(caught) == 1 and caught[0].endswith("the seventh call")
    assert len(calls) < 40, "the rest of the round went on"
    assert [thread for thread in threading.enumerate() if thread.name.startswith("flatfed")] == []
