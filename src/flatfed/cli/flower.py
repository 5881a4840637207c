"""Federations between organisations: flower new."""

import keyword
import re
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flatfed.cli.terminal import app, command_of, console
from flatfed.core.errors import FlatfedError

flower = typer.Typer(help="Federations with Flower.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(flower, name="flower")

TEMPLATE = "my-federation"


@command_of(flower, "remove what was written and try again")
def new(folder: Annotated[Path, typer.Argument(help="The folder to make; its name is the app's.")]) -> None:
    """Write a Flower app that runs flatfed's algorithms, ready for your data."""
    name = folder.name
    package = name.replace("-", "_")
    if not re.fullmatch("[a-z][a-z0-9_-]*", name) or keyword.iskeyword(package):
        raise FlatfedError(f"folder = {name!r}: use small letters, digits and hyphens, a letter first")
    if folder.exists():
        raise FlatfedError(f"{folder}: it exists already; choose another name")
    if find_spec(package) is not None:
        # Flower puts the app's folder first in the path: its package would hide the other one.
        raise FlatfedError(f"folder = {name!r}: there is a Python package {package}; choose another name")
    (folder / package).mkdir(parents=True)
    # Located by its path, because importing the package would need Flower.
    for file in (resources.files("flatfed") / "deployment" / "template").iterdir():
        if not file.is_file():
            continue
        beside = file.name in {"pyproject.toml", "README.md"}
        text = file.read_text().replace(TEMPLATE, name).replace(TEMPLATE.replace("-", "_"), package)
        ((folder if beside else folder / package) / file.name).write_text(text)
    console.print(f"{folder}: a Flower app on handwritten digits. Next: {folder}/README.md")
