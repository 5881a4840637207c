"""Which algorithm a task should use: recommend."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as RichTable
from rich.text import Text

from flatfed.cli.halving import duration
from flatfed.cli.terminal import (
    RUNS,
    AsJson,
    Assignments,
    Root,
    check_damage,
    command,
    console,
    print_json,
    say,
    table_facts,
    tell,
)
from flatfed.core.errors import printable
from flatfed.training.progress import Watcher, round_progress

if TYPE_CHECKING:
    from flatfed.diagnostics.figures import Table
    from flatfed.race.recommendation import Recommendation
    from flatfed.race.recommender import Recommender
    from flatfed.runs.halving import Candidate
    from flatfed.training.loop import Callback


@command
def recommend(
    config: Annotated[Path, typer.Argument(metavar="TASK", help="A TOML file, or my_task.py:make.")],
    budget: Annotated[
        str | None, typer.Option(help="How long it may take by a timed round, e.g. 30m.")
    ] = None,
    gradients: Annotated[int | None, typer.Option(min=1, help="Of all runs together, instead.")] = None,
    bytes_per_round: Annotated[
        int | None, typer.Option(min=1, help="The most that a participant may send and receive in a round.")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of the final runs.")] = 3,
    assignments: Assignments = None,
    runs: Root = RUNS / "recommend",
    as_json: AsJson = False,
) -> None:
    """Race a few algorithms on a task of your own, and say which one to use with which settings."""
    from flatfed.race.effort import seconds_of
    from flatfed.race.recommend import check_outputs
    from flatfed.race.recommender import Recommender
    from flatfed.runs.identity import config_digest
    from flatfed.runs.setting import Setting
    from flatfed.training.config import Config

    seconds = None if budget is None else seconds_of(budget)
    checked = Config.read(config, assignments or [])
    folder = runs / f"{Path(str(config).partition(':')[0]).stem}-{config_digest(checked)[:8]}"
    setting = Setting(checked.model_dump(exclude_unset=True), folder)
    recommender = Recommender(setting, seeds, gradients, seconds, bytes_per_round)
    check_outputs(recommender)
    _describe(recommender)
    _show(_run(recommender), as_json)


def _describe(recommender: Recommender) -> None:
    """What will be tried, and how long it takes."""
    effort, rounds = recommender.effort, recommender.base.tables["training"]["rounds"]
    if recommender.validated is not recommender.setting:
        say("note", "a tenth of the clients' samples is held out to choose by (data.validation = 0.1)")
    if recommender.rounds < rounds:
        say("note", f"the budget allows {recommender.rounds} of {rounds} rounds; more could rank otherwise")
    entrants, left_out = recommender.entrants
    for label, reason in left_out.items():
        say("left out", f"{label}: {reason}")
    tell(
        f"{len(entrants)} methods ({', '.join(entrants)}), {effort.configurations} configurations of each in "
        f"rungs of {', '.join(map(str, effort.halving.counts))}; then the best {effort.finalists} and FedAvg "
        f"under {effort.seeds} seeds of {recommender.rounds} rounds. By a timed round about "
        f"{duration(recommender.estimate)}, less what is there already."
    )


def _run(recommender: Recommender) -> Recommendation:
    total = recommender.total_rounds
    with round_progress() as progress:
        bar = progress.add_task("recommend", total=total, note="", unit="rounds")

        def watch(candidate: Candidate, rung: int, rounds: int) -> Callback:
            method = candidate.method
            phase = f"rung {rung + 1}" if rung >= 0 else f"seed {candidate.run.training.seed}"
            return Watcher(
                progress, bar, f"{method.label} {phase} {' '.join(method.texts(candidate.values))}: "
            )

        outcome = recommender.run(watch)
        progress.update(bar, completed=total, note="")
    return outcome


def _show(outcome: Recommendation, as_json: bool) -> None:
    from flatfed.race.recommend import CONFIG, REPORT, costs_table, plain_words, ranking_table, write_outcome

    for note in write_outcome(outcome):
        say("note", note)
    tables = ranking_table(outcome), costs_table(outcome)
    if as_json:
        print_json(
            {
                "recommended": outcome.best.label,
                "alike": outcome.alike,
                "ahead": outcome.ahead,
                "config": outcome.config,
                "folder": str(outcome.folder),
                **{table.name: table_facts(table)["rows"] for table in tables},
            }
        )
    for table in tables:
        console.print(_as_text(table))
    for line in plain_words(outcome):
        tell(line)
    tell(f"Config: flatfed run {shlex.quote(str(outcome.folder / CONFIG))}")
    tell(f"Report: {outcome.folder / REPORT}")
    for note in outcome.damaged:
        say("left out", note)
    check_damage(len(outcome.damaged))


def _as_text(table: Table) -> RichTable:
    shown = RichTable(title=Text(table.title), title_justify="left")
    for place, column in enumerate(table.columns):
        shown.add_column(column, justify="right" if place else "left")
    for row in table.rows:
        shown.add_row(*(printable(entry.text) for entry in row))
    return shown
