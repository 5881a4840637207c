"""Messages between server and sites: a checked header, and vectors as raw bytes.

Nothing is unpickled. Whatever arrives is compared with what was declared (names, lengths, dtypes, finite
numbers), and anything else is refused in one line.
"""

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, one_line, shown
from flatfed.core.flat import all_finite
from flatfed.core.part import Compressor
from flatfed.core.state import Dimensions, State, Vector

RAW, PAYLOAD = "flatfed.raw", "flatfed.payload"

REFUSED, DIVERGED, SILENT = 1000, 1001, 1002
"""The codes of errors that flatfed itself reports; Flower's own are small. No site sends the last one."""
Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""
LARGEST = 1e100
"""Of any number: sums and squares of such, however weighted, are still finite in double precision."""
MOST_SAMPLES = 10**8
"""At one site, which shuffles its samples in memory."""
MOST_VALUES = 2**28
"""In one sample."""

Number = Annotated[float, Field(allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
Square = Annotated[float, Field(allow_inf_nan=False, ge=0, le=LARGEST)]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**53)]


def _small_enough(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(shape) > MOST_VALUES:
        raise ValueError(f"{math.prod(shape)} values in one sample; at most {MOST_VALUES} are possible")
    return shape


SampleCount = Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLES)]
Shape = Annotated[tuple[Whole, ...], Field(max_length=16), AfterValidator(_small_enough)]
RunName = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]


class Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Answer(Header):
    """What a message is about; a reply repeats it."""

    run: RunName
    client: Whole
    round: Whole


class Request(Answer):
    """What a site is asked to do."""

    spec: str
    """The digest of what server and sites have agreed on."""
    merged: Annotated[int, Field(strict=True, ge=-1)] = -1
    """The last round of which the server merged this client's upload, −1 if none."""
    attempt: Whole = 0
    kept: dict[str, str] = {}
    """The digests of vectors that are sent once; "" where one still has its initial value."""


class TrainReply(Answer):
    """What a site says about its round."""

    samples: Whole
    loss: Number
    drift: Square
    squared_displacement: Square
    gradient_evaluations: Whole
    kept: tuple[str, ...] = ()
    """The digests of the vectors sent once that are on its disk."""


class EvaluateReply(Answer):
    """Loss and metrics on a site's own data, as the local engine records them."""

    metrics: dict[str, Number]


class SampleForm(Header):
    """What one sample looks like to the model."""

    input_shape: Shape
    input_dtype: str
    target_shape: Shape
    target_dtype: str


class SiteDescription(SampleForm):
    """What a site says about itself before a run begins."""

    name: str
    samples: SampleCount


HeaderKind = TypeVar("HeaderKind", bound=Header)


def content(header: Header, **records: ArrayRecord) -> RecordDict:
    return RecordDict({"header": ConfigRecord({"json": header.model_dump_json()}), **records})


def read_header(kind: type[HeaderKind], message: RecordDict) -> HeaderKind:
    record = message.get("header")
    text = record.get("json") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise FlatfedError("message: it has no header; it is not one of flatfed's")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise FlatfedError(f"message: {one_line(error, kind.model_fields)}") from None


def array_record(message: RecordDict, name: str) -> Mapping[str, Array]:
    record = message.get(name)
    if not isinstance(record, ArrayRecord):
        raise FlatfedError(f"message: its {name} are missing")
    return record


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FlatfedError(f"dtype = {shown(name)}: unknown")
    return dtype


def _bytes(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(_bytes(tensor)).hexdigest()


def pack(tensors: State) -> ArrayRecord:
    """Tensors as they are."""
    return ArrayRecord(
        {
            name: Array(dtype_name(value.dtype), tuple(value.shape), RAW, _bytes(value))
            for name, value in tensors.items()
        }
    )


def unpack(
    arrays: Mapping[str, Array], expected: Mapping[str, Form], finite: bool = True
) -> dict[str, Tensor]:
    """The tensors of a record that must hold exactly the expected names, shapes and dtypes."""
    _check_names(arrays, expected)
    tensors = {}
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if (array.stype, array.dtype, tuple(array.shape)) != (RAW, dtype_name(dtype), shape):
            raise FlatfedError(
                f"{name}: {array.dtype} {list(array.shape)} ({shown(array.stype)}) where {dtype_name(dtype)} "
                f"{list(shape)} belongs"
            )
        size = torch.Size(shape).numel()
        if len(array.data) != size * dtype.itemsize:
            raise FlatfedError(f"{name}: {len(array.data)} bytes where {size * dtype.itemsize} belong")
        value = torch.frombuffer(bytearray(array.data), dtype=dtype) if size else torch.empty(0, dtype=dtype)
        if finite and not all_finite(value):
            raise FlatfedError(f"{name}: it holds numbers that are not finite")
        tensors[name] = value.reshape(shape)
    return tensors


def pack_payloads(payloads: Mapping[str, bytes]) -> ArrayRecord:
    """What a compressor made of the uploads."""
    return ArrayRecord(
        {name: Array("uint8", (len(payload),), PAYLOAD, payload) for name, payload in payloads.items()}
    )


def decode_payloads(
    payloads: Mapping[str, Array], algorithm: Algorithm, dimensions: Dimensions, dtype: torch.dtype
) -> tuple[dict[str, Tensor], int]:
    """The uploads that the server sees, and how many bytes they took."""
    _check_names(payloads, algorithm.uploads)
    decoded = {}
    for key in algorithm.uploads:
        if payloads[key].stype != PAYLOAD:
            raise FlatfedError(f"{key}: {shown(payloads[key].stype)} where a payload belongs")
        compress = algorithm.compress if key in algorithm.compressed else Compressor()
        size = dimensions.length(Vector(key, algorithm.declared_uploads[key].size))
        try:
            decoded[key] = compress.decode(payloads[key].data, size, dtype)
        except (ValueError, IndexError, RuntimeError) as error:
            # Whatever a forged payload does to a decoder must not stop the others' round.
            raise FlatfedError(f"{key}: {error}") from None
        # A scale that is finite on the wire may not be in the model's own precision.
        if not all_finite(decoded[key]):
            raise FlatfedError(f"{key}: it holds numbers that are not finite in {dtype_name(dtype)}")
    return decoded, sum(len(array.data) for array in payloads.values())


def _check_names(arrays: Mapping[str, Array], expected: Iterable[str]) -> None:
    if set(arrays) != set(expected):
        raise FlatfedError(f"vectors: {shown(sorted(arrays))} where {shown(sorted(expected))} belong")


def broadcast_shapes(algorithm: Algorithm, dimensions: Dimensions, dtype: torch.dtype) -> dict[str, Form]:
    """The lengths of all that travels down."""
    lengths = {vector.name: dimensions.length(vector) for vector in algorithm.server_vectors}
    lengths["model"] = dimensions.parameters
    return {name: ((lengths[name],), dtype) for name in algorithm.broadcast}


def shapes(tensors: State) -> dict[str, Form]:
    return {name: (tuple(value.shape), value.dtype) for name, value in tensors.items()}


def change_shapes(buffers: State) -> dict[str, Form]:
    """Of buffer changes: booleans never change, and everything else travels in double precision."""
    return {
        name: (tuple(value.shape), torch.float64)
        for name, value in buffers.items()
        if value.dtype != torch.bool
    }
