"""Which algorithm should a task use? A race of a few methods on the task itself.

The methods that the race of all algorithms found best are tuned by halving on the task's validation samples,
losers are dropped from rung to rung, and the last few run under seeds that tuning did not see, beside tuned
FedAvg and what the config says. The validation samples choose the winner; the test samples, where there are
some, only say how good it is.

Run folders and recommend.json, which fixes the effort, are the record: what was interrupted goes on.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from flatfed.core.algorithm import Algorithm
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, shown
from flatfed.core.settings import Training
from flatfed.core.tree import first_leaf
from flatfed.race.effort import REFERENCES, Effort, affordable
from flatfed.race.portfolio import Portfolio, portfolio
from flatfed.race.standings import BASELINE
from flatfed.runs.budget import Pace, gradients_of
from flatfed.runs.files import read_sealed, write_sealed
from flatfed.runs.halving import Candidate, Method, Tuned, Tuning, Values, Watch
from flatfed.runs.identity import digest_of
from flatfed.runs.ranking import Interval, difference, interval
from flatfed.runs.setting import PlannedRun, Setting
from flatfed.runs.statistics import ACCURACY, VALIDATION, last, total
from flatfed.runs.train import train
from flatfed.training.loop import Progress

SHARE = 0.1
"""Of the clients' samples, held out where a task has no validation samples."""
TUNING_SEED = 100
"""Added to the config's seed."""
CONFIGURED = "as configured: "
"""Before the name of the config's own algorithm."""


@dataclass(frozen=True)
class Costs:
    """What a method takes of a participant, from one round."""

    bytes_down: float
    bytes_up: float
    client_bytes: int
    """That a client keeps from round to round."""
    gradients_per_step: int

    @classmethod
    def measured(cls, method: Method) -> Costs:
        """Also tries whether the method can train the task at all."""
        run, setting = method.planned(method.first_values), method.setting
        seen: list[Progress] = []
        training = run.training.replaced(rounds=1, lr=run.algorithm.optimizer.step_sizes.low, lr_warmup=None)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FlatfedWarning)
            task = setting.task_of(setting.seed)
            train(task, run.algorithm, training, run.execution, callbacks=[seen.append], progress=False)
        (now,) = seen
        kept = sum(now.dimensions.length(vector) for vector in run.algorithm.client_vectors)
        members = now.record["participants"]
        return cls(
            now.record["bytes_down"] / members,
            now.record["bytes_up"] / members,
            4 * kept,
            run.algorithm.gradient_evaluations,
        )


@dataclass(frozen=True)
class Finalist:
    """A method with its settings, and its runs under seeds that tuning did not see."""

    method: Method
    values: Values
    runs: Sequence[PlannedRun]
    validation: Sequence[float]
    """By seed."""
    test: Sequence[float]
    """By seed; empty where the task has no test samples."""
    diverged: int
    costs: Costs
    gradients: int
    bytes: int

    @property
    def label(self) -> str:
        return self.method.label

    @property
    def complete(self) -> bool:
        return self.diverged == 0

    @property
    def algorithm(self) -> Algorithm:
        return self.runs[0].algorithm

    @property
    def training(self) -> Training:
        return self.runs[0].training


@dataclass(frozen=True)
class Recommendation:
    """What came out, the best first."""

    ranking: Sequence[Finalist]
    tuned: Sequence[Tuned]
    effort: Effort
    warm_start: Sequence[str]
    """The race's tasks that the methods and their first settings come from."""
    left_out: Mapping[str, str]
    """Methods that were not tried, and why."""
    judged_on: str
    """test or validation: the samples of the intervals."""
    samples: int
    """How many those are."""
    folder: Path

    @property
    def best(self) -> Finalist:
        return self.ranking[0]

    @property
    def algorithm(self) -> Algorithm:
        return self.best.algorithm

    @property
    def training(self) -> Training:
        return self.best.training

    def scores(self, one: Finalist) -> Sequence[float]:
        return one.test if self.judged_on == "test" else one.validation

    def interval(self, one: Finalist) -> Interval | None:
        return interval(self.scores(one), self.samples) if one.complete else None

    def behind(self, one: Finalist) -> Interval | None:
        """How far the best is ahead of it."""
        if not one.complete or one is self.best:
            return None
        return difference(self.scores(self.best), self.scores(one), self.samples)

    @property
    def alike(self) -> list[str]:
        """What cannot be told apart from the best."""
        gaps = ((one.label, self.behind(one)) for one in self.ranking)
        return [label for label, gap in gaps if gap is not None and gap.low <= 0 <= gap.high]

    @property
    def damaged(self) -> list[str]:
        """Why configurations were left out in tuning, whose folders are damaged."""
        tried = (candidate for one in self.tuned for candidate in one.candidates)
        return [candidate.note for candidate in tried if candidate.state == "left out"]

    @property
    def config(self) -> dict[str, Any]:
        """The best method's, as its first run's folder records it."""
        return dict(self.best.runs[0].config)


@dataclass(frozen=True)
class Recommender:
    """The race on one task: its setting, and how much may be tried."""

    setting: Setting
    seeds: int = 3
    gradients: int | None = None
    seconds: float | None = None
    bytes_per_round: int | None = None
    """The most that a participant may send and receive in a round."""
    known: Portfolio | None = None
    """In place of the one that was shipped."""

    def __post_init__(self) -> None:
        if self.seconds is not None and self.gradients is not None:
            raise FlatfedError("budget and gradients: give only one of them")
        for name in ("seeds", "gradients", "bytes_per_round"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise FlatfedError(f"{name} = {shown(value)}: give a whole number, 1 or more")

    @cached_property
    def base(self) -> Setting:
        """The setting with validation samples."""
        setting = with_validation(self.setting)
        setting.check()
        return setting

    @cached_property
    def first_seed(self) -> int:
        return self.base.seed

    @cached_property
    def for_tuning(self) -> Setting:
        rounds = self.base.tables["training"]["rounds"]
        return changed(self.base, seed=self.first_seed + TUNING_SEED, evaluate_every=rounds)

    @cached_property
    def whole(self) -> int:
        """Gradients of a whole run with one gradient per step."""
        run = self.for_tuning.planned({"name": BASELINE})
        federation = self.for_tuning.task_of(run.training.seed).federation
        return gradients_of(federation, run.algorithm, run.training)

    @cached_property
    def pace(self) -> Pace:
        run = self.for_tuning.planned({"name": BASELINE})
        return Pace.measured(
            self.for_tuning.task_of(run.training.seed), run.algorithm, run.training, run.execution
        )

    @cached_property
    def effort(self) -> Effort:
        """As recorded, if this was begun before: time runs differently each time."""
        path = self.base.root / "recommend.json"
        request = digest_of([self.seeds, self.gradients, self.seconds, self.bytes_per_round])
        if path.exists():
            content = read_sealed(path)
            if content["request"] == request:
                return Effort(**content["effort"])
        effort = affordable(self.whole, self.pace, self.seeds, self.gradients, self.seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, {"request": request, "effort": asdict(effort)})
        return effort

    @cached_property
    def rounds(self) -> int:
        return max(1, round(self.effort.share * self.base.tables["training"]["rounds"]))

    @property
    def total_rounds(self) -> int:
        """Of all runs, where every step takes one gradient."""
        effort, before, rounds = self.effort, 0, 0
        for methods, count, limit in zip(
            effort.survivors, effort.halving.counts, effort.halving.limits(self.rounds), strict=True
        ):
            rounds += methods * count * (limit - before)
            before = limit
        return rounds + (effort.finalists + REFERENCES) * effort.seeds * self.rounds

    @cached_property
    def estimate(self) -> float:
        """Seconds of the whole, if nothing has been run yet."""
        entrants, _ = self.entrants
        return replace(self.effort, methods=len(entrants)).seconds(self.whole, self.pace)

    @cached_property
    def shipped(self) -> Portfolio:
        return self.known or portfolio()

    @cached_property
    def entrants(self) -> tuple[dict[str, tuple[Method, Costs]], dict[str, str]]:
        """As many methods as the effort has that the task allows, and why others were left out."""
        entrants: dict[str, tuple[Method, Costs]] = {}
        left_out: dict[str, str] = {}
        for proposal in self.shipped.proposals:
            if len(entrants) == self.effort.methods:
                break
            try:
                method = proposal.method(self.for_tuning)
                costs = Costs.measured(method)
            except FlatfedError as error:
                left_out[proposal.label] = str(error)
                continue
            traffic = costs.bytes_down + costs.bytes_up
            if self.bytes_per_round is not None and traffic > self.bytes_per_round:
                left_out[proposal.label] = f"{traffic:,.0f} bytes for each participant of a round"
                continue
            entrants[proposal.label] = method, costs
        if not entrants:
            label, reason = next(iter(left_out.items()))
            raise FlatfedError(
                f"no method is left to try ({label}: {reason}); allow more bytes per round, or compress "
                "uploads with algorithm.compress"
            )
        return entrants, left_out

    def run(self, watch: Watch) -> Recommendation:
        """Trains what is missing of it all."""
        entrants, left_out = self.entrants
        gradients = int(self.whole * self.effort.share)
        methods = [method for method, _ in entrants.values()]
        tuning = Tuning.checked(methods, self.effort.halving, gradients, self.effort.survivors)
        tuned = tuning.run(watch)
        best = sorted((one for one in tuned if one.best), key=lambda one: one.worth, reverse=True)
        if not best:
            raise DivergedError("all configurations diverged; set clip, or take fewer local steps")
        chosen = best[: self.effort.finalists]
        chosen += [one for one in best[self.effort.finalists :] if one.method.label == BASELINE]
        finalists = []
        for one in chosen:
            assert one.best is not None, "those without were left out"
            finalists.append(self._final(one.method, one.best.values, entrants[one.method.label][1], watch))
        algorithm = self.base.tables.get("algorithm", {"name": BASELINE})
        name = self.for_tuning.planned(algorithm).algorithm.name
        configured = Method.of(CONFIGURED + name, algorithm, self.for_tuning)
        finalists.append(self._final(configured, configured.first_values, Costs.measured(configured), watch))
        if not any(one.complete for one in finalists):
            raise DivergedError("all final runs diverged; set clip, or take fewer local steps")
        task = self.base.task_of(self.first_seed)
        judged_on = "test" if task.federation.test is not None else "validation"
        return Recommendation(
            ranking=sorted(finalists, key=_order),
            tuned=tuned,
            effort=self.effort,
            warm_start=self.shipped.tasks,
            left_out=left_out,
            judged_on=judged_on,
            samples=len(first_leaf(task.federation.evaluated[judged_on][0])),
            folder=self.base.root,
        )

    def _final(self, method: Method, values: Values, costs: Costs, watch: Watch) -> Finalist:
        every = self.base.tables["training"].get("evaluate_every", 1)
        runs, validation, test, diverged = [], [], [], 0
        gradients = traffic = 0
        for seed in range(self.first_seed, self.first_seed + self.seeds):
            run = method.planned(
                values, seed=seed, rounds=self.rounds, evaluate_every=min(every, self.rounds)
            )
            runs.append(run)
            history = self._trained(method, values, run, watch)
            if history is None:
                diverged += 1
                continue
            validation.append(last(history, VALIDATION) or 0.0)
            if (accuracy := last(history, ACCURACY)) is not None:
                test.append(accuracy)
            gradients = int(total(history, "gradient_evaluations"))
            traffic = int(total(history, "bytes_up", "bytes_down"))
        return Finalist(method, values, runs, validation, test, diverged, costs, gradients, traffic)

    def _trained(self, method: Method, values: Values, run: PlannedRun, watch: Watch) -> Any:
        """The history of a final run; None if it diverged."""
        if (history := run.history(self.rounds)) is not None or run.divergence() is not None:
            return history
        candidate = Candidate(method, values, run)
        task = self.for_tuning.task_of(run.training.seed)
        try:
            run.train(task, self.rounds, [watch(candidate, -1, self.rounds)], complete=True)
        except DivergedError:
            return None
        return run.history(self.rounds)


def _order(one: Finalist) -> tuple[bool, float]:
    return not one.complete, -statistics.fmean(one.validation or [0.0])


def changed(setting: Setting, **training: Any) -> Setting:
    tables = {**setting.tables, "training": {**setting.tables["training"], **training}}
    return Setting(tables, setting.root, setting.task)


def with_validation(setting: Setting) -> Setting:
    """The same setting, in which a tenth of the clients' samples is held out unless some are already."""
    task = setting.task_of(setting.seed)
    if task.federation.validation is not None:
        return setting
    if setting.task is not None:
        held_out = replace(task, federation=task.federation.with_validation(SHARE))
        return Setting(setting.tables, setting.root, held_out)
    data = {**setting.tables.get("data", {}), "validation": SHARE}
    return Setting({**setting.tables, "data": data}, setting.root)
