"""Statistics over rounds and seeds, with values missing as tests, divergence and damage leave them."""

from __future__ import annotations

import math

import pytest

from flatfed.core.errors import FlatfedError
from flatfed.runs.compare import summarise
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import (
    Curve,
    Spread,
    best,
    by_round,
    finite,
    finite_values,
    first_round_reaching,
    last,
    mean,
    running_total,
    total,
)

HISTORY = [
    {"round": 1, "bytes_up": 10, "bytes_down": 1, "seconds": 0.5},
    {"round": 2, "bytes_up": 10, "bytes_down": 2, "test_accuracy": 0.6},
    {"round": 3, "bytes_up": 10, "bytes_down": 3, "test_accuracy": math.nan},
    {"round": 4, "bytes_up": 10, "bytes_down": "much", "test_accuracy": 0.8},
    {"round": 5, "bytes_up": 10, "bytes_down": 5, "test_accuracy": 0.7},
    {"round": 6, "bytes_up": 10, "bytes_down": 6},
]


@pytest.mark.parametrize("value", [None, True, "1", math.nan, math.inf, [1]])
def test_only_finite_numbers_count(value):
    assert finite(value) is None
    assert finite_values([value, 2]) == [2.0]
    assert mean([value]) is None and Spread.of_finite([value]) is None
    assert mean([value, 2, 4]) == 3.0


def test_a_quantity_is_read_from_the_rounds_that_have_it():
    assert by_round(HISTORY) == {2: 0.6, 4: 0.8, 5: 0.7}
    assert (last(HISTORY), best(HISTORY)) == (0.7, 0.8)
    assert last(HISTORY[:3]) is None and best(HISTORY[:3]) == 0.6
    assert last(HISTORY, "test_loss") is None and best(HISTORY, "test_loss") is None


def test_the_first_round_to_reach_a_target_counts_even_if_later_ones_fall_behind():
    assert [first_round_reaching(HISTORY, target) for target in (0.6, 0.7, 0.8, 0.9)] == [2, 4, 4, None]
    assert first_round_reaching(HISTORY, 5, "bytes_down") == 5


def test_costs_add_up():
    assert total(HISTORY, "bytes_up") == 60
    assert total(HISTORY, "bytes_up", "bytes_down") == 77
    assert list(running_total(HISTORY, "bytes_up", "bytes_down").values()) == [11, 23, 36, 46, 61, 77]


def test_a_curve_has_the_rounds_of_all_seeds():
    curve = Curve.of([{1: 1.0, 2: 2.0, 4: 4.0}, {2: 4.0, 3: 3.0, 4: 8.0}])
    assert curve.means == {2: 3.0, 4: 6.0}
    assert curve.deviation == pytest.approx([math.sqrt(2), math.sqrt(8)])
    assert curve.end == Spread(6.0, pytest.approx(math.sqrt(8)))
    assert Curve.of([{1: 1.0}]).deviation is None and math.isnan(Curve.of([{1: 1.0}]).end.deviation)
    assert Curve.of([]).end is None and Curve.of([{1: 1.0}, {2: 1.0}]).rounds == []


class Stored(RunFolder):
    """A run folder whose content is given."""

    def __init__(self, tmp_path, history):
        super().__init__(tmp_path)
        self.history = history

    def read_history(self, rounds=None):
        return self.history

    def read_clients(self):
        return {}


def test_a_row_has_the_spreads_over_seeds(tmp_path):
    history = [{**line, "bytes_down": 1e6, "gradient_evaluations": 3, "seconds": 1} for line in HISTORY]
    worse = [{**line, "test_accuracy": 0.1} for line in history]
    row = summarise("fedavg", 0.1, [Stored(tmp_path, history), Stored(tmp_path, worse)], 0.7)
    assert row.accuracy == Spread.of([0.7, 0.1])
    assert (row.rounds_to_target.mean, row.reached, row.seeds) == (4, 1, 2)
    assert (row.megabytes_down.mean, row.gradient_evaluations.mean, row.seconds.mean) == (6, 18, 6)
    assert row.clients is None and row.client_tests is None


def test_runs_without_tests_are_refused_in_one_line(tmp_path):
    untested = [{"round": 1, "bytes_down": 1, "bytes_up": 1, "gradient_evaluations": 1, "seconds": 1}]
    with pytest.raises(FlatfedError, match="fedavg: its runs have no test accuracy"):
        summarise("fedavg", 0.1, [Stored(tmp_path, untested)], 0.7)
