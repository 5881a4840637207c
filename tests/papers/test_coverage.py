"""Every table and figure of the papers is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatfed.papers import bounds, papers, tables
from flatfed.papers.coverage import coverage
from flatfed.papers.reproduce import chosen_cells
from flatfed.papers.theorems import bounds_tables

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# How many tables and figures each paper has.
PRINTED = {"fednsam": (6, 7), "fedsagd": (17, 6), "fedsam": (5, 6), "fedswa": (8, 12), "fedsynsam": (7, 5)}


@pytest.mark.parametrize("paper", papers())
def test_no_table_or_figure_is_missing(paper):
    count, figures = PRINTED[paper]
    expected = [f"table{n}" for n in range(1, count + 1)] + [f"figure{n}" for n in range(1, figures + 1)]
    assert [entry.name for entry in coverage() if entry.paper == paper] == expected


def test_every_figure_that_shows_data_can_be_drawn():
    for entry in coverage():
        table = tables().get(f"{entry.paper}/{entry.name}")
        if entry.name.startswith("figure"):
            assert (table is not None and bool(table.panels)) == (entry.status != "no numbers"), entry
        else:
            assert table is None or not table.panels


def test_every_entry_says_what_it_is():
    for entry in coverage():
        assert entry.shows, (entry.paper, entry.name)
        assert bool(entry.results) == entry.status.startswith("run"), (entry.paper, entry.name)
        assert all((RESULTS / page).is_file() for page in entry.results)
        if entry.status not in {"missing", "no numbers"}:
            assert entry.command, (entry.paper, entry.name)


def test_all_results_of_papers_are_linked_to():
    papers = {entry.paper for entry in coverage()}
    linked = {page for entry in coverage() for page in entry.results}
    assert linked == {path.name for path in RESULTS.glob("*.md") if path.name.partition("-")[0] in papers}


def test_commands_are_good():
    for entry in coverage():
        if entry.command:
            assert entry.command == f"flatfed reproduce {entry.paper}/{entry.name}"
            name = f"{entry.paper}/{entry.name}"
            assert bounds_tables(name) if name in bounds() else chosen_cells(name, from_scratch=True)
