"""A data set or a partition is one file and one registration; everything else finds it by itself."""

from __future__ import annotations

import hashlib
import inspect
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from data import fake
from data.fake import refused
from flatfed import cli, models
from flatfed.data import datasets, partition
from flatfed.data.datasets.base import Labelled, train_test
from flatfed.data.datasets.catalog import CATALOG, DATASETS, DatasetInfo, Download, register
from flatfed.data.partition import PARTITIONS
from flatfed.data.partition.base import Partition
from flatfed.runs.train import run_config
from flatfed.training import config as config_module
from flatfed.training.config import Config

LINES = "\n".join(f"{number} {number % 3}" for number in range(24))


@pytest.fixture(autouse=True)
def restored_registries():
    registries = (DATASETS, CATALOG, PARTITIONS)
    before = [dict(registry) for registry in registries]
    config_module._loaded.cache_clear()
    yield
    for registry, content in zip(registries, before, strict=True):
        registry.clear()
        registry.update(content)
    config_module._loaded.cache_clear()


@pytest.fixture
def line_numbers(tmp_path):
    """A data set of 24 numbers in a text file, published on this disk."""
    published = tmp_path / "published" / "lines.txt"
    published.parent.mkdir()
    published.write_text(LINES)
    checksum = "md5:" + hashlib.md5(LINES.encode()).hexdigest()
    info = DatasetInfo(
        "line_numbers",
        "numbers by their remainder",
        folders=("lines",),
        markers=("lines.txt",),
        downloads=(Download((published.as_uri(),), checksum, len(LINES)),),
    )

    @register(info)
    def load_line_numbers(folder=None, scale: float = 1.0):
        path = info.find(folder) / "lines.txt"
        values = np.loadtxt(info.read(path, checksum).decode().splitlines(), dtype=np.int64)
        inputs = values[:, :1].astype(np.float32) * np.float32(scale)
        labels = info.checked_labels(path, values[:, 1], 3)
        return train_test(
            "line_numbers", Labelled(inputs[:18], labels[:18]), Labelled(inputs[18:], labels[18:]), 3
        )

    return tmp_path / "data"


def register_every_nth():
    @partition.register("every_nth")
    class EveryNth(Partition):
        first: int = 0

        def assign(self, classes, clients, generator):
            samples = np.arange(classes.samples)
            return samples, (samples + self.first) % clients


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def test_a_new_data_set_and_a_new_partition_are_used_through_config(line_numbers, monkeypatch):
    register_every_nth()
    values = {
        "data": {"dataset": "line_numbers", "clients": 3, "options": {"scale": 0.5}},
        "partition": {"name": "every_nth", "first": 1},
        "training": {"rounds": 1, "participants": 3, "local_steps": 1},
    }
    assert invoke("data", "get", "line_numbers", "--folder", line_numbers).exit_code == 0
    monkeypatch.setenv("FLATFED_DATA", str(line_numbers))
    config = Config.checked(values)
    federation = config.make_federation()
    assert federation.classes == 3 and len(federation.test[0]) == 6
    for client in range(3):
        expected = [number for number in range(18) if (number + 1) % 3 == client]
        assert federation.rows(client).tolist() == expected
        inputs, targets = federation.client(client).batch(torch.arange(6))
        assert inputs.flatten().tolist() == [number / 2 for number in expected]
        assert targets.tolist() == [number % 3 for number in expected]
    assert run_config(config).model(torch.zeros(1, 1)).shape == (1, 3)
    with refused("data.options (line_numbers).scael: unknown; did you mean 'scale'?"):
        Config.checked({**values, "data": {"dataset": "line_numbers", "options": {"scael": 1}}})
    with refused("partition.every_nth.frist: unknown; did you mean 'first'?"):
        Config.checked({**values, "partition": {"name": "every_nth", "frist": 1}})
    with refused("partition.every_nth.first = 'one'"):
        Config.checked({**values, "partition": {"name": "every_nth", "first": "one"}})


def test_the_command_line_finds_them(line_numbers, monkeypatch):
    register_every_nth()
    monkeypatch.setenv("FLATFED_DATA", str(line_numbers))
    assert "numbers by their remainder" in invoke("data", "list").output
    missing = invoke("data", "check", "line_numbers")
    assert missing.exit_code == 2 and "run `flatfed data get line_numbers`" in missing.output
    assert invoke("data", "get", "line_numbers").exit_code == 0
    checked = invoke("data", "check", "line_numbers")
    assert checked.exit_code == 0 and "18 training and 6 test samples, 3 classes" in checked.output
    split = invoke("split", "--dataset", "line_numbers", "--clients", 3, "--partition", "every_nth")
    assert split.exit_code == 0 and "every_nth" in split.output
    (line_numbers / "lines" / "lines.txt").write_text(LINES[:-1])
    damaged = invoke("data", "check", "line_numbers")
    assert damaged.exit_code == 2 and "wrong checksum" in damaged.output


@pytest.mark.parametrize(
    ("facts", "missing"),
    [
        ({}, "folders, markers, downloads or script missing"),
        ({"folders": ("a",), "script": "run it"}, "'new': markers missing"),
        ({"folders": ("a",), "markers": ("b",)}, "'new': downloads or script missing"),
    ],
)
def test_an_incomplete_data_set_says_what_is_missing(facts, missing):
    with pytest.raises(ValueError, match=missing):
        DatasetInfo("new", "a title", **facts)


def test_registrations_that_cannot_work_are_refused():
    with pytest.raises(ValueError, match="'new': its loader takes no `folder`"):
        register(DatasetInfo("new", "a title", origin="here"))(lambda: None)
    with pytest.raises(ValueError, match="'digits' is already registered"):
        register(CATALOG["digits"])(lambda folder=None: None)
    with pytest.raises(ValueError, match="'iid' is already registered"):
        partition.register("iid")(PARTITIONS["iid"])
    with pytest.raises(ValueError, match="'new': it has no method assign"):
        partition.register("new")(type("New", (Partition,), {}))
    with pytest.raises(ValueError, match="'mlp' is already registered"):
        models.register(models.MODELS["mlp"])
    assert "new" not in {*DATASETS, *CATALOG, *PARTITIONS}


@pytest.mark.parametrize("package", [datasets, partition, models], ids=lambda package: package.__name__)
def test_every_file_of_the_folder_is_imported(package):
    names = {path.stem for path in Path(package.__file__).parent.glob("*.py")} - {"__init__"}
    assert names and all(f"{package.__name__}.{name}" in sys.modules for name in names)


@pytest.mark.parametrize("name", DATASETS)
def test_every_data_set_keeps_the_contract(name, tmp_path):
    """What the rest of the program relies on, for a few made-up samples of each."""
    assert name in fake.WRITERS, (
        f"{name}: add what writes a few of its samples to WRITERS in tests/data/fake.py"
    )
    fake.WRITERS[name](tmp_path)
    options = fake.SMALL_OPTIONS.get(name, {})
    if "verify" in inspect.signature(DATASETS[name]).parameters:
        options = {**options, "verify": False}
    data = DATASETS[name](folder=None if name == "digits" else tmp_path, **options)
    for inputs, targets, groups in (
        (data.train_inputs, data.train_targets, data.groups),
        (data.test_inputs, data.test_targets, data.test_groups),
    ):
        assert len(inputs) == len(targets) > 0 and targets.dtype == torch.int64
        assert 0 <= int(targets.min()) <= int(targets.max()) < data.classes
        assert len(data.transform.evaluate(inputs)) == len(inputs)
        if groups is not None:
            assert len(groups) == len(targets) and set(groups.tolist()) <= set(range(len(data.group_names)))
    info = CATALOG[name]
    assert info.name == name and info.title
    assert bool(info.origin) != bool(info.folders), f"{name}: give an origin or folders"
    assert info.origin or info.locate(tmp_path) is not None
