"""Training what a config file describes: run and resume."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flatfed.cli.terminal import (
    RUNS,
    AsJson,
    Assignments,
    RayAddress,
    Root,
    Tracking,
    command,
    console,
    on_ray,
    print_json,
    say,
    tell,
    trackers,
)
from flatfed.core.errors import FlatfedError
from flatfed.training.progress import Watcher, describe_round, round_progress

if TYPE_CHECKING:
    from flatfed.runs.compare import LabelledRuns, Measuring
    from flatfed.runs.folder import RunFolder
    from flatfed.training.config import Config
    from flatfed.training.loop import Callback


@command
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file, or your own task: my_task.py:make.")],
    assignments: Assignments = None,
    runs: Root = RUNS,
    folder: Annotated[Path | None, typer.Option(help="This run's folder, instead of one in --runs.")] = None,
    ray_address: RayAddress = None,
    tensorboard: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Train what a config file describes."""
    from flatfed.runs.compare import run_folder
    from flatfed.training.config import Config

    checked = Config.read(config, [*(assignments or []), *on_ray(ray_address)])
    folder = folder or run_folder(checked, runs)
    run_in_folder(checked, folder, tensorboard)
    if as_json:
        print_json(_facts(folder))


@command
def resume(
    folder: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    rounds: Annotated[int | None, typer.Option(min=1, help="Go on to this many rounds.")] = None,
    ray_address: RayAddress = None,
    tensorboard: Tracking = None,
    as_json: AsJson = False,
) -> None:
    """Go on with an interrupted run, to the same bits as if it had not been interrupted."""
    from flatfed.runs.folder import RunFolder
    from flatfed.training.config import Config, with_assignments

    values = RunFolder.existing(folder).read_config()
    if "federation" in values:
        raise FlatfedError(f"{folder}: a federation's run; start its Flower app again with the same folder")
    if "data" not in values and "task" not in values:
        raise FlatfedError(
            f"{folder}: made from Python, whose model and data are not in the folder; call flatfed.train "
            f"again with folder={str(folder)!r}"
        )
    config = Config.checked(with_assignments(values, on_ray(ray_address)))
    if rounds is not None:
        config = config.replaced(training=config.training.continued(rounds))
    run_in_folder(config, folder, tensorboard)
    if as_json:
        print_json(_facts(folder))


def _facts(folder: Path) -> dict[str, Any]:
    """What a complete run's folder says in short."""
    from dataclasses import asdict

    from flatfed.runs.folder import RunFolder
    from flatfed.training.best import best_record

    existing = RunFolder(folder)
    history, config = existing.read_history(), existing.read_config()
    return {
        "folder": str(folder),
        "config": config,
        "rounds": len(history),
        "last": history[-1],
        "best": best_record(history, config["training"].get("best_by")),
        "clients": {name: asdict(spread) for name, spread in existing.read_clients().items()},
    }


def run_in_folder(config: Config, folder: Path, tensorboard: Path | None) -> None:
    """Runs what is missing of a config's rounds and says how it ended."""
    from flatfed.report.pictures import SyntheticPicture
    from flatfed.runs.compare import is_complete
    from flatfed.runs.folder import RunFolder
    from flatfed.runs.train import run_config

    if is_complete(config, folder):
        tell(f"{folder} is complete: {len(RunFolder(folder).read_history())} rounds.")
        return
    task = config.make_task()  # may download and complain, which belongs above the bar
    callbacks: list[Callback] = [SyntheticPicture(folder), *trackers(tensorboard, folder)]
    with round_progress() as progress:
        name = config.make_algorithm().name
        bar = progress.add_task(name, total=config.training.rounds, note="", unit="rounds")
        finished = run_config(config, folder, [Watcher(progress, bar, before=0), *callbacks], task)
    last = finished.history[-1]
    console.print(f"{finished.algorithm.name}: {last['round']} rounds, {describe_round(last)}")
    if finished.chosen is not None:
        best_by = finished.training.best_by or ("accuracy" if "accuracy" in finished.metrics else "loss")
        ended = (
            f"; the training ended after {last['round']}" if last["round"] < config.training.rounds else ""
        )
        console.print(f"best by validation {best_by}: round {finished.best.round}{ended}")
    for name, spread in finished.client_spreads.items():
        console.print(
            f"clients' own {name} data: mean accuracy {spread.mean:.1%}, deviation between clients "
            f"{100 * spread.deviation:.1f} points; chance alone gives {100 * spread.chance:.1f}"
        )
    console.print(f"clients were trained by the {finished.path} path: {finished.path_reason}")
    tell(f"run folder: {folder}")


def run_labelled(
    runs: LabelledRuns,
    root: Path,
    rounds: int,
    tensorboard: Path | None = None,
    measuring: Measuring | None = None,
) -> tuple[list[list[RunFolder]], list[Path]]:
    """Runs what is missing under one bar and says what is left out.

    Returns each label's finished runs, and the folders that are damaged.
    """
    from flatfed.runs.compare import run_missing
    from flatfed.runs.files import RunFolderError

    with round_progress() as progress:
        task = progress.add_task("all runs", total=rounds, note="", unit="rounds")

        def watch(name: str, folder: Path) -> list[Callback]:
            return [*trackers(tensorboard, folder), Watcher(progress, task, f"{name}: ")]

        finished, failures = run_missing(runs, root, watch, measuring)
        progress.update(task, completed=rounds, note="")
    for failure in failures:
        say("left out", f"{failure.name}: {failure.error}")
    return finished, [failure.folder for failure in failures if isinstance(failure.error, RunFolderError)]
