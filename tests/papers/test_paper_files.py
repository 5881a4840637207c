"""The papers' data files: what they may say, and that what they say fits together."""

from __future__ import annotations

import copy
import re

import pytest

from flatfed.algorithms import ALGORITHMS, equations
from flatfed.core.errors import FlatfedError
from flatfed.core.files import read_toml
from flatfed.data.datasets import DATASETS
from flatfed.data.partition import PARTITIONS
from flatfed.diagnostics.folder import check
from flatfed.models import MODELS
from flatfed.papers import papers, schema
from flatfed.papers.scaling import scales
from flatfed.papers.schema import FOLDER, read
from flatfed.training.config import Config

FILES = sorted(path for path in FOLDER.glob("*.toml"))


def checked_tables(values):
    """The tables of a file whose keys are fixed."""
    yield values
    named = [values["datasets"], values["methods"], *values.get("sweeps", {}).values()]
    named += values.get("overrides", {}).values()
    for tuning in values.get("tuned", []):
        yield tuning
        named.append(tuning["best"])
    yield values["defaults"]
    for table in values["tables"].values():
        yield table
        yield from (table[key] for key in ("repeats",) if key in table)
        yield from (*table.get("panels", []), *table.get("measures", []))
        blocks = table.get("blocks", [])
        for block in [table["common"], *blocks] if "common" in table else blocks:
            yield block
            yield block.setdefault("config", {})
            named += [block.get("methods", {}), block.get("results", {})]
    for entries in named:
        yield from entries.values()


def test_there_is_a_file_for_each_paper():
    assert [path.stem for path in FILES] == ["fednsam", "fedsagd", "fedsam", "fedswa", "fedsynsam"]
    assert list(papers()) == [path.stem for path in FILES]
    assert all(paper.title and re.search(r"20\d\d", paper.citation) for paper in papers().values())


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_an_unknown_key_is_one_clear_line(path, monkeypatch):
    written = read_toml(path)
    places = len(list(checked_tables(written)))
    assert places > 50
    for place in range(places):
        values = copy.deepcopy(written)
        list(checked_tables(values))[place]["colour"] = {}
        monkeypatch.setattr(schema, "read_toml", lambda _, values=values: values)
        with pytest.raises(FlatfedError) as caught:
            read(path)
        assert str(caught.value).startswith(f"{path.name}: ") and "colour" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_a_misspelt_key_gets_a_suggestion(monkeypatch):
    values = read_toml(FOLDER / "fedswa.toml")
    values["tables"]["table4"]["blocks"][0]["datset"] = "CIFAR-10"
    monkeypatch.setattr(schema, "read_toml", lambda _: values)
    with pytest.raises(
        FlatfedError, match=r"tables\.table4\.blocks\.0\.datset: unknown; did you mean 'dataset'\?"
    ):
        read(FOLDER / "fedswa.toml")


@pytest.mark.parametrize("kind", ["dataset", "model", "partition", "compressor", "sweep"])
def test_an_unknown_name_is_one_clear_line(kind, monkeypatch):
    values = read_toml(FOLDER / "fedsynsam.toml")
    table = values["tables"]["table5"]
    table["blocks"][0][kind] += "?"
    monkeypatch.setattr(schema, "read_toml", lambda _: values)
    with pytest.raises(FlatfedError) as caught:
        read(FOLDER / "fedsynsam.toml")
    assert f"fedsynsam.toml: table5: {kind} '" in str(caught.value)
    assert "?' is unknown; did you mean '" in str(caught.value)


def test_an_unknown_method_is_one_clear_line(monkeypatch):
    values = read_toml(FOLDER / "fedswa.toml")
    values["tables"]["table4"]["blocks"][0]["results"]["FedSWAG"] = {"acc": 50.0}
    monkeypatch.setattr(schema, "read_toml", lambda _: values)
    with pytest.raises(FlatfedError, match=r"table4: method 'FedSWAG' is unknown; did you mean 'FedSWA'\?"):
        read(FOLDER / "fedswa.toml")


@pytest.mark.parametrize("paper", papers().values(), ids=list(papers()))
def test_names_are_defined_and_used(paper):
    """A name that no table used would be a setting that no test checks."""
    blocks = [block for table in paper.tables.values() for block in table.blocks]
    for kind in ("dataset", "model", "partition", "compressor", "sweep"):
        used = {getattr(block, kind) for block in blocks} - {None}
        assert used == set(getattr(paper, f"{kind}s"))
    rows = {row for table in paper.tables.values() for block in table.blocks for row in block.results}
    rows |= {row for table in paper.tables.values() for row in table.unprinted}
    assert set(paper.aliases) <= rows and set(paper.aliases.values()) <= set(paper.methods)
    assert {paper.aliases.get(row, row) for row in rows} == set(paper.methods)
    for symbol, points in paper.sweeps.items():
        values = {str(value) for block in blocks if block.sweep == symbol for value in block.values}
        assert values == set(points)
    for dataset, methods in paper.overrides.items():
        assert dataset in paper.datasets and set(methods) <= set(paper.methods)
    for tuning in paper.tuned:
        assert set(tuning.tables) <= set(paper.tables) and tuning.dataset in paper.datasets
        assert set(tuning.best) <= rows
    for block in blocks:
        assert set(block.methods) <= set(block.results)
        assert bool(block.sweep) == bool(block.values)


@pytest.mark.parametrize("paper", papers().values(), ids=list(papers()))
def test_the_statistic_is_that_of_a_printed_column(paper):
    for table in (table for table in paper.tables.values() if not table.panels):
        for column in table.statistics:
            assert all(column in row for block in table.blocks for row in block.results.values())


def test_all_but_remarks_are_numbers():
    for table in (table for paper in papers().values() for table in paper.tables.values()):
        for row in (row for block in table.blocks for row in block.results.values()):
            texts = {key: value for key, value in row.items() if isinstance(value, str)}
            assert texts.keys() - {"rounds_to_target"} == row.keys() & {"impossible"}
            assert re.fullmatch(r"\d+\+", texts.get("rounds_to_target", "1000+"))


@pytest.mark.parametrize("place", ["sources", "method", "block"])
def test_an_unknown_kind_of_source_is_one_clear_line(place, monkeypatch):
    values = read_toml(FOLDER / "fedswa.toml")
    block = values["tables"]["table4"]["blocks"][0]
    parts = {"sources": values, "method": values["methods"]["FedAvg"], "block": block["config"]}
    parts[place].setdefault("sources", {})["training.lr"] = "somewhere: else"
    monkeypatch.setattr(schema, "read_toml", lambda _: values)
    with pytest.raises(FlatfedError, match=r"source 'somewhere: else' of training\.lr must be one of: paper"):
        read(FOLDER / "fedswa.toml")


@pytest.mark.parametrize("name", papers())
def test_the_papers_own_algorithm_cites_it(name):
    assert f"\nPaper: {papers()[name].citation}.\n" in equations(name)


@pytest.mark.parametrize("paper", papers().values(), ids=list(papers()))
def test_papers_are_cited_with_authors_year_and_identifier(paper):
    assert re.match(r"([A-Z]\. [A-Z]\w+, )+[A-Z]\. \w+\. |Anonymous authors\. ", paper.citation)
    assert re.search(r"\b20\d\d, (arXiv:\d{4}\.\d{5}|openreview\.net/forum\?id=\w+)$", paper.citation)


@pytest.mark.parametrize("scale", scales().values(), ids=list(scales()))
def test_scales_go_by_our_names(scale):
    assert set(scale.datasets) <= set(DATASETS) and set(scale.models) <= set(MODELS)
    assert set(scale.partitions) <= set(PARTITIONS) and set(scale.algorithms) <= set(ALGORITHMS)
    for dataset, changes in scale.datasets.items():
        made = Config.checked({"data": {"dataset": dataset, **changes["data"]}, "training": {"rounds": 1}})
        assert made.data.options == changes["data"]["options"]
    for name, options in scale.diagnostics.items():
        check([name], options)


@pytest.mark.parametrize("module", ["drawing", "measuring", "presets", "reproduce", "scaling", "schema"])
def test_the_code_names_no_paper_method_or_data_set(module):
    words = set(re.findall(r'"([^"\n]+)"', (FOLDER / f"{module}.py").read_text()))
    names = {*papers(), *ALGORITHMS, *DATASETS}
    for paper in papers().values():
        names |= {*paper.datasets, *paper.models, *paper.methods, *paper.aliases, *paper.sweeps}
    assert not words & names
