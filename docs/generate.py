"""Writes a page per algorithm, the pages of deviations, of the papers and of the race, and what programs
read: the catalog of `flatfed list` and the portfolio of `flatfed recommend`.

`python docs/generate.py` writes them; the tests check that none is missing or out of date.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from flatfed.algorithms import ALGORITHMS, equations
from flatfed.algorithms.registry import FAMILIES, facts
from flatfed.papers import papers
from flatfed.papers.coverage import coverage
from flatfed.race.page import race_page, race_ranks
from flatfed.race.portfolio import portfolio_of
from flatfed.race.preset import preset
from flatfed.race.results import FLATNESS, Measured, Result, read_rows
from flatfed.report.rank_diagram import rank_diagram

ROOT = Path(__file__).parents[1]


def title(name: str) -> str:
    return equations(name).splitlines()[0].rstrip(".")


def page(name: str) -> str:
    text = equations(name)
    heading, _, body = text.partition("\n")
    known = facts(name)
    rows = [
        ("gradients per local step", str(known["gradients_per_step"])),
        ("passes over a client's data per round", str(known["passes_per_round"])),
        ("down", ", ".join([*known["down"], *(f"{key} (once)" for key in known["down_once"])])),
        ("up", ", ".join(known["up"])),
        ("the server keeps", ", ".join(known["server_keeps"])),
        ("a client keeps", ", ".join(known["client_keeps"]) or "nothing"),
    ]
    options = [
        f"| `{option}` | `{parameter.default!r}` |"
        for option, parameter in inspect.signature(ALGORITHMS[name]).parameters.items()
    ]
    body = (
        body.strip("\n")
        .replace("\nPaper:", "\n**Paper.**")
        .replace("\nLimits:", "\n**Limits.**")
        .replace("\nDeviations:", "\n\n**Deviations.**")
    )
    return "\n".join(
        [
            f"# {heading.rstrip('.')}",
            "",
            f'`flatfed.{name}()`, in a config file `algorithm = "{name}"`.',
            "",
            body,
            "",
            "| option | default |",
            "|---|---|",
            *options,
            "",
            "| | |",
            "|---|---|",
            *(f"| {what} | {value} |" for what, value in rows),
            "",
        ]
    )


def index() -> str:
    lines = ["# Algorithms", "", "Generated from the docstrings by `make docs`.", ""]
    lines += [f"- [{title(name)}]({name}.md)" for name in sorted(ALGORITHMS)]
    return "\n".join([*lines, ""])


def deviations() -> str:
    lines = [
        "# Where flatfed differs from printed papers and released code",
        "",
        "Generated from the docstrings by `make docs`. Each line says what is printed or released, and what",
        "is done here instead.",
        "",
    ]
    for name in sorted(ALGORITHMS):
        text = " ".join(equations(name).partition("Deviations:")[2].split())
        lines += [f"- **{title(name).partition(':')[0]}**: {text}"]
    lines += ["", "## The authors' code of whole papers", "", "Read, not run."]
    for paper in (paper for paper in papers().values() if paper.released):
        lines += ["", f"{paper.title}:", "", *(f"- {fact}" for fact in paper.released)]
    return "\n".join([*lines, ""])


STATUS = {
    "run in full": "run at the paper's scale",
    "run in part": "some of its parts, or fewer rounds, have been run",
    "tried out": "runs; the tests run it at the small scale only",
    "missing": "no command makes it",
    "no numbers": "nothing to reproduce: a drawing, or a list of data, models or properties",
}


def coverage_page() -> str:
    lines = [
        "# The papers' tables and figures, and what there is of them",
        "",
        "Generated from `src/flatfed/papers/*.toml` by `make docs`. `flatfed reproduce NAME --explain`",
        "prints every setting of a table or figure and its source; `--scale laptop` sizes a figure for an",
        "hour on two cores.",
        "",
        *(f"- *{status}*: {meaning}" for status, meaning in STATUS.items()),
    ]
    for name, paper in papers().items():
        own = [entry for entry in coverage() if entry.paper == name]
        lines += ["", f"## {paper.title}", "", f"{paper.citation}", ""]
        lines += ["| | shows | command | status | results |", "|---|---|---|---|---|"]
        for entry in own:
            command = f"`{entry.command}`" if entry.command else ""
            links = ", ".join(f"[{page.removesuffix('.md')}](results/{page})" for page in entry.results)
            lines.append(f"| {entry.name} | {entry.shows} | {command} | {entry.status} | {links} |")
    return "\n".join([*lines, ""])


def catalog() -> str:
    order = list(reversed(FAMILIES.values()))
    known = {name: facts(name) for name in sorted(ALGORITHMS)}
    by_family = sorted(known.items(), key=lambda item: order.index(item[1]["family"]))
    return json.dumps(dict(by_family), indent=1, ensure_ascii=False) + "\n"


def race_pages() -> dict[Path, str]:
    """What the race's raw results say, and what `flatfed recommend` starts from."""
    folder = Path("docs") / "race"
    rows = read_rows(ROOT / folder / "results.csv", Result)
    measured = read_rows(ROOT / folder / FLATNESS, Measured)
    written = {folder / "README.md": race_page(preset(), rows, measured, "ranks.svg")}
    ranks = race_ranks(preset(), rows)
    if ranks is not None:
        written[folder / "ranks.svg"] = rank_diagram(ranks)
    portfolio = json.dumps(portfolio_of(preset(), rows), indent=1)
    return {**written, Path("src/flatfed/race/portfolio.json"): f"{portfolio}\n"}


def pages() -> dict[Path, str]:
    """Every generated file by its path below the project's folder."""
    docs = Path("docs")
    written = {docs / "algorithms" / f"{name}.md": page(name) for name in ALGORITHMS}
    return {
        **written,
        docs / "algorithms" / "README.md": index(),
        docs / "deviations.md": deviations(),
        docs / "coverage.md": coverage_page(),
        Path("src/flatfed/algorithms/catalog.json"): catalog(),
        **race_pages(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
