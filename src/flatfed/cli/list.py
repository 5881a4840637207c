"""The command `flatfed list`."""

from collections.abc import Sequence

from rich.table import Table

from flatfed.algorithms import ALGORITHMS, equations
from flatfed.cli.terminal import app, command_of, console
from flatfed.core.algorithm import short_names
from flatfed.core.state import Vector

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
            _short_names(algorithm.server_vectors),
            _short_names(algorithm.client_vectors),
        )
    console.print(table)
    console.print(
        "down, up: vectors of the model's size per participant and round (samples travel once). "
        "See flatfed show NAME."
    )


def _short_names(vectors: Sequence[Vector]) -> str:
    return ", ".join(short_names(vector.name for vector in vectors).values()) or "–"
