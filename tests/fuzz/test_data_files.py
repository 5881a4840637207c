"""Data files of every format that a loader reads, damaged, and any option of any loader and partition."""

import functools
import gzip
import importlib.util
import inspect
import io
import json
import os
import pickle
import random
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from data import fake
from hypothesis import given
from hypothesis import strategies as st
from rule import SOME, command, limits, scratch, unchanged
from values import values

from flatfed.core.errors import FlatfedError
from flatfed.data.datasets import DATASETS, TrainTest
from flatfed.data.download import unpack
from flatfed.data.partition import PARTITIONS

WRITERS: dict[str, tuple[str, Callable[[Path], Any], dict[str, Any]]] = {
    "cifar binary": ("cifar10", lambda root: fake.write_cifar10(root, per_file=1), {}),
    "cifar pickle": ("cifar10", lambda root: fake.write_cifar10_python(root, per_file=1), {}),
    "cifar100 pickle": ("cifar100", fake.write_cifar100_python, {}),
    "idx": ("mnist", lambda root: fake.write_mnist(root / "mnist"), {}),
    "idx gz": ("emnist", lambda root: fake.write_emnist(root / "emnist", train=6, test=4), {}),
    "emnist_l": ("emnist_l", lambda root: fake.write_emnist(root / "emnist", packed=False), {}),
    "leaf": ("femnist", lambda root: fake.write_femnist(root, writers=2, train=2, test=1), {}),
    "xml": ("shakespeare", fake.write_shakespeare, fake.SMALL_OPTIONS["shakespeare"]),
    "images": ("image_folder", lambda root: fake.write_image_folder(root, ["ant", "bee"]), {}),
    "tiny": ("tiny_imagenet", lambda root: fake.write_tiny_imagenet(root, train=1, test=1), {}),
    "client csv": ("folder", lambda root: fake.write_client_tables(root, "csv"), {"targets": "label"}),
    "client npz": ("folder", lambda root: fake.write_client_tables(root, "npz"), {"targets": "label"}),
    "client parquet": (
        "folder",
        lambda root: fake.write_client_tables(root, "parquet"),
        {"targets": "label"},
    ),
    "npz": ("npz", lambda root: fake.write_npz(root / "data.npz"), {}),
}
for _kind in ("csv", "npz", *(["parquet"] if importlib.util.find_spec("pyarrow") else [])):
    WRITERS[f"client {_kind}"] = (
        "folder",
        functools.partial(fake.write_client_tables, suffix=_kind),
        {"targets": "label"},
    )
TEMPLATES = Path(tempfile.mkdtemp(prefix="flatfed-fuzz-templates-"))
for _name, (_, _write, _) in WRITERS.items():
    (TEMPLATES / _name).mkdir()
    _write(TEMPLATES / _name)


def load(name: str, folder: Path, **options: Any) -> TrainTest | None:
    """A data set that keeps its promises, or None after one line."""
    if "verify" in inspect.signature(DATASETS[name]).parameters:
        options = {"verify": False, **options}
    try:
        with limits():
            data = DATASETS[name](folder=folder, **options)
    except FlatfedError as error:
        assert str(error).strip() and len(str(error).splitlines()) == 1, error
        return None
    for inputs, targets in ((data.train_inputs, data.train_targets), (data.test_inputs, data.test_targets)):
        assert len(inputs) == len(targets) > 0
        assert 0 <= int(targets.min()) <= int(targets.max()) < data.classes
        assert bool(torch.isfinite(data.transform.evaluate(inputs).float()).all())
    return data


WORDS = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"NaN", b"-1", b"9" * 5000, b"[" * 3000, b"\x7f\xff\xff\xff")


def damaged(content: bytes, seed: int, edits: int) -> bytes:
    """Some bytes flipped, cut out, repeated, put in or replaced by such as mean something."""
    generator = random.Random(seed)
    damaged = bytearray(content)
    for _ in range(edits):
        place = min(generator.randrange(len(damaged) + 1), int(generator.expovariate(1 / 200)))
        if generator.random() < 0.5:
            place = generator.randrange(len(damaged) + 1)
        length = generator.choice([1, 1, 2, 4, 8, 100])
        kind = generator.randrange(6)
        if kind == 0 and place < len(damaged):
            damaged[place] ^= 1 << generator.randrange(8)
        elif kind == 1:
            del damaged[place : place + length]
        elif kind == 2:
            damaged[place:place] = damaged[place : place + length]
        elif kind == 3:
            damaged[place : place + length] = generator.randbytes(length)
        elif kind == 4:
            word = generator.choice(WORDS)
            damaged[place : place + len(word)] = word
        else:
            del damaged[place:]
    return bytes(damaged)


def with_inner_damage(path: Path, content: bytes, seed: int, edits: int) -> bytes:
    """Damage of what is packed in a file, which then is sound on the outside."""
    if path.suffix == ".gz":
        return gzip.compress(damaged(gzip.decompress(content), seed, edits), 1)
    if path.suffix == ".npz":
        packed = io.BytesIO()
        with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(packed, "w") as new:
            for number, name in enumerate(old.namelist()):
                inner = old.read(name)
                new.writestr(name, damaged(inner, seed + number, edits) if seed % 4 == number else inner)
        return packed.getvalue()
    return damaged(content, seed, edits)


@SOME
@given(st.sampled_from(sorted(WRITERS)), st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_damaged_files(kind, seed, edits, inside):
    name, _, options = WRITERS[kind]
    with scratch() as folder:
        root = folder / "data"
        shutil.copytree(TEMPLATES / kind, root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        path = files[seed % len(files)]
        content = path.read_bytes()
        damage = with_inner_damage if inside else lambda _, *rest: damaged(*rest)
        path.write_bytes(damage(path, content, seed, edits))
        with unchanged(root):
            load(name, root, **options)


REPLACEMENTS = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
    "nothing": lambda path: None,
    "empty": Path.touch,
    "huge": lambda path: os.close(os.open(path, os.O_CREAT)) or os.truncate(path, 2**42),
}


@SOME
@given(st.sampled_from(sorted(WRITERS)), st.integers(0, 100), st.sampled_from(sorted(REPLACEMENTS)))
def test_something_else_in_place_of_a_file(kind, number, replacement):
    name, _, options = WRITERS[kind]
    with scratch() as folder:
        root = folder / "data"
        shutil.copytree(TEMPLATES / kind, root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        path = files[number % len(files)]
        path.unlink()
        REPLACEMENTS[replacement](path)
        load(name, root, **options)


def npz(inputs: bytes, method: int) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", method) as archive:
        archive.writestr("train_inputs.npy", inputs)
        for name, shape in (("train_targets", 2), ("test_inputs", (2, 2)), ("test_targets", 2)):
            with archive.open(f"{name}.npy", "w") as stream:
                np.save(stream, np.zeros(shape, int))
    return packed.getvalue()


def header(version: tuple[int, int], entries: dict[str, Any]) -> bytes:
    text = repr(entries).encode()
    return b"\x93NUMPY" + bytes(version) + len(text).to_bytes(2 if version[0] == 1 else 4, "little") + text


sizes = st.integers(-1, 4) | st.sampled_from([2**31, 2**40, 2**63, 10**30, True, 1.5, "2", None])
DTYPES = [
    "<f8",
    ">f4",
    "<f2",
    "|u1",
    "<u8",
    "|b1",
    "<i4",
    "|O",
    "<U4",
    "<U0",
    "|V0",
    "|S0",
    "<c8",
    "<M8[s]",
    "x",
]
fields = st.tuples(st.sampled_from("ab"), st.sampled_from(["<f4", "|O"]))
entries = st.fixed_dictionaries(
    {
        "descr": st.sampled_from(DTYPES) | st.lists(fields, max_size=2),
        "fortran_order": st.booleans() | st.just(3),
        "shape": st.lists(sizes, max_size=3).map(tuple) | st.just("many"),
    },
    optional={"more": st.integers()},
)
headers = st.builds(header, st.sampled_from([(1, 0), (2, 0), (3, 0), (9, 9)]), entries)
contents = st.binary(max_size=64) | st.integers(0, 2**24).map(bytes)
METHODS = [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA]


@SOME
@given(headers, contents, st.sampled_from(METHODS))
def test_arrays_with_any_header(start, content, method):
    with scratch() as folder:
        (folder / "data.npz").write_bytes(npz(start + content, method))
        load("npz", folder)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.floats()
    | st.integers()
    | st.text(max_size=5)
    | st.just(10**4000)
    | st.just(0.0),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["x", "y", "u", "user_data"]) | st.text(max_size=3), inner, max_size=3
        )
    ),
    max_leaves=10,
)
images = st.just([1.0] * 784) | st.just([0.5019607] * 784) | json_values
samples = {
    "x": st.lists(images, max_size=3) | json_values,
    "y": st.lists(st.integers(-1, 70) | json_values, max_size=3),
}
names = st.text(max_size=3) | st.just("long" * 10**5)
users = st.dictionaries(names, st.fixed_dictionaries(samples) | json_values, max_size=3)


@SOME
@given(st.fixed_dictionaries({"user_data": users}) | json_values, st.sampled_from(["train", "test"]))
def test_any_json_of_leaf(content, part):
    with scratch() as folder:
        shutil.copytree(TEMPLATES / "leaf", folder, dirs_exist_ok=True)
        (folder / "femnist" / part / "all_data_0.json").write_text(json.dumps(content))
        load("femnist", folder)
        (folder / "shakespeare").mkdir()
        for name in ("train", "test"):
            shutil.copytree(folder / "femnist" / part, folder / "shakespeare" / name)
        load("shakespeare", folder, roles=0, train_samples=0, test_samples=0)


xml = st.recursive(
    st.text(max_size=8) | st.sampled_from(["&lt;", "&a;", "<!-- -->", "<![CDATA[x]]>", "words " * 30]),
    lambda inner: st.builds(
        lambda tag, parts: f"<{tag}>{''.join(parts)}</{tag}>",
        st.sampled_from(["PLAY", "TITLE", "SPEECH", "SPEAKER", "LINE", "STAGEDIR", "ACT"]),
        st.lists(inner, max_size=4),
    ),
    max_leaves=20,
)
PROLOGS = [
    "",
    '<?xml version="1.0" encoding="%s"?>',
    '<!DOCTYPE PLAY SYSTEM "play.dtd">',
    '<!DOCTYPE PLAY [<!ENTITY a "b">]>',
]
ENCODINGS = ["utf-8", "utf-16", "latin-1", "ascii", "utf-7", "cp037", "big5", "nothing", "", "idna", "hex"]


@SOME
@given(st.sampled_from(PROLOGS), st.sampled_from(ENCODINGS), st.lists(xml, max_size=5), st.booleans())
def test_any_play(prolog, encoding, parts, framed):
    text = prolog.replace("%s", encoding) + (
        f"<PLAY><TITLE>a</TITLE>{''.join(parts)}</PLAY>" if framed else "".join(parts)
    )
    try:
        content = text.encode(encoding, "replace")
    except (LookupError, UnicodeError):
        content = text.encode("utf-8", "replace")
    with scratch() as folder:
        (folder / "play.xml").write_bytes(content)
        load("shakespeare", folder, roles=0, train_samples=0, test_samples=0)


OPCODES = [bytes([code]) for code in pickle._Unpickler.dispatch]
GLOBALS = [
    "numpy dtype",
    "numpy ndarray",
    "posix system",
    "numpy.core.multiarray _reconstruct",
    "_codecs encode",
]
WORDS_OF_A_PICKLE = [
    *OPCODES,
    *(f"c{name}\n".replace(" ", "\n").encode() for name in GLOBALS),
    *(b"data", b"labels", b"u1"),
]
words = st.sampled_from(WORDS_OF_A_PICKLE) | st.binary(max_size=5)


@SOME
@given(st.lists(words, max_size=30), st.booleans())
def test_any_pickle(parts, ended):
    with scratch() as folder:
        shutil.copytree(TEMPLATES / "cifar pickle", folder, dirs_exist_ok=True)
        path = folder / "cifar-10-batches-py" / "data_batch_2"
        path.write_bytes(b"".join(parts) + (b"." if ended else b""))
        load("cifar10", folder)


@SOME
@given(st.sampled_from(sorted(DATASETS)), st.data())
def test_any_option_of_a_loader(name, data):
    kinds = {"cinic10": None, "digits": None, "fashion_mnist": "idx", "mnist": "idx", "femnist": "leaf"}
    kind = kinds.get(name, next((kind for kind, writer in WRITERS.items() if writer[0] == name), None))
    known = sorted(inspect.signature(DATASETS[name]).parameters)
    options = data.draw(st.dictionaries(st.sampled_from(known), values, min_size=1, max_size=2))
    folder = TEMPLATES / kind if kind else TEMPLATES
    load(name, **{"folder": folder, **options})


numbers = st.integers(-2, 50) | st.sampled_from([10**6, 10**9, 10**12, 2**63, 10**400])
positive = st.sampled_from([5e-324, 1e-300, 1e-12, 1e-3, 0.1, 1.0, 1e3, 1e6, 1e7, 1e300])
DRAWN = {
    "concentration": positive | st.floats() | values,
    "size_spread": positive | st.floats() | values,
    "classes_per_client": numbers | values,
    "minimum": numbers | values,
    "redraws": numbers | values,
    "cap": st.booleans() | values,
    "stratified": st.booleans() | values,
    "groups": st.lists(st.integers(0, 3) | st.text(max_size=2), min_size=90, max_size=90) | values,
}


@SOME
@given(st.sampled_from(sorted(PARTITIONS)), numbers, st.integers(1, 90), st.data())
def test_any_partition(name, clients, classes, data):
    known = inspect.signature(PARTITIONS[name]).parameters.values()
    options = {
        option.name: data.draw(DRAWN[option.name])
        for option in known
        if option.default is option.empty or data.draw(st.booleans())
    }
    labels = np.arange(90) % classes
    try:
        with limits():
            parts = PARTITIONS[name](**options).split(labels, clients, np.random.default_rng(0))
    except ValueError as error:  # config turns it into one line
        assert str(error).strip()
        return
    assert len(parts) == clients and all(len(part) for part in parts)
    assert all(0 <= part.min() <= part.max() < 90 for part in parts)


@SOME
@given(st.sampled_from(["tar", "zip", "gztar"]), st.integers(0, 2**32), st.integers(0, 4))
def test_damaged_archives(kind, seed, edits):
    with scratch() as folder:
        archive = Path(shutil.make_archive(str(folder / "archive"), kind, TEMPLATES / "tiny"))
        archive.write_bytes(damaged(archive.read_bytes(), seed, edits))
        (folder / "into").mkdir()
        try:
            with limits():
                unpack(archive, folder / "into", ("train", "val", "wnids.txt"))
        except FlatfedError as error:
            assert len(str(error).splitlines()) == 1
        outside = {path.name for path in folder.iterdir()}
        assert outside == {"into", archive.name}


@SOME
@given(st.integers(0, 2**32), st.integers(0, 3))
def test_damaged_arrays_on_the_command_line(seed, edits):
    with scratch() as folder:
        content = (TEMPLATES / "npz" / "data.npz").read_bytes()
        path = folder / "data.npz"
        path.write_bytes(with_inner_damage(path, content, seed, edits) if edits else content)
        options = ["--set", f"data.options.file={path}", "--partition", "iid", "--clients", 2]
        answer = command("split", "--dataset", "npz", *options)
        assert edits or answer.code == 0
