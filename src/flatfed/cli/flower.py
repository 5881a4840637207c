"""Federations between organisations: flower new, flower run."""

import json
import keyword
import re
import shutil
import subprocess
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from flatfed.cli.terminal import app, command_of, tell
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
    tell(f"{folder}: a Flower app on handwritten digits. Next: {folder}/README.md")


@command_of(flower, "start it again, and it goes on after its last finished round")
def run(
    app_folder: Annotated[Path, typer.Argument(metavar="APP", help="The folder that `flower new` made.")],
    superlink: Annotated[str, typer.Argument(help="As Flower's config.toml calls it.")] = "",
    from_round: Annotated[
        int | None, typer.Option(min=1, help="Go back to the state after this round, which must be kept.")
    ] = None,
    folder: Annotated[str, typer.Option(help="The run's folder on the server, if not the app's own.")] = "",
) -> None:
    """Start the server of a federation, or go on with it: `flwr run` with the app's settings."""
    program = shutil.which("flwr", path=str(Path(sys.executable).parent)) or shutil.which("flwr")
    if program is None:
        raise FlatfedError("flwr: not found; pip install 'flatfed[flower]'")
    if not (app_folder / "pyproject.toml").is_file():
        raise FlatfedError(f"{app_folder}: it has no pyproject.toml; make an app with flatfed flower new")
    settings = {name: value for name, value in (("folder", folder), ("from-round", from_round)) if value}
    words = [word for name, value in settings.items() for word in ("-c", f"{name}={json.dumps(value)}")]
    where = [app_folder, superlink] if superlink else [app_folder]
    done = subprocess.run([program, "run", *where, "--stream", *words], check=False)
    raise typer.Exit(done.returncode)
