"""The command `flatfed show`."""

from typing import Annotated

import typer
from rich.table import Table

from flatfed.algorithms import build, equations
from flatfed.cli.terminal import app, command_of, console
from flatfed.core.part import SLOTS, describe_part

command = command_of(app, "nothing was changed")


@command
def show(algorithm: Annotated[str, typer.Argument(help="An algorithm's name.")]) -> None:
    """Show an algorithm's equations, defaults, traffic and parts."""
    built = build(algorithm)
    console.print(equations(built.name), highlight=False, markup=False)
    console.print()
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("[bold]defaults", ", ".join(f"{k} = {v}" for k, v in built.options.items()) or "none")
    extra = ", one pass over the client's data per round" if built.full_gradients else ""
    facts.add_row("[bold]gradients per step", f"{built.gradient_evaluations}{extra}")
    down = [f"{name} (once)" if name in built.sent_once else name for name in built.broadcast]
    facts.add_row("[bold]down", ", ".join(down))
    facts.add_row("[bold]up", ", ".join(built.uploads))
    facts.add_row("[bold]server keeps", ", ".join(["model", *(v.name for v in built.server_vectors)]))
    facts.add_row("[bold]client keeps", ", ".join(v.name for v in built.client_vectors) or "–")
    described = [describe_part(part) for part in built.parts if type(part) is not SLOTS[part.slot]]
    calls = [
        f"{part['part']}({', '.join(f'{k}={v}' for k, v in part.items() if k != 'part')})"
        for part in described
    ]
    facts.add_row("[bold]parts", "\n".join(calls) or "none beyond averaging")
    console.print(facts)
