"""Running a paper's table and putting our numbers beside its own."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from timeit import repeat

import torch
import torch.nn.functional as F

from flatfed.core.errors import FlatfedError, FlatfedWarning, did_you_mean
from flatfed.core.sampling import batches, local_steps
from flatfed.diagnostics.folder import diagnose
from flatfed.engines.threads import available_cores, single_threaded
from flatfed.papers.presets import TUNED, PaperCell, cells, small, with_tuning
from flatfed.runs.compare import is_complete, run_folder
from flatfed.runs.files import RunFolderError
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import Spread, best, finite, last
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
) -> list[PaperCell]:
    """The cells of some methods and of the parts whose title contains `only`, their configs changed."""
    table = cells(name)
    known = {cell.method.lower(): cell.method for cell in table}
    for method in methods:
        if method.lower() not in known:
            raise FlatfedError(f"methods = {method!r}: not in {name}; {did_you_mean(method, known.values())}")
    rows = {method.lower() for method in methods or known}
    part = "" if only is None else only.lower()
    chosen = [cell for cell in table if cell.method.lower() in rows and part in cell.title.lower()]
    if not chosen:
        titles = ", ".join(dict.fromkeys(repr(cell.title) for cell in table))
        raise FlatfedError(f"only = {only!r}: matches no part of {name}; there are: {titles}")
    if tuned:
        chosen = [with_tuning(name, cell) for cell in chosen]
        if not any(cell.origin.startswith(TUNED) for cell in chosen):
            raise FlatfedError(f"tuned: no tuning is on record for these cells of {name}; leave --tuned out")
    if any(assignment.partition("=")[0].strip() == "training.lr" for assignment in assignments):
        chosen = [replace(cell, origin="--set") for cell in chosen]
    if scale == "small":
        chosen = [replace(cell, config=small(cell.config)) for cell in chosen]
    assignments = [*([] if rounds is None else [f"training.rounds={rounds}"]), *assignments]
    return [replace(cell, config=with_assignments(cell.config, assignments)) for cell in chosen]


def seeded(cell: PaperCell, seed: int) -> Config:
    return Config.checked({**cell.config, "training": {**cell.config["training"], "seed": seed}})


@dataclass(frozen=True)
class RemainingWork:
    runs: int
    rounds: int
    gradients: int
    seconds: float


def remaining_work(chosen: Sequence[PaperCell], seeds: Sequence[int], root: Path) -> RemainingWork:
    """Counts the missing runs and times one gradient of each kind of model to estimate how long they take."""
    measured: dict[str, float] = {}
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
        if kind not in measured:
            measured[kind] = _seconds_per_gradient(config)
        count = missing * _gradients_per_round(config)
        runs, rounds, gradients = runs + 1, rounds + missing, gradients + count
        seconds += count * measured[kind] / (config.execution.workers or available_cores())
    return RemainingWork(runs, rounds, gradients, seconds)


def _gradients_per_round(config: Config) -> int:
    federation, training = config.make_federation(), config.training
    size = federation.total_samples // len(federation)
    steps = local_steps(training, size)
    return training.cohort_size(len(federation)) * steps * config.make_algorithm().gradient_evaluations


def _seconds_per_gradient(config: Config) -> float:
    """The best of three, on one core."""
    federation = config.make_federation()
    model, data = config.make_model(federation), federation.client(0)
    inputs, targets = data.batch(batches(config.training, len(data), 0, 0)[0])
    inputs = federation.transform.evaluate(inputs)
    with single_threaded(), torch.random.fork_rng(devices=[]):
        return min(repeat(lambda: F.cross_entropy(model(inputs), targets).backward(), number=1, repeat=3))


def measured(cell: PaperCell, runs: Sequence[RunFolder]) -> Spread | None:
    """The statistic that the paper reports, in our runs."""
    if cell.statistic == "top eigenvalue":
        return Spread.of_finite(map(_top_eigenvalue, runs))
    accuracy = best if cell.statistic == "best accuracy" else last
    return Spread.of_finite(accuracy(run.read_history()) for run in runs)


def _top_eigenvalue(run: RunFolder) -> float | None:
    """None, with a warning, for a run that cannot be measured; it must not cost the others their numbers."""
    try:
        result = diagnose(run.path, ["hessian"], HESSIAN)["hessian"]["result"]
    except FlatfedError as error:
        warnings.warn(f"{run.path}: left out, {error}", FlatfedWarning, stacklevel=2)
        return None
    return finite(result["global"]["eigenvalues"][0])
