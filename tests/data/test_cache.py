"""Decoded samples beside the data files: used when they belong to them and are whole, made anew otherwise."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from command import flatfed
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from data.fake import write_cifar10, write_emnist, write_mnist
from flatfed.data.datasets import cache, catalog, cifar, idx
from flatfed.data.datasets.base import TrainTest


@pytest.fixture(autouse=True)
def caches_of_any_size(monkeypatch):
    monkeypatch.setattr(cache, "SMALLEST", 0)


@pytest.fixture
def published(monkeypatch):
    """The fake files count as published ones."""
    monkeypatch.setattr(catalog, "_checksum_mismatch", lambda checksum, source: "")
    monkeypatch.setattr(cifar.DatasetInfo, "check_size", lambda *_: None)
    monkeypatch.setattr(cifar.DatasetInfo, "check_count", lambda *_: None)


@pytest.fixture
def reads(monkeypatch) -> list[Path]:
    """The files that were read and not mapped."""
    read, original = list[Path](), cifar.DatasetInfo.read

    def noted(info, path, *rest, **more):
        read.append(path)
        return original(info, path, *rest, **more)

    monkeypatch.setattr(cifar.DatasetInfo, "read", noted)
    return read


WRITERS = {
    "cifar10": lambda root: write_cifar10(root, per_file=4),
    "emnist": lambda root: write_emnist(root / "emnist"),
    "emnist_l": lambda root: write_emnist(root / "emnist"),
    "fashion_mnist": lambda root: write_mnist(root / "fashion-mnist", packed=True),
}


def assert_same(left: TrainTest, right: TrainTest) -> None:
    for name in ("train_inputs", "train_targets", "test_inputs", "test_targets"):
        one, other = getattr(left, name), getattr(right, name)
        assert one.dtype == other.dtype and torch.equal(one, other), name
    assert (left.transform, left.classes, left.name) == (right.transform, right.classes, right.name)


def caches(root: Path) -> list[Path]:
    return sorted(root.rglob(".flatfed-*"))


@pytest.mark.parametrize("name", WRITERS)
def test_the_second_start_maps_what_the_first_has_read(name, tmp_path, published, reads):
    WRITERS[name](tmp_path)
    first = catalog.DATASETS[name](folder=tmp_path)
    assert reads and len(caches(tmp_path)) == 1
    reads.clear()
    assert_same(catalog.DATASETS[name](folder=tmp_path), first)
    assert reads == []
    with cache.bypassed():
        assert_same(catalog.DATASETS[name](folder=tmp_path), first)
    assert reads


def test_what_is_changed_in_memory_stays_there(tmp_path, published, reads):
    WRITERS["cifar10"](tmp_path)
    first = catalog.DATASETS["cifar10"](folder=tmp_path)
    catalog.DATASETS["cifar10"](folder=tmp_path).train_inputs.zero_()
    reads.clear()
    assert_same(catalog.DATASETS["cifar10"](folder=tmp_path), first)
    assert reads == []


def test_files_with_other_times_are_compared_by_their_checksums(tmp_path, published, reads):
    WRITERS["cifar10"](tmp_path)
    first = catalog.DATASETS["cifar10"](folder=tmp_path)
    files = sorted(tmp_path.rglob("*.bin"))
    for file in files:
        os.utime(file, ns=(1, 1))
    reads.clear()
    assert_same(catalog.DATASETS["cifar10"](folder=tmp_path), first)
    assert reads == []
    content = bytearray(files[0].read_bytes())
    content[100] ^= 1
    files[0].write_bytes(content)
    changed = catalog.DATASETS["cifar10"](folder=tmp_path)
    assert reads and not torch.equal(changed.train_inputs, first.train_inputs)
    reads.clear()
    assert_same(catalog.DATASETS["cifar10"](folder=tmp_path), changed)
    assert reads == []


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip_a_bit_at_the_end(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 4
    path.write_bytes(content)


def rewritten(path: Path, about=lambda about: about, arrays=lambda arrays: arrays, seal=False) -> None:
    """The cache with other facts or arrays in it, under its own checksum unless it is to get a new one."""
    with safe_open(path, "np") as file:
        metadata = file.metadata()
    facts = json.dumps(about(json.loads(metadata["flatfed"])))
    checksum = cache._checksum(facts) if seal else metadata["checksum"]
    save_file(arrays(load_file(path)), path, {"flatfed": facts, "checksum": checksum})


def of_another_version(path: Path) -> None:
    rewritten(path, about=lambda about: {**about, "version": cache.VERSION - 1}, seal=True)


def with_other_sources(path: Path) -> None:
    rewritten(path, about=lambda about: {**about, "sources": {key: [] for key in about["sources"]}})


def without_labels(path: Path) -> None:
    def shorter(table):
        return {name: value for name, value in table.items() if name != "test_labels"}

    rewritten(path, about=lambda about: {**about, "checksums": shorter(about["checksums"])}, arrays=shorter)


def of_another_type(path: Path) -> None:
    rewritten(path, arrays=lambda arrays: {name: value.view(np.int8) for name, value in arrays.items()})


def of_another_shape(path: Path) -> None:
    rewritten(path, arrays=lambda arrays: {name: value.reshape(-1) for name, value in arrays.items()})


DAMAGES = {
    "cut": cut,
    "a flipped bit": flip_a_bit_at_the_end,
    "another version": of_another_version,
    "other sources": with_other_sources,
    "a missing array": without_labels,
    "another type": of_another_type,
    "another shape": of_another_shape,
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("{}"),
    "a folder": lambda path: (path.unlink(), path.mkdir()),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_made_anew(damage, tmp_path, published, reads):
    WRITERS["emnist"](tmp_path)
    first = catalog.DATASETS["emnist"](folder=tmp_path)
    (path,) = caches(tmp_path)
    DAMAGES[damage](path)
    reads.clear()
    assert_same(catalog.DATASETS["emnist"](folder=tmp_path), first)
    assert reads
    reads.clear()
    assert_same(catalog.DATASETS["emnist"](folder=tmp_path), first)
    # What is not a file stays as it is.
    assert (reads == []) == (damage != "a folder")


def test_where_nothing_can_be_written_there_is_no_cache(tmp_path, published, monkeypatch):
    WRITERS["emnist"](tmp_path)

    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(cache.tempfile, "TemporaryDirectory", refuse)
    first = catalog.DATASETS["emnist"](folder=tmp_path)
    assert_same(catalog.DATASETS["emnist"](folder=tmp_path), first)
    assert caches(tmp_path) == []


def test_files_that_are_not_the_published_ones_and_small_sets_have_none(tmp_path, published, monkeypatch):
    WRITERS["cifar10"](tmp_path)
    catalog.DATASETS["cifar10"](folder=tmp_path, verify=False)
    assert caches(tmp_path) == []
    monkeypatch.setattr(cache, "SMALLEST", 2**23)
    catalog.DATASETS["cifar10"](folder=tmp_path)
    assert caches(tmp_path) == []


def test_a_cache_is_no_reason_to_accept_files_unseen(tmp_path, published, monkeypatch):
    """`flatfed data check` looks at the files themselves."""
    WRITERS["emnist"](tmp_path)
    catalog.DATASETS["emnist"](folder=tmp_path)
    images = next(path for path in tmp_path.rglob("*train-images*") if path.suffix == ".gz")
    status = images.stat()
    content = images.read_bytes()
    images.write_bytes(bytes(len(content)))
    os.utime(images, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert_same(catalog.DATASETS["emnist"](folder=tmp_path), catalog.DATASETS["emnist"](folder=tmp_path))
    result = flatfed("data", "check", "emnist", "--folder", tmp_path)
    assert result.returncode == 2 and "not a gzip file" in result.stderr


def test_statistics_of_the_pixels_survive_to_the_last_bit(tmp_path, published):
    WRITERS["emnist"](tmp_path)
    first = catalog.DATASETS["emnist"](folder=tmp_path).transform
    again = catalog.DATASETS["emnist"](folder=tmp_path).transform
    assert first == again
    with cache.bypassed():
        images = catalog.DATASETS["emnist"](folder=tmp_path).train_inputs
    assert (first.mean, first.std) == idx.pixel_statistics(np.asarray(images))


def test_what_a_killed_process_left_is_removed_by_the_next_writer(tmp_path, published):
    WRITERS["emnist"](tmp_path)
    catalog.DATASETS["emnist"](folder=tmp_path)
    (path,) = caches(tmp_path)
    path.unlink()
    old, fresh, others = (path.with_name(f"{path.name}-{name}") for name in ("old", "fresh", "others"))
    for folder in (old, fresh, others):
        folder.mkdir()
        (folder / path.name).write_bytes(b"half")
    (others / "mine").write_text("kept")
    for folder in (old, others):
        os.utime(folder, (1, 1))
    catalog.DATASETS["emnist"](folder=tmp_path)
    assert path.is_file() and fresh.is_dir() and not old.exists()
    assert (others / "mine").read_text() == "kept"
