"""Every table and figure of the papers is accounted for."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from flatfed.diagnostics.registry import DIAGNOSTICS
from flatfed.papers import papers, tables
from flatfed.papers.coverage import coverage
from flatfed.papers.reproduce import chosen_cells

RESULTS = Path(__file__).parents[2] / "docs" / "results"
# How many tables and figures each paper has.
PRINTED = {"fednsam": (6, 7), "fedsagd": (17, 6), "fedsam": (5, 6), "fedswa": (8, 12), "fedsynsam": (7, 5)}


@pytest.mark.parametrize("paper", papers())
def test_no_table_or_figure_is_missing(paper):
    count, figures = PRINTED[paper]
    expected = [f"table{n}" for n in range(1, count + 1)] + [f"figure{n}" for n in range(1, figures + 1)]
    assert [entry.name for entry in coverage() if entry.paper == paper] == expected


def test_every_entry_says_what_it_is():
    for entry in coverage():
        assert entry.shows, (entry.paper, entry.name)
        assert bool(entry.results) == entry.status.startswith("run"), (entry.paper, entry.name)
        assert all((RESULTS / page).is_file() for page in entry.results)
        if entry.status in {"run in full", "tried out", "by hand"}:
            assert entry.command, (entry.paper, entry.name)


def test_all_results_are_linked_to():
    linked = {page for entry in coverage() for page in entry.results}
    assert linked == {path.name for path in RESULTS.glob("*.md")}


def test_commands_are_good():
    for entry in coverage():
        for command in entry.command.split(", then "):
            words = shlex.split(command)
            if words[:2] == ["flatfed", "diagnose"]:
                assert words[3] in DIAGNOSTICS
            elif words[:2] == ["flatfed", "reproduce"]:
                options = dict(zip(words[3::2], words[4::2], strict=True))
                methods = [options["--methods"]] if "--methods" in options else []
                assert words[2] in tables()
                assert chosen_cells(words[2], methods, options.get("--only"), from_scratch=True)
