"""Writes one page per algorithm, the page of all deviations, and the catalog that `flatfed list` prints.

`python docs/generate.py` writes them; the tests check that none is missing or out of date.
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from flatfed.algorithms import ALGORITHMS, equations
from flatfed.algorithms.registry import FAMILIES, facts

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
        body.strip("\n").replace("\nLimits:", "\n**Limits.**").replace("\nDeviations:", "\n\n**Deviations.**")
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
        Path("src/flatfed/algorithms/catalog.json"): catalog(),
    }


if __name__ == "__main__":
    for path, text in pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text)
