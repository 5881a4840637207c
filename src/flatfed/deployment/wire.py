"""Messages between server and sites: a checked header, and vectors as raw bytes.

Nothing is unpickled. Whatever arrives is compared with what was declared (names, lengths, dtypes, finite
numbers) before memory is taken for it, and anything else is refused in one line.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PlainSerializer,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from torch import Tensor

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, one_line, printable, shown
from flatfed.core.flat import all_finite
from flatfed.core.part import Compressor
from flatfed.core.state import Dimensions, State, Vector
from flatfed.core.tree import map_tree

RAW, PAYLOAD = "flatfed.raw", "flatfed.payload"

REFUSED, DIVERGED, SILENT, REPEATED = 1000, 1001, 1002, 1003
"""The codes of errors that flatfed itself reports; Flower's own are small. No site sends the last two."""
Form = tuple[tuple[int, ...], torch.dtype]
"""The shape and dtype of a tensor."""
MOST_SAMPLES = 10**8
"""At one site, which shuffles its samples in memory."""
MOST_VALUES = 2**28
"""In one sample."""
WIDEST, MARGIN = 16, 4096
"""Bytes that a payload may have for each number of an upload, and besides."""
MOST_HEADER = 2**16
"""Characters."""
LARGEST = 1e100
"""Of any number: sums and squares of such, however weighted, are still finite in double precision."""


def largest(dtype: torch.dtype) -> float:
    """Of the numbers of an upload: sums and squares of such are still finite in its own precision."""
    return min(LARGEST, float(torch.finfo(dtype).max) ** 0.4)


def plain(text: str, most: int = 300) -> str:
    """What somebody else wrote as one line for a log: no control characters, and not too many others."""
    line = " ".join(text[: 4 * most].split())
    line = printable(line)
    return line if len(line) <= most else line[: most - 1] + "…"


def _small_enough(shape: tuple[int, ...]) -> tuple[int, ...]:
    if math.prod(shape) > MOST_VALUES:
        raise ValueError(f"{math.prod(shape)} values in one sample; at most {MOST_VALUES} are possible")
    return shape


def _printable(name: str) -> str:
    if not name.isprintable():
        raise ValueError(f"{shown(name)}: it has characters that cannot be shown; use another name")
    return name


Number = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=-LARGEST, le=LARGEST)]
Square = Annotated[float, Field(strict=True, allow_inf_nan=False, ge=0, le=LARGEST)]
Whole = Annotated[int, Field(strict=True, ge=0, le=2**53)]
SampleCount = Annotated[int, Field(strict=True, ge=1, le=MOST_SAMPLES)]
Shape = Annotated[tuple[Whole, ...], Field(max_length=16), AfterValidator(_small_enough)]
Word = Annotated[str, Field(max_length=200)]
SiteName = Annotated[str, Field(max_length=100), AfterValidator(_printable)]
RunName = Annotated[str, Field(pattern="^[0-9a-f]{32}$")]
Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class Header(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    records: ClassVar[frozenset[str]] = frozenset({"header"})
    """What such a message may consist of."""


class Answer(Header):
    """What a message is about; a reply repeats it."""

    run: RunName
    client: Whole
    round: Whole


class Request(Answer):
    """What a site is asked to do."""

    records = frozenset({"header", "vectors", "buffers"})
    spec: Word
    """The digest of what server and sites have agreed on."""
    merged: Annotated[int, Field(strict=True, ge=-1, le=2**53)] = -1
    """The last round of which the server merged this client's upload, −1 if none."""
    restarts: Whole = 0
    """How often the server has gone back to an earlier state."""
    oldest: Whole = 0
    """After how many rounds the oldest state was to which the server may still go back."""
    attempt: Whole = 0
    kept: Annotated[dict[Word, Digest | Literal[""]], Field(max_length=100)] = {}
    """The digests of vectors that are sent once; "" where one still has its initial value."""


class TrainReply(Answer):
    """What a site says about its round."""

    records = Request.records
    samples: Whole
    loss: Number
    drift: Square
    squared_displacement: Square
    gradient_evaluations: Whole
    kept: Annotated[tuple[Digest, ...], Field(max_length=100)] = ()
    """The digests of the vectors sent once that are on its disk."""


class EvaluateReply(Answer):
    """Loss and metrics on a site's own data, as the local engine records them."""

    metrics: Annotated[dict[Word, Number], Field(max_length=200)]


def _at_every_leaf(value: Any, check: Callable[[Any], Any], is_leaf: Callable[[Any], bool]) -> Any:
    """A form (`core.tree`) of what is checked: itself, or dictionaries and lists of forms."""
    if is_leaf(value):
        return check(value)
    if isinstance(value, dict):
        return {_printable(str(key)): _at_every_leaf(part, check, is_leaf) for key, part in value.items()}
    return tuple(_at_every_leaf(part, check, is_leaf) for part in value)


def _shapes(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    # A list of anything but lists, dictionaries and nothing is a shape, or should be one.
    parts = (list, tuple, dict, type(None))
    return _at_every_leaf(
        value,
        check,
        lambda own: (
            not isinstance(own, dict)
            and not (isinstance(own, list | tuple) and own and isinstance(own[0], parts))
        ),
    )


def _words(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    return _at_every_leaf(value, check, lambda own: not isinstance(own, dict | list | tuple))


def _alike(shape: Any, dtype: Any) -> bool:
    """Whether shapes and names of dtypes have one form."""
    if isinstance(dtype, dict):
        same = isinstance(shape, dict) and shape.keys() == dtype.keys()
        return same and all(_alike(shape[key], part) for key, part in dtype.items())
    if isinstance(dtype, tuple):
        same = isinstance(shape, tuple) and len(shape) == len(dtype)
        return same and all(map(_alike, shape, dtype))
    if dtype is None:
        return shape is None
    return isinstance(shape, tuple) and all(isinstance(size, int) for size in shape)


_AS_IT_IS = PlainSerializer(lambda value: value, return_type=Any)
Shapes = Annotated[Shape | None, WrapValidator(_shapes), _AS_IT_IS]
Words = Annotated[Word | None, WrapValidator(_words), _AS_IT_IS]
"""One of them, or a form with one at every leaf, None where there is none."""


class SampleForm(Header):
    """What one sample looks like to the model."""

    input_shape: Shapes
    input_dtype: Words
    target_shape: Shapes
    target_dtype: Words

    @model_validator(mode="after")
    def _of_one_form(self) -> Self:
        for name in ("input", "target"):
            if not _alike(getattr(self, f"{name}_shape"), getattr(self, f"{name}_dtype")):
                raise ValueError(f"{name}_dtype: it has another form than {name}_shape")
        return self


class SiteDescription(SampleForm):
    """What a site says about itself before a run begins."""

    name: SiteName
    samples: SampleCount


HeaderKind = TypeVar("HeaderKind", bound=Header)


def content(header: Header, **records: ArrayRecord) -> RecordDict:
    return RecordDict({"header": ConfigRecord({"json": header.model_dump_json()}), **records})


def read_header(kind: type[HeaderKind], message: RecordDict) -> HeaderKind:
    record = message.get("header")
    text = record.get("json") if isinstance(record, ConfigRecord) else None
    if not isinstance(text, str):
        raise FlatfedError("message: it has no header; it is not one of flatfed's")
    if len(text) > MOST_HEADER:
        raise FlatfedError(f"message: a header of {len(text)} characters, at most {MOST_HEADER} are possible")
    if extra := set(message) - kind.records:
        raise FlatfedError(f"message: it has records that do not belong, such as {shown(min(extra))}")
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise FlatfedError(plain(f"message: {one_line(error, kind.model_fields)}")) from None


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


def dtypes_of(names: Any) -> Any:
    """The dtypes of a form of their names."""
    return map_tree(dtype_of, names)


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
                f"{name}: {plain(array.dtype, 20)} {shown(list(array.shape))} ({shown(array.stype)}) where "
                f"{dtype_name(dtype)} {list(shape)} belongs"
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
        array = payloads[key]
        if array.stype != PAYLOAD:
            raise FlatfedError(f"{key}: {shown(array.stype)} where a payload belongs")
        if (array.dtype, tuple(array.shape)) != ("uint8", (len(array.data),)):
            raise FlatfedError(
                f"{key}: {plain(array.dtype, 20)} {shown(list(array.shape))} with {len(array.data)} bytes "
                "where uint8 belongs; it was cut or damaged"
            )
        compress = algorithm.compress if key in algorithm.compressed else Compressor()
        size = dimensions.length(Vector(key, algorithm.declared_uploads[key].size))
        if len(array.data) > WIDEST * size + MARGIN:
            raise FlatfedError(f"{key}: {len(array.data)} bytes for {size} numbers; it was forged")
        try:
            decoded[key] = compress.decode(array.data, size, dtype)
        except Exception as error:
            # Whatever a forged payload does to a decoder must not stop the others' round.
            raise FlatfedError(f"{key}: {plain(str(error))}") from None
        # A scale that is finite on the wire may not be in the model's own precision.
        if not all_finite(decoded[key]):
            raise FlatfedError(f"{key}: it holds numbers that are not finite in {dtype_name(dtype)}")
    return decoded, sum(len(array.data) for array in payloads.values())


def _check_names(arrays: Mapping[str, Array], expected: Iterable[str]) -> None:
    if set(arrays) != set(expected):
        if len(arrays) > 1000:
            raise FlatfedError(f"vectors: {len(arrays)} of them; there should be fewer")
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
