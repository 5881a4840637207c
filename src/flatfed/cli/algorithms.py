"""What algorithms there are: list and show.

They print the catalog that `make docs` writes, because building the algorithms would need torch.
"""

import json
from importlib import resources
from itertools import groupby
from typing import Annotated, Any

import typer
from rich.table import Table

from flatfed.cli.terminal import console, look, print_facts, print_json
from flatfed.core.errors import FlatfedError, match_name


def catalog() -> dict[str, dict[str, Any]]:
    """The facts about every algorithm, in the order of their families."""
    return json.loads((resources.files("flatfed") / "algorithms" / "catalog.json").read_text("utf-8"))


def _facts(algorithm: str) -> dict[str, Any]:
    known = catalog()
    try:
        return known[match_name("algorithm", algorithm, known)]
    except FlatfedError:
        # A new algorithm is in the catalog only after `make docs`.
        from flatfed.algorithms import ALGORITHMS
        from flatfed.algorithms.registry import facts

        return facts(match_name("algorithm", algorithm, ALGORITHMS))


@look
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that is known, as JSON.")] = False,
) -> None:
    """List the algorithms."""
    if as_json:
        print_json(catalog())
        return
    table = Table("name", "what it is", "gradients\nper step", "down", "up", "server\nkeeps", "client\nkeeps")
    for family, members in groupby(catalog().items(), lambda item: item[1]["family"]):
        table.add_section()
        table.add_row("", family, style="bold")
        for name, facts in members:
            title = facts["title"].partition(": ")[2]
            table.add_row(
                name,
                title[0].upper() + title[1:],
                f"{facts['gradients_per_step']}{' + pass' if facts['passes_per_round'] else ''}",
                f"{facts['models_down']}{' + samples' if facts['down_once'] else ''}",
                str(facts["models_up"]),
                *(str(len(facts[key])) for key in ("server_keeps", "client_keeps")),
            )
    console.print(table)
    console.print(
        "down, up: vectors of the model's size per participant and round (samples travel once). "
        "server, client: vectors that they keep. See flatfed show NAME."
    )


@look
def show(
    algorithm: Annotated[str, typer.Argument(help="An algorithm's name.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print it as JSON.")] = False,
) -> None:
    """Show an algorithm's equations, defaults, traffic and parts."""
    facts = _facts(algorithm)
    if as_json:
        print_json(facts)
        return
    extra = ", one pass over the client's data per round" if facts["passes_per_round"] else ""
    console.print(facts["equations"], end="\n\n")
    print_facts(
        {
            "defaults": ", ".join(f"{key} = {value}" for key, value in facts["options"].items()) or "none",
            "gradients per step": f"{facts['gradients_per_step']}{extra}",
            "down": ", ".join([*facts["down"], *(f"{name} (once)" for name in facts["down_once"])]),
            "up": ", ".join(facts["up"]),
            "server keeps": ", ".join(facts["server_keeps"]),
            "client keeps": ", ".join(facts["client_keeps"]) or "–",
            "parts": "\n".join(facts["parts"]) or "none beyond averaging",
        }.items()
    )
