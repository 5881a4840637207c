"""Test samples for each client: whether they match its training data, and what is refused."""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter

import numpy as np
import pytest
import torch
from problems import train
from typer.testing import CliRunner

import flatfed as ff
from data import fake
from flatfed import Federation, FlatfedError, cli
from flatfed.data.client_tests import matching_rows, own_rows
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import ClientRow
from flatfed.runs.train import run_config
from flatfed.training import config as config_module
from flatfed.training.config import Config

TRAINING = {"rounds": 1, "participants": 2, "local_steps": 1, "batch_size": 4}


def skewed(clients=12, classes=5, size=60, seed=0):
    """Clients whose classes are drawn from very different proportions, and a small balanced test set."""
    generator = np.random.default_rng(seed)
    labels = np.concatenate(
        [generator.choice(classes, size, p=generator.dirichlet([0.3] * classes)) for _ in range(clients)]
    )
    return np.split(np.arange(len(labels)), clients), labels, np.arange(200) % classes


@pytest.mark.parametrize("size", [1, 7, 40])
def test_shards_have_the_classes_of_the_training_data(size):
    parts, train, test = skewed()
    shards = matching_rows(parts, train, test, size, np.random.default_rng(1))
    for part, shard in zip(parts, shards, strict=True):
        assert len(shard) == len(set(shard.tolist())) == size
        held, drawn = Counter(train[part].tolist()), Counter(test[shard].tolist())
        assert set(drawn) <= set(held)
        for label, count in held.items():
            assert abs(drawn[label] - size * count / len(part)) < 1


def test_rounding_favours_no_class():
    # One sample for a client of which a quarter is class 1: over many draws a quarter must be class 1.
    parts, train, test = [np.arange(4)], np.array([0, 0, 1, 0]), np.arange(20) % 2
    generator = np.random.default_rng(0)
    hits = [test[matching_rows(parts, train, test, 1, generator)[0][0]] for _ in range(2000)]
    assert abs(np.mean(hits) - 0.25) < 4 * math.sqrt(0.25 * 0.75 / 2000)


def test_a_client_of_one_class_can_get_all_of_it_and_no_more():
    parts, train, test = [np.array([0, 1]), np.array([2])], np.array([3, 3, 1]), np.array([3, 1, 3, 1, 3])
    with pytest.raises(ValueError, match=r"client 1 needs 3 test samples of class 1 .* there are 2"):
        matching_rows(parts, train, test, 3, np.random.default_rng(0))
    # Both want the same samples, which they may share.
    both = matching_rows([np.array([0, 1]), np.array([1])], train, test, 3, np.random.default_rng(0))
    assert [shard.tolist() for shard in both] == [[0, 2, 4], [0, 2, 4]]


def test_natural_clients_get_their_own_test_samples():
    parts = [np.array([1, 4]), np.array([0])]
    shards = own_rows(parts, np.array([7, 5, 9, 9, 5]), np.array([9, 5, 7, 5, 9]))
    assert [sorted(shard.tolist()) for shard in shards] == [[1, 3], [2]]
    with pytest.raises(ValueError, match="client 1 has training but no test samples"):
        own_rows(parts, np.array([7, 5, 9, 9, 5]), np.array([9, 5, 5]))


# -- in a config ------------------------------------------------------------------------------------------


def made(seed=0, **data):
    values = {"data": {"clients": 10, **data}, "training": {**TRAINING, "seed": seed}}
    return Config.checked(values).make_federation()


def rows_of(federation):
    return [federation.client_test(client).rows.tolist() for client in range(len(federation))]


def test_a_config_gives_equal_shards_that_depend_on_the_seed_alone():
    assert made().client_test(0) is None
    shards = rows_of(made(client_tests="matching"))
    assert {len(shard) for shard in shards} == {355 // 10}
    assert {len(shard) for shard in rows_of(made(client_tests=20))} == {20}
    assert rows_of(made(client_tests="matching")) == shards
    assert rows_of(made(seed=1, client_tests="matching")) != shards


def test_client_tests_do_not_move_a_run_or_its_split():
    with_tests, without = made(client_tests=5), made()
    assert torch.equal(with_tests.pool.rows, without.pool.rows)
    base = {"data": {"clients": 10}, "training": TRAINING}
    config = Config.checked(base)
    asked = Config.checked({**base, "data": {"clients": 10, "client_tests": 5}})
    runs = [run_config(config), run_config(asked)]
    assert torch.equal(runs[0].server["model"], runs[1].server["model"])


def test_natural_data_use_the_roles_own_test_samples(tmp_path, monkeypatch):
    fake.write_everything(tmp_path)
    monkeypatch.setenv("FLATFED_DATA", str(tmp_path))
    config_module._loaded.cache_clear()
    values = {
        "data": {
            "dataset": "shakespeare",
            "clients": 3,
            "client_tests": "matching",
            "options": {"roles": 4, "train_samples": 8, "test_samples": 6, "verify": False},
        },
        "partition": "natural",
        "training": TRAINING,
    }
    config = Config.checked(values)
    federation = config.make_federation()
    data = config_module._loaded("shakespeare", json.dumps(config.data.options))
    for client in range(3):
        role = {int(data.groups[row]) for row in federation.rows(client)}
        own = {int(data.test_groups[row]) for row in federation.client_test(client).rows}
        assert role == own and len(federation.client_test(client)) == 6
    with pytest.raises(FlatfedError, match=r"data\.client_tests = 5: the clients have test samples of their"):
        Config.checked({**values, "data": {**values["data"], "client_tests": 5}}).make_federation()
    config_module._loaded.cache_clear()


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("0", "data.client_tests: 0 is neither a number of samples, 1 or more, nor"),
        ("true", "data.client_tests: True is neither"),
        ("2.5", "data.client_tests: 2.5 is neither"),
        ("match", "data.client_tests: 'match' is neither"),
        ("300", "data.client_tests = 300: client 0 needs"),
    ],
)
def test_bad_values_are_one_clear_line(tmp_path, value, complaint):
    config = tmp_path / "config.toml"
    config.write_text("data.clients = 10\ntraining.rounds = 1\n")
    arguments = ["run", str(config), "--set", f"data.client_tests={value}", "--runs", str(tmp_path / "runs")]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 2
    assert complaint in done.stderr and len(done.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_matching_needs_a_sample_for_each_client():
    with pytest.raises(FlatfedError, match="355 test samples are too few for 400 clients; give a number"):
        made(clients=400, client_tests="matching")


# -- in a federation of one's own -------------------------------------------------------------------------


def samples(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=generator), torch.randint(0, 4, (count,), generator=generator)


CLIENTS = [samples(6, seed) for seed in range(3)]
TESTS = [samples(count, 10 + count) for count in (5, 1, 8)]


def federations():
    pooled = tuple(torch.cat(each) for each in zip(*TESTS, strict=True))
    inputs, targets = (torch.cat(each) for each in zip(*CLIENTS, strict=True))
    dataset = torch.utils.data.TensorDataset(inputs, targets)
    numbers = [range(0, 6), range(6, 12), range(12, 18)]
    return [
        Federation.from_tensors(CLIENTS, client_tests=TESTS),
        Federation.from_dataset(dataset, numbers, pooled, [range(0, 5), [5], range(6, 14)]),
        Federation.from_function(3, CLIENTS.__getitem__, client_tests=TESTS.__getitem__),
    ]


@pytest.mark.parametrize("number", range(3))
def test_every_client_is_tested_on_its_own(number, tmp_path):
    federation = federations()[number]
    model = torch.nn.Linear(3, 4)
    options = {"rounds": 1, "evaluate_on_clients": True, "folder": tmp_path}
    run = train(model, federation, ff.fedavg(), **options)
    right = []
    for client, (inputs, targets) in enumerate(TESTS):
        outputs = run.model(inputs).detach()
        right.append(float((outputs.argmax(1) == targets).double().mean()))
        record = run.per_client[client]
        assert record["test_accuracy"] == pytest.approx(right[-1])
        assert record["test_loss"] == pytest.approx(
            float(torch.nn.functional.cross_entropy(outputs, targets))
        )
        assert (record["samples"], record["test_samples"]) == (6, len(targets))
    spread = run.client_spreads["test"]
    mean = sum(right) / 3
    assert spread.mean == pytest.approx(mean)
    assert spread.deviation == pytest.approx(math.sqrt(sum((each - mean) ** 2 for each in right) / 3))
    assert spread.chance == pytest.approx(math.sqrt(sum(mean * (1 - mean) / n for n in (5, 1, 8)) / 3))
    written = json.loads((tmp_path / "clients.json").read_text())
    assert written["clients"] == run.per_client
    assert written["spread"]["test"]["chance"] == spread.chance
    assert RunFolder(tmp_path).read_clients() == run.client_spreads


def test_without_client_tests_nothing_is_said_about_them():
    run = train(
        torch.nn.Linear(3, 4),
        Federation.from_tensors(CLIENTS),
        ff.fedavg(),
        rounds=1,
        evaluate_on_clients=True,
    )
    assert set(run.client_spreads) == {"train"}
    assert "test_accuracy" not in run.per_client[0]


def test_a_metric_in_percent_has_no_spread(tmp_path):
    percent = {"accuracy": lambda outputs, targets: 100 * (outputs.argmax(1) == targets).double().mean()}
    federation = Federation.from_tensors(CLIENTS)
    options = {"rounds": 1, "metrics": percent, "evaluate_on_clients": True, "folder": tmp_path}
    run = train(torch.nn.Linear(3, 4), federation, ff.fedavg(), **options)
    assert max(client["accuracy"] for client in run.per_client) > 1
    assert run.client_spreads == RunFolder(tmp_path).read_clients() == {}


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: Federation.from_tensors(CLIENTS, client_tests=TESTS[:2]), "there are 2 for 3 clients"),
        (lambda: Federation.from_tensors(CLIENTS, client_tests=[]), "client_tests: the list is empty"),
        (
            lambda: Federation.from_tensors(CLIENTS[:1], client_tests=[samples(0, 0)]),
            "client_tests[0]: it has no samples",
        ),
        (
            lambda: Federation.from_tensors(CLIENTS[:1], client_tests=[(torch.ones(1, 2), torch.ones(1))]),
            "client_tests: its inputs are shaped [2], the clients' [3]",
        ),
        (
            lambda: Federation.from_dataset(torch.utils.data.TensorDataset(*CLIENTS[0]), [[0]], None, [[0]]),
            "client_tests: they are sample numbers of the test data; give test as well",
        ),
        (
            lambda: Federation.from_dataset(
                torch.utils.data.TensorDataset(*CLIENTS[0]), [[0]], TESTS[1], [[1]]
            ),
            "client_tests: sample number 1 is outside the data (0 … 0)",
        ),
        (
            lambda: train(
                torch.nn.Linear(3, 4),
                Federation.from_tensors(CLIENTS[:1], client_tests=[(torch.ones(1, 3), torch.tensor([4]))]),
                ff.fedavg(),
                rounds=1,
            ),
            "the client test data have the label 4",
        ),
    ],
)
def test_bad_tests_are_refused_in_one_line(make, complaint):
    with pytest.raises(FlatfedError) as caught:
        make()
    assert complaint in str(caught.value) and "\n" not in str(caught.value)


# -- in comparisons ---------------------------------------------------------------------------------------


def test_compare_prints_the_clients_tests_when_there_are_some(tmp_path):
    changes = ["--set", "data.clients=10", "--set", "data.client_tests=9", "--set", "training.rounds=1"]
    arguments = ["compare", "fedavg", *changes, "--seeds", "2", "--runs", str(tmp_path)]
    done = CliRunner().invoke(cli.app, arguments)
    assert done.exit_code == 0, done.output
    spreads = [RunFolder(folder).read_clients() for folder in tmp_path.iterdir() if folder.is_dir()]
    row = ClientRow.of(spreads, "test")
    assert row.mean.mean == pytest.approx(statistics.fmean(each["test"].mean for each in spreads))
    shown = done.stdout
    assert "their deviation" in shown
    assert f"{100 * row.deviation.mean:.1f} ± {100 * row.deviation.deviation:.1f}" in shown
    assert f"({100 * row.chance:.1f})" in shown


def test_a_folder_without_a_spread_is_refused_in_one_line(tmp_path):
    (tmp_path / "clients.json").write_text("[]\n")
    with pytest.raises(FlatfedError, match="has no spread over clients; remove the folder"):
        RunFolder(tmp_path).read_clients()
