"""Federations from data sets of Hugging Face's library, in memory."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import flatfed as ff
from data.fake import refused
from flatfed.data.partition import PARTITIONS

datasets = pytest.importorskip("datasets", reason="needs the extra huggingface")

COLUMNS = {
    "input_ids": [[row, row + 1, 0] for row in range(12)],
    "length": [2.5 * row for row in range(12)],
    "label": [row % 3 for row in range(12)],
    "author": ["eve", "ann", "bob"] * 4,
    "site": [7, 10, 9] * 4,
}


@pytest.fixture
def texts():
    features = datasets.Features(
        {
            "input_ids": datasets.Sequence(datasets.Value("int64")),
            "length": datasets.Value("float64"),
            "label": datasets.ClassLabel(names=["good", "bad", "odd", "none"]),
            "author": datasets.Value("string"),
            "site": datasets.Value("int64"),
        }
    )
    return datasets.Dataset.from_dict(COLUMNS, features=features)


def test_a_column_names_the_client(texts):
    federation = ff.Federation.from_huggingface(texts, "input_ids", "label", "author")
    assert federation.client_names == ("ann", "bob", "eve") and federation.test is None
    inputs, targets = federation.client(0).whole()
    assert inputs.tolist() == [[row, row + 1, 0] for row in (1, 4, 7, 10)] and inputs.dtype == torch.int64
    assert targets.tolist() == [1, 1, 1, 1]
    assert federation.classes == 4 and federation.categories["label"] == ("good", "bad", "odd", "none")
    assert ff.Federation.from_huggingface(texts, ["length"], "label", "site").client_names == ("7", "9", "10")


def test_inputs_are_what_a_model_is_called_with_and_it_trains(texts):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words, self.last = nn.Embedding(20, 2), nn.Linear(3, 4)

        def forward(self, input_ids, length):
            return self.last(torch.cat([self.words(input_ids).mean(1), length[:, None] / 30], 1))

    columns = {"input_ids": "input_ids", "length": "length"}
    federation = ff.Federation.from_huggingface(texts, columns, "label", "author", test=0.25)
    assert [len(federation.client(client)) for client in range(3)] == [3, 3, 3] and len(
        federation.test[1]
    ) == 3
    assert federation.client_test(2).whole()[0]["length"].item() % 7.5 == 0
    run = ff.train(ff.Task(Model(), federation), ff.fedavg(), ff.Training(rounds=2), ff.Execution(workers=1))
    assert "test_accuracy" in run.history[-1]


def test_a_partition_or_row_numbers_divide_the_rows(texts):
    partition = PARTITIONS["pathological_balanced"](classes_per_client=1)
    federation = ff.Federation.from_huggingface(texts, ["length"], "label", 3, partition=partition, seed=1)
    assert len(federation) == 3 and federation.client_names == ()
    assert all(len(set(federation.client(client).whole()[1].tolist())) == 1 for client in range(3))
    equal = ff.Federation.from_huggingface(texts, ["length"], ["length"], 4)
    assert [len(equal.client(client)) for client in range(4)] == [3] * 4
    rows = [[0, 2], [5]]
    chosen = ff.Federation.from_huggingface(texts.shuffle(seed=0).sort("length"), ["length"], "label", rows)
    assert chosen.client(0).whole()[0].tolist() == [[0.0], [5.0]] and len(chosen) == 2


def test_selected_rows_and_texts_and_another_test_set(texts):
    some = texts.select([3, 1, 8])
    federation = ff.Federation.from_huggingface(
        some, ["length"], "author", [[0, 1, 2]], test=texts.select([11, 10])
    )
    assert federation.inputs.tolist() == [[7.5], [2.5], [20.0]] and federation.test[0].tolist() == [
        [27.5],
        [25.0],
    ]
    assert federation.categories["author"] == ("ann", "bob", "eve") and federation.targets.tolist() == [
        2,
        0,
        1,
    ]


def test_many_rows_are_read_in_blocks(texts, monkeypatch):
    whole = ff.Federation.from_huggingface(texts, "input_ids", "label", "author")
    monkeypatch.setattr("flatfed.data.huggingface.BLOCK", 5)
    blocks = ff.Federation.from_huggingface(texts, "input_ids", "label", "author")
    assert all(torch.equal(one, other) for one, other in zip(whole.tensors(), blocks.tensors(), strict=True))


def test_images_become_bytes():
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, 3), dtype=np.uint8)
    features = datasets.Features({"img": datasets.Image(), "label": datasets.Value("int64")})
    dataset = datasets.Dataset.from_dict(
        {"img": [Image.fromarray(each) for each in pixels], "label": [0, 1, 1, 0]}, features=features
    )
    federation = ff.Federation.from_huggingface(dataset, "img", "label", 2)
    assert federation.inputs.dtype == torch.uint8 and federation.inputs.shape == (4, 3, 5, 6)
    found = {image.numpy().tobytes() for image in federation.inputs}
    assert found == {image.transpose(2, 0, 1).tobytes() for image in pixels}
    assert abs(float(federation.transform.evaluate(federation.inputs).mean())) < 1e-5
    grey = ff.Federation.from_huggingface(dataset, "img", "label", 2, channels=1)
    assert grey.inputs.shape == (4, 1, 5, 6)
    smaller = [Image.fromarray(pixels[0]), Image.fromarray(pixels[1][:4])]
    odd = datasets.Dataset.from_dict({"img": smaller, "label": [0, 1]}, features=features)
    with refused("column 'img', row 2: [4, 6] pixels, and [5, 6] before"):
        ff.Federation.from_huggingface(odd, "img", "label", [[0, 1]])
    deep = [Image.fromarray(np.full((5, 6), 60000, np.uint16))]
    wide = datasets.Dataset.from_dict({"img": deep, "label": [0]}, features=features)
    with refused("column 'img', row 1: not a readable image (pixels of mode I;16, not of 8 bits)"):
        ff.Federation.from_huggingface(wide, "img", "label", [[0]])


def test_what_cannot_be_meant_is_refused(texts):
    make = ff.Federation.from_huggingface
    for arguments, options, said in (
        ((datasets.DatasetDict({"train": texts}), "length", "label", "author"), {}, "several splits (train)"),
        (([1, 2], "length", "label", "author"), {}, "dataset = 'list': give a datasets.Dataset"),
        ((texts, "lenght", "label", "author"), {}, "dataset: no column 'lenght'; did you mean 'length'?"),
        ((texts, "length", "label", "autor"), {}, "dataset: no column 'autor'; did you mean 'author'?"),
        ((texts, "length", "label", "length"), {}, "clients: the column has neither whole numbers nor texts"),
        ((texts, "length", "label", 13), {}, "partition: clients=13 is more than the 12 samples"),
        ((texts, "length", "label", []), {}, "clients = []: give a column's name, a number"),
        ((texts, "length", "label", [[0.5, 1]]), {}, "clients = [[0.5, 1]]: give a column's name, a number"),
        ((texts, "length", "label", [[True, False]]), {}, "clients = [[True, False]]: give a column's name"),
        ((texts, "length", "label", 3), {"partition": "iid"}, "partition = 'iid': take one of flatfed's"),
        (
            (texts, "length", "label", 3),
            {"categories": {"lable": ["a"]}},
            "categories['lable']: no column that is read; did you mean 'label'?",
        ),
        ((texts, "length", "label", [[0], [12]]), {}, "clients[1] = [12]: give row numbers, 0 … 11"),
        ((texts, "length", "label", 2.5), {}, "clients = 2.5: give a column's name, a number"),
        ((texts, "length", "label", 3), {"test": 1.5}, "test = 1.5: give a share"),
        ((texts, "length", "label", [[0, 1], [1, 2]]), {"test": 0.5}, "rows belong to several clients"),
        ((texts.select([]), "length", "label", 1), {}, "dataset: it has no rows"),
        ((texts, ["author"], "label", 3), {}, "column 'author', row 2: 'ann' is not a number"),
    ):
        with refused(said):
            make(*arguments, **options)
    ragged = datasets.Dataset.from_dict({"x": [[1], [2, 3]], "y": [0, None]})
    with refused("column 'x', row 2: a list of 2, and the first one has 1"):
        make(ragged, "x", "x", [[0, 1]])
    with refused("column 'y', row 2: empty"):
        make(ragged, "y", "y", [[0, 1]])


def test_the_library_is_not_imported_for_anything_else(monkeypatch):
    import subprocess

    script = "import sys, flatfed; flatfed.Federation; assert not {'datasets', 'pyarrow'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
