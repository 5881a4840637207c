"""Files that are damaged, hostile or no files: one line says what is wrong, soon and in little memory."""

from __future__ import annotations

import gzip
import inspect
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import tracemalloc
import zipfile
import zlib
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from data import fake
from data.fake import refused
from flatfed import cli
from flatfed.data.datasets import CATALOG, DATASETS
from flatfed.data.download import get, unpack

LIMIT = 100_000


@pytest.fixture
def small_limit(monkeypatch):
    monkeypatch.setenv("FLATFED_LARGEST_FILE", str(LIMIT))


@contextmanager
def little_memory(megabytes=64):
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < megabytes * 1e6
    finally:
        tracemalloc.stop()


def load(name, folder, **options):
    if "verify" in inspect.signature(DATASETS[name]).parameters:
        options["verify"] = False
    return DATASETS[name](folder=folder, **options)


# --- Arrays -----------------------------------------------------------------------------------------------


def npy(array):
    stream = io.BytesIO()
    np.save(stream, array, allow_pickle=True)
    return stream.getvalue()


def header(description, version=(1, 0), length=None):
    text = description.encode()
    width = 2 if version[0] == 1 else 4
    size = len(text) if length is None else length
    return b"\x93NUMPY" + bytes(version) + size.to_bytes(width, "little") + text


def described(dtype, shape):
    return header(f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}}}")


def write_npz(folder, method=zipfile.ZIP_STORED, **changes):
    arrays = {
        "train_inputs": npy(np.ones((4, 3), np.float32)),
        "train_targets": npy(np.arange(4) % 2),
        "test_inputs": npy(np.ones((2, 3), np.float32)),
        "test_targets": npy(np.arange(2)),
        **changes,
    }
    path = folder / "data.npz"
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in arrays.items():
            archive.writestr(f"{name}.npy", content)
    return path


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (described("<f4", (10**12, 3)), "more than 1,073,741,824 bytes"),
        (described("<f4", (2**70,)), "more than 1,073,741,824 bytes"),
        (described("|i1", (2**28, 1)), "more than 1,073,741,824 bytes"),
        (described("<f4", (-1, 3)), "train_inputs is float32 [-1, 3]"),
        (described("<U0", (10**12, 3)), "train_inputs is <U0"),
        (described("|V0", (10**12, 3)), "train_inputs is |V0"),
        (described("<c8", (4, 3)) + bytes(96), "train_inputs is complex64"),
        (described("<f4", (4, 3)) + bytes(47), "has not the 48 bytes"),
        (described("<f4", (4, 3)) + bytes(49), "has not the 48 bytes"),
        (described("<f4", (4, 0)), "give numbers [samples, …]"),
        (header("{'descr': '<f4'"), "not a readable .npz archive"),
        (header("(" * 5000), "not a readable .npz archive"),
        (header("{'descr': [('a', '|O')], 'fortran_order': False, 'shape': (4,)}"), "Python objects"),
        (header("", (2, 0), 2**32 - 1), "not a readable .npz archive"),
        (header("{}", (3, 0)), "has the format 3.0"),
        (b"", "not a readable .npz archive"),
        (npy(np.full((4, 3), 1e300)), "too large for float32"),
        (npy(np.full((4, 3), 2**64 - 1, np.uint64)), "use numbers below 2**63"),
        (npy(np.full((4, 3), np.nan)), "NaN or infinity"),
        (npy(np.array([[None]])), "Python objects"),
    ],
)
def test_an_array_that_cannot_be_is_refused(content, said, tmp_path):
    path = write_npz(tmp_path, train_inputs=content)
    with little_memory(), refused(path, said):
        load("npz", tmp_path)


def test_objects_in_arrays_are_not_unpickled(tmp_path):
    victim = tmp_path / "victim"
    write_npz(tmp_path, train_groups=npy(np.array([Touch(victim)] * 4, object)))
    with refused("train_groups holds Python objects, which are not unpickled"):
        load("npz", tmp_path)
    assert not victim.exists()


def test_labels_far_beyond_any_number_of_classes_are_refused(tmp_path):
    write_npz(tmp_path, train_targets=npy(np.array([0, 1, 2, 10**9])))
    with refused("label 1000000000 is too high"):
        load("npz", tmp_path)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_arrays_in_odd_compression_are_refused(method, tmp_path):
    path = write_npz(tmp_path, method)
    with refused(path, "encrypted or compressed in a way that numpy does not use"):
        load("npz", tmp_path)


@pytest.mark.parametrize(("offset", "value"), [(6, 1), (8, 99)], ids=["encrypted", "unknown method"])
def test_encrypted_arrays_are_refused(offset, value, tmp_path):
    path = write_npz(tmp_path)
    content = bytearray(path.read_bytes())
    for signature, start in ((b"PK\x01\x02", offset + 2), (b"PK\x03\x04", offset)):
        place = content.find(signature)
        while place >= 0:
            content[place + start] = value
            place = content.find(signature, place + 1)
    path.write_bytes(content)
    with refused(path, "encrypted or compressed"):
        load("npz", tmp_path)


def test_an_array_that_is_there_twice_is_refused(tmp_path):
    path = write_npz(tmp_path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("train_inputs.npy", npy(np.zeros((4, 3), np.float32)))
    with refused(path, "2 arrays train_inputs"):
        load("npz", tmp_path)


def test_an_archive_bomb_is_refused_while_it_is_unpacked(small_limit, tmp_path):
    bomb = described("|u1", (10**8, 1, 1)) + bytes(10**8)
    path = write_npz(tmp_path, zipfile.ZIP_DEFLATED, train_inputs=bomb)
    assert path.stat().st_size < LIMIT * 2
    with little_memory(), refused(path, f"more than {LIMIT:,} bytes", "FLATFED_LARGEST_FILE"):
        load("npz", tmp_path)


def test_an_absurd_table_of_contents_is_refused(tmp_path):
    path = write_npz(tmp_path)
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    start = struct.unpack("<L", content[end + 16 : end + 20])[0]
    table = 2**26
    content[end + 12 : end + 16] = struct.pack("<L", end - start + table)
    content[end:end] = bytes(table)
    path.write_bytes(content)
    with refused(path, "a table or name of"):
        load("npz", tmp_path)


# --- Unpacking --------------------------------------------------------------------------------------------


def test_a_gzip_bomb_is_refused_while_it_is_unpacked(small_limit, tmp_path):
    fake.write_mnist(tmp_path / "mnist", packed=True)
    for name in ("train-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        path = tmp_path / "mnist" / name
        before = path.read_bytes()
        path.write_bytes(gzip.compress(bytes(10**8), 1))
        with little_memory(), refused(path, "more than"):
            load("mnist", tmp_path)
        path.write_bytes(before)


def test_labels_for_images_that_are_not_there_are_not_unpacked(tmp_path):
    fake.write_mnist(tmp_path / "mnist", packed=True)
    path = tmp_path / "mnist" / "train-labels-idx1-ubyte.gz"
    count = 10**8
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 1]) + count.to_bytes(4, "big") + bytes(count), 1))
    with little_memory(), refused(path, "more than 1,048,590 bytes, which is too much for it"):
        load("mnist", tmp_path)


@pytest.mark.parametrize("value", ["many", "-1", "1e9", "9" * 30, "٣"])
def test_the_limit_is_a_number_of_bytes(value, monkeypatch, tmp_path):
    monkeypatch.setenv("FLATFED_LARGEST_FILE", value)
    fake.write_npz(tmp_path / "data.npz")
    with refused("FLATFED_LARGEST_FILE = ", "must be a number of bytes"):
        load("npz", tmp_path)


def write_tar(path, members):
    with tarfile.open(path, "w:gz") as tar:
        for name, size in members:
            member = tarfile.TarInfo(name)
            member.size = size
            tar.addfile(member, io.BytesIO(bytes(size)))


@pytest.mark.parametrize("kind", ["wanted", "unwanted", "declared", "zip", "name", "names"])
def test_an_archive_that_unpacks_to_too_much_is_refused(kind, small_limit, tmp_path):
    archive, folder = tmp_path / "a.tar.gz", tmp_path / "into"
    folder.mkdir()
    if kind == "zip":
        with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as zipped:
            zipped.writestr("x.bin", bytes(10**7))
    elif kind == "declared":
        member = tarfile.TarInfo("x.html")
        member.size = 2**40
        archive.write_bytes(gzip.compress(member.tobuf() + bytes(1024)))
    elif kind == "name":
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, 10**8
        archive.write_bytes(gzip.compress(member.tobuf() + bytes(10**8), 1))
    elif kind == "names":
        member = tarfile.TarInfo("././@LongLink")
        member.type, member.size = tarfile.GNUTYPE_LONGNAME, LIMIT // 512 * 512
        archive.write_bytes(gzip.compress(4 * (member.tobuf() + bytes(member.size)), 1))
    else:
        write_tar(archive, [("x.bin" if kind == "wanted" else "x.html", 10**7)])
    said = {"name": "a table or name", "names": "bytes, unpacked)"}
    with little_memory(), refused("a.tar.gz", said.get(kind, f"more than {LIMIT:,}")):
        unpack(archive, folder, ("*.bin",))
    assert sum(path.stat().st_size for path in folder.iterdir()) <= LIMIT


def test_an_archive_of_too_many_files_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("flatfed.data.download.MOST_MEMBERS", 5)
    write_tar(tmp_path / "a.tar.gz", [(f"{number}.html", 1) for number in range(6)])
    with refused("a.tar.gz", "more than 5 files"):
        unpack(tmp_path / "a.tar.gz", tmp_path, ("*.bin",))


def test_names_that_no_disk_takes_are_refused_by_the_command(monkeypatch, tmp_path):
    write_tar(tmp_path / "cifar-10-binary.tar.gz", [("x" * 300 + ".bin", 1)])
    download = replace(CATALOG["cifar10"].downloads[0], checksum=None)
    monkeypatch.setitem(CATALOG, "cifar10", replace(CATALOG["cifar10"], downloads=(download,)))
    with refused("cannot be written to", "File name too long"):
        get("cifar10", tmp_path)


# --- Something else in place of a file ---------------------------------------------------------------------

KINDS = {
    "cifar10": (fake.write_cifar10, "cifar-10-batches-bin/data_batch_3.bin"),
    "cifar100": (fake.write_cifar100_python, "cifar-100-python/test"),
    "mnist": (lambda root: fake.write_mnist(root / "mnist"), "mnist/train-labels-idx1-ubyte"),
    "emnist": (
        lambda root: fake.write_emnist(root / "emnist"),
        "emnist/emnist-letters-test-labels-idx1-ubyte.gz",
    ),
    "femnist": (fake.write_femnist, "femnist/test/all_data_0.json"),
    "shakespeare": (fake.write_shakespeare, "shakespeare/second.xml"),
    "image_folder": (lambda root: fake.write_image_folder(root, ["ant", "bee"]), "train/ant/000.png"),
    "tiny_imagenet": (fake.write_tiny_imagenet, "tiny-imagenet-200/val/val_annotations.txt"),
    "npz": (lambda root: fake.write_npz(root / "data.npz"), "data.npz"),
}
PLACEHOLDERS = {
    "pipe": os.mkfifo,
    "folder": Path.mkdir,
    "loop": lambda path: path.symlink_to(path.name),
    "device": lambda path: path.symlink_to("/dev/zero"),
}


@pytest.mark.parametrize("placeholder", PLACEHOLDERS)
@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_is_refused_and_not_waited_for(name, placeholder, tmp_path):
    write, file = KINDS[name]
    write(tmp_path)
    path = tmp_path / file
    path.unlink(missing_ok=True)
    PLACEHOLDERS[placeholder](path)
    with refused(path.name):
        load(name, tmp_path)


def test_a_sparse_file_of_terabytes_is_refused(tmp_path):
    fake.write_mnist(tmp_path / "mnist")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    os.truncate(path, 2**42)
    with refused(path, "more than 1,073,741,824 bytes"):
        load("mnist", tmp_path)


# --- Images -----------------------------------------------------------------------------------------------


def picture(folder):
    fake.write_image_folder(folder, ["ant", "bee"])
    return folder / "train" / "bee" / "005.png"


@pytest.mark.parametrize("position", [8, 16, 20, 24, 30, 45, 60, 90])
def test_a_flipped_bit_or_a_cut_gives_an_image_or_one_line(position, tmp_path):
    path = picture(tmp_path)
    content = path.read_bytes()
    for damaged in (
        content[:position],
        content[:position] + bytes([content[position] ^ 16]) + content[position + 1 :],
    ):
        path.write_bytes(damaged)
        with refused("005.png"):
            load("image_folder", tmp_path)


def png(width, height, content):
    def chunk(kind, body):
        checksum = zlib.crc32(kind + body)
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)

    start = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    packed = zlib.compress(content)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", start) + chunk(b"IDAT", packed) + chunk(b"IEND", b"")


def test_an_image_bomb_is_refused_before_it_is_decoded(small_limit, tmp_path):
    path = picture(tmp_path)
    path.write_bytes(png(13000, 13000, b""))
    with little_memory(), refused(path, "[13000, 13000] pixels where [6, 5] are expected"):
        load("image_folder", tmp_path)
    shutil.rmtree(tmp_path / "train")
    (tmp_path / "train" / "ant").mkdir(parents=True)
    first = tmp_path / "train" / "ant" / "000.png"
    first.write_bytes(png(1000, 1000, bytes(1001 * 1000)))
    with refused(tmp_path / "train", f"more than {LIMIT:,} bytes"):
        load("image_folder", tmp_path)


def test_formats_for_which_pillow_starts_programs_are_not_opened(tmp_path):
    path = picture(tmp_path)
    path.write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 5 6\n%%EndComments\nshowpage\n")
    with refused(path, "cannot identify image file"):
        load("image_folder", tmp_path)


def test_pixels_of_16_bits_are_refused_where_they_would_be_cut(tmp_path):
    from PIL import Image

    path = picture(tmp_path)
    Image.fromarray(np.full((6, 5), 40_000, np.uint16)).save(path)
    with refused(path, "not of 8 bits"):
        load("image_folder", tmp_path)


def test_classes_and_images_that_are_named_twice_are_refused(tmp_path):
    fake.write_tiny_imagenet(tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    table = folder / "val" / "val_annotations.txt"
    before = table.read_text()
    table.write_text(before + before.splitlines()[0] + "\n")
    with refused(table, "or one again"):
        load("tiny_imagenet", tmp_path)
    table.write_text(before)
    for names in ("n01\nn02\nn02\n", "n01\n../train/n02\n"):
        (folder / "wnids.txt").write_text(names)
        with refused(folder / "wnids.txt", "is named twice or leads out of the folder"):
            load("tiny_imagenet", tmp_path)


# --- LEAF -------------------------------------------------------------------------------------------------

WHITE = [1.0] * 784


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[" * 100_000, "not JSON"),
        ('{"user_data": {"u": {"x": [[%s]], "y": [1]}}}' % ("9" * 5000), "not JSON"),
        ('{"user_data": {"u": {"x": [[%s]], "y": [1]}}}' % ("9" * 4000), "has not 784 numbers"),
        (b'{"user_data": {"\xff": {}}}', "not JSON"),
        (json.dumps({"user_data": {"u": {"x": [[float("nan")] * 784], "y": [1]}}}), "is not one of 0/255"),
        (json.dumps({"user_data": {"u": {"x": [[float("inf")] * 784], "y": [1]}}}), "is not one of 0/255"),
        (json.dumps({"user_data": {"u": {"x": [WHITE], "y": [-1]}}}), "label -1"),
        (json.dumps({"user_data": {"u": {"x": [WHITE], "y": [62]}}}), "label 62"),
        (json.dumps({"user_data": {"u": {"x": [WHITE], "y": [10**30]}}}), "not a whole number"),
        (json.dumps({"user_data": {"u": {"x": [], "y": []}}}), "no samples"),
        ('{"user_data": {"u": {"x": [], "y": []}, "u": {"x": [], "y": []}}}', "two entries 'u'"),
        (json.dumps({"user_data": {"u" * 10**6: {"x": [WHITE] * 9, "y": [1] * 9}}}), "too long"),
        ('{"user_data": {"a\\u0000": {"x": [], "y": []}}}', "not printable"),
        ('{"user_data": {"\\ud800": {"x": [], "y": []}}}', "not printable"),
    ],
)
def test_leaf_files_of_any_content_are_refused_in_one_line(content, said, tmp_path):
    fake.write_femnist(tmp_path)
    path = tmp_path / "femnist" / "train" / "all_data_0.json"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(tmp_path / "femnist" / "train", said):
        load("femnist", tmp_path)


def test_json_that_would_fill_the_memory_is_refused(small_limit, tmp_path):
    fake.write_leaf(tmp_path / "femnist" / "train", [{"u": ([], [])}])
    path = tmp_path / "femnist" / "train" / "all_data_0.json"
    path.write_text("[" + ",".join(["[]"] * 20_000) + "]")
    assert path.stat().st_size < LIMIT
    with refused(path, f"more than {LIMIT:,} bytes"):
        load("femnist", tmp_path)


def test_characters_that_are_none_count_as_unknown_ones(tmp_path):
    text = "\ud800" * 80
    for part in ("train", "test"):
        fake.write_leaf(tmp_path / "shakespeare" / part, [{"ROLE": ([text, text], ["a", "\udfff"])}])
    data = load("shakespeare", tmp_path, roles=0, train_samples=0, test_samples=0)
    assert data.train_inputs.unique().tolist() == [79] and data.train_targets[1] == 79


# --- Plays ------------------------------------------------------------------------------------------------


def play(body, prolog=""):
    return f"{prolog}<PLAY><TITLE>A</TITLE>{body}</PLAY>"


SPEECH = "<SPEECH><SPEAKER>X</SPEAKER><LINE>words</LINE></SPEECH>"
LAUGHS = "".join(f'<!ENTITY l{n + 1} "{f"&l{n};" * 10}">' for n in range(9))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (play(SPEECH, '<?xml version="1.0" encoding="nothing"?>'), "not XML (unknown encoding: nothing)"),
        (play(SPEECH, '<?xml version="1.0" encoding="big5"?>'), "not XML (multi-byte"),
        (play(SPEECH, '<?xml version="1.0" encoding="hex"?>'), "not XML"),
        (play("&l9;", f'<!DOCTYPE PLAY [<!ENTITY l0 "ha">{LAUGHS}]>'), "declares entities"),
        (play(SPEECH).encode("utf-16"), "has zeros"),
        (play("<SPEECH>" * 100_000 + "</SPEECH>" * 100_000), "a <SPEECH> inside a <SPEECH>"),
        (play(f"<SPEECH>{'<SPEAKER>X</SPEAKER>' * 20_000}<LINE>{'w' * 400_000}</LINE></SPEECH>"), "repeat"),
        (play(SPEECH + " " * 2**23), "more than 8,388,608 bytes"),
        (play("<a>" * 300_000 + "</a>" * 300_000), "no <SPEECH>"),
    ],
)
def test_plays_of_any_content_are_refused_in_one_line(content, said, tmp_path):
    path = tmp_path / "play.xml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with refused(path, said):
        load("shakespeare", tmp_path)


# --- Pickles ----------------------------------------------------------------------------------------------


def nested(depth):
    value = [0, 0]
    for _ in range(depth):
        value = [value, value]
    return value


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\x80\x02}r\xff\xff\xff\xff.", "has no entry"),  # a memo with the number 2**32 - 1
        (b"\x80\x05\x96" + (2**33).to_bytes(8, "little") + b".", "not a pickled batch"),
        (b"\x80\x04\x8e" + (2**40).to_bytes(8, "little") + b".", "not a pickled batch"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": nested(29)}), "one whole number"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [10**5000]}), "one whole number"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [True]}), "one whole number"),
        (b"c" + b"a" * 10_000 + b"\nb\n.", "its pickle asks for aaa"),
    ],
)
def test_pickles_that_ask_for_memory_are_refused(content, said, tmp_path):
    fake.write_cifar10_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(content)
    with little_memory(), refused(path, said):
        load("cifar10", tmp_path)


# --- Options ----------------------------------------------------------------------------------------------

BAD_VALUES = [{"a": 1}, ["x"], "\0", b"bytes", -1.5, float("nan"), {1}]
COLUMNS = {"inputs": [["x"], "\0"], "targets": ["\0"]}  # names of columns may be any texts
OPTIONS = [(name, option) for name in DATASETS for option in inspect.signature(DATASETS[name]).parameters]


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_of_a_wrong_type_is_named(name, option, tmp_path):
    for value in BAD_VALUES:
        if name == "folder" and value in COLUMNS.get(option, []):
            continue
        with refused(option):
            DATASETS[name](**{"folder": None if name == "digits" else tmp_path, option: value})


@pytest.mark.parametrize("value", [1, "yes", None, 0.0])
def test_yes_and_no_are_not_guessed(value, tmp_path):
    with refused("mnist.verify = ", "valid boolean"):
        DATASETS["mnist"](folder=tmp_path, verify=value)


@pytest.mark.parametrize("value", [True, 1.0, 2, "3"])
def test_channels_are_a_number_of_them(value, tmp_path):
    fake.write_image_folder(tmp_path, ["ant", "bee"])
    with refused("channels = "):
        load("image_folder", tmp_path, channels=value)


@pytest.mark.parametrize("option", ["roles", "train_samples", "test_samples"])
def test_absurd_numbers_of_roles_and_samples_are_refused(option, tmp_path):
    with refused(f"shakespeare.{option} = 1000", "less than or equal to 1000000000"):
        load("shakespeare", tmp_path, **{option: 10**400})


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/x", "a\0b", "\ud800"])
def test_a_folder_that_cannot_be_is_named(folder):
    with refused("folder = ", "there is no such path"):
        DATASETS["mnist"](folder=folder)


def test_a_name_that_is_too_long_for_a_folder_is_one_line():
    with refused("mnist: ", "File name too long"):
        DATASETS["mnist"](folder="x" * 5000)


@pytest.mark.parametrize("option", ["mean", "std"])
def test_mean_and_deviation_go_together(option, tmp_path):
    fake.write_image_folder(tmp_path, ["ant", "bee"])
    other = "std" if option == "mean" else "mean"
    with refused(f"{option}: it is given without {other}"):
        load("image_folder", tmp_path, **{option: [0.5, 0.5, 0.5]})
    arrays = {"train_inputs": np.zeros((4, 6, 5), np.uint8), "test_inputs": np.zeros((2, 6, 5), np.uint8)}
    write_npz(tmp_path, **{name: npy(array) for name, array in arrays.items()})
    with refused(f"{option}: it is given without {other}"):
        load("npz", tmp_path, **{option: [0.5]})


@pytest.mark.parametrize(("mean", "std"), [(1e300, 1.0), (0.0, 1e-300), (1e38, 1e-6)])
def test_a_normalisation_that_makes_infinities_is_refused(mean, std, tmp_path):
    fake.write_image_folder(tmp_path, ["ant", "bee"])
    with refused("mean = ", "std = ", "pixels become infinite"):
        load("image_folder", tmp_path, mean=[mean] * 3, std=[std] * 3)


def test_options_reach_the_command_line_as_one_line(tmp_path):
    write_npz(tmp_path, train_inputs=described("<f4", (10**12, 3)))
    for assignment, said in (
        (f"data.options.file={tmp_path / 'data.npz'}", "more than 1,073,741,824 bytes"),
        ("data.options.augmentation=3", "npz.augmentation = 3"),
    ):
        result = CliRunner().invoke(cli.app, ["split", "--dataset", "npz", "--set", assignment])
        assert result.exit_code == 2 and result.output.startswith("error:")
        assert said in " ".join(result.output.split())


def test_files_without_samples_are_refused(tmp_path):
    fake.write_mnist(tmp_path / "mnist", train=0, test=0)
    with refused("train-images-idx3-ubyte", "no samples"):
        load("mnist", tmp_path)
