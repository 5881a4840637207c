"""Runs the race: method by method on a task, tuned on one seed and run under others, into a csv file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from flatfed.algorithms import build
from flatfed.core.errors import DivergedError, FlatfedError
from flatfed.core.tree import first_leaf
from flatfed.race.entries import Entry
from flatfed.race.preset import Preset, RaceTask
from flatfed.race.results import Phase, Result, Results
from flatfed.runs.budget import Pace, gradients_of
from flatfed.runs.environment import source_commit
from flatfed.runs.halving import Candidate, Method, Tuned, Tuning, Values, Watch, evaluation_interval
from flatfed.runs.setting import PlannedRun, Setting
from flatfed.runs.statistics import ACCURACY, VALIDATION, last, mean, tail, total, within
from flatfed.training.loop import History

EVALUATIONS = 12
"""Of a final run, at equal distances, one of them in the middle."""
BYTES = ("bytes_up", "bytes_down")


@dataclass(frozen=True)
class Limits:
    """What FedAvg's whole run on a task takes."""

    rounds: int
    gradients: int
    bytes: int


@dataclass(frozen=True)
class TaskRace:
    """One task of the race on this machine: where its runs are, and its results."""

    preset: Preset
    task: RaceTask
    root: Path
    results: Results
    execution: Mapping[str, Any] = field(default_factory=lambda: {"workers": 1})

    @cached_property
    def setting(self) -> Setting:
        """Under the seed on which methods are tuned."""
        training = self.task.config["training"]
        every = evaluation_interval(training["rounds"])
        changes = {"seed": self.preset.tuning_seed, "evaluate_every": every}
        execution = {"checkpoint_every": training["rounds"], **self.execution}
        tables = {**self.task.config, "training": {**training, **changes}, "execution": execution}
        return Setting(tables, self.root / self.task.name)

    @cached_property
    def limits(self) -> Limits:
        plain = self.setting.planned({"name": "fedavg"})
        task, training = self.setting.task_of(self.preset.tuning_seed), plain.training
        size = sum(value.numel() * value.element_size() for value in task.model.state_dict().values())
        members = training.cohort_size(len(task.federation))
        gradients = gradients_of(task.federation, build("fedavg"), training)
        return Limits(training.rounds, gradients, 2 * size * members * training.rounds)

    def method(self, entry: Entry) -> Method:
        return Method.of(entry.label, entry.algorithm, self.setting, own=False)

    def rows(self, entry: Entry) -> tuple[list[Result], list[Result]]:
        """What there is already of a method: its tuning and its final runs."""
        setting = self.preset.digest(self.task, entry)
        tuning, final = (
            self.results.of(self.task.name, entry.label, phase, setting) for phase in ("tuning", "final")
        )
        return tuning, final

    def missing_seeds(self, entry: Entry) -> list[int]:
        """The final runs that there are no rows of; none for a method whose configurations all diverged."""
        tuning, final = self.rows(entry)
        if tuning and not any(row.chosen for row in tuning):
            return []
        run = {row.seed for row in final}
        return [seed for seed in self.preset.seeds if seed not in run]

    def is_missing(self, entry: Entry) -> bool:
        return bool(self.missing_seeds(entry)) or (entry.tuned and not self.rows(entry)[0])

    def run(self, entry: Entry, watch: Watch) -> None:
        """Tunes a method and runs it under the seeds; what has a row in the results is left as it is."""
        method = self.method(entry)
        values = self._tuned_values(entry, method, watch) if entry.tuned else method.first_values
        if values is not None:
            for seed in self.missing_seeds(entry):
                self._run_final(entry, method, values, seed, watch)

    def _tuned_values(self, entry: Entry, method: Method, watch: Watch) -> Values | None:
        rows, _ = self.rows(entry)
        if not rows:
            tuning = Tuning.checked([method], self.preset.halving, self.limits.gradients)
            (tuned,) = tuning.run(watch)
            rows = self.tried(entry, tuned, "tuning")
            self.results.add(rows)
        best = next((row for row in rows if row.chosen), None)
        return None if best is None else method.values_of(best.values)

    def tried(self, entry: Entry, tuned: Tuned, phase: Phase) -> list[Result]:
        """A row for every configuration that was tried."""
        best = tuned.best
        rows = []
        for number, candidate in enumerate(tuned.candidates):
            if candidate.state == "left out":
                raise FlatfedError(candidate.note)
            history = candidate.run.finished_rounds()
            rows.append(
                Result(
                    **self._common(entry, tuned.method, candidate.values, candidate.run, history),
                    phase=phase,
                    configuration=number,
                    chosen=candidate is best,
                    state=candidate.state,
                    validation_accuracy=candidate.accuracies[-1],
                )
            )
        return rows

    def final_run(self, method: Method, values: Values, seed: int) -> PlannedRun:
        """Of a method with the settings that were chosen."""
        every = max(1, self.task.config["training"]["rounds"] // EVALUATIONS)
        return method.planned(values, seed=seed, evaluate_every=every)

    def _run_final(self, entry: Entry, method: Method, values: Values, seed: int, watch: Watch) -> None:
        run, rounds = self.final_run(method, values, seed), self.limits.rounds
        task = self.setting.task_of(seed)
        # A run is also a candidate, of which there is only one.
        candidate = Candidate(method, values, run)
        divergence = run.divergence()
        if divergence is None and run.history(rounds) is None:
            try:
                run.train(task, rounds, [watch(candidate, -1, rounds)], complete=True)
            except DivergedError as error:
                divergence = str(error)
        history, test = run.finished_rounds(), task.federation.test
        row = Result(
            **self._common(entry, method, values, run, history),
            phase="final",
            chosen=True,
            state="complete" if divergence is None else "diverged",
            **({} if divergence is not None else self._reached(run, history)),
            test_samples=None if test is None else len(first_leaf(test[0])),
        )
        self.results.add([row])

    def _reached(self, run: PlannedRun, history: History) -> dict[str, float | None]:
        limits, spread = self.limits, run.client_spreads().get("train")
        return {
            "validation_accuracy": last(history, VALIDATION),
            "test_accuracy": last(history),
            "test_tail": mean(tail(history, ACCURACY)),
            "test_at_gradients": within(history, limits.gradients, "gradient_evaluations"),
            "test_at_bytes": within(history, limits.bytes, *BYTES),
            "train_accuracy": None if spread is None else spread.mean,
        }

    def _common(
        self, entry: Entry, method: Method, values: Values, run: PlannedRun, history: History
    ) -> dict[str, Any]:
        diagnostics = ("train_loss", "client_drift", "update_norm", "flatness_distance")
        return {
            "task": self.task.name,
            "method": entry.label,
            "seed": run.training.seed,
            "settings": " ".join(method.assignments(values)),
            "rounds": len(history),
            "gradients": int(total(history, "gradient_evaluations")),
            "bytes_up": int(total(history, "bytes_up")),
            "bytes_down": int(total(history, "bytes_down")),
            **{name: mean(tail(history, name)) for name in diagnostics},
            "seconds": round(total(history, "seconds"), 3),
            "commit": run.commit() or source_commit() or "unknown",
            "setting": self.preset.digest(self.task, entry),
        }

    def seconds(self, entries: Sequence[Entry], pace: Pace) -> float:
        """An estimate of what is missing of some methods."""
        halving, limits = self.preset.halving, self.limits
        seconds = 0.0
        for entry in entries:
            if entry.tuned and not self.rows(entry)[0]:
                seconds += pace.seconds(sum(halving.counts), halving.total(limits.gradients))
            each = limits.gradients * build(entry.algorithm).gradient_evaluations
            seeds = self.missing_seeds(entry)
            seconds += pace.seconds(len(seeds), len(seeds) * each)
        return seconds

    def pace(self) -> Pace:
        plain = self.setting.planned({"name": "fedavg"})
        task = self.setting.task_of(self.preset.tuning_seed)
        return Pace.measured(task, plain.algorithm, plain.training, plain.execution)
