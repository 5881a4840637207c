"""Validation samples: which are held out, and that nobody trains on them."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.errors import FlatfedError
from flatfed.core.tree import rows as rows_of
from flatfed.data.federation import Federation
from flatfed.runs.compare import run_folder
from flatfed.runs.identity import config_digest
from flatfed.training.config import Config

CLASSES = 5


def labelled(samples: int, clients: int, seed: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Inputs that say which sample they are, skewed labels, and clients of all sizes."""
    draw = torch.Generator().manual_seed(seed)
    labels = (torch.rand(samples, generator=draw) ** 2 * CLASSES).long()
    owners = (torch.rand(samples, generator=draw) ** 2 * clients).long()
    owners[:clients] = torch.arange(clients)
    rows = [(owners == client).nonzero().flatten() for client in range(clients)]
    return torch.arange(samples).float()[:, None], labels, rows


def pooled(samples: int = 1000, clients: int = 20) -> Federation:
    inputs, labels, rows = labelled(samples, clients)
    test = (torch.arange(50).float()[:, None] + 1e6, torch.arange(50) % CLASSES)
    dataset = torch.utils.data.TensorDataset(inputs, labels)
    return Federation.from_dataset(dataset, [own.tolist() for own in rows], test)


def trained_samples(federation: Federation) -> list[list[float]]:
    clients = (federation.client(number).whole()[0] for number in range(len(federation)))
    return [inputs.flatten().tolist() for inputs in clients]


@pytest.mark.parametrize("share", [0.03, 0.1, 0.5, 0.9])
def test_every_sample_is_either_trained_on_or_held_out(share):
    whole = pooled()
    held = whole.with_validation(share)
    trained = [sample for own in trained_samples(held) for sample in own]
    chosen = held.validation[0].flatten().tolist()
    assert not set(trained) & set(chosen) and not max(chosen) >= 1e6
    assert sorted(trained + chosen) == list(range(1000))
    for own, all_of_them in zip(trained_samples(held), trained_samples(whole), strict=True):
        assert own and own == [sample for sample in all_of_them if sample not in chosen]
    assert held.total_samples == len(trained) and whole.total_samples == 1000 and whole.validation is None
    assert all(torch.equal(one, other) for one, other in zip(held.test, whole.test, strict=True))
    assert held.inputs.data_ptr() == whole.inputs.data_ptr(), "the data were copied"


@pytest.mark.parametrize("share", [0.05, 0.1, 0.37])
def test_classes_and_what_clients_hold_of_them_give_their_share(share):
    _, labels, rows = labelled(2000, 15)
    draws = [pooled(2000, 15).with_validation(share, seed).validation for seed in range(8)]
    for inputs, targets in draws:
        chosen = set(inputs.flatten().long().tolist())
        assert torch.equal(targets, labels[inputs.flatten().long()])
        for label, count in Counter(labels.tolist()).items():
            assert abs(int((targets == label).sum()) - share * count) < 1
            for own in rows:
                cell = [row for row in own.tolist() if labels[row] == label]
                assert abs(len(chosen & set(cell)) - share * len(cell)) < 1
    # Within these bounds the choice is random.
    times = Counter(sample for inputs, _ in draws for sample in inputs.flatten().tolist())
    assert len(times) > 1.5 * share * 2000


def test_the_choice_depends_on_the_seed_alone():
    first, again, other = (pooled().with_validation(0.2, seed).validation[0] for seed in (3, 3, 4))
    assert torch.equal(first, again) and not torch.equal(first, other)


def test_a_sample_that_several_clients_hold_is_held_out_from_all():
    dataset = torch.utils.data.TensorDataset(torch.arange(40).float()[:, None], torch.arange(40) % 2)
    everyone = [list(range(40)), list(range(20)), list(range(10, 40))]
    held = Federation.from_dataset(dataset, everyone).with_validation(0.25)
    chosen = set(held.validation[0].flatten().tolist())
    assert len(chosen) == len(held.validation[0]) == 10
    assert not any(chosen & set(own) for own in trained_samples(held))


def test_every_client_keeps_a_sample_with_a_label():
    labels = torch.tensor([0, -100, 1, -100] * 10)
    clients = [
        (torch.arange(2 * n, 2 * n + 2).float()[:, None], labels[2 * n : 2 * n + 2]) for n in range(20)
    ]
    more = (torch.arange(100, 140).float()[:, None], torch.zeros(40).long())
    held = Federation.from_tensors([*clients, more]).with_validation(0.6)
    for number in range(20):
        inputs, targets = held.client(number).whole()
        assert len(inputs) and bool((targets != -100).any())


@dataclass
class Pair:
    image: Tensor
    words: Tensor


@pytest.mark.parametrize("kind", ["dictionary", "dataclass", "regression", "pixels"])
def test_inputs_and_targets_of_any_form(kind):
    numbers = torch.arange(60)
    inputs = {
        "dictionary": {"a": numbers.float()[:, None], "b": (numbers, None)},
        "dataclass": Pair(numbers.float()[:, None, None], numbers),
    }.get(kind, numbers.float()[:, None])
    targets = {
        "dictionary": {"label": numbers % 3},
        "regression": numbers.float(),
        "pixels": numbers[:, None].expand(60, 4) % 3,
    }.get(kind, numbers % 3)

    def first(tree):
        tree = tree["a"] if isinstance(tree, dict) else tree.image if isinstance(tree, Pair) else tree
        return tree.flatten().tolist()

    samples = (inputs, targets)
    whole = Federation.from_tensors([rows_of(samples, slice(25)), rows_of(samples, slice(25, None))])
    held = whole.with_validation(0.2)
    trained = [sample for client in range(2) for sample in first(held.client(client).whole()[0])]
    assert type(held.validation[0]) is type(inputs)
    assert len(first(held.validation[0])) == 12
    assert sorted(trained + first(held.validation[0])) == list(range(60))


def test_own_validation_samples_are_copied_and_no_client_loses_any():
    inputs, targets = torch.rand(6, 1), torch.arange(6) % CLASSES
    held = pooled().with_validation((inputs, targets))
    inputs.zero_()
    assert bool(held.validation[0].any()) and held.total_samples == 1000
    loaded = Federation.from_function(3, lambda client: (torch.rand(4, 1), torch.arange(4)))
    assert len(loaded.with_validation((inputs, targets)).validation[1]) == 6


@pytest.mark.parametrize(
    ("federation", "validation", "complaint"),
    [
        (pooled, 0.0, "validation = 0.0: give a share, more than 0 and less than 1"),
        (pooled, 1.0, "validation = 1.0: give a share"),
        (pooled, True, "validation = True: give a share"),
        (pooled, float("nan"), "validation = nan: give a share"),
        (pooled, "0.1", "validation = '0.1': give a share"),
        (lambda: pooled(20, 20), 0.5, "validation = 0.5: of 20 samples of 20 clients, who keep one each"),
        (lambda: pooled().with_validation(0.1), 0.1, "there are validation samples already"),
        (pooled, (torch.rand(6, 2), torch.arange(6)), "validation: its inputs are shaped [2]"),
        (
            lambda: Federation.from_function(3, lambda client: (torch.rand(4, 1), torch.arange(4))),
            0.1,
            "validation = 0.1: the clients' data are not all in memory to choose from; give (inputs",
        ),
    ],
)
def test_refusals_are_one_line(federation, validation, complaint):
    with pytest.raises(FlatfedError) as caught:
        federation().with_validation(validation)
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


# -- training ---------------------------------------------------------------------------------------------


class Memory(nn.Module):
    """A row of weights for every sample, which only that sample can change."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(samples, 3))

    def forward(self, one_hot: Tensor) -> Tensor:
        return one_hot @ self.table


def remembered(validation: float | None = 0.25, test: int = 8) -> tuple[ff.Task, Federation]:
    clients = [(torch.eye(48)[8 * n : 8 * n + 8], torch.arange(8) % 3) for n in range(5)]
    whole = Federation.from_tensors(clients, (torch.eye(48)[40 : 40 + test], torch.arange(test) % 3))
    federation = whole if validation is None else whole.with_validation(validation)
    return ff.Task(Memory(48), federation), federation


TRAINING = ff.Training(rounds=6, participants=3, local_epochs=2, batch_size=4, lr=0.5, evaluate_every=2)


@pytest.mark.parametrize("name", ["fedavg", "fedsam", "scaffold", "feddyn"])
def test_a_model_that_memorises_knows_nothing_of_validation_samples(name):
    task, federation = remembered()
    run = ff.train(task, getattr(ff, name)(), TRAINING)
    rows = run.model.table.detach()
    seen = torch.cat([federation.client(client).whole()[0] for client in range(5)]).argmax(1)
    held = federation.validation[0].argmax(1)
    assert len(held) == 10 and len(seen) == 30
    assert bool((rows[seen].abs().sum(1) > 0).all()), "some training samples were not trained on"
    assert not bool(rows[held].any()) and not bool(rows[40:].any())


def test_what_is_recorded_is_the_loss_and_accuracy_on_the_validation_samples():
    task, federation = remembered()
    run = ff.train(task, ff.fedavg(), TRAINING)
    names = ("test_loss", "test_accuracy", "validation_loss", "validation_accuracy")
    for line in run.history:
        assert [name in line for name in names] == [line["round"] % 2 == 0] * 4
    inputs, targets = federation.validation
    with torch.no_grad():
        outputs = run.model(inputs)
    assert run.history[-1]["validation_loss"] == pytest.approx(
        float(nn.functional.cross_entropy(outputs, targets)), rel=1e-6
    )
    assert run.history[-1]["validation_accuracy"] == float((outputs.argmax(1) == targets).double().mean())


def test_evaluating_on_validation_samples_changes_no_bit():
    task, federation = remembered(validation=None)
    plain = ff.train(task, ff.scaffold(), TRAINING)
    own = ff.Task(Memory(48), federation.with_validation((torch.rand(4, 48), torch.arange(4) % 3)))
    other = ff.train(own, ff.scaffold(), TRAINING)
    assert torch.equal(plain.model.table, other.model.table)
    for line, longer in zip(plain.history, other.history, strict=True):
        shared = {key for key in line if key != "seconds"}
        assert {key: longer[key] for key in shared} == {key: line[key] for key in shared}
        assert {key.partition("_")[0] for key in longer.keys() - line.keys()} <= {"validation"}


def test_an_interrupted_run_goes_on_to_the_same_bytes(tmp_path):
    for name, rounds in (("straight", (6,)), ("resumed", (3, 6))):
        for count in rounds:
            ff.train(remembered()[0], ff.scaffold(), TRAINING.replaced(rounds=count), folder=tmp_path / name)
    models = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("straight", "resumed")]
    assert models[0] == models[1]
    histories = [
        [json.loads(line) for line in (tmp_path / name / "history.jsonl").read_text().splitlines()]
        for name in ("straight", "resumed")
    ]
    for line, other in zip(*histories, strict=True):
        if line["round"] != 3:  # the last round of the first part, which is always evaluated
            assert {**line, "seconds": 0} == {**other, "seconds": 0}


@pytest.mark.parametrize(("first", "then"), [(0.25, None), (None, 0.25), (0.25, 0.3)])
def test_another_split_is_another_run(tmp_path, first, then):
    ff.train(remembered(first)[0], ff.fedavg(), TRAINING, folder=tmp_path / "run")
    with pytest.raises(FlatfedError, match="not the same: data"):
        ff.train(remembered(then)[0], ff.fedavg(), TRAINING.replaced(rounds=8), folder=tmp_path / "run")


# -- configs ----------------------------------------------------------------------------------------------

CONFIG = {"data": {"clients": 20}, "model": "logistic_regression", "training": {"rounds": 2}}


def config(validation=None, **changes) -> Config:
    data = {"clients": 20} if validation is None else {"clients": 20, "validation": validation}
    return Config.checked({**CONFIG, "data": data, **changes})


def test_a_config_without_validation_is_written_and_named_as_before(tmp_path):
    assert "validation" not in json.loads(config().model_dump_json())["data"]
    assert json.loads(config(0.1).model_dump_json())["data"]["validation"] == 0.1
    assert config_digest(config()) != config_digest(config(0.1)) != config_digest(config(0.2))
    assert run_folder(config(), tmp_path) != run_folder(config(0.1), tmp_path)
    assert Config.checked(config(0.1).model_dump()) == config(0.1)


def test_all_algorithms_get_the_same_samples_under_one_seed():
    drawn = [
        config(0.1, algorithm=algorithm, training={"rounds": 2, "seed": seed, "lr": lr})
        .make_task()
        .federation
        for algorithm, seed, lr in (("fedavg", 0, 0.1), ("fedsam", 0, 0.3), ("fedavg", 1, 0.1))
    ]
    first, same, other = (federation.validation for federation in drawn)
    assert torch.equal(first[0], same[0]) and torch.equal(first[1], same[1])
    assert first[0].shape != other[0].shape or not torch.equal(first[0], other[0])
    assert len(first[1]) == pytest.approx(0.1 * len(config().make_federation().pool.rows), abs=1)


@pytest.mark.parametrize("value", [0, 1, -0.1, 1.5, "some", True])
def test_a_share_that_is_none_is_refused(value):
    with pytest.raises(FlatfedError, match=r"data\.validation = ") as caught:
        config(value)
    assert "\n" not in str(caught.value)
