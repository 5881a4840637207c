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
from flatfed.papers.presets import SWEEP, Cell, cells, small, with_tuning
from flatfed.runs.compare import is_complete, run_folder
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import ClientRow, Spread
from flatfed.training.config import Config, with_assignments
from flatfed.training.loop import Callback

# What the tables call the accuracy, and whether it is the last or the best of the rounds.
ACCURACIES = {"acc": "last", "top_acc": "best", "val_acc": "last", "acc_500": "last"}
# The largest eigenvalue of the Hessian of the training loss, here on ten thousand samples.
EIGENVALUE = "top_eigenvalue"
HESSIAN = {"samples": 10_000, "eigenvalues": 1, "clients": 1, "probes": 1, "steps": 1}
# What they call the deviation between clients on their own training and test data.
DEVIATIONS = {"train": "train_dev", "test": "val_dev"}


def chosen_cells(
    name: str,
    methods: Sequence[str] = (),
    only: str | None = None,
    rounds: int | None = None,
    scale: str = "full",
    assignments: Sequence[str] = (),
    tuned: bool = False,
) -> list[Cell]:
    """The cells asked for, with their configs changed accordingly."""
    everything = cells(name)
    known = list(dict.fromkeys(cell.method for cell in everything))
    for method in methods:
        if method.lower() not in [each.lower() for each in known]:
            raise FlatfedError(f"methods = {method!r}: not in {name}; {did_you_mean(method, known)}")
    wanted = {method.lower() for method in methods or known}
    found = [
        cell
        for cell in everything
        if cell.method.lower() in wanted and (only is None or only.lower() in cell.title.lower())
    ]
    if not found:
        titles = ", ".join(dict.fromkeys(repr(cell.title) for cell in everything))
        raise FlatfedError(f"only = {only!r}: matches no part of {name}; there are: {titles}")
    if tuned:
        found = [with_tuning(name, cell) for cell in found]
        if not any(cell.origin.startswith(SWEEP) for cell in found):
            raise FlatfedError(f"tuned: no sweep is on record for these cells of {name}; leave --tuned out")
    if any(assignment.partition("=")[0].strip() == "training.lr" for assignment in assignments):
        found = [replace(cell, origin="--set") for cell in found]
    changed = []
    for cell in found:
        config = small(cell.config) if scale == "small" else cell.config
        if rounds is not None:
            config = {**config, "training": {**config["training"], "rounds": rounds}}
        changed.append(replace(cell, config=with_assignments(config, assignments)))
    return changed


def seeded(cell: Cell, seed: int) -> Config:
    return Config.checked({**cell.config, "training": {**cell.config["training"], "seed": seed}})


@dataclass(frozen=True)
class Work:
    """What is left to do."""

    runs: int
    rounds: int
    gradients: int
    seconds: float


def remaining_work(chosen: Sequence[Cell], seeds: Sequence[int], root: Path) -> Work:
    """Counts the runs that are missing and times one gradient of each kind of model to estimate them."""
    measured: dict[str, float] = {}
    runs = rounds = gradients = 0
    seconds = 0.0
    for cell in chosen:
        for seed in seeds:
            config = seeded(cell, seed)
            folder = run_folder(config, root)
            if is_complete(config, folder):
                continue
            done = len(RunFolder(folder).read_history())
            kind = str((config.data, config.model, config.training.batch_size))
            if kind not in measured:
                measured[kind] = _seconds_per_gradient(config)
            count = (config.training.rounds - done) * _gradients_per_round(config)
            runs, rounds = runs + 1, rounds + config.training.rounds - done
            gradients += count
            seconds += count * measured[kind] / (config.training.workers or available_cores())
    return Work(runs, rounds, gradients, seconds)


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
    best = math.inf
    with single_threaded(), torch.random.fork_rng(devices=[]):
        for _ in range(3):
            began = time.perf_counter()
            ModuleOracle(bound, F.cross_entropy, batch, None)(point)
            best = min(best, time.perf_counter() - began)
    return best


@dataclass(frozen=True)
class Result:
    """A cell's numbers: the paper's and ours."""

    cell: Cell
    measure: str
    """What is compared: "accuracy" or "top eigenvalue"."""
    printed: float | None
    printed_deviation: float | None
    ours: Spread | None
    seeds: int
    printed_rounds: tuple[int | None, ...]
    our_rounds: tuple[Spread | None, ...]
    reached: tuple[int, ...]
    """Under how many seeds each target was reached."""
    printed_deviations: Mapping[str, float]
    """Between clients on their "train" and "test" data, where the paper prints them."""
    clients: Mapping[str, ClientRow | None]
    megabytes_up: Spread | None
    """Of all participants over the whole run."""

    @property
    def percent(self) -> bool:
        """Whether the paper prints it in percent."""
        return self.measure == "accuracy"

    @property
    def difference(self) -> float | None:
        if self.ours is None or self.printed is None:
            return None
        return (100 if self.percent else 1) * self.ours.mean - self.printed


def reproduce(
    chosen: Sequence[Cell],
    seeds: Sequence[int],
    root: Path,
    watch: Callable[[Cell, int], Callback],
    failed: Callable[[Cell, int, DivergedError], None],
) -> list[Result]:
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


def _result(cell: Cell, folders: Sequence[RunFolder]) -> Result:
    kind = next((key for key in ACCURACIES if key in cell.printed), "acc")
    histories = [folder.read_history() for folder in folders]
    curves = [
        [(record["round"], record["test_accuracy"]) for record in history if "test_accuracy" in record]
        for history in histories
    ]
    if EIGENVALUE in cell.printed:
        measure, kind = "top eigenvalue", EIGENVALUE
        found = [diagnose(folder.path, ["hessian"], HESSIAN)["hessian"]["result"] for folder in folders]
        values = [each["global"]["eigenvalues"][0] for each in found]
    else:
        measure = "accuracy"
        values = [
            max(value for _, value in curve) if ACCURACIES[kind] == "best" else curve[-1][1]
            for curve in curves
        ]
    printed_rounds = cell.printed.get("rounds_to_targets")
    if printed_rounds is None:
        printed_rounds = [cell.printed.get("rounds_to_target")] * len(cell.targets)
    to_targets = [
        [next((number for number, value in curve if value >= target), None) for curve in curves]
        for target in cell.targets
    ]
    reached = [[number for number in numbers if number is not None] for numbers in to_targets]
    printed_deviations = {name: cell.printed[key] for name, key in DEVIATIONS.items() if key in cell.printed}
    spreads = [folder.read_clients() for folder in folders] if printed_deviations else []
    return Result(
        cell=cell,
        measure=measure,
        printed=cell.printed.get(kind),
        printed_deviation=cell.printed.get("std"),
        ours=Spread.of(values) if values else None,
        seeds=len(values),
        printed_rounds=tuple(printed_rounds),
        our_rounds=tuple(Spread.of(numbers) if numbers else None for numbers in reached),
        reached=tuple(len(numbers) for numbers in reached),
        printed_deviations=printed_deviations,
        clients={name: ClientRow.of(spreads, name) for name in printed_deviations},
        megabytes_up=Spread.of(sum(line["bytes_up"] for line in history) / 1e6 for history in histories)
        if histories
        else None,
    )
