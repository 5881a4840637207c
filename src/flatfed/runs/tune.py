"""Tries a grid of settings, one training per combination, and ranks the results.

Trials are ranked, and stopped early, by their accuracy on validation samples, which nobody trains on. The
test samples are for the numbers that are reported: what was chosen by them looks better than it is.

All combinations are run, or a number of them proposed by Optuna's TPE. Run folders are the only record: a
trial is the run folder of its config, and what became of it is read from there. Tuning that was interrupted
therefore continues where it was, and a run that has ended is never repeated, whichever command started it.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from flatfed.core import random
from flatfed.core.errors import DivergedError, FlatfedError, check_choice
from flatfed.runs.compare import is_complete, run_folder
from flatfed.runs.files import RunFolderError
from flatfed.runs.folder import RunFolder
from flatfed.runs.statistics import by_round
from flatfed.runs.train import run_config
from flatfed.training.config import Config, with_assignments
from flatfed.training.loop import Callback, Progress

METRICS = ("final", "best")
CHOICES = ("validation", "test")
"""The samples by which trials may be ranked."""
# Stopping early needs enough trials to compare with, and the first rounds say little.
TRIALS_BEFORE_STOPPING = 4
ROUNDS_BEFORE_STOPPING = 0.1
# How often TPE is asked again when it proposes what has been tried.
PROPOSALS = 10
Ending = Literal["complete", "stopped early", "diverged", "left out"]
Grid = Mapping[str, tuple[str, ...]]
"""The values of each key, as they were written."""
Combination = tuple[str, ...]
"""One assignment `key=value` for each key of the grid."""
Curve = Mapping[int, float]
"""By round the accuracy that trials are ranked by."""
Watch = Callable[[Combination, int], Callback]
"""Makes the progress callback of a trial, given how many trials have ended."""


def parse_grid(options: Sequence[str]) -> Grid:
    """Parses options such as `training.lr=0.01,0.1`."""
    grid: dict[str, tuple[str, ...]] = {}
    for option in options:
        key, sign, text = option.partition("=")
        key, values = key.strip(), _split_values(text)
        if not sign or not key or "" in values:
            raise FlatfedError(f"--grid {option}: write it as key=value,value, e.g. training.lr=0.01,0.1")
        if key in grid:
            raise FlatfedError(f"--grid {option}: {key} is given twice; list all its values at once")
        if len(set(values)) < len(values):
            repeated = next(value for value in values if values.count(value) > 1)
            raise FlatfedError(f"--grid {option}: {repeated} is listed twice; list it once")
        grid[key] = values
    if not grid:
        raise FlatfedError("--grid: missing; give at least one, e.g. --grid training.lr=0.01,0.1")
    return grid


def _split_values(text: str) -> tuple[str, ...]:
    """Splits at commas outside brackets and quotes: `[64,32],[128]` is two values."""
    values, depth = [""], 0
    for token in re.findall(r"""'[^']*'|"[^"]*"|.""", text):
        depth += (token in "[{") - (token in "]}")
        if token == "," and depth == 0:
            values.append("")
        else:
            values[-1] += token
    return tuple(value.strip() for value in values)


@dataclass(frozen=True)
class Trial:
    """A combination whose run has ended, and its result."""

    assignments: Combination
    state: Ending
    value: float | None
    """The metric, up to where the run was stopped; None if it diverged or was never evaluated."""
    rounds: int
    folder: Path
    curve: Curve
    note: str = ""
    """Why the run did not reach its last round."""


@dataclass(frozen=True)
class Search:
    """The combinations to try and the metric to rank them by."""

    grid: Grid
    metric: str
    choose_by: str
    configs: Mapping[Combination, Config]
    """The config of every combination, in the grid's order."""

    @classmethod
    def checked(
        cls,
        base: Mapping[str, Any],
        grid: Grid,
        metric: str = "final",
        seed: int | None = None,
        choose_by: str = "validation",
    ) -> Search:
        """Checks the config of every combination, so that errors appear before anything runs."""
        check_choice("metric", metric, METRICS)
        check_choice("choose_by", choose_by, CHOICES)
        if seed is not None:
            base = with_assignments(base, [f"training.seed={seed}"])
        assignments = ([f"{key}={value}" for value in values] for key, values in grid.items())
        configs = {
            combination: Config.checked(with_assignments(base, combination))
            for combination in itertools.product(*assignments)
        }
        tasks = {json.dumps([config.task, config.data.validation]): config for config in configs.values()}
        if choose_by == "validation" and not all(config.has_validation() for config in tasks.values()):
            raise FlatfedError(
                "validation: there are no samples to choose by; hold some out with --set "
                "data.validation=0.1, or choose by the test samples with --choose-by test"
            )
        own = next(iter(configs.values()))
        if own.task is not None and "accuracy" not in own.make_task().used_metrics:
            raise FlatfedError(
                "metrics: trials are ranked by their accuracy, which this task has not; give it one, "
                'metrics={"accuracy": …}, where more is better'
            )
        return cls(grid, metric, choose_by, configs)

    @property
    def accuracy(self) -> str:
        """What histories call the accuracy that trials are ranked by."""
        return f"{self.choose_by}_accuracy"

    @property
    def rounds(self) -> int:
        return max(config.training.rounds for config in self.configs.values())

    def read_trial(self, combination: Combination, root: Path) -> Trial | None:
        """Reads a combination's result from its run folder; None if its run has not ended."""
        try:
            return self._read_trial(combination, root)
        except RunFolderError as error:
            return self.left_out(combination, root, error)

    def left_out(self, combination: Combination, root: Path, error: RunFolderError) -> Trial:
        """A trial whose folder is damaged."""
        folder = run_folder(self.configs[combination], root)
        return Trial(combination, "left out", None, 0, folder, {}, str(error))

    def _read_trial(self, combination: Combination, root: Path) -> Trial | None:
        config = self.configs[combination]
        folder, rounds = RunFolder(run_folder(config, root)), config.training.rounds
        complete, note = is_complete(config, folder.path), ""
        history = folder.read_history()
        state: Ending = "complete"
        # `flatfed resume --rounds` may have taken the run past the trial's last round.
        if complete or len(history) > rounds:
            history = history[:rounds]
        elif (divergence := folder.read_divergence()) is not None:
            state, note = "diverged", divergence
        elif (stop := folder.read_stop()) is not None:
            state, note = "stopped early", stop["reason"]
            history.append(stop)
        else:
            return None
        curve, value = by_round(history, self.accuracy), None
        if curve and state != "diverged":
            value = curve[max(curve)] if self.metric == "final" else max(curve.values())
        return Trial(combination, state, value, len(history), folder.path, curve, note)

    def falls_behind(self, curve: Curve, now: int, complete: Sequence[Curve]) -> bool:
        """The rule for stopping: the best accuracy so far is below the complete trials' median this round."""
        at_round = [other[now] for other in complete if now in other]
        too_early = now < int(self.rounds * ROUNDS_BEFORE_STOPPING)
        if too_early or len(complete) < TRIALS_BEFORE_STOPPING or not at_round:
            return False
        best = max(accuracy for number, accuracy in curve.items() if number <= now)
        return best < statistics.median(at_round)


class _FellBehind(FlatfedError):
    """Raised by a callback to end a run whose finished rounds are kept."""


def tune(search: Search, root: Path, trials: int | None, watch: Watch) -> list[Trial]:
    """Runs what is missing of all combinations, or of `trials` of them.

    Returns every trial that has ended, best first. Interrupted runs are continued before new ones begin.
    """
    configs = search.configs
    limit = min(trials or len(configs), len(configs))
    if limit < len(configs) and importlib.util.find_spec("optuna") is None:
        raise FlatfedError(
            f"trials = {trials}: needs optuna; pip install 'flatfed[tune]', or try all {len(configs)}"
        )
    ended = {
        trial.assignments: trial for combination in configs if (trial := search.read_trial(combination, root))
    }
    interrupted = [
        combination
        for combination, config in configs.items()
        if combination not in ended and (run_folder(config, root) / "config.json").exists()
    ]
    while len(ended) < limit:
        if interrupted:
            combination = interrupted.pop(0)
        elif limit < len(configs):
            combination = _propose(search, ended, limit)
        else:
            combination = next(untried for untried in configs if untried not in ended)
        # Another spelling of the same value, 0.10 for 0.1, is the same run.
        trial = search.read_trial(combination, root)
        ended[combination] = trial or _run_trial(search, combination, root, ended, watch)
    order = get_args(Ending)
    return sorted(ended.values(), key=lambda trial: (order.index(trial.state), -(trial.value or 0.0)))


def _run_trial(
    search: Search, combination: Combination, root: Path, ended: Mapping[Combination, Trial], watch: Watch
) -> Trial:
    config = search.configs[combination]
    folder = RunFolder(run_folder(config, root))
    curve = by_round(folder.read_history(), search.accuracy)
    complete = [trial.curve for trial in ended.values() if trial.state == "complete"]

    def stop_if_behind(now: Progress) -> None:
        curve.update(by_round([dict(now.record)], search.accuracy))
        # Stopping after the last round would save nothing.
        judged = search.accuracy in now.record and now.round < config.training.rounds
        if judged and search.falls_behind(curve, now.round, complete):
            reason = f"round {now.round}: below the median of the other trials"
            # Noted while the run still holds its lock.
            names = (f"{samples}_accuracy" for samples in CHOICES)
            accuracies = {name: now.record[name] for name in names if name in now.record}
            folder.note_stop(reason, now.round, accuracies)
            raise _FellBehind(reason)

    # In both cases the folder says what happened.
    try:
        run_config(config, folder.path, [watch(combination, len(ended)), stop_if_behind])
    except (DivergedError, _FellBehind):
        pass
    except RunFolderError as error:
        return search.left_out(combination, root, error)
    trial = search.read_trial(combination, root)
    assert trial is not None, f"{folder.path}: the run returned without having ended"
    return trial


def _propose(search: Search, ended: Mapping[Combination, Trial], limit: int) -> Combination:
    """TPE's choice among the combinations not yet tried.

    It depends on the seed and the ended trials alone, so tuning that was interrupted tries the same
    combinations as tuning that was not.
    """
    import optuna  # noqa: PLC0415  (an extra)

    seed = next(iter(search.configs.values())).training.seed
    sampler = optuna.samplers.TPESampler(
        seed=random.key(seed, "tune", len(ended)) % 2**32, n_startup_trials=min(10, max(2, limit // 3))
    )
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # no line in the progress bar for every study
    study = optuna.create_study(direction="maximize", sampler=sampler)
    optuna.logging.set_verbosity(verbosity)
    choices: dict[str, optuna.distributions.BaseDistribution] = {
        key: optuna.distributions.CategoricalDistribution([f"{key}={value}" for value in values])
        for key, values in search.grid.items()
    }
    states = optuna.trial.TrialState
    study.add_trials(
        optuna.trial.create_trial(
            # Optuna would ignore failed trials; one that was pruned without a value counts as the worst.
            state=states.PRUNED if trial.value is None or trial.state != "complete" else states.COMPLETE,
            value=trial.value,
            params=dict(zip(search.grid, trial.assignments, strict=True)),
            distributions=choices,
            intermediate_values={} if trial.value is None else dict(trial.curve),
        )
        for combination in search.configs
        if (trial := ended.get(combination))
    )
    # A proposal stays in the study as a running trial, which TPE takes for a bad one: the next one differs.
    for _ in range(PROPOSALS):
        proposed = study.ask(choices).params
        combination = tuple(proposed[key] for key in search.grid)
        if combination not in ended:
            return combination
    untried = [combination for combination in search.configs if combination not in ended]
    return untried[random.key(seed, "untried", len(ended)) % len(untried)]
