"""A share of a data set."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets import DATASETS
from flatfed.data.datasets.base import Labelled, train_test
from flatfed.data.datasets.subset import subset
from flatfed.training.config import Config

CONFIG = {"data": {"dataset": "digits", "clients": 5}, "training": {"rounds": 1}}


def config(share, seed=0):
    data = {**CONFIG["data"], "options": {"subset": share}}
    return Config.checked({**CONFIG, "data": data, "training": {"rounds": 1, "seed": seed}})


def test_both_parts_have_that_share_and_every_run_the_same_samples():
    whole = DATASETS["digits"]()
    for share in (0.1, 0.5):
        federation, other = config(share).make_federation(), config(share, seed=1).make_federation()
        assert federation.total_samples == round(share * len(whole.train_targets))
        assert len(federation.test[1]) == round(share * len(whole.test_targets))
        assert torch.equal(federation.test[0], other.test[0])


def test_the_papers_emnist_has_the_papers_size():
    sizes = [len(subset(labelled(train, test), 0.1).train_targets) for train, test in ((697_932, 116_323),)]
    sizes += [len(subset(labelled(697_932, 116_323), 0.1).test_targets)]
    assert sum(sizes) == 81_425


def labelled(train, test):
    parts = [Labelled(np.zeros((n, 1), np.uint8), np.arange(n) % 62, np.arange(n) % 7) for n in (train, test)]
    return train_test("numbers", *parts, classes=62)


def test_samples_keep_their_labels_groups_and_order():
    rows = np.arange(100)
    part = Labelled(rows[:, None].astype(np.float32), rows % 10, rows % 4)
    data = train_test("numbers", part, part, classes=10)
    some = subset(data, 0.3)
    kept = some.train_inputs[:, 0].to(torch.int64)
    assert len(kept) == 30 and torch.equal(kept, kept.sort().values) and len(set(kept.tolist())) == 30
    assert torch.equal(some.train_targets, kept % 10)
    assert some.groups is not None and np.array_equal(some.groups, kept.numpy() % 4)
    assert some.test_groups is not None and len(some.test_groups) == 30
    assert subset(data, 1.0) is data


@pytest.mark.parametrize("share", [0, -0.1, 1.5, "half", True, None])
def test_a_bad_share_is_one_clear_line(share):
    with pytest.raises(FlatfedError, match=r"data\.options\.subset = .*: must be a share of the samples"):
        config(share)
