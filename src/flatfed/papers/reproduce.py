"""Running a paper's table and putting our numbers beside its own."""

import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import FlatfedError, FlatfedWarning, did_you_mean
from flatfed.core.part import SLOTS
from flatfed.core.sampling import local_steps
from flatfed.diagnostics.figures import Result
from flatfed.diagnostics.folder import diagnose
from flatfed.diagnostics.subject import Tick, silent
from flatfed.papers.presets import TUNED, PaperCell, cells, with_tuning
from flatfed.papers.scaling import scaled
from flatfed.papers.schema import Column, Values, tables
from flatfed.runs.budget import Pace
from flatfed.runs.compare import is_complete, run_folder
from flatfed.runs.files import RunFolderError
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import ClientRow, Spread, best, by_round, finite, last
from flatfed.training.config import Config, with_assignments

# The largest eigenvalue of the Hessian of the training loss is measured on ten thousand samples.
HESSIAN = {"samples": 10_000, "eigenvalues": 1, "clients": 1, "probes": 1, "steps": 1}


def chosen_cells(
    name: str,
    methods: Sequence[str] = (),
    only: str | None = None,
    rounds: int | None = None,
    scale: str = "full",
    assignments: Sequence[str] = (),
    tuned: bool = False,
    from_scratch: bool = False,
) -> list[PaperCell]:
    """The cells of some methods and of the parts whose title has the words `only`, their configs changed."""
    table = cells(name)
    known = {method.lower(): method for cell in table for method in (cell.known_as, cell.method)}
    for method in methods:
        if method.lower() not in known:
            raise FlatfedError(f"methods = {method!r}: not in {name}; {did_you_mean(method, known.values())}")
    rows = {method.lower() for method in methods or known}
    chosen = [
        cell
        for cell in table
        if {cell.method.lower(), cell.known_as.lower()} & rows and _has_words(cell.title, only)
    ]
    if not chosen:
        titles = ", ".join(dict.fromkeys(repr(cell.title) for cell in table))
        raise FlatfedError(f"only = {only!r}: matches no part of {name}; there are: {titles}")
    if tuned:
        chosen = [with_tuning(name, cell) for cell in chosen]
        if not any(cell.origin.startswith(TUNED) for cell in chosen):
            raise FlatfedError(f"tuned: no tuning is on record for these cells of {name}; leave --tuned out")
    chosen = [scaled(cell, scale, tables()[name]) for cell in chosen]
    if rounds is not None:
        changed = [with_assignments(cell.config, [f"training.rounds={rounds}"]) for cell in chosen]
        chosen = [cell.changed(config, "--rounds") for cell, config in zip(chosen, changed, strict=True)]
    chosen = _with_assignments(chosen, assignments)
    return chosen if scale == "small" else [_with_weights(name, cell, from_scratch) for cell in chosen]


def _has_words(title: str, only: str | None) -> bool:
    """Whether these words are in the title, as whole words: CIFAR-10 is not in CIFAR-100."""
    return not only or re.search(rf"(?<!\w){re.escape(only)}(?!\w)", title, re.IGNORECASE) is not None


def _with_assignments(chosen: list[PaperCell], assignments: Sequence[str]) -> list[PaperCell]:
    """The cells with settings changed where they fit: not every method of a table has a radius."""
    names = {assignment: assignment.partition("=")[0].strip() for assignment in assignments}
    for_all = {name for name in names.values() if not any(_takes(cell, name) for cell in chosen)}
    changed = []
    for cell in chosen:
        own = [assignment for assignment, name in names.items() if name in for_all or _takes(cell, name)]
        config, own_names = with_assignments(cell.config, own), [names[assignment] for assignment in own]
        changed.append(cell.changed(config, "--set", own_names) if own else cell)
    return changed


def _takes(cell: PaperCell, name: str) -> bool:
    section, _, option = name.partition(".")
    if section not in {"algorithm", "model", "partition"} or option.partition(".")[0] in SLOTS:
        return True
    return any(f"{setting}.".startswith(f"{name}.") for setting in cell.sources)


def _with_weights(name: str, cell: PaperCell, from_scratch: bool) -> PaperCell:
    """The cell if it starts where the paper's does: from published weights, of the folder of its model."""
    model = cell.config["model"]
    if not cell.needs_weights:
        return cell
    if from_scratch:
        return cell.changed(cell.config, "--from-scratch", ["model.pretrained"])
    if model.get("pretrained") is None:
        raise FlatfedError(
            f"model.pretrained: missing; {name} starts {model['name']} from published weights; give their "
            "folder, or one with a folder for each model: --set model.pretrained=FOLDER, or --from-scratch"
        )
    place = Path(model["pretrained"]).expanduser()
    own = next((own for own in (place / model["name"], place / f"{model['name']}.pth") if own.exists()), None)
    if own is None:
        return cell
    return cell.changed({**cell.config, "model": {**model, "pretrained": str(own)}}, "--set")


def seeded(cell: PaperCell, seed: int) -> Config:
    return Config.checked({**cell.config, "training": {**cell.config["training"], "seed": seed}})


@dataclass(frozen=True)
class RemainingWork:
    runs: int
    rounds: int
    gradients: int
    seconds: float


def remaining_work(chosen: Sequence[PaperCell], seeds: Sequence[int], root: Path) -> RemainingWork:
    """Counts the missing runs and times a round of each kind of model to estimate how long they take."""
    paces: dict[str, Pace] = {}
    runs = rounds = gradients = 0
    seconds = 0.0
    for config in (seeded(cell, seed) for cell in chosen for seed in seeds):
        folder = RunFolder(run_folder(config, root))
        try:
            if is_complete(config, folder.path):
                continue
            missing = config.training.rounds - len(folder.read_history())
        except RunFolderError:  # whoever runs what is missing names the damaged folder and goes on
            continue
        kind = str((config.data, config.model, config.training.batch_size))
        if kind not in paces:
            paces[kind] = _pace(config)
        count = missing * _gradients_per_round(config)
        runs, rounds, gradients = runs + 1, rounds + missing, gradients + count
        seconds += paces[kind].seconds(1, count)
    return RemainingWork(runs, rounds, gradients, seconds)


def _gradients_per_round(config: Config) -> int:
    federation, training = config.make_federation(), config.training
    size = federation.total_samples // len(federation)
    steps = local_steps(training, size)
    return training.cohort_size(len(federation)) * steps * config.make_algorithm().gradient_evaluations


def _pace(config: Config) -> Pace:
    """Of plain averaging with two local steps, so that no model takes long; the step size plays no part."""
    short = config.training.replaced(local_steps=2, local_epochs=None, lr=1e-6, rounds=2)
    return Pace.measured(config.make_task(), Algorithm(), short, config.execution)


def measured(cell: PaperCell, runs: Sequence[RunFolder], column: Column | None = None) -> Spread | None:
    """The statistic that the paper reports, in its main column unless another is given, in our runs."""
    statistic = cell.statistics[column or cell.column]
    if statistic == "top eigenvalue":
        return Spread.of_finite(map(_top_eigenvalue, runs))
    if statistic.startswith("mean over clients"):
        clients = ClientRow.of([run.read_clients() for run in runs], statistic.rpartition(" ")[2])
        return None if clients is None else clients.mean
    if statistic.startswith("accuracy at round"):
        number = int(statistic.rpartition(" ")[2])
        return Spread.of_finite(by_round(run.read_history()).get(number) for run in runs)
    accuracy = best if statistic == "best accuracy" else last
    return Spread.of_finite(accuracy(run.read_history()) for run in runs)


def _top_eigenvalue(run: RunFolder) -> float | None:
    result = diagnosed(run, "hessian", HESSIAN)
    return None if result is None else finite(result["global"]["eigenvalues"][0])


def diagnosed(
    run: RunFolder, name: str, options: Values, watch: Callable[[str], Tick] = lambda _: silent
) -> Result | None:
    """None, with a warning, for a run that cannot be measured; it must not cost the others their numbers."""
    try:
        return diagnose(run.path, [name], options, watch=watch)[name]["result"]
    except FlatfedError as error:
        warnings.warn(f"{run.path}: left out, {error}", FlatfedWarning, stacklevel=3)
        return None
