"""What algorithms there are: list and show."""

from collections.abc import Sequence
from typing import Annotated

import typer
from rich.table import Table

from flatfed.algorithms import ALGORITHMS, build, equations
from flatfed.cli.terminal import console, look, print_facts
from flatfed.core.algorithm import short_names
from flatfed.core.part import SLOTS, describe_part
from flatfed.core.state import Vector


@look
def list_() -> None:
    """List the algorithms."""
    table = Table("name", "what it is", "gradients\nper step", "down", "up", "server keeps", "client keeps")
    for name in sorted(ALGORITHMS):
        algorithm = ALGORITHMS[name]()
        title = equations(name).splitlines()[0].partition(": ")[2].rstrip(".")
        extra = " + pass" if algorithm.full_gradients else ""
        samples = " + samples" if algorithm.sent_once else ""
        table.add_row(
            name,
            title[0].upper() + title[1:],
            f"{algorithm.gradient_evaluations}{extra}",
            f"{len(algorithm.broadcast) - len(algorithm.sent_once)}{samples}",
            str(len(algorithm.uploads)),
            _short_names(algorithm.server_vectors),
            _short_names(algorithm.client_vectors),
        )
    console.print(table)
    console.print(
        "down, up: vectors of the model's size per participant and round (samples travel once). "
        "See flatfed show NAME."
    )


@look
def show(algorithm: Annotated[str, typer.Argument(help="An algorithm's name.")]) -> None:
    """Show an algorithm's equations, defaults, traffic and parts."""
    built = build(algorithm)
    extra = ", one pass over the client's data per round" if built.full_gradients else ""
    described = [describe_part(part) for part in built.parts if type(part) is not SLOTS[part.slot]]
    calls = [
        f"{part['part']}({', '.join(f'{k}={v}' for k, v in part.items() if k != 'part')})"
        for part in described
    ]
    facts = {
        "defaults": ", ".join(f"{k} = {v}" for k, v in built.options.items()) or "none",
        "gradients per step": f"{built.gradient_evaluations}{extra}",
        "down": ", ".join(f"{name} (once)" if name in built.sent_once else name for name in built.broadcast),
        "up": ", ".join(built.uploads),
        "server keeps": ", ".join(["model", *(vector.name for vector in built.server_vectors)]),
        "client keeps": ", ".join(vector.name for vector in built.client_vectors) or "–",
        "parts": "\n".join(calls) or "none beyond averaging",
    }
    console.print(equations(built.name), end="\n\n")
    print_facts(facts.items())


def _short_names(vectors: Sequence[Vector]) -> str:
    return ", ".join(short_names(vector.name for vector in vectors).values()) or "–"
