"""Writes one page per algorithm, and the page of all deviations, from the algorithms' docstrings.

`python docs/generate.py` writes them; the tests check that none is missing or out of date.
"""

from __future__ import annotations

import inspect
from pathlib import Path

from flatfed.algorithms import ALGORITHMS, equations

FOLDER = Path(__file__).parent


def title(name: str) -> str:
    return equations(name).splitlines()[0].rstrip(".")


def page(name: str) -> str:
    text = equations(name)
    heading, _, body = text.partition("\n")
    algorithm = ALGORITHMS[name]()
    down = [f"{key} (once)" if key in algorithm.sent_once else key for key in algorithm.broadcast]
    rows = [
        ("gradients per local step", str(algorithm.gradient_evaluations)),
        ("passes over a client's data per round", str(algorithm.full_gradients)),
        ("down", ", ".join(down)),
        ("up", ", ".join(algorithm.uploads)),
        ("the server keeps", ", ".join(["model", *(vector.name for vector in algorithm.server_vectors)])),
        ("a client keeps", ", ".join(vector.name for vector in algorithm.client_vectors) or "nothing"),
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


def pages() -> dict[Path, str]:
    """Every generated page by its path below docs/."""
    written = {Path("algorithms") / f"{name}.md": page(name) for name in ALGORITHMS}
    return {**written, Path("algorithms/README.md"): index(), Path("deviations.md"): deviations()}


if __name__ == "__main__":
    for path, text in pages().items():
        (FOLDER / path).parent.mkdir(exist_ok=True)
        (FOLDER / path).write_text(text)
