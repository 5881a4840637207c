"""A recommendation for a task: from Python, as tables, as a page and as a config file ready to run."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path

from flatfed.core.errors import FlatfedError, FlatfedWarning, shown
from flatfed.core.files import as_path
from flatfed.core.settings import Training
from flatfed.diagnostics.figures import Table, TableCell, cell
from flatfed.engines.execution import Execution
from flatfed.race.effort import seconds_of
from flatfed.race.recommendation import Finalist, Recommendation
from flatfed.race.recommender import Recommender
from flatfed.report.page import config_file, write_report
from flatfed.runs.files import MARK, check_replaceable, write_atomically
from flatfed.runs.halving import Candidate
from flatfed.runs.ranking import Interval
from flatfed.runs.setting import Setting
from flatfed.runs.statistics import MEGABYTE
from flatfed.training.loop import Callback
from flatfed.training.task import Task

REPORT, CONFIG = "report.html", "recommended.toml"


def recommend(
    task: Task,
    training: Training,
    execution: Execution = Execution(),  # noqa: B008 (frozen)
    *,
    budget: str | None = None,
    gradients: int | None = None,
    bytes_per_round: int | None = None,
    seeds: int = 3,
    folder: str | Path = "runs/recommend",
) -> Recommendation:
    """Races a few methods on a task, and says which one to use with which settings.

    `training` says for how many rounds and with which participation and local work; step sizes are tuned.
    `budget` ("30m") or `gradients` limit how much is tried, `bytes_per_round` what a participant may send and
    receive. A tenth of the samples is held out to choose by, unless the task has validation samples. What is
    in the folder already is not run again.
    """
    if not isinstance(task, Task) or not isinstance(training, Training):
        raise FlatfedError(f"recommend({shown(task)}, {shown(training)}): give a flatfed.Task and a Training")
    setting = Setting.of_task(task, training, execution, as_path("folder", folder))
    seconds = None if budget is None else seconds_of(budget)
    recommender = Recommender(setting, seeds, gradients, seconds, bytes_per_round)
    check_outputs(recommender)
    outcome = recommender.run(_unwatched)
    for note in (*write_outcome(outcome), *(f"left out: {note}" for note in outcome.damaged)):
        warnings.warn(note, FlatfedWarning, stacklevel=2)
    return outcome


def _unwatched(candidate: Candidate, rung: int, rounds: int) -> Callback:
    return lambda now: None


def check_outputs(recommender: Recommender) -> None:
    """Refuses to replace files that are not flatfed's, before anything is trained."""
    for name in (REPORT, CONFIG):
        check_replaceable(recommender.setting.root / name)


def write_outcome(outcome: Recommendation) -> list[str]:
    """The page about the final runs, and the winner's config file if it can be run by one."""
    labels = {
        run.folder: one.label for one in outcome.ranking for run in one.runs if run.divergence() is None
    }
    text = config_file(outcome.config)
    if text is not None:
        head = f"# {MARK.decode()}\n# {outcome.best.label}, recommended for this task; flatfed run {CONFIG}\n"
        write_atomically(outcome.folder / CONFIG, (head + text).encode())
    return write_report(
        list(labels),
        outcome.folder / REPORT,
        labels=labels,
        title=f"Recommended: {outcome.best.label}",
        tables=[ranking_table(outcome), costs_table(outcome), tuning_table(outcome)],
    )


def ranking_table(outcome: Recommendation) -> Table:
    """The final runs, the best on validation samples first."""
    columns = ["method", "settings", "validation %", f"{outcome.judged_on} %\n[95 %]", "the best is ahead by"]
    rows = []
    for one in outcome.ranking:
        reached, behind = outcome.interval(one), outcome.behind(one)
        validation = sum(one.validation) / len(one.validation) if one.validation else None
        accuracy = reached.text() if reached else f"{one.diverged} of {len(one.runs)} diverged"
        rows.append(
            [
                cell(one.label),
                cell(" ".join(one.method.texts(one.values))),
                cell(validation, 1, 100),
                TableCell(accuracy, reached.mean if reached else None),
                cell(gap_text(behind)),
            ]
        )
    note = f"Sorted by the mean accuracy on validation samples, which choose. {beside_others(outcome)}"
    return Table("ranking", "Ranking", columns, rows, note)


def gap_text(gap: Interval | None) -> str:
    if gap is None:
        return "–"
    mean, low, high = (f"{100 * value:+.1f}" for value in (gap.mean, gap.low, gap.high))
    return f"{mean} [{low}, {high}]"


def beside_others(outcome: Recommendation) -> str:
    """How sure it is that the best is the best; last, what is as good."""
    best, sentences = outcome.best, []
    if len(best.runs) == 1:
        sentences.append("There is one seed, so intervals are over samples alone.")
    if outcome.ahead:
        sentences.append(
            f"Better on the {outcome.judged_on} samples, which do not choose: {', '.join(outcome.ahead)}."
        )
    if outcome.alike:
        sentences.append(f"Cannot be told apart from {best.label}: {', '.join(outcome.alike)}.")
    elif not outcome.ahead:
        sentences.append(f"{best.label} is better than all others here, each compared by itself.")
    return " ".join(sentences)


def costs_table(outcome: Recommendation) -> Table:
    """What the final runs cost, beside what they reached."""
    columns = [
        "method", f"{outcome.judged_on} %", "gradients", "MB in all", "kB per round\ndown + up",
        "kB a client keeps", "gradients\nper step",
    ]  # fmt: skip
    rows = []
    for one in outcome.ranking:
        scores, costs = outcome.scores(one), one.costs
        rows.append(
            [
                cell(one.label),
                cell(sum(scores) / len(scores) if scores else None, 1, 100),
                cell(one.gradients, 0),
                cell(one.bytes / MEGABYTE, 1),
                TableCell(
                    f"{costs.bytes_down / 1000:,.1f} + {costs.bytes_up / 1000:,.1f}",
                    costs.bytes_down + costs.bytes_up,
                ),
                cell(costs.client_bytes / 1000, 1),
                cell(costs.gradients_per_step, 0),
            ]
        )
    return Table("costs", "Cost against gain", columns, rows)


def tuning_table(outcome: Recommendation) -> Table:
    """How far every method came in tuning, by its best configuration."""
    counts = outcome.effort.halving.counts
    columns = ["method", *(f"validation %\nrung {rung + 1}" for rung in range(len(counts))), "best settings"]
    rows = []
    for one in sorted(outcome.tuned, key=lambda tuned: tuned.worth, reverse=True):
        reached = [_best_of_rung(one.candidates, rung) for rung in range(len(counts))]
        settings = " ".join(one.method.texts(one.best.values)) if one.best else "all diverged"
        rows.append([cell(one.method.label), *(cell(value, 1, 100) for value in reached), cell(settings)])
    left_out = "; ".join(f"{label}: {reason}" for label, reason in outcome.left_out.items())
    notes = [origin(outcome), *([f"Left out: {left_out}."] if left_out else [])]
    return Table("tuning", "Tuning", columns, rows, "\n".join(notes))


def _best_of_rung(candidates: Sequence[object], rung: int) -> float | None:
    reached = [getattr(one, "accuracies", [])[rung : rung + 1] for one in candidates]
    values = [value for accuracies in reached for value in accuracies if value is not None]
    return max(values, default=None)


def plain_words(outcome: Recommendation) -> list[str]:
    """What a person should know, in sentences."""
    best = outcome.best
    lines = [
        f"Recommended: {best.label} ({' '.join(best.method.texts(best.values))}). {beside_others(outcome)}"
    ]
    cheaper = cheapest_alike(outcome)
    if cheaper is not None:
        lines.append(
            f"Of those, {cheaper.label} is the cheapest: {cheaper.gradients:,} gradients and "
            f"{cheaper.bytes / MEGABYTE:,.1f} MB where {best.label} takes {best.gradients:,} and "
            f"{best.bytes / MEGABYTE:,.1f}."
        )
    return [*lines, origin(outcome)]


def origin(outcome: Recommendation) -> str:
    """Where the methods and their first settings come from."""
    if not outcome.warm_start:
        return "No results of other tasks were at hand: the methods are a usual choice."
    return (
        "Methods and first settings come from the race of all algorithms on other tasks: "
        f"{'; '.join(outcome.warm_start)}."
    )


def cheapest_alike(outcome: Recommendation) -> Finalist | None:
    """A method that cannot be told apart from the best and takes less of one thing and no more of another."""
    best = outcome.best
    alike = [
        one
        for one in outcome.ranking
        if one.label in outcome.alike
        and (one.gradients, one.bytes) != (best.gradients, best.bytes)
        and one.gradients <= best.gradients
        and one.bytes <= best.bytes
    ]
    return min(alike, key=lambda one: (one.gradients, one.bytes), default=None)
