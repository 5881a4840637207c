"""Loaders: every format read back exactly, and every kind of bad file refused in one line."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from data import fake
from data.fake import assert_holds, refused
from flatfed.data.datasets import CATALOG, DATASETS, cifar, data_folder, idx, shakespeare
from flatfed.data.partition.natural import Natural
from flatfed.data.transform import ImageTransform, pixel_statistics


def load(name, folder, **options):
    return DATASETS[name](folder=folder, verify=False, **options)


# --- every format, read back exactly ---

WRITERS = {
    "cifar10": (fake.write_cifar10, 10),
    "cifar10 python": (fake.write_cifar10_python, 10),
    "cifar100": (fake.write_cifar100, 100),
    "cifar100 python": (fake.write_cifar100_python, 100),
    "mnist": (lambda root: fake.write_mnist(root / "mnist"), 10),
    "mnist packed": (lambda root: fake.write_mnist(root / "mnist", packed=True), 10),
    "mnist elsewhere": (lambda root: fake.write_mnist(root / "MNIST" / "raw"), 10),
    "fashion_mnist": (lambda root: fake.write_mnist(root / "fashion-mnist", packed=True), 10),
    "emnist": (lambda root: fake.write_emnist(root / "emnist"), 26),
    "emnist unpacked": (lambda root: fake.write_emnist(root / "emnist", packed=False), 26),
    "tiny_imagenet": (fake.write_tiny_imagenet, 2),
}


@pytest.mark.parametrize("case", WRITERS)
def test_images_and_labels_come_back_exactly(case, tmp_path):
    write, classes = WRITERS[case]
    written = write(tmp_path)
    loaded = load(case.split()[0], tmp_path)
    assert_holds(loaded, written, classes)
    assert loaded.name == case.split()[0]
    assert isinstance(loaded.transform, ImageTransform) and not loaded.transform.draws
    assert loaded.groups is None


@pytest.mark.parametrize("case", WRITERS)
def test_the_folder_of_the_files_themselves_will_do_and_so_will_text(case, tmp_path):
    write, classes = WRITERS[case]
    written = write(tmp_path)
    name = case.split()[0]
    assert_holds(load(name, str(CATALOG[name].find(tmp_path))), written, classes)


def test_both_versions_of_cifar_give_the_same(tmp_path):
    fake.write_cifar10(tmp_path / "binary", seed=4)
    fake.write_cifar10_python(tmp_path / "python", seed=4)
    binary, python = load("cifar10", tmp_path / "binary"), load("cifar10", tmp_path / "python")
    assert torch.equal(binary.train_inputs, python.train_inputs)
    assert torch.equal(binary.train_targets, python.train_targets)
    assert torch.equal(binary.test_inputs, python.test_inputs)


def test_a_pickle_of_python_2_and_old_numpy_is_read(tmp_path):
    """Byte for byte what Python 2 wrote: text as short strings and numpy's functions under old names."""
    fake.write_cifar100_python(tmp_path)
    data = bytes(range(256)) * 24  # two images
    array = (
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\x00tU\x01btR(K\x01K\x02M\x00\x0c\x86"
        b"cnumpy\ndtype\n(U\x02u1K\x00K\x01tR(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + len(data).to_bytes(4, "little") + data + b"tb"
    )
    content = b"\x80\x02}(U\x04data" + array + b"U\x0bfine_labels](K\x07K\x63eu."
    for name in ("train", "test"):
        (tmp_path / "cifar-100-python" / name).write_bytes(content)
    loaded = load("cifar100", tmp_path)
    assert loaded.train_targets.tolist() == [7, 99]
    assert loaded.train_inputs.numpy().tobytes() == data


def test_cifar_pixels_are_where_the_format_says(tmp_path):
    """Red plane first, row by row: byte 1 + 1024·channel + 32·row + column."""
    fake.write_cifar10(tmp_path, per_file=1)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    content = bytearray(3073)
    content[0] = 3
    content[1 + 1024 * 2 + 32 * 5 + 7] = 200
    path.write_bytes(bytes(content))
    loaded = load("cifar10", tmp_path)
    assert loaded.test_targets.tolist() == [3]
    assert loaded.test_inputs[0, 2, 5, 7] == 200 and int(loaded.test_inputs.sum()) == 200


def test_emnist_is_turned_upright_and_letters_count_from_zero(tmp_path):
    """The file holds columns as rows: its row 3, column 20 is row 20, column 3 of the character."""
    stored = np.zeros((1, 28, 28), np.uint8)
    stored[0, 3, 20] = 9
    for part in ("train", "test"):
        fake.write_idx(tmp_path / f"emnist-letters-{part}-images-idx3-ubyte", stored)
        fake.write_idx(tmp_path / f"emnist-letters-{part}-labels-idx1-ubyte", np.array([1]))
    loaded = load("emnist", tmp_path)
    assert loaded.train_inputs[0, 0, 20, 3] == 9 and int(loaded.train_inputs.sum()) == 9
    assert loaded.train_targets.tolist() == [0]


@pytest.mark.parametrize(("split", "classes"), [("balanced", 47), ("byclass", 62)])
def test_other_splits_of_emnist(split, classes, tmp_path):
    written = fake.write_emnist(tmp_path / "emnist", split, train=80)
    assert_holds(load("emnist", tmp_path, split=split), written, classes)
    with refused("emnist-letters-train-images", "flatfed data get emnist"):
        load("emnist", tmp_path)


def test_emnist_l_is_the_first_ten_letters_by_their_own_mean_and_deviation(tmp_path):
    (train, train_labels), (test, test_labels) = fake.write_emnist(tmp_path / "emnist", train=200, test=100)
    loaded = load("emnist_l", tmp_path)
    kept = (train[train_labels < 10], train_labels[train_labels < 10])
    assert_holds(loaded, (kept, (test[test_labels < 10], test_labels[test_labels < 10])), 10)
    pixels = kept[0].astype(np.float64)
    expected = (pixels - pixels.mean()) / pixels.std()
    np.testing.assert_allclose(loaded.transform.evaluate(loaded.train_inputs), expected, rtol=1e-4, atol=1e-5)


def test_pixel_statistics_against_numpy():
    images = np.random.default_rng(0).integers(0, 256, (5000, 3, 4, 5), dtype=np.uint8)
    images[:, 2] = 77
    mean, std = pixel_statistics(images)
    scaled = images / 255
    np.testing.assert_allclose(mean, scaled.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(std[:2], scaled[:, :2].std((0, 2, 3)), rtol=1e-12)
    assert std[2] == 1.0  # a constant channel stays finite


def test_normalisation_and_augmentation_are_options(tmp_path):
    fake.write_cifar10(tmp_path)
    fake.write_cifar100(tmp_path)
    fake.write_mnist(tmp_path / "fashion-mnist")
    shared = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    for name, own in (
        ("cifar10", ((0.491, 0.482, 0.447), (0.247, 0.243, 0.262))),
        ("cifar100", ((0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761))),
    ):
        assert load(name, tmp_path).transform == ImageTransform(*own)
        assert load(name, tmp_path, normalisation="fedswa").transform == ImageTransform(*shared)
        assert load(name, tmp_path, augmentation="half_crop_flip").transform == ImageTransform(
            *own, "half_crop_flip"
        )
        with refused("normalisation = 'fedswaa'", "'feddyn' or 'fedswa'"):
            load(name, tmp_path, normalisation="fedswaa")
        with refused("augmentation = 'crop'", "crop_flip"):
            load(name, tmp_path, augmentation="crop")
    fake.write_tiny_imagenet(tmp_path)
    whole = load("tiny_imagenet", tmp_path, normalisation="imagenet").transform
    assert whole == ImageTransform((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), "none")
    assert load("fashion_mnist", tmp_path, normalisation="mnist").transform == ImageTransform(
        (0.1307,), (0.3081,)
    )
    with refused("split = 'letter'", "'letters', 'balanced' or 'byclass'"):
        load("emnist", tmp_path, split="letter")


# --- bad files ---


@pytest.mark.parametrize("name", [info.name for info in CATALOG.values() if not info.origin])
def test_a_missing_data_set_says_where_it_belongs_and_how_to_get_it(name, tmp_path):
    fix = "preprocess.sh" if name == "femnist" else f"flatfed data get {name}"
    with refused(f"{name}: no ", tmp_path / CATALOG[name].folders[0], fix):
        DATASETS[name](folder=tmp_path)
    with refused(tmp_path / "nowhere", fix):
        DATASETS[name](folder=tmp_path / "nowhere")


def test_files_that_are_not_the_published_ones_are_refused_unless_told(tmp_path):
    """Every loader of published files compares them by default."""
    fake.write_cifar10(tmp_path)
    fake.write_cifar100(tmp_path)
    fake.write_mnist(tmp_path / "mnist")
    fake.write_mnist(tmp_path / "fashion-mnist", packed=True)
    fake.write_emnist(tmp_path / "emnist")
    fake.write_tiny_imagenet(tmp_path)
    fake.write_image_folder(
        tmp_path / "CINIC-10", DATASETS_CINIC, (("train", 1), ("test", 1)), shape=(3, 32, 32)
    )
    fake.write_play(tmp_path / "shakespeare" / "one.xml", "One", [(["A"], "<LINE>word</LINE>")])
    for name, said in (
        ("cifar10", "truncated, 9,219 bytes where 30,730,000"),
        ("cifar100", "truncated, 15,370 bytes where 153,700,000"),
        ("mnist", "wrong checksum, md5"),
        ("fashion_mnist", "wrong checksum, md5"),
        ("emnist", "60 images where 124,800"),
        ("emnist_l", "60 images where 124,800"),
        ("tiny_imagenet", "2 classes where 200"),
        ("cinic10", "10 images where 90,000"),
        ("shakespeare", "1 .xml files where 37"),
    ):
        with refused(said, "flatfed data get"):
            DATASETS[name](folder=tmp_path)


DATASETS_CINIC = ["airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"]


@pytest.mark.parametrize("version", ["binary", "python"])
def test_a_wrong_checksum_names_the_file(version, tmp_path):
    small = replace(cifar.CIFAR10, images=dict.fromkeys(cifar.CIFAR10.images, 3))
    if version == "binary":
        fake.write_cifar10(tmp_path)
        path = tmp_path / "cifar-10-batches-bin" / "data_batch_1.bin"
    else:
        fake.write_cifar10_python(tmp_path)
        path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    with refused(path, "wrong checksum", "flatfed data get cifar10 --force"):
        small.load(folder=tmp_path)


def test_published_checksums_are_compared_with_the_content(tmp_path):
    """With the checksums of the fake files in place of the published ones, verifying accepts them."""
    written = fake.write_cifar100(tmp_path)
    import hashlib

    sums = {
        f"{part}.bin": "sha1:"
        + hashlib.sha1((tmp_path / "cifar-100-binary" / f"{part}.bin").read_bytes()).hexdigest()
        for part in ("train", "test")
    }
    small = replace(cifar.CIFAR100, checksums=sums, images={"train": 5, "test": 3})
    assert_holds(small.load(folder=tmp_path), written, 100)
    path = tmp_path / "cifar-100-binary" / "test.bin"
    content = bytearray(path.read_bytes())
    content[1000] ^= 1
    path.write_bytes(bytes(content))
    with refused(path, "wrong checksum, sha1"):
        small.load(folder=tmp_path)


def test_a_truncated_binary_batch_is_refused(tmp_path):
    fake.write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with refused(path, "truncated, 9,218 bytes", "flatfed data get cifar10"):
        load("cifar10", tmp_path)
    path.write_bytes(b"")
    with refused(path, "truncated"):
        load("cifar10", tmp_path)


def test_a_missing_batch_is_refused(tmp_path):
    fake.write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin"
    path.unlink()
    with refused(path, "not found", "flatfed data get cifar10"):
        load("cifar10", tmp_path)


def test_a_label_out_of_range_is_refused(tmp_path):
    fake.write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    content = bytearray(path.read_bytes())
    content[3073] = 10
    path.write_bytes(bytes(content))
    with refused(path, "label 10 of sample 1 is outside 0 … 9"):
        load("cifar10", tmp_path)
    fake.write_emnist(tmp_path / "emnist")
    fake.write_idx(tmp_path / "emnist" / "emnist-letters-test-labels-idx1-ubyte", np.full(40, 27))
    with refused("emnist-letters-test-labels", "label 26 of sample 0 is outside 0 … 25"):
        load("emnist", tmp_path)


class Malicious:
    def __init__(self, call, *arguments):
        self.call, self.arguments = call, arguments

    def __reduce__(self):
        return self.call, self.arguments


@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("attack", ["os.system", "eval", "open", "getattr", "inside"])
def test_a_malicious_pickle_is_refused_and_does_nothing(attack, protocol, tmp_path):
    victim = tmp_path / "victim"
    command = f"touch {victim}"
    bad = {
        "os.system": lambda: Malicious(os.system, command),
        "eval": lambda: Malicious(eval, f"__import__('os').system({command!r})"),
        "open": lambda: Malicious(open, str(victim), "w"),
        "getattr": lambda: Malicious(getattr, "text", "upper"),
        "inside": lambda: {"data": np.array([Malicious(os.system, command)], dtype=object), "labels": [0]},
    }[attack]()
    fake.write_cifar10_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(pickle.dumps(bad, protocol=protocol))
    with refused(path, "its pickle asks for"):
        load("cifar10", tmp_path)
    assert not victim.exists()


def test_a_pickle_may_not_use_other_codecs(tmp_path):
    fake.write_cifar10_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_1"
    path.write_bytes(b"\x80\x02c_codecs\nencode\nX\x01\x00\x00\x00aX\x05\x00\x00\x00utf_8\x86R.")
    with refused(path, "its pickle asks for the codec utf_8"):
        load("cifar10", tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "truncated or not a pickled batch"),
        (b"not a pickle", "truncated or not a pickled batch"),
        (pickle.dumps([1, 2]), "truncated or not a pickled batch"),
        (pickle.dumps({"labels": [1]}), "no entry 'data'"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8)}), "no entry 'labels'"),
        (pickle.dumps({"data": np.zeros((1, 3072)), "labels": [1]}), "asks for an array of 'f8'"),
        (pickle.dumps({"data": np.zeros((1, 3071), np.uint8), "labels": [1]}), "no array `data`"),
        (pickle.dumps({"data": [[0] * 3072], "labels": [1]}), "no array `data`"),
        # numpy.ndarray itself, called with a shape that would not fit into memory.
        (b"cnumpy\nndarray\n((J\xff\xff\xff\x7fttR.", "truncated or not a pickled batch"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}), "one whole number"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["1"]}), "one whole number"),
        (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [11]}), "label 11"),
        (pickle.dumps({"data": np.zeros((0, 3072), np.uint8), "labels": []}), "one whole number"),
    ],
)
def test_a_pickle_of_something_else_is_refused(content, said, tmp_path):
    fake.write_cifar10_python(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(content)
    with refused(path, said):
        load("cifar10", tmp_path)


IMAGES, LABELS = np.zeros((4, 28, 28)), np.zeros(4)


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("train-images-idx3-ubyte", b"", "not as an idx3-ubyte file"),
        ("train-images-idx3-ubyte", b"\x00\x00\x08\x03\x00", "truncated"),
        (
            "train-images-idx3-ubyte",
            fake.idx_bytes(IMAGES)[:-1],
            "truncated, 3,151 bytes where its header says 3,152",
        ),
        ("train-images-idx3-ubyte", fake.idx_bytes(IMAGES) + b"x", "too long"),
        ("train-images-idx3-ubyte", fake.idx_bytes(LABELS), "starts with 00 00 08 01"),
        (
            "train-images-idx3-ubyte",
            b"\x00\x00\x0d\x03" + fake.idx_bytes(IMAGES)[4:],
            "starts with 00 00 0d 03",
        ),
        ("train-images-idx3-ubyte", fake.idx_bytes(np.zeros((7, 28, 27))), "images of [28, 27] pixels"),
        ("train-labels-idx1-ubyte", fake.idx_bytes(LABELS), "4 labels for 7 images"),
        ("t10k-labels-idx1-ubyte", fake.idx_bytes(np.array([1, 2, 10, 3])), "label 10 of sample 2"),
    ],
)
def test_bad_idx_files_are_refused(file, content, said, tmp_path):
    fake.write_mnist(tmp_path / "mnist")
    (tmp_path / "mnist" / file).write_bytes(content)
    with refused(tmp_path / "mnist" / file, said, "flatfed data get mnist"):
        load("mnist", tmp_path)


def test_bad_packed_files_are_refused(tmp_path):
    fake.write_mnist(tmp_path / "mnist", packed=True)
    path = tmp_path / "mnist" / "train-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    for content in (whole[:-20], whole[:5], b"no gzip at all", whole[:-8] + b"\x00" * 8):
        path.write_bytes(content)
        with refused(path, "truncated or not a gzip file"):
            load("mnist", tmp_path)
    path.write_bytes(gzip.compress(b"another file"))
    with refused(path, "not as an idx3-ubyte file"):
        load("mnist", tmp_path)


# --- Shakespeare ---


def test_the_alphabet_is_leafs():
    assert shakespeare.ALPHABET == (
        "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
    )
    assert len(shakespeare.ALPHABET) == 80
    assert shakespeare.encode("\n A.z}").tolist() == [0, 1, 25, 10, 78, 79]
    assert shakespeare.encode("$é€\U0001f600").tolist() == [79] * 4


def test_windows_by_hand():
    text = "To be, or not to be: that is the question: Whether 'tis nobler in the mind to suffer"
    assert len(text) == 84
    samples = shakespeare.samples_of(text)
    assert samples.shape == (4, 81)

    def spelled(codes):
        return "".join(shakespeare.ALPHABET[code] for code in codes)

    assert spelled(samples[0, :80]) == text[:80] == text[:-4]
    assert spelled(samples[3, :80]) == text[3:83]
    assert spelled(samples[:, 80]) == "ffer"
    assert shakespeare.samples_of(text[:80]).shape == (0, 81)
    assert shakespeare.samples_of("").shape == (0, 81)


def test_speeches_have_no_stage_directions_and_belong_to_every_speaker(tmp_path):
    path = tmp_path / "play.xml"
    fake.write_play(
        path,
        "The Play",
        [
            (
                ["HAMLET"],
                "<LINE>To be, or not\n  to be:</LINE>\n<STAGEDIR>Exit</STAGEDIR><LINE> that is </LINE>",
            ),
            (["ROS", "GUIL"], "<LINE><STAGEDIR>Aside</STAGEDIR> Both &amp; all</LINE>"),
            ([""], "<LINE>nobody</LINE>"),
            (["HAMLET"], "<LINE>A <STAGEDIR>Dies</STAGEDIR>rat</LINE><LINE/>"),
        ],
    )
    assert shakespeare.speeches(path) == [
        ("The Play: HAMLET", "To be, or not to be: that is"),
        ("The Play: ROS", "Both & all"),
        ("The Play: GUIL", "Both & all"),
        ("The Play: HAMLET", "A rat"),
    ]


def words(count, seed):
    """Random text of exactly `count` characters that reads the same after joining lines."""
    letters = np.random.default_rng(seed).choice(list("abcdefghijklmnopqrstuvwxyz"), count)
    letters[5::6] = " "
    letters[-1] = "."
    return "".join(letters)


def write_plays(folder, roles, characters=1500):
    """One play a pair of roles, each with a text of its own in two speeches; returns the texts."""
    texts = {}
    for number in range(0, roles, 2):
        speeches = []
        for role in (number, number + 1):
            text = words(characters, role)
            texts[f"Play {number:02}: ROLE {role:02}"] = text
            cut = text.index(" ", characters // 2)
            speeches += [
                ([f"ROLE {role:02}"], f"<LINE>{part}</LINE>") for part in (text[:cut], text[cut + 1 :])
            ]
        # Speeches of the two roles take turns.
        fake.write_play(folder / f"{number:02}.xml", f"Play {number:02}", speeches[::2] + speeches[1::2])
    return texts


def spelled(codes):
    return "".join(shakespeare.ALPHABET[code] for code in codes)


def test_all_samples_of_all_roles_split_in_time(tmp_path):
    texts = write_plays(tmp_path / "shakespeare", 4)
    loaded = load("shakespeare", tmp_path, roles=0, train_samples=0, test_samples=0)
    assert loaded.group_names == tuple(sorted(texts)) and loaded.classes == 80
    # 1500 characters make 1420 samples: 1136 to train on, 80 dropped, 204 to test on.
    assert loaded.train_inputs.shape == (4 * 1136, 80) and loaded.test_inputs.shape == (4 * 204, 80)
    assert Counter(loaded.groups.tolist()) == dict.fromkeys(range(4), 1136)
    assert Counter(loaded.test_groups.tolist()) == dict.fromkeys(range(4), 204)
    for number, name in enumerate(loaded.group_names):
        text = texts[name]
        train = loaded.train_inputs[loaded.groups == number]
        assert spelled(train[0]) == text[:80]
        assert spelled(train[1135]) == text[1135:1215]
        assert spelled(loaded.train_targets[loaded.groups == number]) == text[80:1216]
        test = loaded.test_inputs[loaded.test_groups == number]
        # The last character seen in training is number 1215.
        assert spelled(test[0]) == text[1216:1296]
        assert spelled(loaded.test_targets[loaded.test_groups == number]) == text[1296:]


def test_the_crop_is_one_contiguous_stretch_of_each_chosen_role(tmp_path):
    texts = write_plays(tmp_path / "shakespeare", 10)
    loaded = load("shakespeare", tmp_path, roles=6, train_samples=200, test_samples=40)
    assert loaded.train_inputs.dtype == torch.uint8
    assert loaded.train_inputs.shape == (1200, 80) and loaded.test_inputs.shape == (240, 80)
    assert len(set(loaded.group_names)) == 6 and set(loaded.group_names) <= set(texts)
    np.testing.assert_array_equal(loaded.groups, np.repeat(np.arange(6), 200))
    np.testing.assert_array_equal(loaded.test_groups, np.repeat(np.arange(6), 40))
    starts = []
    for inputs, targets, size in (
        (loaded.train_inputs, loaded.train_targets, 200),
        (loaded.test_inputs, loaded.test_targets, 40),
    ):
        for number, name in enumerate(loaded.group_names):
            mine = slice(number * size, (number + 1) * size)
            stretch = spelled(inputs[mine][0]) + spelled(targets[mine])
            assert stretch in texts[name]
            for shift in (1, size - 1):
                assert spelled(inputs[mine][shift]) == stretch[shift : shift + 80]
            starts.append(texts[name].index(stretch))
    assert len(set(starts[:6])) > 3
    assert all(start + 279 < 1216 for start in starts[:6])
    assert all(start >= 1216 for start in starts[6:])


def test_the_crop_depends_on_its_seed_alone(tmp_path):
    write_plays(tmp_path / "shakespeare", 10)

    def crop(seed):
        return load("shakespeare", tmp_path, roles=6, train_samples=200, test_samples=40, crop_seed=seed)

    np.random.seed(1)
    first = crop(0)
    np.random.seed(2)
    again = crop(0)
    assert torch.equal(first.train_inputs, again.train_inputs) and first.group_names == again.group_names
    assert not torch.equal(first.train_inputs, crop(1).train_inputs)


def test_models_see_character_numbers_as_int64(tmp_path):
    write_plays(tmp_path / "shakespeare", 2)
    loaded = load("shakespeare", tmp_path, roles=2, train_samples=20, test_samples=10)
    for seen in (
        loaded.transform.train(loaded.train_inputs, None),
        loaded.transform.evaluate(loaded.train_inputs),
    ):
        assert seen.dtype == torch.int64 and torch.equal(seen, loaded.train_inputs.to(torch.int64))
    assert not loaded.transform.draws
    torch.nn.Embedding(80, 2)(loaded.transform.evaluate(loaded.test_inputs))


def test_roles_that_are_too_small_do_not_count(tmp_path):
    write_plays(tmp_path / "shakespeare", 4)
    fake.write_play(tmp_path / "shakespeare" / "x.xml", "X", [(["SMALL"], f"<LINE>{words(300, 9)}</LINE>")])
    assert len(load("shakespeare", tmp_path, roles=4, train_samples=1135, test_samples=203).group_names) == 4
    with refused("roles = 4: only 0 roles have more than 1136", "ask for fewer"):
        load("shakespeare", tmp_path, roles=4, train_samples=1136, test_samples=203)
    with refused("roles = 5: only 4 roles"):
        load("shakespeare", tmp_path, roles=5, train_samples=500, test_samples=100)
    with refused("roles = 100: only 0 roles have more than 2000 training and 400 test samples"):
        load("shakespeare", tmp_path)
    with refused("train_samples = -1"):
        load("shakespeare", tmp_path, train_samples=-1)


def leaf_text(text):
    return [text[start : start + 80] for start in range(len(text) - 80)], list(text[80:])


def test_shakespeare_from_leafs_files(tmp_path):
    first, second, third = words(400, 1), words(400, 2), words(400, 3)
    folder = tmp_path / "shakespeare"
    fake.write_leaf(
        folder / "train", [{"A_ONE": leaf_text(first), "B": leaf_text(second)}, {"C": leaf_text(third)}]
    )
    fake.write_leaf(folder / "test", [{"A_ONE": leaf_text(second), "C": leaf_text(first)}])
    loaded = load("shakespeare", tmp_path, roles=0, train_samples=0, test_samples=0)
    assert loaded.group_names == ("A_ONE", "C")  # nobody can test B
    np.testing.assert_array_equal(loaded.groups, np.repeat([0, 1], 320))
    assert spelled(loaded.train_targets[:320]) == first[80:]
    assert spelled(loaded.train_inputs[320]) == third[:80]
    assert spelled(loaded.test_targets[320:]) == first[80:]
    cropped = load("shakespeare", tmp_path, roles=2, train_samples=100, test_samples=30)
    assert spelled(cropped.train_targets[:100]) in first and spelled(cropped.test_targets[:30]) in second


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        (["a" * 79], ["b"], "has not 80 characters"),
        (["a" * 80], ["bc"], "is not one character"),
        (["a" * 80], [1], "is not one character"),
        (["a" * 80, "a" * 80], ["b"], "2 inputs but 1 targets"),
    ],
)
def test_bad_leaf_text_is_refused(inputs, targets, said, tmp_path):
    for part in ("train", "test"):
        fake.write_leaf(tmp_path / "shakespeare" / part, [{"ROLE": (inputs, targets)}])
    with refused(tmp_path / "shakespeare" / "train" / "all_data_0.json", "ROLE", said):
        load("shakespeare", tmp_path)


def test_bad_plays_are_refused(tmp_path):
    write_plays(tmp_path / "shakespeare", 2)
    path = tmp_path / "shakespeare" / "00.xml"
    whole = path.read_text()
    for content, said in (
        (whole[: len(whole) // 2], "truncated or not XML"),
        ("", "truncated or not XML"),
        ("<BOOK><TITLE>t</TITLE></BOOK>", "is a <BOOK>"),
        ("<PLAY><TITLE>t</TITLE></PLAY>", "no <SPEECH>"),
    ):
        path.write_text(content)
        with refused(path, said, "flatfed data get shakespeare"):
            load("shakespeare", tmp_path)


def test_natural_clients_partition_the_data(tmp_path):
    write_plays(tmp_path / "shakespeare", 6)
    loaded = load("shakespeare", tmp_path, roles=5, train_samples=100, test_samples=20)
    clients = Natural(loaded.groups).split(loaded.train_targets.numpy(), 5, np.random.default_rng(0))
    assert [rows.tolist() for rows in clients] == [list(range(k * 100, (k + 1) * 100)) for k in range(5)]


# --- FEMNIST ---


def femnist_user(generator, count):
    pixels = generator.integers(0, 256, (count, 784))
    return pixels, generator.integers(0, 62, count).tolist()


def test_femnist_by_writer(tmp_path):
    generator = np.random.default_rng(0)
    users = {
        name: femnist_user(generator, count) for name, count in (("f2", 4), ("f1", 3), ("f3", 5), ("f0", 1))
    }
    written = {name: ((pixels / 255).tolist(), labels) for name, (pixels, labels) in users.items()}
    train = [{name: written[name] for name in ("f2", "f1")}, {"f3": written["f3"], "empty": ([], [])}]
    fake.write_leaf(tmp_path / "femnist" / "train", train)
    fake.write_leaf(tmp_path / "femnist" / "test", [{name: written[name] for name in ("f3", "f0")}])
    loaded = DATASETS["femnist"](folder=tmp_path)
    order = ("f1", "f2", "f3")
    images = np.concatenate([users[name][0] for name in order]).reshape(-1, 1, 28, 28)
    test_images = np.concatenate([users[name][0] for name in ("f0", "f3")]).reshape(-1, 1, 28, 28)
    labels = [label for name in order for label in users[name][1]]
    test_labels = users["f0"][1] + users["f3"][1]
    assert_holds(loaded, ((images, labels), (test_images, test_labels)), 62)
    assert loaded.group_names == ("f0", "f1", "f2", "f3")
    assert loaded.groups.tolist() == [1] * 3 + [2] * 4 + [3] * 5
    assert loaded.test_groups.tolist() == [0] + [3] * 5
    np.testing.assert_allclose(loaded.transform.evaluate(loaded.train_inputs), images / 255, atol=1e-6)


@pytest.mark.parametrize(
    ("inputs", "targets", "said"),
    [
        ([[0.0] * 783], [1], "has not 784 numbers"),
        ([["a"] * 784], [1], "has not 784 numbers"),
        ([[0.0] * 784, [0.0]], [1, 2], "has not 784 numbers"),
        ([[0.5] * 784], [1], "is not one of 0/255"),
        ([[2.0] * 784], [1], "is not one of 0/255"),
        ([[float("nan")] * 784], [1], "is not one of 0/255"),
        ([[0.0] * 784], [62], "label 62 of sample 0 is outside 0 … 61"),
        ([[0.0] * 784], [1.5], "is not a whole number"),
    ],
)
def test_bad_femnist_is_refused(inputs, targets, said, tmp_path):
    for part in ("train", "test"):
        fake.write_leaf(tmp_path / "femnist" / part, [{"f7": (inputs, targets)}])
    with refused(tmp_path / "femnist" / "train" / "all_data_0.json", said, "preprocess.sh"):
        DATASETS["femnist"](folder=tmp_path)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "truncated or not JSON"),
        ('{"user_data": {"a"', "truncated or not JSON"),
        ("[]", "has no user_data"),
        ('{"users": []}', "has no user_data"),
        ('{"user_data": {"a": {"x": []}}}', "has no user_data"),
        ('{"user_data": {"a": {"x": "no", "y": 1}}}', "is not a list"),
        ('{"user_data": {}}', "no samples"),
    ],
)
def test_bad_leaf_files_are_refused(content, said, tmp_path):
    folder = tmp_path / "femnist" / "train"
    folder.mkdir(parents=True)
    (folder / "a.json").write_text(content)
    with refused(folder, said):
        DATASETS["femnist"](folder=tmp_path)
    if content.startswith('{"user_data": {}'):
        fake.write_leaf(folder, [{"f": ([[0.0] * 784], [0])}])
        with refused(tmp_path / "femnist" / "test", "no .json files"):
            DATASETS["femnist"](folder=tmp_path)


# --- image files ---


def test_cinic_and_its_validation_images(tmp_path):
    parts = (("train", 2), ("valid", 1), ("test", 1))
    train, valid, test = fake.write_image_folder(tmp_path / "CINIC-10", DATASETS_CINIC, parts, (3, 32, 32))
    assert_holds(load("cinic10", tmp_path), (train, test), 10)
    both = tuple(np.concatenate(each) for each in zip(train, valid, strict=True))
    loaded = load("cinic10", tmp_path, with_validation=True, augmentation="crop_flip")
    assert_holds(loaded, (both, test), 10)
    assert loaded.transform == ImageTransform((0.4789, 0.4723, 0.4305), (0.2421, 0.2383, 0.2587), "crop_flip")
    fake.write_picture(
        tmp_path / "CINIC-10" / "train" / "bird" / "small.png", np.zeros((3, 31, 32), np.uint8)
    )
    with refused("small.png", "[31, 32] pixels where [32, 32]"):
        load("cinic10", tmp_path)


def test_bad_tiny_imagenet_is_refused(tmp_path):
    fake.write_tiny_imagenet(tmp_path)
    folder = tmp_path / "tiny-imagenet-200"
    table = folder / "val" / "val_annotations.txt"
    whole = table.read_text()
    for content, said in (("val_0.JPEG\tn99\t0\n", "names no image of a class"), ("", "no images")):
        table.write_text(content)
        with refused(table, said):
            load("tiny_imagenet", tmp_path)
    table.write_text("../../secret\tn01\n")
    with refused(table, "names no image"):
        load("tiny_imagenet", tmp_path)
    table.write_text(whole.replace("val_1.", "val_9."))
    with refused("val_9.JPEG", "not a readable image"):
        load("tiny_imagenet", tmp_path)
    table.write_text(whole)
    (folder / "wnids.txt").write_text("n01\nn02\nn03\n")
    with refused(folder / "train" / "n03" / "images", "not found"):
        load("tiny_imagenet", tmp_path)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_folder_of_images(channels, tmp_path):
    train, test = fake.write_image_folder(tmp_path, ["ant", "bee", "cow"], shape=(channels, 6, 5))
    (tmp_path / "train" / "ant" / ".hidden.png").write_bytes(b"")
    (tmp_path / "train" / "notes.txt").write_text("not a class")
    loaded = DATASETS["image_folder"](folder=tmp_path, channels=channels)
    assert_holds(loaded, (train, test), 3)
    seen = loaded.transform.evaluate(loaded.train_inputs)
    np.testing.assert_allclose(seen.mean((0, 2, 3)), np.zeros(channels), atol=1e-5)
    np.testing.assert_allclose(seen.std((0, 2, 3), correction=0), np.ones(channels), rtol=1e-4)
    given = DATASETS["image_folder"](
        folder=tmp_path, channels=channels, mean=[0.5] * channels, std=[0.25] * channels
    )
    assert given.transform == ImageTransform((0.5,) * channels, (0.25,) * channels)


def test_bad_image_folders_are_refused(tmp_path):
    def loaded(**options):
        return DATASETS["image_folder"](folder=tmp_path, **options)

    with refused("image_folder: folder is missing"):
        DATASETS["image_folder"]()
    with refused(tmp_path / "train", "cannot be read"):
        loaded()
    (tmp_path / "train").mkdir()
    with refused(tmp_path / "train", "no class folders"):
        loaded()
    (tmp_path / "train" / "ant").mkdir()
    with refused(tmp_path / "train", "no images"):
        loaded()
    fake.write_image_folder(tmp_path, ["ant", "bee"])
    for options, said in (
        ({"channels": 2}, "channels = 2"),
        ({"mean": [0.5], "std": [0.5]}, "the images have 3 channels"),
        ({"mean": [0.5] * 3, "std": [0.0] * 3}, "must be positive"),
        ({"augmentation": "flip"}, "augmentation = 'flip'"),
    ):
        with refused(said):
            loaded(**options)
    fake.write_picture(tmp_path / "test" / "bee" / "odd.png", np.zeros((3, 7, 5), np.uint8))
    with refused("odd.png", "[7, 5] pixels where [6, 5]", "one size"):
        loaded()
    whole = (tmp_path / "test" / "bee" / "odd.png").read_bytes()
    (tmp_path / "test" / "bee" / "odd.png").write_bytes(whole[:-30])
    with refused("odd.png", "not a readable image"):
        loaded()
    (tmp_path / "test" / "bee" / "odd.png").unlink()
    (tmp_path / "test" / "wasp").mkdir()
    with refused(tmp_path / "test" / "wasp", "not a known class"):
        loaded()


def test_without_pillow_one_line_says_what_to_install(tmp_path, monkeypatch):
    fake.write_image_folder(tmp_path, ["ant"])
    monkeypatch.setitem(sys.modules, "PIL", None)
    with refused("pip install Pillow"):
        DATASETS["image_folder"](folder=tmp_path)


# --- arrays of one's own ---


def arrays(**changes):
    generator = np.random.default_rng(0)
    made = {
        "train_inputs": generator.normal(size=(6, 3)),
        "train_targets": np.array([0, 1, 2, 0, 1, 2]),
        "test_inputs": generator.normal(size=(2, 3)),
        "test_targets": np.array([0, 1]),
    }
    return {key: value for key, value in {**made, **changes}.items() if value is not None}


def test_npz_of_numbers(tmp_path):
    given = arrays(train_groups=np.array(["b", "a", "c", "a", "b", "b"]), test_groups=np.array(["c", "d"]))
    np.savez(tmp_path / "own.npz", **given)
    loaded = DATASETS["npz"](file="own.npz", folder=tmp_path)
    assert loaded.name == "own" and loaded.classes == 3
    assert loaded.train_inputs.dtype == torch.float32 and loaded.train_targets.dtype == torch.int64
    np.testing.assert_allclose(loaded.train_inputs, given["train_inputs"], rtol=1e-6)
    assert loaded.transform.evaluate(loaded.train_inputs) is loaded.train_inputs
    assert loaded.group_names == ("a", "b", "c", "d")
    assert loaded.groups.tolist() == [1, 0, 2, 0, 1, 1] and loaded.test_groups.tolist() == [2, 3]
    assert DATASETS["npz"](file=tmp_path / "own.npz", classes=5).classes == 5
    np.savez(
        tmp_path / "codes.npz",
        **arrays(train_inputs=np.ones((6, 4), np.int32), test_inputs=np.ones((2, 4), int)),
    )
    codes = DATASETS["npz"](file="codes.npz", folder=tmp_path)
    assert codes.train_inputs.dtype == torch.int64 and codes.groups is None


@pytest.mark.parametrize("shape", [(3, 4, 5), (4, 5)])
def test_npz_of_images(shape, tmp_path):
    generator = np.random.default_rng(1)
    train, test = (generator.integers(0, 256, (count, *shape), dtype=np.uint8) for count in (6, 2))
    np.savez_compressed(tmp_path / "data.npz", **arrays(train_inputs=train, test_inputs=test))
    loaded = DATASETS["npz"](folder=tmp_path, augmentation="crop_flip")
    channels = shape[0] if len(shape) == 3 else 1
    assert loaded.train_inputs.shape == (6, channels, 4, 5) and loaded.train_inputs.dtype == torch.uint8
    np.testing.assert_array_equal(loaded.train_inputs.numpy().reshape(train.shape), train)
    assert loaded.transform == ImageTransform(*pixel_statistics(loaded.train_inputs.numpy()), "crop_flip")


@pytest.mark.parametrize(
    ("changes", "options", "said"),
    [
        ({"test_targets": None}, {}, "no array test_targets"),
        ({"train_targets": np.array([0, 1])}, {}, "train_targets are int64 [2]"),
        ({"train_targets": np.zeros(6)}, {}, "train_targets are float64"),
        ({"test_targets": np.array([0, -1])}, {}, "test_targets hold -1"),
        ({}, {"classes": 2}, "label 2 is outside 0 … 1"),
        ({"train_inputs": np.zeros(6)}, {}, "train_inputs are float64 [6]"),
        ({"train_inputs": np.array([["a"]] * 6)}, {}, "train_inputs are <U1"),
        ({"train_inputs": np.full((6, 3), np.nan)}, {}, "NaN or infinity"),
        ({"test_inputs": np.zeros((2, 4))}, {}, "make them alike"),
        ({"test_inputs": np.zeros((0, 3)), "test_targets": np.zeros(0, int)}, {}, "test_inputs are"),
        ({"train_groups": np.zeros(5, int)}, {}, "groups are int64 [5] for 6 samples"),
        (
            {
                "train_inputs": np.zeros((6, 9, 9, 3), np.uint8),
                "test_inputs": np.zeros((2, 9, 9, 3), np.uint8),
            },
            {},
            "are no images [channels",
        ),
        ({}, {"augmentation": "crop_flip"}, "only uint8 images"),
    ],
)
def test_bad_arrays_are_refused(changes, options, said, tmp_path):
    np.savez(tmp_path / "data.npz", **arrays(**changes))
    with refused(tmp_path / "data.npz", said):
        DATASETS["npz"](folder=tmp_path, **options)


def test_bad_archives_are_refused(tmp_path):
    path = tmp_path / "data.npz"
    with refused(path, "not found"):
        DATASETS["npz"](folder=tmp_path)
    np.savez(path, **arrays())
    whole = path.read_bytes()
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    pickled = io.BytesIO()
    np.savez(pickled, **arrays(train_inputs=np.array([{}], dtype=object)))
    for content, said in (
        (whole[:200], "not a readable .npz archive"),
        (b"", "not a readable .npz archive"),
        (b"text", "not a readable .npz archive"),
        (stream.getvalue(), "one array, not an archive"),
        (pickled.getvalue(), "not a readable .npz archive"),
    ):
        path.write_bytes(content)
        with refused(path, said):
            DATASETS["npz"](folder=tmp_path)


# --- where data live ---


def test_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATFED_DATA", str(tmp_path / "own"))
    assert data_folder() == tmp_path / "own"
    monkeypatch.setenv("FLATFED_DATA", "~/own")
    assert data_folder() == Path.home() / "own"
    monkeypatch.delenv("FLATFED_DATA")
    for platform, variable, value, expected in (
        ("linux", "XDG_CACHE_HOME", None, Path.home() / ".cache" / "flatfed"),
        ("linux", "XDG_CACHE_HOME", str(tmp_path), tmp_path / "flatfed"),
        ("darwin", "XDG_CACHE_HOME", None, Path.home() / "Library" / "Caches" / "flatfed"),
        ("win32", "LOCALAPPDATA", str(tmp_path), tmp_path / "flatfed" / "Cache"),
        ("win32", "LOCALAPPDATA", None, Path.home() / "AppData" / "Local" / "flatfed" / "Cache"),
    ):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.delenv(variable, raising=False)
        if value:
            monkeypatch.setenv(variable, value)
        assert data_folder() == expected


def test_loaders_look_in_the_data_folder_by_default(monkeypatch, tmp_path):
    monkeypatch.setenv("FLATFED_DATA", str(tmp_path))
    written = fake.write_cifar100(tmp_path)
    assert_holds(DATASETS["cifar100"](verify=False), written, 100)


def test_the_systems_own_copy_is_used_only_when_no_folder_is_given(monkeypatch, tmp_path):
    written = fake.write_mnist(tmp_path / "system", packed=True)
    info = replace(idx.FASHION_MNIST, system_folders=(str(tmp_path / "system"),))
    monkeypatch.setattr(idx, "FASHION_MNIST", info)
    monkeypatch.setenv("FLATFED_DATA", str(tmp_path / "empty"))
    assert_holds(DATASETS["fashion_mnist"](verify=False), written, 10)
    with refused("fashion_mnist: no "):
        DATASETS["fashion_mnist"](folder=tmp_path / "empty", verify=False)


def test_every_loader_takes_a_folder_and_digits_refuses_it():
    import inspect

    for name, loader in DATASETS.items():
        assert inspect.signature(loader).parameters["folder"].default is None, name
    with refused("folder = 'x': the digits have no files"):
        DATASETS["digits"](folder=Path("x"))


def test_json_of_the_fake_files_is_leafs_form(tmp_path):
    fake.write_leaf(tmp_path, [{"u": ([1], [2])}])
    assert json.loads((tmp_path / "all_data_0.json").read_text()) == {
        "users": ["u"],
        "num_samples": [1],
        "user_data": {"u": {"x": [1], "y": [2]}},
    }
