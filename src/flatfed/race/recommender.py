"""Which algorithm should a task use? A race of a few methods on the task itself.

The methods that the race of all algorithms found best are tuned by halving on the task's validation samples,
losers are dropped from rung to rung, and the last few run under seeds that tuning did not see, beside tuned
FedAvg and what the config says. The validation samples choose the winner; the test samples, where there are
some, only say how good it is.

Run folders and recommend.json, which fixes the effort, are the record: what was interrupted goes on.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

from flatfed.core.errors import DivergedError, FlatfedError, shown
from flatfed.core.tree import first_leaf
from flatfed.race.effort import REFERENCES, USUAL, Effort, affordable
from flatfed.race.portfolio import Portfolio, portfolio
from flatfed.race.recommendation import Costs, Finalist, Recommendation
from flatfed.race.standings import BASELINE
from flatfed.runs.budget import Pace, gradients_of
from flatfed.runs.files import read_sealed, write_sealed
from flatfed.runs.halving import Candidate, Method, Tuning, Values, Watch, evaluation_interval
from flatfed.runs.identity import digest_of
from flatfed.runs.setting import PlannedRun, Setting
from flatfed.runs.statistics import ACCURACY, VALIDATION, last, total

SHARE = 0.1
"""Of the clients' samples, held out where a task has no validation samples."""
TUNING_SEED = 100
"""Added to the config's seed."""
CONFIGURED = "as configured: "
"""Before the name of the config's own algorithm."""


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
    def validated(self) -> Setting:
        """The setting with validation samples."""
        setting = with_validation(self.setting)
        setting.check()
        return setting

    @cached_property
    def base(self) -> Setting:
        """That, with the workers that are quicker."""
        return changed(self.validated, self.timed[0])

    @cached_property
    def first_seed(self) -> int:
        return self.validated.seed

    @cached_property
    def timing(self) -> Setting:
        """That of tuning, under a seed of its own, but for the workers."""
        rounds = self.validated.tables["training"]["rounds"]
        every = evaluation_interval(rounds)
        return changed(self.validated, seed=self.first_seed + TUNING_SEED, evaluate_every=every)

    @cached_property
    def for_tuning(self) -> Setting:
        return changed(self.timing, self.timed[0])

    @cached_property
    def whole(self) -> int:
        """Gradients of a whole run with one gradient per step."""
        return self._gradients({"name": BASELINE})

    def _gradients(self, algorithm: Mapping[str, Any]) -> int:
        run = self.timing.planned(algorithm)
        return gradients_of(self.timing.task_of(self.timing.seed).federation, run.algorithm, run.training)

    @cached_property
    def configured(self) -> Mapping[str, Any]:
        """The config's own algorithm."""
        algorithm: Mapping[str, Any] = self.validated.tables.get("algorithm", {"name": BASELINE})
        return algorithm

    @cached_property
    def dearest(self) -> float:
        """How many times as many gradients the methods take that may run to the end, at most."""
        algorithms = [self.configured, *(proposal.algorithm for proposal in self.shipped.proposals)]
        return max(self._gradients(algorithm) for algorithm in algorithms) / self.whole

    @cached_property
    def timed(self) -> tuple[int | None, Pace]:
        """How many workers to take, None for a worker per core, and how quick they are.

        Runs of small models are over before several processes have paid for their start.
        """
        run, task = self.timing.planned({"name": BASELINE}), self.timing.task_of(self.timing.seed)
        execution = run.execution
        free = execution.workers is None and execution.engine == "local" and execution.device == "cpu"
        paces: dict[int | None, Pace] = {}
        for _ in range(2):  # the first time everything is slow
            for workers in (None, 1) if free else (None,):
                chosen = execution if workers is None else execution.replaced(workers=workers)
                paces[workers] = Pace.measured(task, run.algorithm, run.training, chosen)

        def seconds(workers: int | None) -> float:
            return USUAL.seconds(self.whole, self.dearest, paces[workers])

        best = min(paces, key=seconds)
        return best, paces[best]

    @property
    def pace(self) -> Pace:
        return self.timed[1]

    @cached_property
    def effort(self) -> Effort:
        """As recorded, if this was begun before: time runs differently each time."""
        path = self.base.root / "recommend.json"
        request = digest_of([self.seeds, self.gradients, self.seconds, self.bytes_per_round])
        if path.exists():
            content = read_sealed(path)
            if content["request"] == request:
                return Effort(**content["effort"])
        effort = affordable(self.whole, self.dearest, self.pace, self.seeds, self.gradients, self.seconds)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_sealed(path, {"request": request, "effort": asdict(effort)})
        return effort

    @cached_property
    def rounds(self) -> int:
        return max(1, round(self.effort.share * self.base.tables["training"]["rounds"]))

    @property
    def tuning_gradients(self) -> int:
        """Of a whole run of tuning, the same for all methods."""
        return int(self.whole * self.effort.share)

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
        return replace(self.effort, methods=len(entrants)).seconds(self.whole, self.dearest, self.pace)

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
                # Refuses a method of which not even a round fits into the first rung.
                Tuning.checked([method], self.effort.halving, self.tuning_gradients)
                costs = Costs.measured(method)
            except FlatfedError as error:
                left_out[proposal.label] = str(error)
                continue
            if self._sends_too_much(costs):
                left_out[proposal.label] = costs.traffic_text
                continue
            entrants[proposal.label] = method, costs
        if not entrants:
            label, reason = next(iter(left_out.items()))
            raise FlatfedError(
                f"no method is left to try ({label}: {reason}); allow more bytes per round, or compress "
                "uploads with algorithm.compress"
            )
        return entrants, left_out

    def _sends_too_much(self, costs: Costs) -> bool:
        return self.bytes_per_round is not None and costs.traffic > self.bytes_per_round

    def run(self, watch: Watch) -> Recommendation:
        """Trains what is missing of it all."""
        entrants, left_out = self.entrants
        methods = [method for method, _ in entrants.values()]
        tuning = Tuning.checked(methods, self.effort.halving, self.tuning_gradients, self.effort.survivors)
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
        name = self.for_tuning.planned(self.configured).algorithm.name
        own = Method.of(CONFIGURED + name, self.configured, self.for_tuning)
        costs = Costs.measured(own)
        if self._sends_too_much(costs):
            left_out = {**left_out, own.label: costs.traffic_text}
        else:
            finalists.append(self._final(own, own.first_values, costs, watch))
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


def changed(setting: Setting, workers: int | None = None, **training: Any) -> Setting:
    tables = {**setting.tables, "training": {**setting.tables["training"], **training}}
    return Setting(tables, setting.root, setting.task, workers)


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
