"""What clients do to a model's buffers is averaged for every kind of number, or refused."""

import pytest
import torch
from torch import nn

import flatfed as ff
from flatfed.core.flat import Layout, apply_buffer_change, buffer_change, length, unit


@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.int8, torch.int32, torch.int64, torch.float32, torch.float64]
)
def test_changes_up_and_down_are_averaged(dtype):
    before = {"count": torch.tensor([100, 3], dtype=dtype)}
    ends = [torch.tensor(end, dtype=dtype) for end in ([96, 3], [100, 5], [107, 4])]
    changes = [buffer_change(before, {"count": end})["count"] for end in ends]
    mean = {"count": torch.stack(changes).mean(0)}
    after = apply_buffer_change(before, mean)["count"]
    assert after.dtype == dtype and torch.equal(after, torch.tensor([101, 4], dtype=dtype))


def test_numbers_of_64_bits_that_do_not_change_keep_every_bit():
    before = {
        "key": torch.tensor([2**62 + 1]),
        "flag": torch.tensor([True]),
        "filter": torch.tensor([1 + 2j]),
    }
    changes = buffer_change(before, {name: value.clone() for name, value in before.items()})
    after = apply_buffer_change(before, changes)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_a_complex_buffer_that_changes_is_refused():
    before = {"filter": torch.tensor([1 + 2j])}
    with pytest.raises(ff.FlatfedError, match=r"model: its buffer 'filter' is complex and changes"):
        buffer_change(before, {"filter": torch.tensor([1 + 3j])})


def test_complex_parameters_are_refused():
    with pytest.raises(ff.FlatfedError, match="model: it has complex parameters"):
        Layout(nn.Linear(2, 2, dtype=torch.complex64))


def test_the_vector_of_a_module_is_a_copy():
    for module in (nn.Linear(2, 2), nn.Linear(3, 1, bias=False), nn.Conv2d(1, 2, 3, bias=False)):
        vector = Layout(module).vector(module)
        addresses = {value.untyped_storage().data_ptr() for value in module.parameters()}
        assert vector.untyped_storage().data_ptr() not in addresses


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_directions_of_any_length_have_length_1(dtype):
    limits = torch.finfo(dtype)
    for size in (limits.tiny * 4, limits.tiny**0.5 / 8, 1e-3, 1.0, 1e6, limits.max**0.5 * 8, limits.max / 8):
        vector = size * torch.tensor([[3.0, 0, -4], [0, 1, 0]], dtype=dtype)
        assert torch.allclose(length(vector)[:, 0] / size, torch.tensor([5.0, 1.0], dtype=dtype), rtol=1e-6)
        expected = torch.tensor([[0.6, 0, -0.8], [0, 1, 0]], dtype=dtype)
        assert torch.allclose(unit(vector), expected, rtol=1e-6)
    zero = torch.zeros(2, 3, dtype=dtype)
    assert torch.equal(unit(zero), zero) and torch.equal(length(zero), zero[:, :1])
    mixed = torch.stack([zero[0], 1e30 * torch.ones(3, dtype=dtype)])
    assert bool(torch.isfinite(unit(mixed)).all()) and float(unit(mixed)[1].norm()) == pytest.approx(1)
