"""A task of one's own to start from: new."""

import re
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from flatfed.cli.terminal import app, command_of, tell
from flatfed.core.errors import FlatfedError


@command_of(app, "remove what was written and try again")
def new(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="The task's name, e.g. my-task for my_task.py.")
    ],
) -> None:
    """Write a Python file with a task of your own, which runs as it is."""
    stem = name.removesuffix(".py").replace("-", "_")
    if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", stem):
        raise FlatfedError(f"name = {name!r}: use letters, digits and hyphens, a letter first")
    path = Path(f"{stem}.py")
    if path.exists():
        raise FlatfedError(f"{path}: it exists already; choose another name")
    text = (resources.files("flatfed") / "cli" / "template" / "my_task.py").read_text()
    path.write_text(text.replace("my_task", stem))
    tell(f"{path}: runs with flatfed run {path}:make; replace its data and model with yours")
