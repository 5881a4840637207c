"""Going on with a run: resume."""

from pathlib import Path
from typing import Annotated

import typer

from flatfed.cli.run import run_in_folder
from flatfed.cli.terminal import RayAddress, Tracking, command, on_ray
from flatfed.core.errors import FlatfedError
from flatfed.runs.folder import RunFolder, read_json
from flatfed.training.config import Config, with_assignments


@command
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Go on to this many rounds.")] = None,
    ray_address: RayAddress = None,
    tensorboard: Tracking = None,
) -> None:
    """Go on with an interrupted run, to the same bits as if it had not been interrupted."""
    existing = RunFolder.existing(folder)
    values = read_json(existing.path / "config.json")
    if isinstance(values, dict) and "federation" in values:
        raise FlatfedError(f"{folder}: a federation's run; start its Flower app again with the same folder")
    if not isinstance(values, dict) or "data" not in values:
        raise FlatfedError(
            f"{folder}: made from Python, whose model and data are not in the folder; call flatfed.train "
            f"again with folder={str(folder)!r}"
        )
    changes = [f"training.rounds={rounds}"] if rounds is not None else []
    run_in_folder(
        Config.checked(with_assignments(values, [*changes, *on_ray(ray_address)])), folder, tensorboard
    )
