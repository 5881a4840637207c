"""Flat vectors: whether they are finite."""

from __future__ import annotations

import pytest
import torch

from flatfed.core.flat import all_finite

INFINITY, HUGE = float("inf"), 3e38


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -2.0], True),
        ([], True),
        ([HUGE, HUGE, HUGE], True),
        ([HUGE, HUGE, -HUGE, -HUGE], True),
        ([1.0, float("nan")], False),
        ([INFINITY, 1.0], False),
        ([INFINITY, -INFINITY], False),
        ([HUGE, HUGE, -INFINITY], False),
    ],
)
def test_infinities_and_nan_are_found_and_huge_numbers_are_not_taken_for_them(values, expected):
    assert all_finite(torch.tensor(values)) is expected
