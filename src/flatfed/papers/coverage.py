"""What there is of every table and figure of the papers: a command, how far it has been run, results."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from flatfed.papers.schema import Exhibit, Paper, Status, papers


@dataclass(frozen=True)
class Covered:
    """A table or a figure."""

    paper: str
    name: str
    shows: str
    command: str
    """Empty if there is none."""
    status: Status
    results: tuple[str, ...]
    """Pages below docs/results."""


def coverage() -> list[Covered]:
    """All tables and figures of all papers: those of `tables`, and those that their files only mention."""
    return [entry for name, paper in papers().items() for entry in _of_paper(name, paper)]


def _of_paper(paper_name: str, paper: Paper) -> Iterator[Covered]:
    for name in sorted(paper.tables.keys() | paper.bounds.keys() | paper.exhibits.keys(), key=_place):
        table = paper.tables.get(name) or paper.bounds.get(name)
        exhibit = paper.exhibits.get(name, Exhibit(status="tried out"))
        yield Covered(
            paper=paper_name,
            name=name,
            shows=exhibit.shows or (table.title if table is not None else ""),
            command=f"flatfed reproduce {paper_name}/{name}" if table is not None else "",
            status=exhibit.status,
            results=tuple(exhibit.results),
        )


def _place(name: str) -> tuple[bool, int]:
    """Tables come before figures."""
    return name.startswith("figure"), int(re.sub(r"\D", "", name))
