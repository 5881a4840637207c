"""A folder with a file or a folder for every client, and what is refused in it."""

from __future__ import annotations

import gzip
import io
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn
from typer.testing import CliRunner

import flatfed as ff
from data import fake
from data.fake import refused
from flatfed import cli
from flatfed.core.errors import FlatfedError
from flatfed.data.datasets import DATASETS
from flatfed.training.config import Config

ANN = "age,ward,score,label\n31,a,0.5,sick\n40,b,1.5,well\n22,a,2,well\n"
BOB = "age,ward,score,label\n50,c,3,well\n61,a,4.25,dead\n"
TEST = "age,ward,score,label\n1,b,0,dead\n"


@pytest.fixture
def hospitals(tmp_path):
    folder = tmp_path / "hospitals"
    folder.mkdir()
    for name, text in (("ann", ANN), ("bob", BOB), ("test", TEST)):
        (folder / f"{name}.csv").write_text(text)
    return folder


def rows(federation, client):
    return federation.client(client).whole()


# --- what is read ---


def test_a_list_of_columns_is_a_matrix_and_texts_are_numbered_by_the_alphabet(hospitals):
    federation = ff.Federation.from_folder(hospitals, ["age", "score"], "label")
    assert federation.client_names == ("ann", "bob") and len(federation) == 2
    assert federation.categories == {"label": ("dead", "sick", "well")} and federation.classes == 3
    inputs, targets = rows(federation, 0)
    assert inputs.dtype == torch.float32 and inputs.tolist() == [[31, 0.5], [40, 1.5], [22, 2]]
    assert targets.dtype == torch.int64 and targets.tolist() == [1, 2, 2]
    assert rows(federation, 1)[1].tolist() == [2, 0]
    assert federation.test[0].tolist() == [[1, 0]] and federation.test[1].tolist() == [0]


def test_a_dictionary_is_what_a_model_is_called_with_and_columns_keep_their_types(hospitals):
    columns = {"numbers": ["age", "score"], "ward": "ward", "age": "age"}
    federation = ff.Federation.from_folder(hospitals, columns, "label")
    inputs, _ = rows(federation, 0)
    assert inputs["ward"].tolist() == [0, 1, 0] and inputs["age"].dtype == torch.int64
    assert federation.categories["ward"] == ("a", "b", "c")

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.wards = nn.Embedding(len(federation.categories["ward"]), 2)
            self.last = nn.Linear(4, federation.classes)

        def forward(self, numbers, ward, age):
            return self.last(torch.cat([numbers / 50, self.wards(ward)], 1)) + 0 * age[:, None]

    run = ff.train(ff.Task(Model(), federation), ff.fedavg(), ff.Training(rounds=2), ff.Execution(workers=1))
    assert "test_accuracy" in run.history[-1]


def test_given_categories_say_the_order_and_also_number_what_looks_like_numbers(hospitals):
    names = ["well", "sick", "dead", "lost"]
    federation = ff.Federation.from_folder(
        hospitals, "age", "label", categories={"label": names, "age": ["1", "22", "31", "40", "50", "61"]}
    )
    assert rows(federation, 0)[1].tolist() == [1, 0, 0] and federation.classes == 4
    assert rows(federation, 0)[0].tolist() == [2, 3, 1]
    with refused("bob.csv: column 'label', line 3: 'dead' is none of its categories"):
        ff.Federation.from_folder(hospitals, "age", "label", categories={"label": names[:2]})


def test_all_other_columns_are_inputs_unless_some_are_named(hospitals):
    with refused("ann.csv: column 'ward', line 2: 'a' is not a number; name texts by themselves"):
        ff.Federation.from_folder(hospitals, targets="label")
    for path in hospitals.iterdir():
        lines = [line.split(",") for line in path.read_text().splitlines()]
        path.write_text("\n".join(",".join([line[0], *line[2:]]) for line in lines))
    federation = ff.Federation.from_folder(hospitals, targets="label")
    assert rows(federation, 1)[0].tolist() == [[50, 3], [61, 4.25]]


def test_a_target_may_be_a_number(hospitals):
    federation = ff.Federation.from_folder(hospitals, ["age"], ["score"])
    assert federation.classes is None and rows(federation, 0)[1].tolist() == [[0.5], [1.5], [2]]
    assert ff.Federation.from_folder(hospitals, ["age"], "score").targets.dtype == torch.float32


def test_whole_numbers_in_one_file_and_others_in_another_are_floats(hospitals):
    (hospitals / "ann.csv").write_text(ANN.replace("0.5", "7").replace("1.5", "8"))
    federation = ff.Federation.from_folder(hospitals, "score", "label")
    assert rows(federation, 0)[0].tolist() == [7.0, 8.0, 2.0] and federation.inputs.dtype == torch.float32


def test_a_client_may_be_a_folder_of_files_and_files_may_be_packed(hospitals):
    federation = ff.Federation.from_folder(hospitals, ["age"], "label")
    (hospitals / "ann.csv").unlink()
    (hospitals / "ann").mkdir()
    header, *lines = ANN.splitlines()
    for number, some in ((10, lines[2:]), (9, lines[:2])):
        (hospitals / "ann" / f"part-{number}.csv.gz").write_bytes(
            gzip.compress("\n".join([header, *some]).encode())
        )
    (hospitals / ".hidden").touch()
    again = ff.Federation.from_folder(hospitals, ["age"], "label")
    assert again.client_names == ("ann", "bob")
    assert all(
        torch.equal(one, other) for one, other in zip(federation.tensors(), again.tensors(), strict=True)
    )


def test_clients_are_in_the_order_in_which_people_count(tmp_path):
    for number in (10, 9, 1):
        (tmp_path / f"site{number}.csv").write_text(f"x,y\n{number},0\n")
    federation = ff.Federation.from_folder(tmp_path, "x", "y")
    assert federation.client_names == ("site1", "site9", "site10") and federation.inputs.tolist() == [
        1,
        9,
        10,
    ]
    assert federation.test is None


def test_quoted_cells_may_hold_commas_and_lines_and_lines_are_still_counted(tmp_path):
    (tmp_path / "a.csv").write_text('\ufeffx,y\r\n"1","a,\nb"\r\n\r\n2,c\r\n', encoding="utf-8")
    federation = ff.Federation.from_folder(tmp_path, "x", "y")
    assert federation.categories["y"] == ("a,\nb", "c") and federation.inputs.tolist() == [1, 2]
    (tmp_path / "a.csv").write_text('x,y\n"1","a\nb"\nnan,c\n')
    with refused("a.csv: column 'x', line 4: nan is no number that single precision holds"):
        ff.Federation.from_folder(tmp_path, "x", "y")


# --- test samples ---


def test_a_share_of_each_clients_samples_is_its_own_test_data(tmp_path):
    for name in ("ann", "bob", "cid"):
        np.savez(tmp_path / f"{name}.npz", x=np.arange(40) + 100 * ord(name[0]), y=np.arange(40) % 2)
    federation = ff.Federation.from_folder(tmp_path, "x", "y", test=0.25)
    for client in range(3):
        own, tests = rows(federation, client)[0], federation.client_test(client).whole()[0]
        assert len(own) == 30 and sorted([*own.tolist(), *tests.tolist()]) == (
            [*range(100 * ord("abc"[client]), 100 * ord("abc"[client]) + 40)]
        )
    assert len(federation.test[0]) == 30
    (tmp_path / "aaron.npz").write_bytes((tmp_path / "bob.npz").read_bytes())
    more = ff.Federation.from_folder(tmp_path, "x", "y", test=0.25)
    assert more.client_names[1:] == federation.client_names
    assert torch.equal(rows(more, 1)[0], rows(federation, 0)[0]), "other clients change nothing"


def test_a_share_and_test_data_are_not_both(hospitals):
    with refused("test = 0.2: there is", "test.csv; use either"):
        ff.Federation.from_folder(hospitals, ["age"], "label", test=0.2)
    for share in (0.0, 1.0, 2, "test", True):
        with refused("test = ", "give a share"):
            ff.Federation.from_folder(hospitals, ["age"], "label", test=share)


def test_a_client_with_one_sample_keeps_it(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,0\n")
    (tmp_path / "b.csv").write_text("x,y\n" + "1,0\n" * 9)
    federation = ff.Federation.from_folder(tmp_path, "x", "y", test=0.9)
    assert (
        len(federation.client(0)) == 1 and len(federation.test[0]) == 8 and federation.client_test(0) is None
    )


# --- parquet ---


def test_parquet_files_and_their_types(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    columns = {
        "number": pyarrow.array([1.5, 2.5, 3.5]),
        "whole": pyarrow.array([1, 2, 3], pyarrow.int8()),
        "yes": pyarrow.array([True, False, True]),
        "price": pyarrow.array([1, 2, 3], pyarrow.decimal128(5, 2)),
        "word": pyarrow.array(["b", "a", "b"]),
        "kind": pyarrow.array(["y", "x", "y"]).dictionary_encode(),
        "series": pyarrow.array([[1, 2], [3, 4], [5, 6]], pyarrow.list_(pyarrow.int64())),
        "grid": pyarrow.array([[[1.0], [2.0]]] * 3, pyarrow.list_(pyarrow.list_(pyarrow.float32(), 1))),
    }
    parquet.write_table(pyarrow.table(columns), tmp_path / "a.parquet", row_group_size=2)
    federation = ff.Federation.from_folder(tmp_path, {name: name for name in columns if name != "yes"}, "yes")
    inputs, targets = rows(federation, 0)
    assert targets.tolist() == [1, 0, 1] and federation.classes == 2
    assert inputs["whole"].tolist() == [1, 2, 3] and inputs["whole"].dtype == torch.int64
    assert inputs["price"].tolist() == [1.0, 2.0, 3.0]
    assert inputs["word"].tolist() == inputs["kind"].tolist() == [1, 0, 1]
    assert inputs["series"].tolist() == [[1, 2], [3, 4], [5, 6]] and inputs["grid"].shape == (3, 2, 1)
    assert federation.categories == {"word": ("a", "b"), "kind": ("x", "y")}


def test_bad_parquet_files_are_refused_in_one_line(tmp_path, monkeypatch):
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    path = tmp_path / "a.parquet"

    def write(**columns):
        parquet.write_table(pyarrow.table({"y": [0, 1, 0], **columns}), path)

    for column, said in (
        ([1.0, None, 2.0], "column 'x', row 2: empty; fill it in or leave the row out"),
        ([1.0, 2.0, float("inf")], "column 'x', row 3: inf is no number"),
        ([1.0, 2.0, 1e300], "column 'x', row 3: 1e+300 is no number that single precision holds; scale"),
        ([[1], [2], [3, 4]], "column 'x', row 3: a list of 2, and the first one has 1; make all as long"),
        ([[1, None], [2, 3], [3, 4]], "column 'x', row 1: empty"),
        ([b"a", b"b", b"c"], "column 'x': its values are 'binary'; give numbers or texts"),
        ([["a"], ["b"], ["c"]], "column 'x': lists of texts"),
        ([{"a": 1}] * 3, "column 'x': its values are 'struct<a: int64>'"),
    ):
        write(x=column)
        with refused(path, said):
            ff.Federation.from_folder(tmp_path, "x", "y")
    write(x=[1, 2, 3])
    with refused(f"{path}: no column 'z'; choose from: x, y"):
        ff.Federation.from_folder(tmp_path, "z", "y")
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"PAR1" + bytes(100), b""):
        path.write_bytes(content)
        with refused(f"{path}: not a readable parquet file"):
            ff.Federation.from_folder(tmp_path, "x", "y")
    # A file of some kilobytes that unpacks to 80 MB.
    parquet.write_table(pyarrow.table({"x": np.zeros(10**7), "y": np.zeros(10**7, np.int8)}), path)
    assert path.stat().st_size < 10**6
    monkeypatch.setenv("FLATFED_LARGEST_FILE", str(10**6))
    with refused(f"{path}: more than 1,000,000 bytes"):
        ff.Federation.from_folder(tmp_path, "x", "y")


def test_without_pyarrow_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with refused("a.parquet: pyarrow is missing", "pip install 'flatfed[parquet]'"):
        ff.Federation.from_folder(tmp_path, "x", "y")


# --- npz and images ---


def test_arrays_keep_their_shape_and_bytes_are_images(tmp_path):
    generator = np.random.default_rng(0)
    images = generator.integers(0, 256, (5, 6, 4), dtype=np.uint8)
    np.savez(tmp_path / "a.npz", x=images, y=np.arange(5) % 3)
    np.savez(tmp_path / "b.npz", x=images[:2], y=np.arange(2))
    federation = ff.Federation.from_folder(tmp_path, targets="y", augmentation="crop_flip")
    assert federation.inputs.shape == (7, 1, 6, 4) and federation.inputs.dtype == torch.uint8
    seen = federation.transform.evaluate(federation.inputs)
    assert abs(float(seen.mean())) < 1e-5 and abs(float(seen.std(correction=0)) - 1) < 1e-5
    assert federation.transform.augmentation == "crop_flip"
    np.savez(tmp_path / "b.npz", x=images[:2, :5], y=np.arange(2))
    with refused("column 'x': it has rows shaped [5, 4] and [6, 4]; make them alike"):
        ff.Federation.from_folder(tmp_path, "x", "y")


def test_objects_in_archives_are_refused_and_never_unpickled(tmp_path):
    touched = tmp_path / "touched"

    class Touch:
        def __reduce__(self):
            return type(touched).touch, (touched,)

    stream = io.BytesIO()
    np.save(stream, np.array([Touch()], object), allow_pickle=True)
    assert b"touch" in stream.getvalue()
    (tmp_path / "c").mkdir()
    with zipfile.ZipFile(tmp_path / "c" / "a.npz", "w") as archive:
        archive.writestr("x.npy", stream.getvalue())
        archive.writestr("y.npy", pickle.dumps(Touch()))
    with refused("a.npz: not a readable .npz archive (x holds Python objects, which are not unpickled"):
        ff.Federation.from_folder(tmp_path / "c", "x", "y")
    assert not touched.exists()


def test_images_in_class_folders(tmp_path):
    shape = (4, 5, 3)
    generator = np.random.default_rng(0)
    for client, name in (("ann", "cat"), ("ann", "dog"), ("bob", "dog"), ("test", "cat")):
        (tmp_path / client / name).mkdir(parents=True)
        for number in range(2):
            pixels = generator.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / client / name / f"{number}.png")
    federation = ff.Federation.from_folder(tmp_path)
    assert federation.client_names == ("ann", "bob") and federation.categories == {"class": ("cat", "dog")}
    assert rows(federation, 0)[1].tolist() == [0, 0, 1, 1] and rows(federation, 1)[1].tolist() == [1, 1]
    assert federation.inputs.shape == (6, 3, 4, 5) and len(federation.test[0]) == 2
    np.testing.assert_array_equal(
        federation.inputs[4].permute(1, 2, 0), np.asarray(Image.open(tmp_path / "bob" / "dog" / "0.png"))
    )
    for folder in (tmp_path / "test" / "cat", tmp_path / "test"):
        for path in folder.iterdir():
            path.unlink() if path.is_file() else None
        folder.rmdir()
    shared = ff.Federation.from_folder(tmp_path, test=0.5, channels=1)
    assert shared.inputs.shape[1] == 1 and len(shared.test[0]) == 3
    with refused("inputs = 'x':", "holds images; leave it out"):
        ff.Federation.from_folder(tmp_path, "x")
    (tmp_path / "ann" / "dog").rename(tmp_path / "ann" / "emu")
    with refused("bob/dog: no class 'dog'; remove it or add it to categories['class']"):
        ff.Federation.from_folder(tmp_path, categories={"class": ["cat", "emu"]})


# --- what is refused ---


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "a.csv: no column 'x'"),
        ("x,y\n", "a.csv: it has no rows"),
        ("x,y\n1\n", "a.csv: line 2: 1 cells, and 2 columns in the first line"),
        ("x,x,y\n1,1,1\n", "a.csv: 2 columns are called 'x'; rename them"),
        ("x;y\n1;2\n", "a.csv: no column 'x'; choose from: x;y"),
        ("x,y\n1,2\n,3\n", "a.csv: column 'x', line 3: empty; fill it in or leave the row out"),
        ("x,y\n1,2\nn/a,3\n", "a.csv: column 'x', line 3: 'n/a' is not a number"),
        ("x,y\n1,0\n1e999,1\n", "a.csv: column 'x', line 3: inf is no number"),
        ('x,y\n"1,2\n', "a.csv: line 2: not CSV"),
        ("x,y\n1,2\n\0,3\n", "a.csv: "),
        ("x,y\n1,0\n1_2,1\n", "a.csv: column 'x', line 3: '1_2' is not a number"),
    ],
)
def test_bad_tables_are_named_by_file_column_and_line(tmp_path, text, said):
    (tmp_path / "a.csv").write_text(text)
    with refused(said):
        ff.Federation.from_folder(tmp_path, ["x"], "y")


def test_a_text_among_numbers_is_not_taken_for_a_category(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,2\n2,n/a\n")
    with refused(
        "a.csv: column 'y', line 3: 'n/a' is not a number, as others are; correct it, or give categ"
    ):
        ff.Federation.from_folder(tmp_path, "x", "y")
    (tmp_path / "a.csv").write_text("x,y\n1,2\n")
    (tmp_path / "b.csv").write_text("x,y\n1,two\n")
    with refused("b.csv: column 'y', line 2: 'two' is not a number, as those in", "a.csv"):
        ff.Federation.from_folder(tmp_path, "x", "y")


def test_texts_that_python_would_read_as_numbers_are_texts(tmp_path):
    (tmp_path / "a.csv").write_text("x,y\n1,1_2\n2,3_4\n")
    assert ff.Federation.from_folder(tmp_path, ["x"], "y").categories == {"y": ("1_2", "3_4")}


def test_names_of_files_and_columns_stay_in_one_line(tmp_path):
    (tmp_path / "a\n\x1b[31m.csv").write_text('"x\x0bz","y\n"\n1,0\n')
    with refused("a\\n\\x1b[31m.csv: no column 'x'; choose from: x\\x0bz, y\\n"):
        ff.Federation.from_folder(tmp_path, "x", "y")


def test_numbers_that_count_no_classes(tmp_path):
    (tmp_path / "test.csv").write_text("x,y\n1,0\n")
    for label, said in ((10**7, "targets = 'y': not a class"), (-1, "targets = 'y': -1 is no class")):
        (tmp_path / "a.csv").write_text(f"x,y\n1,0\n2,{label}\n")
        with refused(said):
            DATASETS["folder"](tmp_path, ["x"], "y")
        # They may be numbers to predict.
        federation = ff.Federation.from_folder(tmp_path, ["x"], "y")
        assert rows(federation, 0)[1].tolist() == [0, label] and (label < 0 or federation.classes is None)


def test_files_without_rows_are_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((0, 3)), y=np.ones(0))
    with refused("a.npz: it has no rows; fill it or leave it out"):
        ff.Federation.from_folder(tmp_path, "x", "y")
    pyarrow = pytest.importorskip("pyarrow", reason="needs the extra parquet")
    from pyarrow import parquet

    (tmp_path / "a.npz").unlink()
    empty = pyarrow.table({"x": pyarrow.array([], "float"), "y": pyarrow.array([], "int64")})
    parquet.write_table(empty, tmp_path / "a.parquet")
    with refused("a.parquet: it has no rows; fill it or leave it out"):
        ff.Federation.from_folder(tmp_path, "x", "y")


def test_a_folder_that_may_be_listed_but_not_looked_into_is_named(tmp_path, monkeypatch):
    def forbidden(path):
        raise PermissionError(13, "Permission denied", str(path))

    (tmp_path / "a.csv").write_text("x,y\n1,0\n")
    monkeypatch.setattr(Path, "is_dir", forbidden)
    with refused("a.csv: cannot be read (Permission denied); check its permissions"):
        ff.Federation.from_folder(tmp_path, "x", "y")


@pytest.mark.parametrize("folder", [5, None, b"data"])
def test_what_is_no_path_is_refused(folder):
    with refused(f"folder = {str(folder)!r}: there is no such path"):
        ff.Federation.from_folder(folder, "x", "y")


def test_test_data_of_another_spelling_do_not_become_a_client(tmp_path):
    for name in ("a", "TEST"):
        (tmp_path / f"{name}.csv").write_text("x,y\n1,0\n2,1\n")
    with refused("TEST.csv: test data are called 'test'; rename it"):
        ff.Federation.from_folder(tmp_path, "x", "y")


def test_what_is_no_folder_of_clients_is_refused(tmp_path):
    with refused("nowhere: cannot be read"):
        ff.Federation.from_folder(tmp_path / "nowhere", "x", "y")
    with refused("no clients; put a file (.parquet, .csv"):
        ff.Federation.from_folder(tmp_path, "x", "y")
    (tmp_path / "a.csv").write_text("x,y\n1,0\n")
    with refused("targets: missing; name the column to predict, one of x, y"):
        ff.Federation.from_folder(tmp_path)
    for columns in (3, [], ["x", 3], ["x", "x"], {}, {1: "x"}, {"a": {"b": "x"}}):
        with refused("inputs = ", "give "):
            ff.Federation.from_folder(tmp_path, columns, "y")
    with refused("categories['y'] = 'ab'"):
        ff.Federation.from_folder(tmp_path, "x", "y", categories={"y": "ab"})
    with refused("categories['z']: no column that is read; choose from: x, y"):
        ff.Federation.from_folder(tmp_path, "x", "y", categories={"z": ["a"]})
    with refused("channels = 2: give 3 for colour or 1 for grey"):
        ff.Federation.from_folder(tmp_path, "x", "y", channels=2)
    with refused("augmentation, mean, std: only images of bytes have them"):
        ff.Federation.from_folder(tmp_path, "x", "y", augmentation="crop_flip")
    (tmp_path / "a.xlsx").touch()
    with refused("a.xlsx: none of .parquet, .csv, .csv.gz, .npz"):
        ff.Federation.from_folder(tmp_path, "x", "y")
    (tmp_path / "a.xlsx").rename(tmp_path / "a.csv.gz")
    with refused("a.csv.gz:", "is client 'a' already"):
        ff.Federation.from_folder(tmp_path, "x", "y")
    (tmp_path / "a.csv.gz").unlink()
    (tmp_path / "b").mkdir()
    with refused("b: images or nothing, and", "a.csv holds tables"):
        ff.Federation.from_folder(tmp_path, "x", "y")


# --- memory ---


LOADED = """
import sys
from pathlib import Path

import flatfed as ff


def peak_memory():
    (peak,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")
    )
    Path("/proc/self/clear_refs").write_text("5")
    return 1024 * int(peak.split()[1])


small, large = sys.argv[1:]
ff.Federation.from_folder(small, "x", "y")  # whatever is needed once
peak_memory()
before = peak_memory()
federation = ff.Federation.from_folder(large, "x", "y")
print(peak_memory() - before, federation.inputs.nbytes + federation.targets.nbytes)
"""
"""Says by how much reading a folder raised the peak of the memory taken, and how much is held afterwards."""


def save_clients(folder, clients, rows):
    folder.mkdir()
    array = np.random.default_rng(0).random((rows, 16), np.float32)
    for number in range(clients):
        np.savez(folder / f"{number}.npz", x=array, y=np.zeros(len(array), np.int64))
    return folder


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux tells the peak")
def test_the_data_of_clients_are_never_held_twice(tmp_path):
    small, large = save_clients(tmp_path / "small", 2, 10), save_clients(tmp_path / "large", 8, 3 * 2**15)
    # A process of its own: how arrays grow depends on what its allocator has seen before.
    words = [sys.executable, "-c", LOADED, str(small), str(large)]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    taken, held = map(int, said.split())
    assert held > 50e6
    assert taken < 1.6 * held


def test_clients_share_the_memory_of_their_folder(hospitals):
    assert rows_share_memory(ff.Federation.from_folder(hospitals, ["age", "score"], "label"))


def rows_share_memory(federation):
    return all(
        federation.client(number).inputs.data_ptr() == federation.inputs.data_ptr()
        for number in range(len(federation))
    )


# --- from config files and the command line ---


def test_a_config_names_it_and_its_clients_are_those_of_the_folder(hospitals, tmp_path):
    options = {"folder": str(hospitals), "inputs": ["age", "score"], "targets": "label"}
    values = {"data": {"dataset": "folder", "options": options}, "training": {"rounds": 1}}
    config = Config.checked(values)
    assert config.data.clients == "all" and config.partition == {"name": "natural"}
    again = Config.checked(config.model_dump())
    assert again == config
    federation = config.make_federation()
    assert len(federation) == 2 and rows(federation, 1)[0].tolist() == [[50, 3], [61, 4.25]]
    divided = Config.checked({**values, "partition": "iid", "data": {**values["data"], "clients": 5}})
    assert len(divided.make_federation()) == 5
    with refused("data.clients = 'all': only natural clients are that many; give a number"):
        Config.checked({**values, "partition": "iid", "data": {**values["data"], "clients": "all"}})
    with refused("clients = 0"):
        Config.checked({**values, "data": {**values["data"], "clients": 0}})
    with refused("participants = 3: there are only 2 clients"):
        Config.checked({**values, "training": {"rounds": 1, "participants": 3}}).make_federation()


def test_it_runs_on_the_command_line_with_clients_tests_of_their_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fake.write_client_folder(tmp_path)
    (tmp_path / "test.csv").unlink()
    (tmp_path / "data").mkdir()
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.csv").rename(tmp_path / "data" / f"{name}.csv")
    (tmp_path / "c.toml").write_text(
        '[data]\ndataset = "folder"\nclient_tests = "matching"\n'
        'options = { folder = "data", targets = "label", test = 0.5 }\n'
        "[model]\nname = 'mlp'\nhidden = [3]\n[training]\nrounds = 2\n[execution]\nworkers = 1\n"
    )
    done = CliRunner().invoke(cli.app, ["run", "c.toml", "--folder", "run"])
    assert done.exit_code == 0, done.output
    assert "clients' own test data" in done.output
    wrong = CliRunner().invoke(
        cli.app, ["run", "c.toml", "--set", "data.options.targets=labl", "--folder", "b"]
    )
    assert wrong.exit_code == 2 and "no column 'labl'; did you mean 'label'?" in wrong.output
    columns = ["--set", "data.options.inputs=['height']", "--set", "data.options.targets=age"]
    wrong = CliRunner().invoke(cli.app, ["run", "c.toml", *columns, "--folder", "b"])
    assert wrong.exit_code == 2 and "targets = 'age': not a class" in wrong.output


def test_a_relative_folder_may_lie_beside_the_other_data_sets(tmp_path, monkeypatch):
    monkeypatch.setenv("FLATFED_DATA", str(tmp_path))
    monkeypatch.chdir(tmp_path.parent)
    (tmp_path / "own").mkdir()
    for name in ("train", "test"):
        arrays = {"x": np.eye(4, dtype=np.float32), "y": np.arange(4) % 2}
        np.savez(tmp_path / "own" / f"{name}.npz", **arrays)
    data = DATASETS["folder"](folder="own", inputs="x", targets="y")
    assert len(data.train_inputs) == 4 and data.name == "own"
    with pytest.raises(FlatfedError, match="elsewhere"):
        DATASETS["folder"](folder="elsewhere", inputs="x", targets="y")
