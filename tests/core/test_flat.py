"""Flat vectors: whether they are finite, and their lengths."""

from __future__ import annotations

import pytest
import torch

from flatfed.core.flat import all_finite, unit

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


@pytest.mark.parametrize("tiny_as_zero", [False, True], ids=["tiny numbers kept", "tiny numbers as zero"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_unit_vector_has_length_one_however_short_the_vector(dtype, tiny_as_zero):
    draws = torch.randn(1000, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    one_larger = torch.ones(1000, dtype=torch.float64).index_fill(0, torch.tensor([3]), 2.0)
    scales = 10.0 ** -torch.arange(0, 31, dtype=torch.float64)
    vectors = (scales[:, None, None] * torch.stack([draws, one_larger, torch.zeros(1000)])).to(dtype)
    torch.set_flush_denormal(tiny_as_zero)
    try:
        units = unit(vectors)
        alone = torch.stack([unit(vector) for vector in vectors.flatten(0, 1)])
    finally:
        torch.set_flush_denormal(False)
    lengths = units.double().norm(dim=-1)
    assert torch.allclose(lengths[:, :2], torch.ones(31, 2, dtype=torch.float64), rtol=0, atol=1e-6)
    assert not units[:, 2].any()
    assert torch.allclose(alone.double(), units.flatten(0, 1).double(), rtol=0, atol=1e-7)
