"""Compressors against their equations: moments, contraction, bytes, damage, and what error feedback keeps."""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from torch import Tensor

import flatfed as ff
from flatfed.core.context import MergeContext
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.part import Compressor
from flatfed.core.random import torch_generator
from flatfed.core.rounds import encode_uploads, server_round
from flatfed.parts import ErrorFeedback, ErrorFeedback21, Quantize, Sign, TopK
from flatfed.parts.compress import pack, unpack

LARGEST = torch.finfo(torch.float32).max
SMALLEST = 2.0**-149
"""The smallest positive single."""
COMPRESSORS: list[Compressor] = [
    *(Quantize(bits, 5, norm) for bits in range(2, 9) for norm in ("l2", "max")),
    Quantize(4, None),
    Quantize(5, None, levels=8),
    Quantize(6, 5, levels=17),
    TopK(0.3),
    TopK(0.02),
    Sign(),
    Sign(4),
]

every_compressor = pytest.mark.parametrize("compress", COMPRESSORS, ids=str)
numbers = st.floats(-1e6, 1e6, width=32)
singles = st.floats(width=32, allow_nan=False, allow_infinity=False)
buckets = st.sampled_from([None, 1, 3, 8, 64, 10**12])


def vectors(element: st.SearchStrategy[float], least: int = 0) -> st.SearchStrategy[Tensor]:
    return st.lists(element, min_size=least, max_size=40).map(torch.tensor)


def draws(seed: int = 0) -> torch.Generator:
    return torch_generator(seed, "test")


def normal(*shape: int, seed: int = 0) -> Tensor:
    """From another stream than the quantizer's, or its rounding would depend on the numbers."""
    return torch.randn(*shape, generator=torch_generator(seed, "vector"))


def sent(compress: Compressor, vector: Tensor, seed: int = 0) -> Tensor:
    return compress.decode(compress.encode(vector, draws(seed)), len(vector), vector.dtype)


def pieces(vector: Tensor, bucket: int | None) -> Sequence[Tensor]:
    return vector.double().split(bucket or max(1, len(vector))) if len(vector) else []


# -- quantization: moments ---------------------------------------------------------------------------------

REPEATS = 4000
SIGMAS = 5


def repeated(compress: Quantize, vector: Tensor) -> Tensor:
    """Independent outcomes for one vector, [REPEATS, d]: each is a bucket of its own."""
    many = replace(compress, bucket=len(vector))
    return sent(many, vector.repeat(REPEATS)).double().view(REPEATS, -1)


def chances(compress: Quantize, vector: Tensor) -> tuple[float, Tensor, Tensor]:
    """n, ⌊r_j⌋ and p_j by the definition, r_j = s |v_j| / n."""
    order = 2 if compress.norm == "l2" else math.inf
    norm = float(torch.linalg.vector_norm(vector.double(), ord=order))
    exact = compress.magnitudes * vector.double().abs() / norm
    return norm, exact.floor(), exact - exact.floor()


@pytest.mark.parametrize("norm", ["l2", "max"])
@pytest.mark.parametrize("bits", range(2, 9))
def test_quantization_has_the_exact_mean_and_variance(bits, norm):
    compress, vector = Quantize(bits=bits, norm=norm), normal(50, seed=bits)
    found = repeated(compress, vector)
    length, _, chance = chances(compress, vector)
    step = length / (2 ** (bits - 1) - 1)
    spread = chance * (1 - chance)
    error = (found.mean(0) - vector.double()).abs()
    assert bool((error <= SIGMAS * step * (spread / REPEATS).sqrt() + 1e-5 * step).all())

    squares = (found - vector.double()).square().sum(1)
    expected = step**2 * float(spread.sum())
    # Of the square of a centred Bernoulli number.
    uncertain = step**2 * math.sqrt(float((spread * (1 - 2 * chance).square()).sum()) / REPEATS)
    assert float(squares.mean()) == pytest.approx(expected, abs=SIGMAS * uncertain + 1e-4 * expected)

    size, levels = len(vector), compress.magnitudes
    bound = min(size / levels**2, math.sqrt(size) / levels) if norm == "l2" else size / (4 * levels**2)
    assert expected <= bound * length**2
    assert float(squares.mean()) <= bound * length**2 + SIGMAS * uncertain


def test_few_numbers_are_left_by_coarse_quantization():
    for bits, size in ((2, 200), (3, 200), (2, 20)):
        compress, vector = Quantize(bits=bits), normal(size)
        kept = (repeated(compress, vector) != 0).double()
        _, whole, chance = chances(compress, vector)
        probability = torch.where(whole > 0, 1.0, chance)
        uncertain = math.sqrt(float((probability * (1 - probability)).sum()) / REPEATS)
        expected = float(probability.sum())
        assert float(kept.sum(1).mean()) == pytest.approx(expected, abs=SIGMAS * uncertain)
        levels = compress.magnitudes
        assert expected <= levels * (levels + math.sqrt(size))


def test_variance_over_a_whole_model():
    vector = normal(320_010)
    for compress in (Quantize(4, None), Quantize(8, None), Quantize(4, 512), Quantize(4, 512, "max")):
        own = [chances(compress, piece) for piece in pieces(vector, compress.bucket)]
        expected = sum((norm / compress.magnitudes) ** 2 * float((p * (1 - p)).sum()) for norm, _, p in own)
        found = float((sent(compress, vector) - vector).square().sum())
        assert found == pytest.approx(expected, rel=0.02)


@given(
    st.integers(2, 8),
    st.integers(-100, 100),
    st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=30),
    st.integers(0, 99),
)
def test_numbers_on_the_levels_are_kept_exactly(bits, exponent, places, seed):
    top = 2 ** (bits - 1) - 1
    levels = [top, *(round(place * top) * (-1) ** negative for place, negative in places)]
    vector = torch.tensor(levels, dtype=torch.float32) * 2.0**exponent
    assert torch.equal(sent(Quantize(bits, None, "max"), vector, seed), vector)


# -- quantization: round trips -----------------------------------------------------------------------------


@given(vectors(singles), st.integers(2, 8), buckets, st.integers(0, 99))
@example(torch.tensor([LARGEST, -LARGEST, LARGEST / 3, 1.0]), 8, None, 0)
@example(torch.tensor([SMALLEST, -SMALLEST, 0.0]), 4, 3, 0)
@example(torch.tensor([-0.0]), 2, 1, 0)
@example(torch.zeros(7), 5, 3, 0)
def test_quantized_numbers_go_to_a_neighbouring_level(vector, bits, bucket, seed):
    found = sent(Quantize(bits, bucket, "max"), vector, seed)
    levels = 2 ** (bits - 1) - 1
    for own, values in zip(pieces(found, bucket), pieces(vector, bucket), strict=True):
        norm = float(values.abs().max())
        # Half a smallest number is lost where the levels lie below single precision.
        assert bool(((own - values).abs() <= (1 + 1e-4) * norm / levels + SMALLEST).all())
        assert bool((own.abs() <= norm).all())
        assert bool((own * values >= 0).all())
        assert bool((own[values == 0] == 0).all())
        assert not bool(torch.signbit(own[values == 0]).any())


@given(vectors(numbers), st.integers(2, 8), buckets, st.integers(0, 99))
def test_the_norm_travels_as_the_next_single_above(vector, bits, bucket, seed):
    payload = Quantize(bits, bucket).encode(vector, draws(seed))
    own = pieces(vector, bucket)
    norms = struct.unpack(f"<{len(own)}f", payload[: 4 * len(own)])
    for norm, values in zip(norms, own, strict=True):
        exact = math.sqrt(math.fsum(float(value) ** 2 for value in values))
        assert exact * (1 - 1e-14) <= norm <= exact * (1 + 2**-22) + SMALLEST


@pytest.mark.parametrize("bits", range(2, 9))
def test_lone_numbers_are_kept_whatever_they_are(bits):
    values = [1.0, -1.0, 0.1, -1e-30, SMALLEST, -SMALLEST, LARGEST, -LARGEST, 0.0]
    for norm in ("l2", "max"):
        vector = torch.tensor(values)
        assert torch.equal(sent(Quantize(bits, 1, norm), vector), vector)


def test_a_norm_beyond_single_precision_is_refused():
    vector = torch.full((2,), LARGEST)
    with pytest.raises(DivergedError, match="norm is beyond single precision"):
        Quantize(norm="l2").encode(vector, draws())
    assert torch.equal(sent(Quantize(norm="max"), vector), vector)


def test_a_bucket_may_be_much_longer_than_the_vector():
    vector = normal(10)
    payload, whole = (Quantize(4, bucket).encode(vector, draws()) for bucket in (10**15, None))
    assert payload == whole


@given(vectors(numbers), st.integers(2, 8), buckets, st.integers(0, 99))
def test_the_payload_says_what_the_receiver_sees(vector, bits, bucket, seed):
    """Decoded bit by bit from the description of the format."""
    compress = Quantize(bits, bucket)
    payload = compress.encode(vector, draws(seed))
    count = len(pieces(vector, bucket))
    norms = struct.unpack(f"<{count}f", payload[: 4 * count])
    stream = int.from_bytes(payload[4 * count : -4], "little")
    expected = []
    for index in range(len(vector)):
        code = stream >> (bits * index) & (2**bits - 1)
        magnitude, negative = code & (2 ** (bits - 1) - 1), code >> (bits - 1)
        norm = norms[index // (bucket or len(vector))]
        expected.append((-1) ** negative * norm * magnitude / (2 ** (bits - 1) - 1))
    found = compress.decode(payload, len(vector), torch.float64)
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-40)


@given(st.integers(1, 8), st.lists(st.integers(0, 255), max_size=40))
def test_packing_is_a_row_of_bits(bits, raw):
    codes = [code % 2**bits for code in raw]
    stream = 0
    for index, code in enumerate(codes):
        for bit in range(bits):
            stream |= (code >> bit & 1) << (index * bits + bit)
    packed = pack(np.array(codes, np.uint8), bits)
    assert packed == stream.to_bytes(math.ceil(len(codes) * bits / 8), "little")
    assert unpack(packed, bits, len(codes)).tolist() == codes


# -- Top-k and signs ---------------------------------------------------------------------------------------


@given(vectors(singles, 1), st.floats(0.001, 1))
@example(torch.tensor([1.0, -1.0, 1.0, 1.0]), 0.5)
@example(torch.zeros(5), 0.5)
@example(torch.tensor([-0.0, SMALLEST, -SMALLEST]), 0.4)
def test_top_k_keeps_the_largest_and_of_equals_the_first(vector, ratio):
    size = len(vector)
    kept = math.ceil(ratio * size)
    assume(abs(ratio * size - round(ratio * size)) > 1e-9 or ratio == 0.5)
    order = sorted(range(size), key=lambda index: (-abs(float(vector[index])), index))
    expected = torch.zeros(size)
    for index in order[:kept]:
        expected[index] = vector[index]
    found = sent(TopK(ratio), vector)
    assert torch.equal(found, expected)
    lost = float((vector.double() - found.double()).square().sum())
    assert lost <= (1 - kept / size) * float(vector.double().square().sum()) * (1 + 1e-12)


def test_top_k_loses_most_when_all_are_equal():
    vector = torch.full((10,), -2.0)
    lost = (vector - sent(TopK(0.3), vector)).square().sum()
    assert float(lost) == pytest.approx((1 - 3 / 10) * float(vector.square().sum()))


@pytest.mark.parametrize("hundredths", range(1, 101))
def test_top_k_counts_in_the_decimals_that_were_written(hundredths):
    ratio = float(f"{hundredths / 100:.2f}")
    for size in (1, 7, 100, 320_010):
        assert TopK(ratio).kept(size) == -(-hundredths * size // 100)


@given(vectors(numbers, 1), st.sampled_from([None, 1, 3, 8, 10**12]))
def test_signs_carry_the_mean_magnitude(vector, bucket):
    found = sent(Sign(bucket), vector)
    for own, values in zip(pieces(found, bucket), pieces(vector, bucket), strict=True):
        size, total = len(values), float(values.abs().sum())
        expected = torch.where(values < 0, -1.0, 1.0).double() * total / size
        torch.testing.assert_close(own, expected, rtol=1e-6, atol=SMALLEST)
        lost, square = float((values - own).square().sum()), float(values.square().sum())
        assert lost == pytest.approx(square - total**2 / size, rel=1e-5, abs=1e-6 * square + 1e-80)


def test_signs_of_the_largest_numbers_stay_finite():
    vector = torch.tensor([LARGEST, -LARGEST, LARGEST])
    assert torch.equal(sent(Sign(), vector), vector)


# -- bytes -------------------------------------------------------------------------------------------------


def formula(compress: Compressor, size: int) -> int:
    """Bits of a payload without its checksum."""
    if isinstance(compress, Quantize | Sign):
        bits = compress.bits if isinstance(compress, Quantize) else 1
        return bits * size + 32 * math.ceil(size / (compress.bucket or max(1, size)))
    assert isinstance(compress, TopK)
    kept = math.ceil(round(compress.ratio * size, 9))
    indices = kept * math.ceil(math.log2(size)) if size else 0
    return 32 * kept + min(indices, size)


@every_compressor
def test_a_payload_takes_what_the_formula_says(compress):
    for size in (0, 1, 2, 3, 7, 8, 9, 63, 64, 65, 1000, 1023):
        payload = compress.encode(normal(size), draws())
        assert len(payload) == math.ceil(formula(compress, size) / 8) + 4
        assert int.from_bytes(payload[-4:], "little") == zlib.crc32(payload[:-4])
        assert compress.decode(payload, size, torch.float32).shape == (size,)


@pytest.mark.parametrize(
    ("compress", "bits"),
    [
        (Quantize(4, 512), 1_300_072),
        (Quantize(8, 512), 2_580_112),
        (TopK(0.1), 1_344_042),
        (TopK(0.25), 2_880_106),
        (TopK(0.01), 32 * 3201 + 19 * 3201),
        (Sign(), 320_010 + 32),
    ],
    ids=str,
)
def test_bytes_of_a_real_model(compress, bits):
    assert formula(compress, 320_010) == bits
    payload = compress.encode(normal(320_010), draws())
    assert len(payload) == math.ceil(bits / 8) + 4


# -- what is refused ---------------------------------------------------------------------------------------


@every_compressor
def test_damage_is_noticed(compress):
    size = 21
    payload = compress.encode(normal(size), draws())
    for position in range(8 * len(payload)):
        damaged = bytearray(payload)
        damaged[position // 8] ^= 1 << position % 8
        with pytest.raises(FlatfedError, match=r"^payload: .*damaged$"):
            compress.decode(bytes(damaged), size, torch.float32)
    for wrong in (*(payload[:length] for length in range(len(payload))), payload + b"\0", b"\0" + payload):
        with pytest.raises(FlatfedError, match=r"^payload: .*damaged$"):
            compress.decode(wrong, size, torch.float32)


def sealed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(4, "little")


@pytest.mark.parametrize(
    ("compress", "size", "body"),
    [
        (Quantize(8), 1, struct.pack("<f", math.inf) + b"\x01"),
        (Sign(), 1, struct.pack("<f", math.nan) + b"\0"),
        (TopK(1.0), 1, struct.pack("<f", -math.inf)),
        (TopK(1.0), 2, b"\x80" + struct.pack("<2f", 1.0, 1.0)),  # one position where two belong
        (TopK(0.02), 100, b"\x06\x0c" + struct.pack("<2f", 1.0, 1.0)),  # 48 twice
        (TopK(0.01), 100, b"\xfe" + struct.pack("<f", 1.0)),  # the 127th of 100
    ],
    ids=str,
)
def test_a_forged_payload_that_cannot_be_right_is_refused(compress, size, body):
    with pytest.raises(FlatfedError, match=r"^payload: "):
        compress.decode(sealed(body), size, torch.float32)


def test_a_payload_without_a_compressor_is_checked_too():
    plain = Compressor()
    for payload in (b"", b"\0" * 7, b"\0" * 9, struct.pack("<2f", 1.0, math.nan)):
        with pytest.raises(FlatfedError, match=r"^payload: .*damaged$"):
            plain.decode(payload, 2, torch.float32)


@every_compressor
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_refused(compress, bad):
    for vector in (torch.tensor([1.0, bad, 2.0]), torch.tensor([bad, -bad]), torch.tensor([bad]).double()):
        with pytest.raises(DivergedError, match=r"^compress: "):
            compress.encode(vector, draws())


@every_compressor
def test_doubles_beyond_single_precision_are_refused(compress):
    with pytest.raises(DivergedError, match="single precision"):
        compress.encode(torch.tensor([1.0, 1e39], dtype=torch.float64), draws())


@every_compressor
def test_double_precision_travels_as_single(compress):
    vector = torch.randn(30, generator=draws(), dtype=torch.float64)
    payload = compress.encode(vector, draws())
    assert payload == compress.encode(vector.float(), draws())
    found = compress.decode(payload, 30, torch.float64)
    assert found.dtype == torch.float64
    assert torch.equal(found, compress.decode(payload, 30, torch.float32).double())


@pytest.mark.parametrize("compress", [Compressor(), *COMPRESSORS], ids=str)
def test_the_vector_is_left_as_it_is(compress):
    wide = normal(30, 2)
    before, column = wide.clone(), wide[:, 1]
    assert torch.equal(sent(compress, column), sent(compress, column.contiguous()))
    assert torch.equal(wide, before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_without_a_compressor_every_bit_travels(dtype):
    vector = torch.cat([normal(9), torch.tensor([-0.0])]).to(dtype)
    found = sent(Compressor(), vector)
    assert torch.equal(found, vector)
    assert torch.equal(torch.signbit(found), torch.signbit(vector))


def test_the_default_dtype_and_torchs_own_generator_do_not_matter():
    vector, compress = normal(100), Quantize(3)
    before, expected = torch.get_rng_state(), compress.encode(vector, draws())
    assert torch.equal(before, torch.get_rng_state())
    try:
        torch.set_default_dtype(torch.float64)
        assert compress.encode(vector, draws()) == expected
    finally:
        torch.set_default_dtype(torch.float32)


# -- error feedback ----------------------------------------------------------------------------------------


@given(
    st.lists(st.lists(numbers, min_size=6, max_size=6), min_size=1, max_size=6),
    st.sampled_from([*COMPRESSORS, Compressor()]),
)
def test_error_feedback_loses_nothing(rows, inner):
    sequence = torch.tensor(rows, dtype=torch.float64)
    compress = ErrorFeedback(of=inner)
    memory, received = torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    scale = 1.0
    for number, vector in enumerate(sequence):
        target = compress.target(vector, memory)
        decoded = compress.decode(compress.encode(target, draws(number)), 6, torch.float64)
        memory = compress.memory(target, decoded, memory)
        received += decoded
        scale = max(scale, float(target.abs().max()), float(decoded.abs().max()))
        missing = sequence[: number + 1].sum(0) - memory - received
        assert float(missing.abs().max()) <= 1e-13 * scale


@pytest.mark.parametrize("inner", [TopK(0.1), TopK(0.5), Sign(), Sign(4)], ids=str)
def test_what_error_feedback_remembers_stays_bounded(inner):
    """For ‖p − C(p)‖² ≤ (1 − δ) ‖p‖²: ‖e‖ ≤ r/(1 − r) · max ‖v‖ with r = √(1 − δ)."""
    size, compress = 20, ErrorFeedback(of=inner)
    memory, largest, worst = torch.zeros(size), 0.0, 0.0
    for number in range(300):
        vector = 1 + normal(size, seed=number)
        target = compress.target(vector, memory)
        memory = compress.memory(target, sent(inner, target), memory)
        worst = max(worst, float(memory.norm() / target.norm()))
        largest = max(largest, float(vector.norm()))
        assert float(memory.norm()) <= worst / (1 - worst) * largest * (1 + 1e-5)
    assert worst < 1


def scaffold_with(compress: Compressor, *uncompressed: str) -> ff.Algorithm:
    return replace(ff.scaffold(), compress=compress, uncompressed=uncompressed)


def uploads(number: int, size: int = 30) -> dict[str, Tensor]:
    return {name: normal(size, seed=2 * number + at) for at, name in enumerate(ff.scaffold().uploads)}


@pytest.mark.parametrize("inner", [TopK(0.2), Sign(), Quantize(8)], ids=str)
def test_ef21_keeps_the_mean_memory_of_the_population_on_the_server(inner):
    algorithm, clients, size = scaffold_with(ErrorFeedback21(of=inner)), 5, 30
    memories = [
        {algorithm.memory_key(name): torch.zeros(size) for name in algorithm.uploads} for _ in range(clients)
    ]
    server = {"model": torch.zeros(size)}
    server |= {vector.name: torch.zeros(size) for vector in algorithm.server_vectors}
    for number, cohort in enumerate([[0, 1, 2, 3, 4], [0, 2], [4], [1, 2, 3]]):
        received = []
        for client in cohort:
            own = uploads(10 * number + client, size)
            before = memories[client]
            result = encode_uploads(algorithm, own, before, {}, 0, number, client)
            memories[client] = result.memory
            received.append(result.decoded)
            for name, vector in own.items():
                key = algorithm.memory_key(name)
                gap = vector - before[key]
                generator = torch_generator(0, f"compress {name.rpartition('.')[2]}", number, client)
                expected = inner.decode(inner.encode(gap, generator), size, torch.float32)
                assert torch.equal(result.decoded[name], expected)
                torch.testing.assert_close(result.memory[key], before[key] + expected)
        mean = {name: torch.stack([each[name] for each in received]).mean(0) for name in algorithm.uploads}
        before = server
        server = server_round(algorithm, server, mean, MergeContext(number, len(cohort) / clients, 1.0))
        for name in algorithm.uploads:
            expected = torch.stack([memory[algorithm.memory_key(name)] for memory in memories]).mean(0)
            torch.testing.assert_close(server[algorithm.estimate_key(name)], expected)
        # The estimate stands for the mean displacement.
        moved = server["model"] - before["model"]
        torch.testing.assert_close(
            moved, server["error_feedback21.displacement_estimate"], rtol=1e-5, atol=1e-6
        )


def test_levels_must_fit_into_their_bits():
    assert Quantize(4).magnitudes == Quantize(4, levels=7).magnitudes == 7
    with pytest.raises(FlatfedError, match=r"quantize.levels = 17: .* 6 bits, not 4; use bits = 6"):
        Quantize(4, levels=17)
    with pytest.raises(FlatfedError, match=r"use at most 127 levels"):
        Quantize(8, levels=257)
    described = {"name": "fedavg", "compress": {"part": "quantize", "bucket": "none"}}
    assert ff.build(described).compress == Quantize(4, None)


# -- sending -----------------------------------------------------------------------------------------------


def test_every_round_client_and_upload_has_draws_of_its_own():
    algorithm, vector = scaffold_with(Quantize(4)), normal(200)
    same = dict.fromkeys(algorithm.uploads, vector)
    kept = {"control_variate.control": vector}
    payloads = [
        payload
        for seed, number, client in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
        for payload in encode_uploads(algorithm, same, {}, kept, seed, number, client).payloads.values()
    ]
    assert len(set(payloads)) == len(payloads) == 10
    again = encode_uploads(algorithm, same, {}, kept, 0, 0, 0).payloads
    assert list(again.values()) == payloads[:2]


def test_uncompressed_uploads_travel_as_they_are():
    control, memory_key = "control_variate.control_change", "error_feedback.displacement_memory"
    algorithm = scaffold_with(ErrorFeedback(of=TopK(0.1)), control)
    memory = {memory_key: normal(30, seed=9)}
    own = uploads(0)
    result = encode_uploads(algorithm, own, memory, {}, 0, 0, 0)
    assert torch.equal(result.decoded[control], own[control])
    assert len(result.payloads[control]) == 4 * 30
    target = own["displacement"] + memory[memory_key]
    assert torch.equal(result.decoded["displacement"], sent(TopK(0.1), target))
    assert result.memory.keys() == {memory_key}
    assert torch.equal(result.memory[memory_key], target - result.decoded["displacement"])
    assert [vector.name for vector in algorithm.client_vectors] == ["control_variate.control", memory_key]


def test_without_a_compressor_nothing_is_declared_or_kept():
    algorithm = ff.scaffold()
    assert algorithm.compressed == ()
    own = uploads(0)
    result = encode_uploads(algorithm, own, {}, {}, 0, 0, 0)
    assert all(torch.equal(result.decoded[name], own[name]) for name in own)
    assert result.memory == {}
