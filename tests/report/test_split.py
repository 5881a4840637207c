"""The picture of a split: its numbers, its marks and its files."""

from __future__ import annotations

import itertools
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from flatfed import cli
from flatfed.data.partition import class_counts, summary
from flatfed.data.partition.dirichlet import DirichletClient
from flatfed.report.split import (
    RAMP,
    binned,
    colour,
    describe,
    html_page,
    svg_picture,
    terminal_picture,
    tick_step,
)
from flatfed.training.config import Config

SVG = "{http://www.w3.org/2000/svg}"


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["split", *map(str, arguments)])


def example(clients=20, classes=7, samples=1400, seed=0):
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, classes, samples)
    return DirichletClient(concentration=0.2).split(labels, clients, generator), labels


def numbers(line, text):
    found = re.search(rf"{line}\s+(.*)", text)
    assert found, line
    return [float(each.replace(",", "")) for each in re.findall(r"[\d,]*\.?\d+", found[1])]


def test_the_printed_numbers_are_those_of_the_run_with_that_seed():
    done = invoke("--clients", 30, "--seed", 3, "--set", "concentration=0.5")
    assert done.exit_code == 0, done.output
    values = {
        "data": {"clients": 30},
        "partition": {"name": "dirichlet_client", "concentration": 0.5},
        "training": {"rounds": 1, "seed": 3},
    }
    federation = Config.checked(values).make_federation()
    labels = federation.targets.numpy()
    held = [np.unique(labels[federation.rows(client)]) for client in range(30)]
    sizes = [len(federation.rows(client)) for client in range(30)]
    assert numbers("samples per client", done.stdout) == [min(sizes), max(sizes), np.median(sizes)]
    assert numbers("classes per client", done.stdout) == [
        min(map(len, held)),
        max(map(len, held)),
        10,
        round(float(np.mean([len(each) for each in held])), 1),
    ]
    assert numbers("samples used", done.stdout) == [1442, 100.0]
    assert numbers("samples unused", done.stdout) == [0]
    assert numbers("samples duplicated", done.stdout) == [0]


def test_duplicates_and_unused_samples_are_counted():
    parts = [np.array([0, 1, 1]), np.array([1, 2])]
    labels = np.array([0, 1, 1, 2, 0])
    lines = dict(describe(summary(parts, labels)))
    assert lines["samples used"].startswith("3 ") and lines["samples unused"] == "2"
    assert lines["samples duplicated"] == "2"
    assert lines["classes that nobody holds"] == "2"


def test_the_default_is_a_strong_skew_and_other_partitions_have_their_options():
    assert "dirichlet_client, concentration = 0.1" in invoke().stdout
    done = invoke("--partition", "pathological_balanced", "--set", "classes_per_client=2", "--clients", 20)
    assert done.exit_code == 0, done.output
    assert numbers("classes per client", done.stdout)[:2] == [2, 2]
    assert invoke("--partition", "iid", "--clients", 7).exit_code == 0


def test_bins_keep_the_samples():
    parts, labels = example(clients=50, classes=9)
    counts = class_counts(parts, labels, 9)
    values, clients, classes = binned(counts, columns=8, rows=4)
    assert values.shape == (len(clients), len(classes)) and len(clients) <= 8 and len(classes) <= 4
    widths = np.diff(clients, append=50)[:, None] * np.diff(classes, append=9)
    assert (values * widths).sum() == pytest.approx(counts.sum())
    assert values[0, 0] == pytest.approx(counts[: clients[1], : classes[1]].mean())
    same, *_ = binned(counts, columns=50, rows=9)
    np.testing.assert_array_equal(same, counts)


@pytest.mark.parametrize("coloured", [True, False])
@pytest.mark.parametrize(
    ("clients", "classes", "width"), [(100, 10, 120), (500, 62, 80), (3, 2, 60), (1, 1, 40)]
)
def test_the_terminal_picture_fits_and_shows_empty_cells_as_such(clients, classes, width, coloured):
    parts, labels = example(clients, classes, samples=3000)
    counts = class_counts(parts, labels, classes)
    picture = terminal_picture(counts, width, coloured)
    lines = picture.plain.splitlines()
    rows = lines[1:-2]
    assert len(rows) <= 40 and all(len(line) <= width for line in rows)
    if clients == 100 and not coloured:
        drawn = np.array([[character != " " for character in row[6:]] for row in rows])
        np.testing.assert_array_equal(drawn, counts.T > 0)
    console = Console(width=200, force_terminal=True, color_system="truecolor")
    with console.capture() as capture:
        console.print(picture)
    assert ("\x1b[48;2;" in capture.get()) == coloured


def test_the_ramp_grows_darker():
    assert colour(0.0) == RAMP[0] and colour(1.0) == RAMP[-1]
    light = [0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in (colour(step / 50) for step in range(51))]
    assert all(before > after for before, after in itertools.pairwise(light))


def test_ticks_are_round():
    assert [tick_step(things, 10) for things in (1, 10, 11, 62, 100, 500, 3500)] == [1, 1, 2, 10, 10, 50, 500]


@pytest.mark.parametrize(("clients", "classes"), [(100, 10), (500, 62), (1, 1), (3, 100)])
def test_the_svg_has_a_mark_for_every_count(clients, classes):
    parts, labels = example(clients, classes, samples=4000)
    counts = class_counts(parts, labels, classes)
    root = ElementTree.fromstring(svg_picture(counts, "a < b & c"))
    groups = {group.get("class"): group for group in root.iter(f"{SVG}g")}
    marks = groups["cells"].findall(f"{SVG}rect")
    assert len(marks) == np.count_nonzero(counts)
    assert len(groups["sizes"].findall(f"{SVG}rect")) == clients
    titles = [mark.findtext(f"{SVG}title") for mark in marks]
    told = np.zeros_like(counts)
    for title in titles:
        client, label, count = map(int, re.findall(r"\d+", title))
        told[client, label] = count
    np.testing.assert_array_equal(told, counts)
    panel = next(each for each in root.iter(f"{SVG}rect") if each.get("class") == "panel")
    for mark in marks:
        assert float(mark.get("x")) + float(mark.get("width")) <= float(panel.get("width")) + 0.02
        assert float(mark.get("y")) + float(mark.get("height")) <= float(panel.get("height")) + 0.02
    # The darkest mark is the largest count.
    fills = {
        int(title.rpartition(": ")[2]): mark.get("fill") for title, mark in zip(titles, marks, strict=True)
    }
    assert fills[counts.max()] == "#{:02x}{:02x}{:02x}".format(*RAMP[-1])
    words = [text.text for text in root.iter(f"{SVG}text")]
    assert {"a < b & c", "client", "class", "samples", f"{counts.max():,}"} <= set(words)
    labels_shown = [int(word) for word in words if word.isdigit()]
    assert len(labels_shown) < 80


def test_the_page_holds_the_picture_and_the_numbers():
    parts, labels = example()
    page = html_page(class_counts(parts, labels, 7), "a title", summary(parts, labels))
    assert page.startswith("<!DOCTYPE html>")
    root = ElementTree.fromstring(page.partition("\n")[2])
    assert len(list(root.iter(f"{SVG}svg"))) == 1
    assert next(row.findtext("th") for row in root.iter("tr")) == "clients"
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize("name", ["split.svg", "split.html", "new/split.SVG"])
def test_files_are_written(tmp_path, name):
    done = invoke("--clients", 10, "--output", tmp_path / name)
    assert done.exit_code == 0, done.output
    text = (tmp_path / name).read_text()
    assert "digits over 10 clients, dirichlet_client, concentration = 0.1, seed 0" in text


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--output", "split.png"], "output = 'split.png': only .svg and .html files can be written"),
        (["--dataset", "digit"], "data.dataset: 'digit' is unknown; did you mean 'digits'?"),
        (["--clients", "0"], "data.clients = 0"),
        (["--clients", "5000"], "clients=5000 is more than the 1442 samples"),
        (["--partition", "dirichlet"], "partition.name = 'dirichlet': unknown"),
        (["--partition", "natural"], "the samples of digits belong to nobody in particular"),
        (
            ["--partition", "pathological_balanced"],
            "partition.pathological_balanced.classes_per_client: missing",
        ),
        (["--set", "alpha=1"], "partition.dirichlet_client.alpha: unknown"),
        (["--set", "concentration=0"], "partition.dirichlet_client.concentration = 0"),
        (["--set", "concentration"], "write it as key=value"),
    ],
)
def test_bad_input_is_one_clear_line(arguments, complaint):
    done = invoke(*arguments)
    assert done.exit_code == 2, done.output
    assert complaint in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
