"""Tuning by resuming: many short runs, of which the better third goes on, and of those a third again.

A configuration is one run in one folder: the runs of a rung are those of the rung before, continued for more
rounds, and nothing is trained twice. What is tuned is the step size and the one or two options that the
algorithm's constructor, or the parts of a composition, declare with a range; the first configuration has the
values as given, the others are proposed by Optuna's TPE. Rungs end after a number of gradients rather than
rounds: every method gets the same number of configurations and of gradients, up to a part of a round.

The mean of the accuracies on the validation samples in the last fifth of a rung's rounds decides: where
clients differ, the accuracy of a single round may be several points off. Run folders are the only record:
what was proposed follows from the seed and from them, so tuning that was interrupted goes on to the same
result.

The model of a run does not depend on how many rounds it was asked for (schedules over rounds have a length of
their own, `lr_cosine`), so that of a rung is that of an uninterrupted run.
"""

from __future__ import annotations

import copy
import importlib.util
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from flatfed.algorithms.registry import tuned_options
from flatfed.core import random
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, shown
from flatfed.core.types import Range
from flatfed.runs.budget import Pace, gradients_of, rounds_within
from flatfed.runs.files import RunFolderError
from flatfed.runs.setting import PlannedRun, Setting
from flatfed.runs.statistics import VALIDATION, by_round, mean, tail, total
from flatfed.training.loop import Callback, History

Place = tuple[str | int, ...]
"""Where a value stands: ("training", "lr"), or ("algorithm", …) and the option's place there."""
STEP_SIZE: Place = ("training", "lr")
Values = tuple[float, ...]
Ending = Literal["waiting", "tried", "diverged", "left out"]
EVALUATIONS = 30
"""Of a whole run that is being tuned: enough for means over the ends of rungs."""
Watch = Callable[["Candidate", int, int], Callback]
"""Makes the progress callback of a run, given its candidate, the rung and how many rounds it has."""


def evaluation_interval(rounds: int) -> int:
    """After how many rounds each a run of so many is evaluated while it is being tuned."""
    return max(1, rounds // EVALUATIONS)


@dataclass(frozen=True)
class Halving:
    """How many configurations there are and which share of them goes on."""

    configurations: int = 9
    factor: int = 3
    rungs: int | None = None
    """At most so many; until a single configuration is left, unless given."""

    def __post_init__(self) -> None:
        for name, least in (("configurations", 1), ("factor", 2), ("rungs", 1)):
            value = getattr(self, name)
            if name == "rungs" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise FlatfedError(f"{name} = {shown(value)}: give a whole number, {least} or more")

    @property
    def counts(self) -> list[int]:
        """The configurations of each rung, at least one in the last."""
        counts = [self.configurations]
        while counts[-1] >= self.factor and len(counts) != self.rungs:
            counts.append(counts[-1] // self.factor)
        return counts

    def limits(self, gradients: int) -> list[int]:
        """After how many gradients each rung ends, where a whole run has so many."""
        rungs = len(self.counts)
        return [gradients // self.factor ** (rungs - 1 - rung) for rung in range(rungs)]

    def total(self, gradients: int) -> int:
        """Those of all rungs together, where a whole run has so many."""
        steps = (after - before for before, after in itertools.pairwise([0, *self.limits(gradients)]))
        return sum(count * step for count, step in zip(self.counts, steps, strict=True))


@dataclass(frozen=True)
class Method:
    """An algorithm to tune, as a config describes it, and what is tuned in it."""

    label: str
    algorithm: Mapping[str, Any]
    setting: Setting
    defaults: Mapping[Place, float] = field(default_factory=dict)
    """Values to start from, in place of those as given."""

    @classmethod
    def of(cls, label: str, algorithm: Mapping[str, Any], setting: Setting, own: bool = True) -> Method:
        """A method whose first step size is the setting's, cut to its optimizer's range if that is not
        its `own`."""
        run = setting.planned(algorithm)
        # What is described in full has a place for every value.
        method = cls(label, run.algorithm.describe(), setting)
        sizes = run.algorithm.optimizer.step_sizes
        if own:
            return method
        return replace(method, defaults={STEP_SIZE: sizes.value(sizes.share(run.training.lr))})

    def starting_at(self, values: Mapping[Place, float]) -> Method:
        """With other first values, which are cut to the ranges."""
        inside = {
            place: kind.value(kind.share(values[place]))
            for place, kind in self.space.items()
            if place in values
        }
        return replace(self, defaults={**self.defaults, **inside})

    @property
    def space(self) -> dict[Place, Range]:
        run = self.setting.planned(self.algorithm)
        own = {("algorithm", *place): kind for place, kind in tuned_options(run.algorithm).items()}
        return {STEP_SIZE: run.algorithm.optimizer.step_sizes, **own}

    @property
    def first_values(self) -> Values:
        """As given."""
        lr = self.setting.planned(self.algorithm).training.lr
        values = []
        for place in self.space:
            value: Any = self.algorithm
            for key in place[1:] if place != STEP_SIZE else ():
                value = value[key]
            values.append(self.defaults.get(place, lr if place == STEP_SIZE else float(value)))
        return tuple(values)

    def values_of(self, assigned: Mapping[str, float]) -> Values:
        """The values that were written as assignments."""
        names = [".".join(map(str, place)) for place in self.space]
        if set(names) != set(assigned):
            raise FlatfedError(
                f"{self.label}: it is tuned in {', '.join(names)}, but the settings given are for "
                f"{', '.join(assigned) or 'nothing'}; tune it again"
            )
        return tuple(assigned[name] for name in names)

    def planned(self, values: Values, **training: Any) -> PlannedRun:
        """The run with these values of the space."""
        description: Any = copy.deepcopy(dict(self.algorithm))
        for place, value in zip(self.space, values, strict=True):
            if place == STEP_SIZE:
                training = {"lr": value, **training}
                continue
            table = description
            for key in place[1:-1]:
                table = table[key]
            table[place[-1]] = value
        return self.setting.planned(description, **training)

    def texts(self, values: Values) -> list[str]:
        """The values by the names of their options alone."""
        return [f"{place[-1]}={value:g}" for place, value in zip(self.space, values, strict=True)]

    def assignments(self, values: Values) -> list[str]:
        """The values as one would write them."""
        names = (".".join(map(str, place)) for place in self.space)
        return [f"{name}={value:g}" for name, value in zip(names, values, strict=True)]


@dataclass
class Candidate:
    """A configuration of a method: one run, and what it reached at the end of each rung."""

    method: Method
    values: Values
    run: PlannedRun
    accuracies: list[float | None] = field(default_factory=list)
    """On the validation samples, in the last fifth of each rung; None if the run did not get there."""
    state: Ending = "waiting"
    rounds: int = 0
    gradients: int = 0
    """As its history counts them."""
    note: str = ""

    @property
    def worth(self) -> tuple[int, float]:
        """By which candidates are sorted: those of later rungs first, then the more accurate."""
        value = self.accuracies[-1] if self.accuracies else None
        reached = len(self.accuracies) if value is not None else 0
        return reached, value if value is not None else float("-inf")


@dataclass
class Tuned:
    """A method after tuning, with every configuration that was tried."""

    method: Method
    candidates: list[Candidate]
    rounds: list[int]
    """After how many rounds each rung ends."""

    @property
    def best(self) -> Candidate | None:
        """The most accurate configuration of those that went furthest; None if all diverged."""
        ended = [candidate for candidate in self.candidates if candidate.worth[0]]
        return max(ended, key=lambda candidate: candidate.worth, default=None)

    @property
    def worth(self) -> tuple[int, float]:
        """That of the best configuration."""
        return (0, float("-inf")) if self.best is None else self.best.worth

    @property
    def gradients(self) -> int:
        return sum(candidate.gradients for candidate in self.candidates)


@dataclass(frozen=True)
class Tuning:
    """Methods of one task, and the budget that each of them gets."""

    methods: Sequence[Method]
    halving: Halving
    gradients: int
    """Of one whole run, at the end of the last rung."""
    survivors: Sequence[int] = ()
    """How many methods each rung has; all of them, unless given."""

    @classmethod
    def checked(
        cls,
        methods: Sequence[Method],
        halving: Halving,
        gradients: int | None = None,
        survivors: Sequence[int] = (),
    ) -> Tuning:
        """With as many gradients as all methods' rounds allow, unless a number is given."""
        if halving.configurations > 1 and importlib.util.find_spec("optuna") is None:
            raise FlatfedError("halving: needs optuna to propose; pip install 'flatfed[tune]'")
        for setting in {id(method.setting): method.setting for method in methods}.values():
            setting.check()
        if gradients is None:
            gradients = min(cls._whole(method) for method in methods)
        tuning = cls(methods, halving, gradients, survivors)
        for method in methods:
            tuning.rung_rounds(method)  # refuses a budget below one round
        return tuning

    @staticmethod
    def _whole(method: Method) -> int:
        run, setting = method.setting.planned(method.algorithm), method.setting
        return gradients_of(setting.task_of(setting.seed).federation, run.algorithm, run.training)

    def rung_rounds(self, method: Method) -> list[int]:
        """After how many rounds each rung of a method ends."""
        run, setting = method.setting.planned(method.algorithm), method.setting
        federation = setting.task_of(setting.seed).federation
        limits = self.halving.limits(self.gradients)
        return [rounds_within(federation, run.algorithm, run.training, limit) for limit in limits]

    def pace(self) -> Pace:
        """From timed rounds of the first method."""
        method = self.methods[0]
        run, setting = method.setting.planned(method.algorithm), method.setting
        return Pace.measured(setting.task_of(setting.seed), run.algorithm, run.training, run.execution)

    def seconds(self, pace: Pace) -> float:
        """An estimate of the whole tuning, if no run has begun."""
        starts = sum(self.halving.counts)
        return len(self.methods) * pace.seconds(starts, self.halving.total(self.gradients))

    def run(self, watch: Watch) -> list[Tuned]:
        """Trains what is missing, rung by rung over all methods."""
        results = [Tuned(method, [], self.rung_rounds(method)) for method in self.methods]
        for rung, count in enumerate(self.halving.counts):
            for tuned in self._remaining(results, rung):
                for candidate in self._entrants(tuned, rung, count):
                    self._advance(candidate, rung, tuned.rounds[rung], watch)
        return results

    def _remaining(self, results: Sequence[Tuned], rung: int) -> list[Tuned]:
        """The methods of a rung in their order: those whose best configuration has done best so far."""
        count = self.survivors[rung] if self.survivors else len(results)
        order = sorted(range(len(results)), key=lambda number: results[number].worth, reverse=True)
        return [results[number] for number in sorted(order[:count])]

    def _entrants(self, tuned: Tuned, rung: int, count: int) -> Iterator[Candidate]:
        """The candidates of a rung; those of the first are proposed one after the other."""
        if rung:
            best = sorted(tuned.candidates, key=lambda candidate: candidate.worth, reverse=True)
            yield from (candidate for candidate in best[:count] if candidate.state == "tried")
            return
        method = tuned.method
        while len(tuned.candidates) < count:
            number = len(tuned.candidates)
            values = _propose(tuned, count) if number else method.first_values
            candidate = Candidate(method, values, method.planned(values))
            tuned.candidates.append(candidate)
            yield candidate

    def _advance(self, candidate: Candidate, rung: int, rounds: int, watch: Watch) -> None:
        """Takes a candidate's run to the end of a rung, from wherever its folder is."""
        try:
            history = self._reached(candidate, rung, rounds, watch)
        except RunFolderError as error:
            candidate.state, candidate.note = "left out", str(error)
            candidate.accuracies.append(None)
            return
        # A run that was there before need not have been evaluated at the end of a rung.
        late = tail(history, VALIDATION) or list(by_round(history, VALIDATION).values())[-1:]
        value = mean(late)
        candidate.accuracies.append(value if candidate.state != "diverged" else None)
        candidate.rounds = len(history)
        candidate.gradients = int(total(history, "gradient_evaluations"))
        if candidate.state != "diverged":
            candidate.state = "tried"

    def _reached(self, candidate: Candidate, rung: int, rounds: int, watch: Watch) -> History:
        run, setting = candidate.run, candidate.method.setting
        task = setting.task_of(run.training.seed)
        if rung == 0 and run.folder.exists():
            run.check_task(task)
        history = run.history(rounds)
        if history is None and (divergence := run.divergence()) is None:
            last = rounds == run.training.rounds
            try:
                with warnings.catch_warnings():
                    # The first rungs are short by design.
                    warnings.simplefilter("ignore", FlatfedWarning)
                    run.train(task, rounds, [watch(candidate, rung, rounds)], complete=last)
            except DivergedError as error:
                divergence = str(error)
            else:
                history = run.history(rounds)
                assert history is not None, f"{run.folder}: the run returned without having ended"
        if history is None:
            candidate.state, candidate.note = "diverged", str(divergence)
            return run.finished_rounds()
        return history


# How often TPE is asked again when it proposes what has been tried.
PROPOSALS = 10


def _propose(tuned: Tuned, count: int) -> Values:
    """TPE's choice, which follows from the seed and the candidates so far alone."""
    import optuna  # noqa: PLC0415  (an extra)

    method, tried = tuned.method, tuned.candidates
    space, seed = method.space, method.setting.seed
    names = [".".join(map(str, place)) for place in space]
    sampler = optuna.samplers.TPESampler(
        seed=random.key(seed, "halving", len(tried)) % 2**32, n_startup_trials=max(2, count // 2)
    )
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    optuna.logging.set_verbosity(verbosity)
    # Shares of the ranges: scales are ours, so that values have few digits.
    choices: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.FloatDistribution(0.0, 1.0) for name in names
    }
    states = optuna.trial.TrialState
    for candidate in tried:
        value = candidate.accuracies[0]
        shares = [kind.share(number) for kind, number in zip(space.values(), candidate.values, strict=True)]
        study.add_trial(
            optuna.trial.create_trial(
                # Optuna would ignore failed trials; one that was pruned without a value counts as the worst.
                state=states.PRUNED if value is None else states.COMPLETE,
                value=value,
                params=dict(zip(names, shares, strict=True)),
                distributions=choices,
            )
        )
    known = {candidate.values for candidate in tried}
    for _ in range(PROPOSALS):
        proposed = study.ask(choices).params
        values = tuple(kind.value(proposed[name]) for name, kind in zip(names, space.values(), strict=True))
        if values not in known:
            return values
    generator = random.numpy_generator(seed, "halving values", len(tried))
    while True:
        values = tuple(kind.value(float(generator.random())) for kind in space.values())
        if values not in known:
            return values
