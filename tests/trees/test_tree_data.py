"""Federations of trees: what is taken, copied, padded, told apart and refused."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

import flatfed as ff
from flatfed.core.tree import (
    call,
    children,
    cloned,
    described_tree,
    dtypes,
    empty,
    equal,
    map_tree,
    sample_shapes,
    versions,
)
from flatfed.runs.content import ContentHasher
from trees.tree_problems import Batch, Pair, formed

NUMBERS, CODES, LABELS = torch.arange(6.0).view(3, 2), torch.arange(3), torch.tensor([0, 1, 0])


def digest(tree: Any) -> str:
    hasher = ContentHasher()
    hasher.add_data(tree)
    return hasher.digest.hexdigest()


def test_arrays_and_mappings_of_any_kind_become_trees_of_tensors():
    federation = ff.Federation.from_tensors(
        [(UserDict(numbers=NUMBERS.numpy(), more=(CODES.numpy(), [True, False, True])), LABELS.tolist())]
    )
    inputs = federation.inputs
    assert type(inputs) is dict and type(inputs["more"]) is tuple
    assert [inputs["numbers"].dtype, inputs["more"][0].dtype, inputs["more"][1].dtype] == [
        torch.float32,
        torch.int64,
        torch.bool,
    ]
    assert torch.equal(federation.targets, LABELS)


def test_tuples_and_lists_of_numbers_are_still_arrays():
    plain = ff.Federation.from_tensors([(((0.0, 1.0), (2.0, 3.0)), (0, 1))])
    assert torch.equal(plain.inputs, torch.tensor([[0.0, 1.0], [2.0, 3.0]]))
    assert torch.equal(plain.targets, torch.tensor([0, 1]))
    rows = ff.Federation.from_tensors([([np.zeros(2), np.ones(2)], [0, 1])])
    assert rows.inputs.shape == (2, 2)


def test_a_client_gets_its_own_rows_of_every_tensor():
    data = formed("dataclass")
    federation = ff.Federation.from_tensors(data)
    inputs, targets = federation.client(4).batch(torch.tensor([3, 1]))
    assert isinstance(inputs, Batch) and inputs.weights is None
    assert torch.equal(inputs.codes, data[4][0].codes[[3, 1]])
    assert torch.equal(targets, data[4][1][[3, 1]])
    assert len(federation.client(4)) == 9


@pytest.mark.parametrize("form", ["tuple", "dictionary", "dataclass", "nested"])
def test_everything_is_copied(form):
    data = formed(form)
    before = cloned(data)
    federation = ff.Federation.from_tensors(data, test=data[0], client_tests=data)
    map_tree(lambda tensor: tensor.zero_(), data)
    assert equal(federation.client(2).whole(), before[2])
    assert federation.test is not None and equal(federation.test, before[0])
    own_test = federation.client_test(3)
    assert own_test is not None and equal(own_test.whole(), before[3])


@dataclass
class Other:
    numbers: Tensor


BAD: dict[str, tuple[Any, str]] = {
    "NaN": (
        [({"a": CODES, "b": NUMBERS / 0}, LABELS)],
        r"clients\[0\]: its inputs\['b'\] contain NaN or infinity",
    ),
    "NaN in a dataclass": (
        [(Other(NUMBERS * float("nan")), LABELS)],
        r"clients\[0\]: its inputs.numbers contain NaN",
    ),
    "NaN among the targets": (
        [(NUMBERS, (LABELS, NUMBERS / 0))],
        r"clients\[0\]: its targets\[1\] contain NaN or infinity",
    ),
    "lengths": (
        [((NUMBERS, CODES[:2]), LABELS)],
        r"clients\[0\]: 3 inputs\[0\] but 2 inputs\[1\]; give as many of each",
    ),
    "target length": (
        [({"a": NUMBERS}, LABELS[:2])],
        r"clients\[0\]: 3 inputs\['a'\] but 2 targets; give as many of each",
    ),
    "no samples": ([((NUMBERS[:0], CODES[:0]), LABELS[:0])], r"clients\[0\]: it has no samples"),
    "a number for each client": (
        [({"a": NUMBERS, "b": 3}, LABELS)],
        r"its inputs\['b'\] are no plain tensor \[samples, …\]",
    ),
    "text": ([({"a": NUMBERS, "b": "words"}, LABELS)], r"give \(inputs, targets\) as tensors or arrays"),
    "a key that is no text": ([({1: NUMBERS}, LABELS)], "the key 1 is no text"),
    "empty": ([({}, LABELS)], "its inputs or targets are an empty container"),
    "nothing in it": ([(Batch(None, None), LABELS)], "its inputs or targets are an empty container"),
    "another key": (
        [({"a": NUMBERS}, LABELS), ({"b": NUMBERS}, LABELS)],
        r"clients\[1\]: its inputs are \{b: \[3, 2\] float32\}, those of client 0 \{a: \[3, 2\] float32\}",
    ),
    "another container": (
        [((NUMBERS, CODES), LABELS), (Pair(NUMBERS, CODES), LABELS)],
        r"clients\[1\]: its inputs are \{Pair.numbers: .*\}, those of client 0 \(\[3, 2\] float32, ",
    ),
    "another shape": (
        [({"a": NUMBERS, "b": CODES}, LABELS), ({"a": NUMBERS[:, :1], "b": CODES}, LABELS)],
        r"clients\[1\]: its inputs\['a'\] are shaped \[1\], those of client 0 \[2\]; make them alike",
    ),
    "another type": (
        [({"a": CODES}, LABELS), ({"a": CODES.int()}, LABELS)],
        r"its inputs\['a'\] are of type torch.int32, those of client 0 torch.int64",
    ),
    "nothing to learn": (
        [((NUMBERS, CODES), (LABELS, LABELS)), ((NUMBERS, CODES), (LABELS * 0 - 100, LABELS * 0 - 100))],
        r"clients\[1\]: all its targets are -100",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_trees_are_refused_in_one_line(case):
    clients, complaint = BAD[case]
    with pytest.raises(ff.FlatfedError, match=complaint) as refusal:
        ff.Federation.from_tensors(clients)
    assert "\n" not in str(refusal.value)


def test_one_task_of_several_may_have_no_labels_at_a_client():
    targets = (LABELS * 0 - 100, LABELS)
    assert len(ff.Federation.from_tensors([((NUMBERS, CODES), targets)])) == 1


def test_test_data_and_loaded_clients_must_be_of_the_same_form():
    with pytest.raises(ff.FlatfedError, match="test: its inputs are"):
        ff.Federation.from_tensors([({"a": NUMBERS}, LABELS)], test=(NUMBERS, LABELS))
    loaded = ff.Federation.from_function(
        2, lambda client: ({"a": NUMBERS / client}, LABELS), ({"a": NUMBERS}, LABELS)
    )
    assert len(loaded.client(1)) == 3
    with pytest.raises(ff.FlatfedError, match=r"clients\[0\]: its inputs\['a'\] contain NaN"):
        loaded.client(0)


# -- data sets and ragged samples --------------------------------------------------------------------------


class Texts(Dataset[Any]):
    """Sentences of different lengths, as dictionaries without a shape in common."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths = lengths

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index == len(self):
            raise IndexError(index)
        return {"words": torch.arange(1, self.lengths[index] + 1), "label": index % 2}


def padded(samples: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Tensor]:
    words = pad_sequence([sample["words"] for sample in samples], batch_first=True)
    return {"words": words, "mask": words > 0}, torch.tensor([sample["label"] for sample in samples])


@pytest.mark.parametrize("listed", [False, True], ids=["datasets", "lists"])
def test_a_collate_function_pads_training_and_test_samples_alike(listed):
    texts, test = (list(own) if listed else own for own in (Texts([2, 3, 1, 2]), Texts([5, 1])))
    federation = ff.Federation.from_dataset(
        texts, [[0, 2], [1, 3]], test=test, client_tests=[[0], [1]], collate=padded
    )
    inputs, targets = federation.client(1).whole()
    assert inputs["words"].tolist() == [[1, 2, 3, 0, 0], [1, 2, 0, 0, 0]]
    assert inputs["mask"].dtype == torch.bool and targets.tolist() == [1, 1]
    assert federation.test is not None
    assert federation.test[0]["words"].tolist() == [[1, 2, 3, 4, 5], [1, 0, 0, 0, 0]]
    own = federation.client_test(1)
    assert own is not None and own.whole()[0]["words"].tolist() == [[1, 0, 0, 0, 0]]


def test_ragged_samples_without_a_collate_function_are_refused_with_the_remedy():
    samples = [(torch.arange(length), 0) for length in (2, 3)]
    with pytest.raises(ff.FlatfedError, match=r"\(input, target\) of one shape .*give a collate function"):
        ff.Federation.from_dataset(samples, [[0, 1]])


def test_a_collate_function_that_fails_or_loses_samples_is_named():
    def fails(samples: list[Any]) -> Any:
        raise KeyError("words")

    for collate, complaint in (
        (fails, "collate: it cannot put together 3 samples"),
        (lambda samples: padded(samples[:2]), "collate: it makes 2 samples of 3; keep each of them"),
        (lambda samples: samples, "collate: give .inputs, targets. as tensors or arrays"),
    ):
        with pytest.raises(ff.FlatfedError, match=complaint):
            ff.Federation.from_dataset(Texts([1, 2, 3]), [[0, 1, 2]], collate=collate)


def test_samples_of_a_dataset_may_be_trees():
    samples = [({"a": [1.0, 2.0], "b": row}, {"c": row, "d": np.float32(row)}) for row in range(4)]
    federation = ff.Federation.from_dataset(samples, [[0, 1], [2, 3]])
    assert federation.inputs["a"].shape == (4, 2) and federation.inputs["b"].tolist() == [0, 1, 2, 3]
    assert [tensor.dtype for tensor in federation.targets.values()] == [torch.int64, torch.float32]


# -- identity, and trees themselves ------------------------------------------------------------------------


def test_the_identity_of_data_is_of_their_content_and_their_form():
    tree = {"a": NUMBERS, "b": CODES}
    assert digest(tree) == digest(cloned(tree))
    others = [
        {"a": NUMBERS, "c": CODES},
        {"a": NUMBERS, "b": CODES + 1},
        {"a": NUMBERS, "b": CODES.int()},
        (NUMBERS, CODES),
        Pair(NUMBERS, CODES),
        {"a": {"b": CODES}},
        NUMBERS,
        (NUMBERS,),
    ]
    digests = [digest(other) for other in (tree, *others)]
    assert len(set(digests)) == len(digests)


def test_large_tensors_in_trees_are_noticed_when_they_are_edited():
    tree = {"a": torch.zeros(2**19), "b": CODES}
    before = digest(tree)
    assert digest(tree) == before
    tree["a"][7] = 1
    assert digest(tree) != before


class Echo(torch.nn.Module):
    def forward(self, *positional: Any, **named: Any) -> Any:
        return positional, named


def test_how_a_model_is_called():
    batch = Batch(NUMBERS, CODES)
    for inputs, expected in (
        (NUMBERS, ((NUMBERS,), {})),
        ((NUMBERS, CODES), ((NUMBERS, CODES), {})),
        ({"a": NUMBERS}, ((), {"a": NUMBERS})),
        (batch, ((batch,), {})),
        (pair := Pair(NUMBERS, CODES), ((pair,), {})),
    ):
        positional, named = call(Echo(), inputs)
        assert [id(value) for value in positional] == [id(value) for value in expected[0]]
        assert {name: id(value) for name, value in named.items()} == {
            name: id(value) for name, value in expected[1].items()
        }


def test_versions_notice_edits_and_exchanges():
    batch = Batch(NUMBERS.clone(), CODES.clone())
    before = versions(batch)
    assert versions(batch) == before
    batch.codes.add_(1)
    edited = versions(batch)
    assert edited != before
    batch.numbers = batch.numbers.clone()
    assert versions(batch) != edited


def test_a_form_can_be_made_of_shapes_and_dtypes_unless_a_class_is_in_it():
    tree = {"a": NUMBERS, "more": (CODES, {"b": LABELS})}
    made = empty(sample_shapes(tree), dtypes(tree), 3)
    assert described_tree(made) == described_tree(tree)
    assert empty(sample_shapes(Batch(NUMBERS, CODES)), dtypes(Batch(NUMBERS, CODES)), 3) is None
    assert children(torch.Size([1])) is None
