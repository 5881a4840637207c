"""A task of one's own to start from: new."""

import keyword
import os
import re
from importlib import resources
from importlib.util import find_spec
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
    if not os.path.lexists(path) and (keyword.iskeyword(stem) or find_spec(stem) is not None):
        raise FlatfedError(f"name = {name!r}: Python has a module or a word {stem}; choose another name")
    text = (resources.files("flatfed") / "cli" / "template" / "my_task.py").read_text("utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("my_task", stem))
    except FileExistsError:
        raise FlatfedError(f"{path}: it exists already; choose another name") from None
    tell(f"{path}: runs with flatfed run {path}:make; replace its data and model with yours")
