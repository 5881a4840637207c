"""Intervals and ranks on made-up numbers whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flatfed.runs.ranking import difference, interval, ranks

SEEDS, SAMPLES, REPEATS = 3, 2000, 300


def measured(generator, truth, deviation, wrong):
    """Accuracies under some seeds on test samples that all of them share: `wrong` is how hard those are."""
    models = truth + deviation * generator.standard_normal(SEEDS)
    return (models - wrong).tolist()


def coverage(deviation, paired):
    generator, hits = np.random.default_rng(1), 0
    for _ in range(REPEATS):
        truth = 0.8
        one, other = (
            measured(
                generator, truth, deviation, generator.normal(0, math.sqrt(truth * (1 - truth) / SAMPLES))
            )
            for _ in range(2)
        )
        found = difference(one, other, SAMPLES) if paired else interval(one, SAMPLES)
        hits += found.low <= (0 if paired else truth) <= found.high
    return hits / REPEATS


@pytest.mark.parametrize("paired", [False, True], ids=["interval", "difference"])
@pytest.mark.parametrize("deviation", [0.0, 0.01, 0.05])
def test_intervals_cover_the_truth(deviation, paired):
    # 95 %, give or take three standard errors of so many repeats, and never much too wide.
    assert 0.91 <= coverage(deviation, paired) <= 0.995


def test_intervals_are_those_of_the_textbook():
    # Many samples: Student's t alone. One seed: the binomial alone.
    many = interval([0.79, 0.80, 0.81], 10**9)
    assert many.mean == pytest.approx(0.8)
    assert many.high - many.low == pytest.approx(2 * 4.303 * 0.01 / math.sqrt(3), rel=0.1)
    one = interval([0.8], 1000)
    assert one.high - one.low == pytest.approx(2 * 1.96 * math.sqrt(0.8 * 0.2 / 1000), rel=0.05)
    assert one.text() == f"80.0 [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def test_intervals_of_accuracies_end_where_accuracies_do():
    found = interval([0.1, 0.8, 0.8], 1000)
    assert found.low == 0 and found.high == 1


def test_what_seeds_share_cancels_in_differences():
    one, other = [0.70, 0.80, 0.90], [0.69, 0.79, 0.89]
    assert difference(one, other, 10**9).low == pytest.approx(0.01, abs=1e-4)
    assert interval(one, 10**9).low < 0.6


def test_intervals_do_not_depend_on_when_they_are_asked_for():
    assert interval([0.7, 0.8], 100) == interval([0.7, 0.8], 100)


def test_ranks_and_their_critical_difference():
    # Demšar (2006), Table 5: four classifiers, CD = 2.569 √(4·5 / (6·14)) at 0.05.
    scores = {name: [value] * 14 for name, value in zip("abcd", (0.9, 0.8, 0.7, 0.6), strict=True)}
    found = ranks(scores)
    assert list(found.means.items()) == [("a", 1.0), ("b", 2.0), ("c", 3.0), ("d", 4.0)]
    assert found.critical_difference == pytest.approx(2.569 * math.sqrt(4 * 5 / (6 * 14)), rel=1e-3)
    assert found.alike == [("a", "b"), ("b", "c"), ("c", "d")]
    # Friedman's statistic of a perfect order is blocks (methods − 1).
    assert found.p_value == pytest.approx(math.exp(-21) * 1e3, rel=10)


def test_failures_are_last_and_ties_share_a_rank():
    found = ranks({"a": [0.5, None], "b": [0.5, 0.6], "c": [0.4, 0.7]})
    assert list(found.means.items()) == [("b", 1.75), ("c", 2.0), ("a", 2.25)]
    assert found.alike == [("b", "c", "a")] and found.p_value > 0.5
