"""Running a paper's table and putting our numbers beside its own."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F

from flatfed.core.errors import DivergedError, FlatfedError, did_you_mean
from flatfed.core.flat import BoundModel, Layout
from flatfed.core.sampling import batches
from flatfed.diagnostics.folder import diagnose
from flatfed.engines.local import available_cores, single_threaded
from flatfed.engines.oracles import ModuleOracle
from flatfed.papers.presets import SWEEP, PaperCell, cells, small, with_tuning
from flatfed.runs.compare import is_complete, run_folder
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import ClientRow, Spread, best, first_round_reaching, last, total
from flatfed.training.config import Config, with_assignments
from flatfed.training.loop import Callback

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
        if not any(cell.origin.startswith(SWEEP) for cell in chosen):
            raise FlatfedError(f"tuned: no sweep is on record for these cells of {name}; leave --tuned out")
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
        folder = run_folder(config, root)
        if is_complete(config, folder):
            continue
        kind = str((config.data, config.model, config.training.batch_size))
        if kind not in measured:
            measured[kind] = _seconds_per_gradient(config)
        missing = config.training.rounds - len(RunFolder(folder).read_history())
        count = missing * _gradients_per_round(config)
        runs, rounds, gradients = runs + 1, rounds + missing, gradients + count
        seconds += count * measured[kind] / (config.training.workers or available_cores())
    return RemainingWork(runs, rounds, gradients, seconds)


def _gradients_per_round(config: Config) -> int:
    federation, settings = config.make_federation(), config.training
    size = federation.total_samples // len(federation)
    steps = len(batches(settings, size, 0, 0))
    return settings.cohort_size(len(federation)) * steps * config.make_algorithm().gradient_evaluations


def _seconds_per_gradient(config: Config) -> float:
    federation = config.make_federation()
    model = config.make_model(federation)
    layout = Layout(model)
    bound, point = BoundModel(model, layout, torch.device("cpu")), layout.vector(model)
    data = federation.client(0)
    inputs, targets = data.batch(batches(config.training, len(data), 0, 0)[0])
    batch = (federation.transform.evaluate(inputs), targets)
    fastest = math.inf
    with single_threaded(), torch.random.fork_rng(devices=[]):
        for _ in range(3):
            began = time.perf_counter()
            ModuleOracle(bound, F.cross_entropy, batch, None)(point)
            fastest = min(fastest, time.perf_counter() - began)
    return fastest


@dataclass(frozen=True)
class CellResult:
    """Our numbers for a cell, over the seeds that did not diverge."""

    cell: PaperCell
    seeds: int
    value: Spread | None
    """The statistic that the paper reports."""
    rounds: tuple[Spread | None, ...]
    """Until each target was reached."""
    reached: tuple[int, ...]
    """Under how many seeds each target was reached."""
    clients: Mapping[str, ClientRow | None]
    """The spread over clients, on the data for which the paper prints a deviation."""
    megabytes_up: Spread | None
    """Of all participants over the whole run."""

    @property
    def scale(self) -> int:
        """Papers print accuracies in percent."""
        return 1 if self.cell.statistic == "top eigenvalue" else 100

    @property
    def difference(self) -> float | None:
        printed = self.cell.printed.get(self.cell.column)
        return None if self.value is None or printed is None else self.scale * self.value.mean - printed


def run_cells(
    chosen: Sequence[PaperCell],
    seeds: Sequence[int],
    root: Path,
    watch: Callable[[PaperCell, int], Callback],
    failed: Callable[[PaperCell, int, DivergedError], None],
) -> list[CellResult]:
    """Runs what is missing and compares; a run that diverges is reported and left out."""
    results = []
    for cell in chosen:
        folders = []
        for seed in seeds:
            config = seeded(cell, seed)
            folder = run_folder(config, root)
            try:
                if not is_complete(config, folder):
                    config.run(config.make_federation(), folder, [watch(cell, seed)])
            except DivergedError as error:
                failed(cell, seed, error)
                continue
            folders.append(RunFolder(folder))
        results.append(_result(cell, folders))
    return results


def _result(cell: PaperCell, folders: Sequence[RunFolder]) -> CellResult:
    histories = [folder.read_history() for folder in folders]
    to_targets = [[first_round_reaching(history, target) for history in histories] for target in cell.targets]
    rounds = [[number for number in numbers if number is not None] for numbers in to_targets]
    clients = [folder.read_clients() for folder in folders] if cell.printed_deviations else []
    return CellResult(
        cell=cell,
        seeds=len(folders),
        value=_spread([_measured(cell, folder) for folder in folders]),
        rounds=tuple(_spread(numbers) for numbers in rounds),
        reached=tuple(len(numbers) for numbers in rounds),
        clients={name: ClientRow.of(clients, name) for name in cell.printed_deviations},
        megabytes_up=_spread([total(history, "bytes_up") / 1e6 for history in histories]),
    )


def _measured(cell: PaperCell, folder: RunFolder) -> float:
    """What the paper reports, in one of our runs."""
    if cell.statistic == "top eigenvalue":
        return diagnose(folder.path, ["hessian"], HESSIAN)["hessian"]["result"]["global"]["eigenvalues"][0]
    value = (best if cell.statistic == "best accuracy" else last)(folder.read_history())
    if value is None:
        raise FlatfedError(f"{folder.path}: no round was evaluated; delete the folder to run it again")
    return value


def _spread(values: Sequence[float]) -> Spread | None:
    return Spread.of(values) if values else None
