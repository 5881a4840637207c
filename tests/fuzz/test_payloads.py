"""Uploads that were damaged or forged on their way: refused, or a finite vector of the right shape."""

import math
import zlib

import torch
from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, limits

from flatfed import parts
from flatfed.core.errors import FlatfedError
from flatfed.core.part import Compressor
from flatfed.core.random import torch_generator

ratios = st.floats(1e-6, 1.0)
buckets = st.none() | st.integers(1, 70) | st.just(10**12)
plain = st.one_of(
    st.just(Compressor()),
    st.builds(parts.Quantize, st.integers(2, 8), buckets, st.sampled_from(["l2", "max"])),
    st.builds(parts.TopK, ratios),
    st.builds(parts.Sign, buckets),
)
compressors = plain | st.builds(parts.ErrorFeedback, plain) | st.builds(parts.ErrorFeedback21, plain)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16])
sizes = st.integers(0, 70)
HUGE = [10**6, 2**31, 2**40, 10**15]


@st.composite
def damaged(draw: st.DrawFn, payload: bytes) -> bytes:
    """The payload after some accidents, and perhaps with a checksum that fits again."""
    content = bytearray(payload)
    for _ in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(["flip", "cut", "extend", "replace", "swap"]))
        place = draw(st.integers(0, max(0, len(content) - 1)))
        if kind == "flip" and content:
            content[place] ^= 1 << draw(st.integers(0, 7))
        elif kind == "cut":
            del content[place : place + draw(st.integers(1, 8))]
        elif kind == "extend":
            content[place:place] = draw(st.binary(max_size=8))
        elif kind == "replace":
            content[place : place + 4] = draw(st.binary(min_size=4, max_size=4))
        else:
            content[:] = content[place:] + content[:place]
    if draw(st.booleans()) and len(content) >= 4:
        body = bytes(content[:-4])
        return body + zlib.crc32(body).to_bytes(4, "little")
    return bytes(content)


def decoded(compress: Compressor, payload: bytes, size: int, dtype: torch.dtype) -> torch.Tensor | None:
    """What the receiver sees, or None if it refused; anything else breaks the rule."""
    with limits(memory=2**28):
        try:
            vector = compress.decode(payload, size, dtype)
        except FlatfedError as error:
            assert str(error).startswith("payload: ") and "\n" not in str(error)
            return None
    assert vector.shape == (size,) and vector.dtype == dtype
    assert bool(torch.isfinite(vector).all())
    return vector


@SOME
@given(st.data(), compressors, dtypes, sizes)
def test_a_damaged_payload(data, compress, dtype, size):
    vector = torch.randn(size, generator=torch_generator(size, "fuzz")).to(dtype)
    payload = compress.encode(vector, torch_generator(size, "rounding"))
    expected = decoded(compress, payload, size, dtype)
    assert expected is not None
    wrong = data.draw(damaged(payload))
    found = decoded(compress, wrong, size, dtype)
    if wrong == payload:
        assert found is not None and torch.equal(found, expected)


@SOME
@given(compressors, dtypes, sizes | st.sampled_from(HUGE), st.binary(max_size=400))
def test_any_bytes_as_a_payload(compress, dtype, size, content):
    decoded(compress, content, size, dtype)
    decoded(compress, content + zlib.crc32(content).to_bytes(4, "little"), size, dtype)


@SOME
@given(st.data(), compressors, sizes)
def test_bytes_of_the_right_length_with_a_checksum_that_fits(data, compress, size):
    """What a hostile client would send: everything is consistent, and the numbers are anything."""
    dtype = data.draw(dtypes)
    honest = compress.encode(torch.ones(size, dtype=dtype), torch_generator(size, "rounding"))
    own = type(getattr(compress, "of", compress)) is Compressor
    length = len(honest) - (0 if own else 4)
    body = data.draw(st.binary(min_size=length, max_size=length))
    decoded(compress, body if own else body + zlib.crc32(body).to_bytes(4, "little"), size, dtype)


numbers = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-45, 3e38, -3e38, 65504.0, 7e4])


@SOME
@given(compressors, dtypes, st.lists(numbers, max_size=70))
def test_any_vector_is_sent_or_refused(compress, dtype, values):
    vector = torch.tensor(values, dtype=torch.float64).to(dtype)
    try:
        payload = compress.encode(vector, torch_generator(len(values), "rounding"))
    except FlatfedError as error:
        assert "\n" not in str(error)
        assert not all(math.isfinite(number) and abs(number) < 1e30 for number in vector.tolist())
        return
    decoded(compress, payload, len(vector), dtype)
