"""The command `flatfed show`."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Table

from flatfed.algorithms import build, equations
from flatfed.cli.terminal import app, command_of, console
from flatfed.core.algorithm import Algorithm
from flatfed.core.part import SLOTS, describe_part

command = command_of(app, "nothing was changed")


@command
def show(algorithm: Annotated[str, typer.Argument(help="An algorithm's name.")]) -> None:
    """Show an algorithm's equations, defaults, traffic and parts."""
    built = build(algorithm)
    console.print(equations(built.name), highlight=False, markup=False)
    console.print()
    console.print(_facts(built))


def _facts(algorithm: Algorithm) -> Table:
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("[bold]defaults", ", ".join(f"{k} = {v}" for k, v in algorithm.options.items()) or "none")
    extra = ", one pass over the client's data per round" if algorithm.full_gradients else ""
    facts.add_row("[bold]gradients per step", f"{algorithm.gradient_evaluations}{extra}")
    down = [f"{name} (once)" if name in algorithm.sent_once else name for name in algorithm.broadcast]
    facts.add_row("[bold]down", ", ".join(down))
    facts.add_row("[bold]up", ", ".join(algorithm.uploads))
    facts.add_row("[bold]server keeps", ", ".join(["model", *(v.name for v in algorithm.server_vectors)]))
    facts.add_row("[bold]client keeps", ", ".join(v.name for v in algorithm.client_vectors) or "–")
    described = [describe_part(part) for part in algorithm.parts if type(part) is not SLOTS[part.slot]]
    calls = [
        f"{part['part']}({', '.join(f'{k}={v}' for k, v in part.items() if k != 'part')})"
        for part in described
    ]
    facts.add_row("[bold]parts", "\n".join(calls) or "none beyond averaging")
    return facts
