"""CIFAR-10 and CIFAR-100: 60,000 colour images of 32×32 pixels, from the binary or the Python version.

The targets of CIFAR-100 are its 100 fine classes.

The Python version is pickled, and pickles can run programs. So nothing that a pickle names is looked up or
called: stand-ins take the place of the few names that an array of bytes needs, and all others are refused.
"""

import io
import pickle
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from flatfed.core.errors import brief
from flatfed.data.datasets.base import Labelled, TrainTest, image_set
from flatfed.data.datasets.cache import Arrays, arrays_of, cached, samples_of
from flatfed.data.datasets.catalog import DatasetInfo, Folder, archive, register
from flatfed.data.transform import Augmentation

Normalisation = Literal["feddyn", "fedswa"]
Constants = tuple[tuple[float, float, float], tuple[float, float, float]]  # mean and deviation per channel

# The FedSWA, FedNSAM and DynaFed code uses these for both data sets.
FEDSWA: Constants = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
PIXELS = 3 * 32 * 32
URL = "https://www.cs.toronto.edu/~kriz"


@dataclass(frozen=True)
class CifarFormat:
    """How one of the two data sets is stored."""

    info: DatasetInfo
    classes: int
    label_bytes: int  # of a record in a .bin file, before its pixels; the last one is the class
    label_key: str  # of the classes in a pickled batch
    images: Mapping[str, int]  # in each file, which is called so or with .bin; the last file is the test set
    checksums: Mapping[str, str]
    normalisations: Mapping[str, Constants]

    def load(
        self,
        folder: Folder = None,
        augmentation: Augmentation = "none",
        normalisation: Normalisation = "feddyn",
        verify: bool = True,
    ) -> TrainTest:
        """Load the data set as uint8 [samples, 3, 32, 32]."""
        located = self.info.find(folder)
        binary = (located / f"{next(iter(self.images))}.bin").is_file()

        def read(name: str) -> Labelled:
            if binary:
                return self._read_binary(located / f"{name}.bin", self.images[name], verify)
            return self._read_pickled(located / name, self.images[name], verify)

        def read_all() -> Arrays:
            # Reading and checksums leave the interpreter lock free.
            with ThreadPoolExecutor(2) as pool:
                *train, test = pool.map(read, self.images)
            return arrays_of(_images(train), _images([test]))

        files = [located / (f"{name}.bin" if binary else name) for name in self.images]
        arrays = cached(self.info.name, files, read_all) if verify else read_all()
        constants = self.normalisations[normalisation]
        return image_set(self.info.name, *samples_of(arrays), self.classes, *constants, augmentation)

    def _read_binary(self, path: Path, images: int, verify: bool) -> Labelled:
        length = self.label_bytes + PIXELS
        checksum, size = (self.checksums.get(path.name), images * length) if verify else (None, None)
        content = np.frombuffer(self.info.read(path, checksum, size), np.uint8)
        if len(content) == 0 or len(content) % length:
            raise self.info.damaged(path, f"truncated, {len(content):,} bytes are not records of {length:,}")
        records = content.reshape(-1, length)
        labels = self.info.checked_labels(path, records[:, self.label_bytes - 1], self.classes)
        return Labelled(records[:, self.label_bytes :], labels)

    def _read_pickled(self, path: Path, images: int, verify: bool) -> Labelled:
        content = self.info.read(path, self.checksums.get(path.name) if verify else None)
        try:
            batch = _load_pickle(content)
        except _UnsafePickleError as error:
            problem = f"its pickle asks for {brief(error)}, which no image file needs"
            raise self.info.damaged(path, problem) from None
        except Exception:  # bytes that are no pickle can raise anything
            raise self.info.damaged(path, "truncated or not a pickled batch") from None
        for key in ("data", self.label_key):
            if key not in batch:
                raise self.info.damaged(path, f"has no entry {key!r}")
        data, labels = batch["data"], batch[self.label_key]
        if not isinstance(data, np.ndarray) or data.shape[1:] != (PIXELS,):
            raise self.info.damaged(path, f"has no array `data` of [images, {PIXELS}]")
        are_numbers = isinstance(labels, list) and all(
            type(label) is int and abs(label) < 2**31 for label in labels
        )
        if len(data) == 0 or not are_numbers or len(labels) != len(data):
            raise self.info.damaged(path, f"has not one whole number in `{self.label_key}` for each image")
        if verify:
            self.info.check_count(path, len(data), images)
        return Labelled(data, self.info.checked_labels(path, np.array(labels), self.classes))


def _images(parts: list[Labelled]) -> Labelled:
    joined = Labelled.joined(parts)
    return joined._replace(inputs=joined.inputs.reshape(-1, 3, 32, 32))


class _UnsafePickleError(Exception):
    """A pickle names something other than arrays of bytes."""


def _load_pickle(content: bytearray) -> dict[object, Any]:
    """A pickled dictionary, its keys as text; bytes that are no pickle can raise anything."""
    values = _ArraysOnly(io.BytesIO(content), encoding="bytes").load()
    return {_text(key): value.values if isinstance(value, _Array) else value for key, value in values.items()}


def _text(key: object) -> object:
    return key.decode("latin-1") if isinstance(key, bytes) else key


class _Type:
    """Stands in for numpy's dtype; bytes need none of its further state."""

    def __init__(self, code: object, *flags: object) -> None:
        if _text(code) not in {"u1", "|u1"}:
            raise _UnsafePickleError(f"an array of {_text(code)!r}")

    def __setstate__(self, state: object) -> None:
        pass


class _Array:
    """Stands in for numpy's arrays, whose own unpickling trusts the file with sizes and types."""

    def __setstate__(self, state: Any) -> None:
        _, shape, _, columns_first, content = state
        self.values = np.frombuffer(content, np.uint8).reshape(shape, order="F" if columns_first else "C")


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into old pickle protocols."""
    if encoding not in {"latin1", "latin-1"}:
        raise _UnsafePickleError(f"the codec {encoding}")
    return text.encode("latin-1")


class _ArraysOnly(pickle._Unpickler):
    """In Python: the one in C allocates what a file says, such as room for four billion memos."""

    dispatch = dict(pickle._Unpickler.dispatch)
    del dispatch[pickle.BYTEARRAY8[0]]
    _stand_ins: Mapping[tuple[str, str], Any] = {
        ("numpy", "ndarray"): None,
        ("numpy", "dtype"): _Type,
        ("numpy.core.multiarray", "_reconstruct"): lambda kind, shape, code: _Array(),
        ("numpy._core.multiarray", "_reconstruct"): lambda kind, shape, code: _Array(),
        ("_codecs", "encode"): _encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        try:
            return self._stand_ins[module, name]
        except KeyError:
            raise _UnsafePickleError(f"{module}.{name}") from None


def _info(classes: int, folders: tuple[str, str], first_file: str, checksum: str, size: int) -> DatasetInfo:
    return DatasetInfo(
        f"cifar{classes}",
        f"colour images 32×32, {classes} classes, 50,000 + 10,000",
        folders=folders,
        markers=(f"{first_file}.bin", first_file),
        downloads=archive(f"{URL}/cifar-{classes}-binary.tar.gz", checksum, size, "*.bin", "*.txt"),
    )


CIFAR10 = CifarFormat(
    _info(
        10,
        ("cifar-10-batches-bin", "cifar-10-batches-py"),
        "data_batch_1",
        "md5:c32a1d4ab5d03f1284b67883e8d87530",
        170_052_171,
    ),
    classes=10,
    label_bytes=1,
    label_key="labels",
    images={**{f"data_batch_{number}": 10_000 for number in range(1, 6)}, "test_batch": 10_000},
    checksums={
        "data_batch_1.bin": "sha1:aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        "data_batch_2.bin": "sha1:c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        "data_batch_3.bin": "sha1:1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        "data_batch_4.bin": "sha1:aab85764eb3584312d3c7f65fd2fd016e36a258e",
        "data_batch_5.bin": "sha1:26e2849e66a845b7f1e4614ae70f4889ae604628",
        "test_batch.bin": "sha1:67eb016db431130d61cd03c7ad570b013799c88c",
        "data_batch_1": "md5:c99cafc152244af753f735de768cd75f",
        "data_batch_2": "md5:d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "md5:54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "md5:634d18415352ddfa80567beed471001a",
        "data_batch_5": "md5:482c414d41f54cd18b22e5b47cb7c3cb",
        "test_batch": "md5:40351d587109b95175f43aff81a1287e",
    },
    normalisations={"feddyn": ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262)), "fedswa": FEDSWA},
)

CIFAR100 = CifarFormat(
    _info(
        100,
        ("cifar-100-binary", "cifar-100-python"),
        "train",
        "md5:03b5dce01913d631647c71ecec9e9cb8",
        168_513_733,
    ),
    classes=100,
    label_bytes=2,
    label_key="fine_labels",
    images={"train": 50_000, "test": 10_000},
    checksums={
        "train.bin": "sha1:e207cd2e05b73b1393c74c7f5e7bea451d63e08e",
        "test.bin": "sha1:8fb6623e830365ff53cf14adec797474f5478006",
        "train": "md5:16019d7e3df5f24257cddd939b257f8d",
        "test": "md5:f0ef6b0ae62326f3e7ffdfab6717acfc",
    },
    normalisations={"feddyn": ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)), "fedswa": FEDSWA},
)

register(CIFAR10.info)(CIFAR10.load)
register(CIFAR100.info)(CIFAR100.load)
