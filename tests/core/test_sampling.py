"""Cohorts and batches: what is promised about local work, participation and streams."""

from __future__ import annotations

import inspect

import numpy as np
import pytest
import torch

from flatfed import Execution, FlatfedError, Training
from flatfed.core.random import key, numpy_generator, torch_generator
from flatfed.core.sampling import batches, cohort, equal_batches, local_steps


def test_an_epoch_is_every_sample_once_with_a_smaller_last_batch():
    settings = Training(rounds=1, local_epochs=3, batch_size=4)
    taken = batches(settings, 10, 0, 0)
    assert [len(batch) for batch in taken] == [4, 4, 2] * 3
    for epoch in range(3):
        assert sorted(torch.cat(taken[3 * epoch : 3 * epoch + 3]).tolist()) == list(range(10))
    assert not torch.equal(torch.cat(taken[:3]), torch.cat(taken[3:6])), "every epoch has an order of its own"


def test_steps_take_full_batches_across_epochs():
    settings = Training(rounds=1, local_steps=5, batch_size=4)
    taken = batches(settings, 10, 0, 0)
    assert [len(batch) for batch in taken] == [4] * 5
    assert sorted(torch.cat(taken).tolist()) == sorted([*range(10), *range(10)])


@pytest.mark.parametrize("work", [{"local_steps": 3}, {"local_epochs": 3}])
@pytest.mark.parametrize("size", [None, 1, 4, 5, 99])
def test_steps_are_counted_without_drawing(work, size):
    settings = Training(rounds=1, batch_size=size, **work)
    assert local_steps(settings, 10) == len(batches(settings, 10, 0, 0))


def test_a_client_smaller_than_a_batch_repeats_samples_evenly():
    taken = batches(Training(rounds=1, local_steps=2, batch_size=7), 3, 0, 0)
    assert [len(batch) for batch in taken] == [7, 7]
    counts = torch.bincount(torch.cat(taken), minlength=3)
    assert counts.max() - counts.min() <= 1


@pytest.mark.parametrize("work", [{"local_steps": 3}, {"local_epochs": 3}])
def test_full_batches(work):
    taken = batches(Training(rounds=1, batch_size=None, **work), 6, 0, 0)
    assert [batch.tolist() for batch in taken] == [list(range(6))] * 3


def test_batches_depend_on_seed_round_and_client():
    settings = Training(rounds=1, local_steps=4, batch_size=5)
    base = torch.cat(batches(settings, 40, 2, 3))
    assert torch.equal(base, torch.cat(batches(settings, 40, 2, 3)))
    for changed, round_number, client in [
        (settings, 1, 3),
        (settings, 2, 4),
        (settings.model_copy(update={"seed": 1}), 2, 3),
    ]:
        assert not torch.equal(base, torch.cat(batches(changed, 40, round_number, client)))


def test_which_settings_make_equal_batches():
    assert equal_batches(Training(rounds=1, local_steps=3), None)
    assert not equal_batches(Training(rounds=1, local_epochs=3), None)
    assert not equal_batches(Training(rounds=1, local_steps=3, batch_size=None), None)
    assert equal_batches(Training(rounds=1, local_epochs=3), 20)


def test_fixed_cohorts_are_sorted_distinct_and_uniform():
    settings = Training(rounds=1, participation=0.3)
    counts = np.zeros(10)
    for round_number in range(600):
        chosen = cohort(settings, 10, round_number)
        assert len(chosen) == 3 == len(set(chosen))
        assert chosen == sorted(chosen)
        counts[chosen] += 1
    # 180 expected each; the standard deviation is √(600 · 0.3 · 0.7) = 11.2.
    assert abs(counts - 180).max() < 5 * 11.2


def test_bernoulli_cohorts_have_the_right_sizes_and_are_never_empty():
    settings = Training(rounds=1, participation=0.1, sampling="bernoulli")
    sizes = np.array([len(cohort(settings, 10, round_number)) for round_number in range(3000)])
    assert sizes.min() >= 1
    share_of_ones = 10 * 0.1 * 0.9**9 / (1 - 0.9**10)
    assert abs((sizes == 1).mean() - share_of_ones) < 0.05
    assert abs(sizes.mean() - 1 / (1 - 0.9**10)) < 0.1


@pytest.mark.parametrize(
    ("share", "clients", "expected"), [(0.1, 3, 1), (1.0, 7, 7), (0.5, 9, 5), (0.01, 500, 5)]
)
def test_a_share_becomes_at_least_one_participant(share, clients, expected):
    assert len(cohort(Training(rounds=1, participation=share), clients, 0)) == expected


def test_everybody_takes_part_unless_told_otherwise():
    assert cohort(Training(rounds=1), 4, 0) == [0, 1, 2, 3]


def test_keys_are_distinct_and_generators_follow_them():
    keys = {key(*name) for name in [(0, "a"), (0, "b"), (1, "a"), (0, "a", 1), (0, "a", 1, 2), (0, "a", 12)]}
    assert len(keys) == 6
    assert all(0 <= number < 2**63 for number in keys)
    draws = {float(torch.rand(1, generator=torch_generator(0, "x", number))) for number in range(50)}
    assert len(draws) == 50
    assert numpy_generator(3, "x").random() == numpy_generator(3, "x").random()


@pytest.mark.parametrize("kind", [Training, Execution])
def test_keyword_arguments_are_the_fields_of_settings(kind):
    assert set(inspect.signature(kind).parameters) == set(kind.model_fields)


def test_a_setting_decides_numbers_or_execution_but_not_both():
    assert not set(Training.model_fields) & set(Execution.model_fields)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({}, "rounds: missing"),
        ({"rounds": 1, "lr": float("inf")}, "lr = inf"),
        ({"rounds": 1, "lr": True}, "lr = True"),
        ({"rounds": 1.5}, "rounds = 1.5"),
        ({"rounds": 1, "participation": 1.5}, "participation = 1.5"),
        ({"rounds": 1, "clip": 0}, "clip = 0"),
        ({"rounds": 1, "sampling": "poisson"}, "sampling = 'poisson'"),
        ({"rounds": 1, "batchsize": 3}, "batchsize: unknown; did you mean 'batch_size'?"),
        ({"rounds": 1, "participation": 0.1, "participants": 2}, "give only one"),
        ({"rounds": 1, "lr": -1, "seed": -1}, "(and 1 more)"),
    ],
)
def test_bad_settings_name_the_field_and_the_value(values, complaint):
    with pytest.raises(FlatfedError) as caught:
        Training(**values)
    assert complaint in str(caught.value)
    assert "\n" not in str(caught.value)


def test_numpy_integers_and_full_are_accepted():
    settings = Training(rounds=np.int64(3), batch_size="full", seed=np.int32(4))
    assert (settings.rounds, settings.batch_size, settings.seed) == (3, None, 4)


@pytest.mark.parametrize(
    "settings",
    [
        {"local_steps": 10**9},
        {"local_steps": 10**9, "batch_size": None},
        {"local_epochs": 10**9, "batch_size": None},
        {"local_epochs": 10**9},
        {"local_steps": 1, "batch_size": 10**12},
        {"local_steps": 5, "batch_size": 10**7},
        {"local_steps": 2**62, "batch_size": 2**62},
    ],
    ids=str,
)
def test_a_round_that_would_never_begin_is_refused(settings):
    with pytest.raises(FlatfedError) as refused:
        batches(Training(rounds=1, **settings), 7, 0, 0)
    message = str(refused.value)
    for name, value in settings.items():
        assert value is None or f"{name} = {value}" in message
    assert "use at most 1e" in message


def test_a_batch_larger_than_the_data_is_all_of_it_in_epochs():
    (batch,) = batches(Training(rounds=1, batch_size=10**12), 7, 0, 0)
    assert sorted(batch.tolist()) == list(range(7))
