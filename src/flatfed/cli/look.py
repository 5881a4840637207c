"""Looking things up: list, show, split."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from flatfed.algorithms import ALGORITHMS, build, equations
from flatfed.cli.terminal import app, command_of, console
from flatfed.core.algorithm import Algorithm
from flatfed.core.part import SLOTS, describe_part
from flatfed.data.partition import PARTITIONS, class_counts, summary
from flatfed.report.split import check_output, describe, terminal_picture, write_picture
from flatfed.training.config import Config, with_assignments

command = command_of(app, "nothing was changed")


@command
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
            _names(algorithm.server_vectors),
            _names(algorithm.client_vectors),
        )
    console.print(table)
    console.print(
        "down, up: vectors of the model's size per participant and round (samples travel once). "
        "See flatfed show NAME."
    )


@command
def show(algorithm: Annotated[str, typer.Argument(help="An algorithm's name.")]) -> None:
    """Show an algorithm's equations, defaults, traffic and parts."""
    made = build(algorithm)
    console.print(equations(made.name), highlight=False, markup=False)
    console.print()
    console.print(_facts(made))


def _facts(made: Algorithm) -> Table:
    facts = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    facts.add_row("[bold]defaults", ", ".join(f"{k} = {v}" for k, v in made.options.items()) or "none")
    extra = ", one pass over the client's data per round" if made.full_gradients else ""
    facts.add_row("[bold]gradients per step", f"{made.gradient_evaluations}{extra}")
    down = [f"{name} (once)" if name in made.sent_once else name for name in made.broadcast]
    facts.add_row("[bold]down", ", ".join(down))
    facts.add_row("[bold]up", ", ".join(made.uploads))
    facts.add_row("[bold]server keeps", ", ".join(["model", *(v.name for v in made.server_vectors)]))
    facts.add_row("[bold]client keeps", _names(made.client_vectors))
    described = [describe_part(part) for part in made.parts if type(part) is not SLOTS[part.slot]]
    facts.add_row(
        "[bold]parts",
        "\n".join(
            f"{each['part']}({', '.join(f'{k}={v}' for k, v in each.items() if k != 'part')})"
            for each in described
        )
        or "none beyond averaging",
    )
    return facts


def _names(vectors: Sequence[Any]) -> str:
    return ", ".join(vector.name for vector in vectors) or "–"


@command
def split(
    dataset: Annotated[str, typer.Option(help="A data set; see flatfed data list.")] = "digits",
    clients: Annotated[int, typer.Option(help="Among how many clients.")] = 100,
    partition: Annotated[str, typer.Option(help="How they are divided.")] = "dirichlet_client",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="An option of the partition, e.g. concentration=0.1, or of the data set, e.g. "
            "data.options.split=byclass. Repeatable.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="The same seed in a run gives the same split.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Also write the picture, as .svg or .html.")] = None,
) -> None:
    """Show which client holds how many samples of which class."""
    if output is not None:
        check_output(output)
    values: dict[str, Any] = {
        "data": {"dataset": dataset, "clients": clients},
        "partition": {"name": partition},
        "training": {"rounds": 1, "seed": seed},
    }
    if "concentration" in inspect.signature(PARTITIONS.get(partition, object)).parameters:
        values["partition"]["concentration"] = 0.1
    # A plain name is an option of the partition, one with dots a setting of the config.
    named = [each if "." in each.partition("=")[0] else f"partition.{each}" for each in assignments or []]
    config = Config.checked(with_assignments(values, named))
    federation = config.make_federation()
    rows = [federation.rows(client).numpy() for client in range(len(federation))]
    labels = federation.targets.numpy()
    counts, found = class_counts(rows, labels, federation.classes or 1), summary(rows, labels)
    options = ", ".join(f"{key} = {value}" for key, value in config.partition.items() if key != "name")
    title = ", ".join(filter(None, [f"{dataset} over {clients} clients", config.partition["name"], options]))
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for what, number in describe(found):
        table.add_row(f"[bold]{what}", number)
    console.print(f"[bold]{escape(title)}", highlight=False)
    console.print(table)
    coloured = console.color_system is not None and not console.no_color
    console.print(terminal_picture(counts, min(console.width, 140), coloured))
    if output is not None:
        write_picture(output, counts, f"{title}, seed {seed}", found)
        console.print(f"picture: {output}", highlight=False)
