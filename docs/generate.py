"""Writes a page per algorithm, the pages of deviations and of the papers, and the catalog of `flatfed list`.

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
    return "\n".join([*lines, ""])


STATUS = {
    "run in full": "run at the paper's scale",
    "run in part": "some of its parts, or fewer rounds, have been run",
    "tried out": "runs; the tests run it at the small scale only",
    "by hand": "the runs have a command, the picture takes a further step",
    "missing": "no command makes it",
    "no numbers": "nothing to reproduce: a drawing, or a list of data, models or properties",
}


def coverage_page() -> str:
    lines = [
        "# The papers' tables and figures, and what there is of them",
        "",
        "Generated from `src/flatfed/papers/*.toml` by `make docs`. `flatfed reproduce TABLE --explain`",
        "prints every setting of a table and its source.",
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
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
