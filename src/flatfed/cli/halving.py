"""Tuning by resuming runs: `flatfed tune --halving`."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.table import Table
from rich.text import Text

from flatfed.cli.terminal import check_damage, console, print_json, say, tell
from flatfed.core.errors import DivergedError, printable
from flatfed.training.progress import Watcher, round_progress

if TYPE_CHECKING:
    from flatfed.runs.halving import Candidate, Tuned, Tuning
    from flatfed.training.loop import Callback


@dataclass(frozen=True)
class Subject:
    """A config to tune, and the command that runs it, to which settings can be appended."""

    label: str
    config: Mapping[str, Any]
    command: str


def set_options(assignments: Sequence[str]) -> str:
    return "".join(f" --set {shlex.quote(assignment)}" for assignment in assignments)


def tune_by_halving(
    subjects: Sequence[Subject],
    runs: Path,
    seed: int | None,
    configurations: int | None,
    gradients: int | None,
    as_json: bool = False,
) -> None:
    """Tunes every subject with the same number of configurations and gradients, and prints the best."""
    from flatfed.runs.halving import Halving, Method, Tuning
    from flatfed.runs.setting import Setting
    from flatfed.training.config import Config, with_assignments

    methods = []
    for subject in subjects:
        changes = [] if seed is None else [f"training.seed={seed}"]
        config = Config.checked(with_assignments(subject.config, changes))
        setting = Setting(config.model_dump(exclude_unset=True), runs)
        methods.append(Method.of(subject.label, config.algorithm, setting))
    halving = Halving() if configurations is None else Halving(configurations)
    tuning = Tuning.checked(methods, halving, gradients)
    results = run_tuning(tuning)
    if as_json:
        print_json({tuned.method.label: _candidate_facts(tuned) for tuned in results})
    for tuned in results:
        print_candidates(tuned, tuning)
    damaged = sum(candidate.state == "left out" for tuned in results for candidate in tuned.candidates)
    lines = [
        subject.command + set_options(best.method.assignments(best.values))
        for subject, tuned in zip(subjects, results, strict=True)
        if (best := tuned.best)
    ]
    if not lines:
        check_damage(damaged)
        raise DivergedError("all configurations diverged; set clip, or take fewer local steps")
    console.print("chosen by validation accuracy (mean of the last fifth of the rounds), best:")
    for line in lines:
        tell(line)
    tell(f"Run folders are in {runs}; the same command runs what is missing.")
    check_damage(damaged)


def _candidate_facts(tuned: Tuned) -> list[dict[str, Any]]:
    """The configurations of a method, best first."""
    return [
        {
            "assignments": tuned.method.assignments(candidate.values),
            "accuracies": dict(zip(map(str, tuned.rounds), candidate.accuracies, strict=False)),
            "gradients": candidate.gradients,
            "state": candidate.state,
            "folder": str(candidate.run.folder),
            "note": candidate.note,
            "chosen_by": "validation",
        }
        for candidate in sorted(tuned.candidates, key=lambda one: one.worth, reverse=True)
    ]


def run_tuning(tuning: Tuning) -> list[Tuned]:
    """Says how long it will take, and does it under one bar."""
    describe_work(tuning)
    counts = tuning.halving.counts
    total = 0
    for method in tuning.methods:
        ends = [0, *tuning.rung_rounds(method)]
        total += sum(count * (ends[rung + 1] - ends[rung]) for rung, count in enumerate(counts))
    with round_progress() as progress:
        bar = progress.add_task("tuning", total=total, note="", unit="rounds")

        def watch(candidate: Candidate, rung: int, rounds: int) -> Callback:
            method = candidate.method
            values = " ".join(method.texts(candidate.values))
            return Watcher(progress, bar, f"{method.label} rung {rung + 1}/{len(counts)} {values}: ")

        results = tuning.run(watch)
        progress.update(bar, completed=total, note="")
    return results


def describe_work(tuning: Tuning) -> None:
    """What will be trained, and how long it takes by a timed round."""
    halving, pace = tuning.halving, tuning.pace()
    seconds = tuning.seconds(pace)
    methods = f"each of {len(tuning.methods)} methods" if len(tuning.methods) > 1 else "one method"
    if any(method.setting.tables.get("training", {}).get("lr_cosine") for method in tuning.methods):
        say("note", "lr_cosine: early rungs end in mid-schedule, where step sizes are still large")
    tell(
        f"{halving.configurations} configurations of {methods}, in rungs of "
        f"{', '.join(map(str, halving.counts))}; {halving.total(tuning.gradients):,.0f} gradients for each "
        f"method. By a timed round about {duration(seconds)}, less what is there already."
    )


def duration(seconds: float) -> str:
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def print_candidates(tuned: Tuned, tuning: Tuning) -> None:
    method = tuned.method
    table = Table(
        title=Text(printable(f"{method.label}: {tuned.gradients:,} gradients")), title_justify="left"
    )
    names = [str(place[-1]) for place in method.space]
    rungs = [f"validation %\nround {rounds}" for rounds in tuned.rounds]
    for header in (*names, *rungs, "gradients", "state", "run folder"):
        words = header in {"state", "run folder"}
        table.add_column(header, justify="left" if words else "right", overflow="fold")
    for candidate in sorted(tuned.candidates, key=lambda one: one.worth, reverse=True):
        if candidate.state in {"diverged", "left out"}:
            values = " ".join(method.texts(candidate.values))
            say(candidate.state, f"{method.label} {values}: {candidate.note}")
        reached = ["–" if value is None else f"{100 * value:.2f}" for value in candidate.accuracies]
        reached += [""] * (len(rungs) - len(reached))
        cells = (
            *(f"{value:g}" for value in candidate.values),
            *reached,
            f"{candidate.gradients:,}",
            candidate.state,
            candidate.run.folder.name,
        )
        table.add_row(*map(printable, cells))
    console.print(table)
