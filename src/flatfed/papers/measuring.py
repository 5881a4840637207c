"""What a figure measures: during its runs, and of the models that they end with."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from flatfed.diagnostics.during import DuringTraining
from flatfed.diagnostics.figures import Result
from flatfed.diagnostics.subject import Tick, inspect
from flatfed.papers.drawing import Results
from flatfed.papers.reproduce import diagnosed
from flatfed.papers.results import FinishedCell
from flatfed.papers.scaling import scaled_measure, scaled_options
from flatfed.papers.schema import PaperTable
from flatfed.runs.compare import Measuring
from flatfed.training.config import Config
from flatfed.training.loop import Callback
from flatfed.training.task import Task


def during_runs(table: PaperTable, scale: str) -> Measuring | None:
    """The callbacks of a figure's runs; None if nothing is measured while they go on."""
    if not table.measures:
        return None
    measures = [scaled_measure(measure, scale) for measure in table.measures]

    @contextmanager
    def measuring(config: Config, task: Task) -> Iterator[Sequence[Callback]]:
        execution = config.execution.replaced(engine="local", ray_address=None)
        with inspect(task, config.make_algorithm(), config.training, execution) as subject:
            yield [
                DuringTraining(subject, one.diagnostic, one.numbers, one.every, one.options)
                for one in measures
            ]

    return measuring


def of_finished_runs(
    table: PaperTable, finished: Sequence[FinishedCell], scale: str, watch: Callable[[str], Tick]
) -> Results:
    """What the panels' diagnostics say of the finished runs; kept in the run folders.

    A surface is that of the first seed.
    """
    results: dict[tuple[int, int], Sequence[Result]] = {}
    for number, panel in enumerate(table.panels):
        name = panel.of_diagnostic
        for place, (cell, runs) in enumerate(finished) if name else ():
            if panel.blocks and cell.block not in panel.blocks:
                continue
            options = scaled_options(panel, scale)
            measured_runs = runs[:1] if panel.draw == "surfaces" else runs
            bar = partial(_bar, watch, cell.label)
            measurements = (diagnosed(run, name, options, bar) for run in measured_runs)
            results[number, place] = [result for result in measurements if result is not None]
    return results


def _bar(watch: Callable[[str], Tick], label: str, name: str) -> Tick:
    return watch(f"{name}: {label}")
