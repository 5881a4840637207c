"""A grid of settings tried out one by one, on Optuna.

All combinations are run, or some of them chosen by TPE. After every evaluation a run whose accuracy is
below the median of the others at that round is stopped. Each trial is a run folder like any other, and the
sweep itself a journal beside them, sweep-NAME.journal: a sweep that was killed goes on where it was, and
trials that have ended are never run again.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import itertools
import json
import os
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flatfed.core.errors import DivergedError, FlatfedError, did_you_mean
from flatfed.runs.compare import is_complete, run_folder
from flatfed.training.config import Config, with_assignments
from flatfed.runs.folder import FREE_SETTINGS, RunFolder
from flatfed.training.loop import Callback, Progress

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

METRICS = ("final", "best")
# Stopping early needs something to compare with, and first rounds that say nothing yet.
TRIALS_BEFORE_PRUNING = 4
ROUNDS_BEFORE_PRUNING = 0.1
Watch = Callable[[Sequence[str], int], Callback]
"""Given a trial's assignments and how many trials have ended, what to call after its rounds."""


def parse_grid(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """`training.lr=0.01,0.1` and the like, as values by key; the values stay as they were written."""
    grid: dict[str, tuple[str, ...]] = {}
    for text in texts:
        key, sign, listed = text.partition("=")
        key, values = key.strip(), tuple(_listed(listed))
        if not sign or not key or "" in values:
            raise FlatfedError(f"--grid {text}: write it as key=value,value, e.g. training.lr=0.01,0.1")
        if key in grid:
            raise FlatfedError(f"--grid {text}: {key} is given twice; list all its values at once")
        if len(set(values)) < len(values):
            twice = next(value for value in values if values.count(value) > 1)
            raise FlatfedError(f"--grid {text}: {twice} is listed twice; list it once")
        grid[key] = values
    if not grid:
        raise FlatfedError("--grid: missing; give at least one, e.g. --grid training.lr=0.01,0.1")
    return grid


def _listed(text: str) -> Iterator[str]:
    """The parts between commas that are not inside brackets or quotes: `[64,32],[128]` has two."""
    start = depth = 0
    quote = ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


@dataclass(frozen=True)
class Plan:
    """What to try: a config, the values to put into it, and what to compare by."""

    base: Mapping[str, Any]
    grid: Mapping[str, Sequence[str]]
    metric: str
    seed: int
    configs: Mapping[tuple[str, ...], Config]
    """The config of every combination of values."""

    @classmethod
    def checked(
        cls,
        base: Mapping[str, Any],
        grid: Mapping[str, Sequence[str]],
        metric: str = "final",
        seed: int | None = None,
    ) -> Plan:
        """A plan all of whose configs are good, or a one-line error before anything runs."""
        if metric not in METRICS:
            raise FlatfedError(f"metric = {metric!r}: unknown; {did_you_mean(metric, METRICS)}")
        if seed is not None:
            base = with_assignments(base, [f"training.seed={seed}"])
        configs = {}
        for values in itertools.product(*grid.values()):
            assigned = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
            configs[values] = Config.checked(with_assignments(base, assigned))
        return cls(base, grid, metric, next(iter(configs.values())).training.seed, configs)

    @property
    def combinations(self) -> list[tuple[str, ...]]:
        return list(self.configs)

    @property
    def rounds(self) -> int:
        return max(config.training.rounds for config in self.configs.values())

    @property
    def fingerprint(self) -> str:
        """Everything on which the trials' results depend."""
        base = json.loads(json.dumps(self.base))
        for name in FREE_SETTINGS - {"rounds"}:
            base.get("training", {}).pop(name, None)
        content = {"base": base, "grid": {key: list(values) for key, values in self.grid.items()}}
        return json.dumps({**content, "metric": self.metric, "seed": self.seed}, sort_keys=True)

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.fingerprint.encode()).hexdigest()[:8]

    def assignments(self, values: Sequence[str]) -> tuple[str, ...]:
        return tuple(f"{key}={value}" for key, value in zip(self.grid, values, strict=True))

    def score(self, accuracies: Sequence[float]) -> float:
        return accuracies[-1] if self.metric == "final" else max(accuracies)


@dataclass(frozen=True)
class Trial:
    """One combination and what became of it."""

    assignments: tuple[str, ...]
    state: Literal["complete", "stopped early", "diverged"]
    value: float | None
    """The metric; of a run that was stopped early, as far as it got."""
    rounds: int
    folder: Path
    note: str = ""


class _FellBehind(FlatfedError):
    """Ends a run from within a callback, its finished rounds kept."""


def sweep(plan: Plan, name: str, root: Path, trials: int | None, watch: Watch) -> list[Trial]:
    """Runs what is missing of all combinations, or of `trials` of them; returns the ended, best first."""
    optuna = _optuna()
    if not re.fullmatch(r"[\w.-]+", name):
        raise FlatfedError(f"study = {name!r}: use letters, digits, '.', '_' and '-' only")
    root.mkdir(parents=True, exist_ok=True)
    journal = root / f"sweep-{name}.journal"
    with _taken(journal), _quiet(optuna):
        study = _open_study(optuna, journal, name, plan)
        _queue_unfinished(optuna, study, plan)
        wanted = min(trials or len(plan.configs), len(plan.configs))
        missing = wanted - len(_ended(study, plan))
        if missing > 0:
            study.sampler = _sampler(optuna, study, plan, wanted)
            study.optimize(
                lambda trial: _objective(optuna, study, trial, plan, root, watch),
                n_trials=missing,
                catch=(DivergedError,),
            )
        ended = _ended(study, plan)
    order = {"complete": 0, "stopped early": 1, "diverged": 2}
    found = [_outcome(values, trial, plan, root) for values, trial in ended.items()]
    return sorted(found, key=lambda each: (order[each.state], -(each.value or 0.0)))


def _optuna() -> Any:
    try:
        return importlib.import_module("optuna")
    except ImportError:
        raise FlatfedError("optuna: not installed; pip install 'flatfed[sweep]'") from None


@contextlib.contextmanager
def _quiet(optuna: Any) -> Iterator[None]:
    """Without a log line, or a traceback for every divergence, in the middle of the progress bar."""
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.CRITICAL)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(level)


@contextlib.contextmanager
def _taken(journal: Path) -> Iterator[None]:
    """One process at a time: another one's running trial would look like one that was killed."""
    with journal.with_suffix(".lock").open("w") as lock:
        if fcntl is not None:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise FlatfedError(
                    f"{journal}: another process is running this sweep; wait or stop that one"
                ) from None
        yield


def _open_study(optuna: Any, journal: Path, name: str, plan: Plan) -> Any:
    _cut_half_line(journal)
    storages = optuna.storages
    lock = storages.journal.JournalFileOpenLock(str(journal))
    storage = storages.JournalStorage(storages.journal.JournalFileBackend(str(journal), lock_obj=lock))
    pruner = optuna.pruners.MedianPruner(
        n_startup_trials=TRIALS_BEFORE_PRUNING, n_warmup_steps=int(plan.rounds * ROUNDS_BEFORE_PRUNING)
    )
    study = optuna.create_study(
        storage=storage, study_name=name, direction="maximize", pruner=pruner, load_if_exists=True
    )
    before = study.user_attrs.setdefault("plan", plan.fingerprint)
    if before != plan.fingerprint:
        raise FlatfedError(
            f"study = {name!r}: it was made with another config, grid, metric or seed; choose another "
            f"--study or remove {journal}"
        )
    study.set_user_attr("plan", plan.fingerprint)
    return study


def _cut_half_line(journal: Path) -> None:
    """A kill may have cut the last line; what came before it stands."""
    if journal.exists():
        content = journal.read_bytes()
        if not content.endswith(b"\n"):
            os.truncate(journal, content.rfind(b"\n") + 1)


def _values(trial: Any, plan: Plan) -> tuple[str, ...] | None:
    """A trial's combination; None if it was killed before it had one."""
    chosen = trial.system_attrs.get("fixed_params") or trial.params
    return tuple(chosen[key] for key in plan.grid) if set(chosen) == set(plan.grid) else None


def _ended(study: Any, plan: Plan) -> dict[tuple[str, ...], Any]:
    """The trials that need not be run again, by their values."""
    ended = {}
    for trial in study.get_trials(deepcopy=False):
        values = _values(trial, plan)
        done = trial.state.name in {"COMPLETE", "PRUNED"} or "diverged" in trial.user_attrs
        if values is not None and done:
            ended[values] = trial
    return ended


def _queue_unfinished(optuna: Any, study: Any, plan: Plan) -> None:
    """Trials that were interrupted are closed and come first."""
    states, ended = optuna.trial.TrialState, _ended(study, plan)
    everything = study.get_trials(deepcopy=False)
    queued = {_values(trial, plan) for trial in everything if trial.state == states.WAITING}
    for trial in everything:
        values = _values(trial, plan)
        if trial.state == states.RUNNING:
            study.tell(trial.number, state=states.FAIL)
        elif trial.state != states.FAIL:
            continue
        if values is None or values in ended or values in queued:
            continue
        queued.add(values)
        place = {
            key: trial.system_attrs[key] for key in ("grid_id", "search_space") if key in trial.system_attrs
        }
        chosen = dict(zip(plan.grid, values, strict=True))
        study.add_trial(
            optuna.trial.create_trial(state=states.WAITING, system_attrs={**place, "fixed_params": chosen})
        )


def _sampler(optuna: Any, study: Any, plan: Plan, wanted: int) -> Any:
    # GridSampler knows only trials of its own, and takes one that was killed at once for done. After such
    # trials the rest is found by its values.
    foreign = any(
        "grid_id" not in trial.system_attrs or _values(trial, plan) is None
        for trial in study.get_trials(deepcopy=False)
    )
    if wanted == len(plan.configs) and not foreign:
        space = {key: list(values) for key, values in plan.grid.items()}
        return optuna.samplers.GridSampler(space, seed=plan.seed)
    return _unseen_sampler(plan, wanted)


def _unseen_sampler(plan: Plan, wanted: int) -> Any:
    """TPE that never proposes a combination twice."""
    from optuna.distributions import BaseDistribution, CategoricalDistribution  # noqa: PLC0415
    from optuna.samplers import TPESampler  # noqa: PLC0415

    class UnseenSampler(TPESampler):
        def infer_relative_search_space(self, study: Any, trial: Any) -> dict[str, BaseDistribution]:
            return {key: CategoricalDistribution(tuple(values)) for key, values in plan.grid.items()}

        def sample_relative(
            self, study: Any, trial: Any, search_space: dict[str, BaseDistribution]
        ) -> dict[str, Any]:
            others = [each for each in study.get_trials(deepcopy=False) if each.number != trial.number]
            seen = {_values(each, plan) for each in others}
            unseen = [values for values in plan.configs if values not in seen]
            if not unseen:
                return {}
            for _ in range(10):
                proposed = super().sample_relative(study, trial, search_space)
                if proposed and tuple(proposed[key] for key in plan.grid) in unseen:
                    return proposed
            # At first there is nothing to go by, and at last TPE insists on what it has seen.
            chosen = random.Random(f"{plan.seed} {len(others)}").choice(unseen)
            return dict(zip(plan.grid, chosen, strict=True))

    return UnseenSampler(seed=plan.seed, n_startup_trials=min(10, max(2, wanted // 3)), constant_liar=False)


def _objective(optuna: Any, study: Any, trial: Any, plan: Plan, root: Path, watch: Watch) -> float:
    values = tuple(trial.suggest_categorical(key, list(known)) for key, known in plan.grid.items())
    config = plan.configs[values]
    folder = run_folder(config, root)
    accuracies: dict[int, float] = {}

    def report(record: Mapping[str, Any]) -> bool:
        """Whether the round was evaluated and had not been reported before."""
        number = record["round"]
        if "test_accuracy" not in record or number in accuracies:
            return False
        accuracies[number] = record["test_accuracy"]
        trial.report(accuracies[number], number)
        return True

    def judge(now: Progress) -> None:
        # A run that is through its last round has nothing left to save.
        if report(now.record) and now.round < config.training.rounds and trial.should_prune():
            raise _FellBehind(f"round {now.round}: below the median of the other trials")

    # What an interrupted trial, or any other run of the same config, has already done.
    for record in RunFolder(folder).read_history():
        report(record)
    if not is_complete(config, folder):
        callback = watch(plan.assignments(values), len(_ended(study, plan)))
        try:
            config.run(config.make_federation(), folder, [callback, judge])
        except _FellBehind:
            raise optuna.TrialPruned from None
        except DivergedError as error:
            trial.set_user_attr("diverged", str(error))
            raise
    return plan.score([accuracies[number] for number in sorted(accuracies)])


def _outcome(values: tuple[str, ...], trial: Any, plan: Plan, root: Path) -> Trial:
    folder = run_folder(plan.configs[values], root)
    seen = trial.intermediate_values
    reported = [seen[number] for number in sorted(seen)]
    rounds = max(seen, default=0)
    if "diverged" in trial.user_attrs:
        return Trial(plan.assignments(values), "diverged", None, rounds, folder, trial.user_attrs["diverged"])
    complete = trial.state.name == "COMPLETE"
    return Trial(
        assignments=plan.assignments(values),
        state="complete" if complete else "stopped early",
        value=trial.value if complete else plan.score(reported),
        rounds=rounds,
        folder=folder,
    )
