"""What goes up the wire: vectors as bytes, and what the server makes of them.

`encode` gives the bytes that would travel, `decode` the vector that the server sees; training uses exactly
what `decode` gives. Every payload of the compressors here ends in a checksum of four bytes, so that a cut or
damaged one is refused. Numbers travel in single precision whatever the model's.

Error feedback wraps any of them: what was not sent is remembered on the client.
"""

import math
import zlib
from fractions import Fraction
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core.context import MergeContext
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.flat import all_finite
from flatfed.core.part import Compressor
from flatfed.core.types import Count, PositiveShare, Whole

CHECKSUM = 4
Bucket = Annotated[Count | None, BeforeValidator(lambda value: None if value == "none" else value)]
BLOCK = 1 << 16
"""Numbers that are quantized at a time, so that what lies between stays in the cache."""


@dataclass(frozen=True)
class Quantize(Compressor):
    """Stochastic quantization (QSGD) to a sign and s magnitudes above zero: 2^(bits − 1) − 1, or `levels`.

    In each bucket with norm n, |v_j| s/n is rounded to one of its two neighbours so that the mean is exact:
    E Q(v) = v. The ℓ₂ norm gives E ‖Q(v) − v‖² ≤ min(d/s², √d/s) ‖v‖² with d the bucket's length, the largest
    magnitude ("max") d n²/(4 s²). Takes bits · P + 32 · ⌈P / bucket⌉ bits. `bucket=None` (in files:
    "none") is the whole vector.
    """

    bits: Annotated[Whole, Field(ge=2, le=8)] = 4
    bucket: Bucket = 512
    norm: Literal["l2", "max"] = "l2"
    levels: Count | None = None

    def __post_init__(self) -> None:
        needed = 1 + self.magnitudes.bit_length()
        if needed > self.bits:
            raise FlatfedError(
                f"quantize.levels = {self.levels}: a sign and so many magnitudes take {needed} bits, not "
                f"{self.bits}; use {f'bits = {needed}' if needed <= 8 else 'at most 127 levels'}"
            )

    @property
    def magnitudes(self) -> int:
        return 2 ** (self.bits - 1) - 1 if self.levels is None else self.levels

    def encode(self, vector: Tensor, generator: torch.Generator) -> bytes:
        buckets = _buckets(_single(vector), self.bucket)  # [N, B], zeros behind the end
        if self.norm == "max":
            norms = torch.linalg.vector_norm(buckets, ord=math.inf, dim=1, keepdim=True)
        else:
            exact = torch.linalg.vector_norm(buckets, dim=1, keepdim=True, dtype=torch.float64)
            norms = exact.float()
            # Rounded up, or a lone number could be larger than its norm.
            norms = torch.where(norms < exact, norms.nextafter(torch.full_like(norms, math.inf)), norms)
        if not bool(torch.isfinite(norms).all()):
            raise DivergedError("compress: a bucket's norm is beyond single precision; lower lr or set clip")
        codes = torch.empty(buckets.shape, dtype=torch.uint8)
        rows = max(1, BLOCK // buckets.shape[1])
        for start in range(0, len(buckets), rows):
            block = slice(start, start + rows)
            codes[block] = self._codes(buckets[block], norms[block], generator)
        packed = pack(codes.flatten()[: len(vector)].numpy(), self.bits)
        return _sealed(norms.numpy().tobytes() + packed)

    def _codes(self, values: Tensor, norms: Tensor, generator: torch.Generator) -> Tensor:
        """A magnitude in the lower bits and the sign above them, for values [N, B] and norms [N, 1]."""
        fraction = values.abs().div_(torch.where(norms > 0, norms, 1)).mul_(self.magnitudes)
        levels = fraction.floor()
        # Compared with the fraction, not added to it: a number that is on a level then stays there.
        levels += torch.rand(levels.shape, generator=generator, dtype=levels.dtype) < fraction.sub_(levels)
        codes = levels.clamp_(max=self.magnitudes).to(torch.uint8)
        return codes | (((values < 0) & (codes > 0)).to(torch.uint8) << (self.bits - 1))

    def decode(self, payload: bytes, size: int, dtype: torch.dtype) -> Tensor:
        count = -(-size // (self.bucket or max(1, size)))
        body = _opened(payload, 4 * count + packed_bytes(size, self.bits))
        norms = _finite(np.frombuffer(body[: 4 * count], np.float32))
        magnitudes = np.arange(2 ** (self.bits - 1), dtype=np.float32) / np.float32(self.magnitudes)
        meaning = np.concatenate([magnitudes, -magnitudes]).clip(-1, 1)  # of each code
        shares = torch.from_numpy(np.take(meaning, unpack(body[4 * count :], self.bits, size)))
        return _in_precision(_buckets(shares, self.bucket).mul_(norms[:, None]).flatten()[:size], dtype)


@dataclass(frozen=True)
class TopK(Compressor):
    """The k = ⌈ratio · P⌉ largest magnitudes (ties by the lower index), zero elsewhere; biased.

    ‖v − C(v)‖² ≤ (1 − k/P) ‖v‖². Takes 32 k bits and the positions, min(k ⌈log₂ P⌉, P) bits: a list of
    indices or a bitmap, whichever is smaller.
    """

    ratio: PositiveShare = 0.1

    def encode(self, vector: Tensor, generator: torch.Generator) -> bytes:
        values = _single(vector).numpy()
        size, kept = len(values), self.kept(len(values))
        if size == 0:
            return _sealed(b"")
        magnitudes = np.abs(values)
        threshold = np.partition(magnitudes, size - kept)[size - kept]
        chosen = magnitudes > threshold
        ties = np.flatnonzero(magnitudes == threshold)
        chosen[ties[: kept - int(chosen.sum())]] = True
        if self._lists_indices(size):
            positions = _pack_wide(np.flatnonzero(chosen), _index_bits(size))
        else:
            positions = np.packbits(chosen).tobytes()
        return _sealed(positions + values[chosen].tobytes())

    def decode(self, payload: bytes, size: int, dtype: torch.dtype) -> Tensor:
        kept = self.kept(size)
        position_bits = kept * _index_bits(size) if self._lists_indices(size) else size
        body = _opened(payload, -(-position_bits // 8) + 4 * kept)
        positions, values = body[: len(body) - 4 * kept], body[len(body) - 4 * kept :]
        if self._lists_indices(size):
            chosen = _unpack_wide(positions, _index_bits(size), kept)
        else:
            chosen = np.flatnonzero(np.unpackbits(np.frombuffer(positions, np.uint8), count=size))
        if len(chosen) != kept or (kept and (chosen[-1] >= size or bool((np.diff(chosen) <= 0).any()))):
            raise FlatfedError(f"payload: its positions are not {kept} of {size} in order; it was damaged")
        vector = torch.zeros(size, dtype=dtype)
        vector[torch.from_numpy(chosen)] = _in_precision(_finite(np.frombuffer(values, np.float32)), dtype)
        return vector

    def kept(self, size: int) -> int:
        # The decimal that was written: the product of floats makes 8 of 0.07 · 100.
        return math.ceil(Fraction(str(self.ratio)) * size)

    def _lists_indices(self, size: int) -> bool:
        return self.kept(size) * _index_bits(size) < size


@dataclass(frozen=True)
class Sign(Compressor):
    """Signs times the mean magnitude of their bucket: (‖v‖₁/d) sign(v), with sign(0) = 1; biased.

    ‖v − C(v)‖² = ‖v‖² − ‖v‖₁²/d in each bucket of length d. Takes P + 32 · ⌈P / bucket⌉ bits; `bucket=None`
    (in files: "none") is the whole vector.
    """

    bucket: Bucket = None

    def encode(self, vector: Tensor, generator: torch.Generator) -> bytes:
        values = _single(vector)
        buckets = _buckets(values, self.bucket)
        lengths = torch.full((len(buckets),), buckets.shape[1], dtype=torch.float64)
        lengths[-1:] -= buckets.numel() - len(values)
        scales = (buckets.abs().sum(1, dtype=torch.float64) / lengths).float()
        return _sealed(scales.numpy().tobytes() + np.packbits((values < 0).numpy()).tobytes())

    def decode(self, payload: bytes, size: int, dtype: torch.dtype) -> Tensor:
        count = -(-size // (self.bucket or max(1, size)))
        body = _opened(payload, 4 * count + -(-size // 8))
        scales = _finite(np.frombuffer(body[: 4 * count], np.float32))
        negative = np.unpackbits(np.frombuffer(body[4 * count :], np.uint8), count=size)
        signs = torch.from_numpy(negative).float().mul_(-2).add_(1)
        return _in_precision(_buckets(signs, self.bucket).mul_(scales[:, None]).flatten()[:size], dtype)


def _without_memory(inner: Compressor) -> Compressor:
    if inner.remembers:
        raise ValueError("error feedback cannot be put into error feedback; give what it was around")
    return inner


@dataclass(frozen=True)
class ErrorFeedback(Compressor):
    """EF: p = v + e is sent as C(p), and e ← p − C(p) is kept for the next time.

    So Σ sent = Σ v − e: nothing is lost, only late. Clients that do not take part keep their e, which stays
    bounded if ‖p − C(p)‖ < ‖p‖: so for Top-k and signs, but not for few bits with an ℓ₂ norm.
    """

    of: Annotated[Compressor, AfterValidator(_without_memory)]
    remembers = True

    def encode(self, vector: Tensor, generator: torch.Generator) -> bytes:
        return self.of.encode(vector, generator)

    def decode(self, payload: bytes, size: int, dtype: torch.dtype) -> Tensor:
        return self.of.decode(payload, size, dtype)

    def target(self, vector: Tensor, memory: Tensor) -> Tensor:
        return vector + memory

    def memory(self, target: Tensor, decoded: Tensor, memory: Tensor) -> Tensor:
        return target - decoded


@dataclass(frozen=True)
class ErrorFeedback21(ErrorFeedback):
    """EF21: c = C(v − e) is sent and e ← e + c; the server's G ← G + (1/N) Σ c stands for the mean upload.

    G is the mean of all N clients' e, so with few participants it is partly out of date, whatever C is.
    """

    estimates = True

    def target(self, vector: Tensor, memory: Tensor) -> Tensor:
        return vector - memory

    def memory(self, target: Tensor, decoded: Tensor, memory: Tensor) -> Tensor:
        return memory + decoded

    def estimate(self, estimate: Tensor, mean: Tensor, context: MergeContext) -> Tensor:
        return estimate + context.fraction * mean


def packed_bytes(count: int, bits: int) -> int:
    return -(-count * bits // 8)


def pack(codes: np.ndarray, bits: int) -> bytes:
    """Numbers below 2^bits (at most 8 bits), eight of them in `bits` bytes, the first in the lowest bits."""
    count = len(codes)
    words = np.zeros(-(-count // 8) * 8, np.uint8)
    words[:count] = codes
    width = bits
    while width % 8:
        kind = _word(2 * width)
        words = words[0::2].astype(kind) | words[1::2].astype(kind) << kind.type(width)
        width *= 2
    whole = words.astype(_word(width), copy=False)
    packed = whole.view(np.uint8).reshape(-1, whole.itemsize)[:, : width // 8]
    return packed.tobytes()[: packed_bytes(count, bits)]


def unpack(packed: bytes, bits: int, count: int) -> np.ndarray:
    """The inverse of `pack`."""
    width = math.lcm(bits, 8)
    words = np.zeros(-(-count // 8) * 8 * bits // width, _word(width))
    padded = np.zeros(len(words) * (width // 8), np.uint8)
    padded[: len(packed)] = np.frombuffer(packed, np.uint8)
    words.view(np.uint8).reshape(-1, words.itemsize)[:, : width // 8] = padded.reshape(-1, width // 8)
    while width > bits:
        width //= 2
        halves = np.empty((len(words), 2), _word(width))
        halves[:, 0] = words & words.dtype.type(2**width - 1)
        halves[:, 1] = words >> words.dtype.type(width)
        words = halves.reshape(-1)
    return words[:count]


def _word(width: int) -> np.dtype[Any]:
    """The smallest kind of whole numbers that holds so many bits, its lowest byte first."""
    return np.dtype(f"<u{max(1, 1 << (width - 1).bit_length() >> 3)}")


def _index_bits(size: int) -> int:
    """⌈log₂ size⌉: what an index into a vector of this size takes."""
    return max(0, size - 1).bit_length()


def _pack_wide(numbers: np.ndarray, bits: int) -> bytes:
    """Numbers of any width; slower than `pack`, for lists that are short."""
    return np.packbits((numbers[:, None] >> np.arange(bits)) & 1).tobytes()


def _unpack_wide(packed: bytes, bits: int, count: int) -> np.ndarray:
    digits = np.unpackbits(np.frombuffer(packed, np.uint8), count=count * bits)
    return digits.reshape(count, bits).astype(np.int64) @ (1 << np.arange(bits, dtype=np.int64))


def _single(vector: Tensor) -> Tensor:
    """A finite vector in single precision on the CPU."""
    single = vector.detach().to("cpu", torch.float32).contiguous()
    if not all_finite(single):
        raise DivergedError(
            "compress: the vector has numbers that single precision cannot hold; lower lr or set clip"
        )
    return single


def _buckets(vector: Tensor, width: int | None) -> Tensor:
    """A vector [P] as rows [N, width], with zeros behind its end; one row is no wider than the vector."""
    width = max(1, min(width or len(vector), len(vector)))
    return torch.nn.functional.pad(vector, (0, -len(vector) % width)).view(-1, width)


def _finite(numbers: np.ndarray) -> Tensor:
    if not np.isfinite(numbers).all():
        raise FlatfedError("payload: it holds numbers that are not finite; it was damaged")
    return torch.from_numpy(numbers.copy())


def _in_precision(vector: Tensor, dtype: torch.dtype) -> Tensor:
    """Finite singles in the model's precision, which may hold less."""
    converted = vector.to(dtype)
    if dtype.itemsize < 4 and not all_finite(converted):
        raise FlatfedError(f"payload: it holds numbers beyond {dtype}; it was damaged")
    return converted


def _sealed(body: bytes) -> bytes:
    return body + zlib.crc32(body).to_bytes(CHECKSUM, "little")


def _opened(payload: bytes, length: int) -> bytes:
    """The body of a payload whose length and checksum are right."""
    if len(payload) != length + CHECKSUM:
        raise FlatfedError(
            f"payload: {len(payload)} bytes where {length + CHECKSUM} belong; it was cut or damaged"
        )
    body = payload[:length]
    if zlib.crc32(body) != int.from_bytes(payload[length:], "little"):
        raise FlatfedError("payload: its checksum is wrong; it was damaged")
    return body
