"""What is said about the race's results, on made-up results whose answers are known."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from flatfed.race.flatness import Correlation, across_tasks, within_task
from flatfed.race.page import race_page
from flatfed.race.portfolio import judged_tasks, portfolio_of
from flatfed.race.preset import preset
from flatfed.race.regret import regrets, summary
from flatfed.race.results import Measured, Result
from flatfed.race.standings import TaskStandings, all_standings, ranked

METHODS = ("fedavg", "fedcm", "fedsam", "scaffold", "fedacg", "fedprox")
FIRST, SECOND = list(preset().tasks)[:2]
LISTED = {*METHODS, "fedavg (step size as given)"}


def shortened(task):
    return replace(task, entries=[entry for entry in task.entries if entry.label in LISTED])


SMALL = replace(preset(), tasks={name: shortened(preset().tasks[name]) for name in (FIRST, SECOND)})
"""The race with few methods, of which half are soon there."""


def setting_of(task, method):
    entries = {entry.label: entry for entry in (*preset().tasks[task].entries, *preset().compositions)}
    return preset().digest(preset().tasks[task], entries[method])


def made_up(task, method, test, validation=None, phase="final", **changes):
    values = {
        "settings": "training.lr=0.1", "chosen": True, "state": "complete", "rounds": 1, "gradients": 1,
        "bytes_up": 1, "bytes_down": 1, "test_samples": 10_000, "seconds": 1.0, "commit": "",
        "validation_accuracy": test if validation is None else validation,
        "setting": setting_of(task, method), **changes,
    }  # fmt: skip
    seeds = (0, 1) if phase == "final" else (100,)
    accuracy = test if phase == "final" else None
    return [
        Result(task=task, method=method, phase=phase, seed=seed, test_accuracy=accuracy, **values)
        for seed in seeds
    ]


def raced(task, accuracies, **changes):
    rows = []
    for method, accuracy in accuracies.items():
        rows += made_up(task, method, accuracy, phase="tuning")
        rows += made_up(task, method, accuracy, **changes)
    return rows


def test_the_regret_of_a_recommendation():
    # By validation fedcm is best on the second task, by test samples fedsam.
    rows = raced(FIRST, {"fedavg": 0.70, "fedcm": 0.80, "fedsam": 0.75, "fedprox": 0.1})
    rows += raced(SECOND, {"fedavg": 0.60, "fedcm": 0.66, "fedprox": 0.1})
    rows += [
        *made_up(SECOND, "fedsam", 0.5, phase="tuning"),
        *made_up(SECOND, "fedsam", 0.68, validation=0.5),
        *made_up(SECOND, "fedavg (step size as given)", 0.55),
    ]
    first, second = regrets(SMALL, rows)
    assert (first.task, second.task) == (FIRST, SECOND)
    assert (second.recommended, second.accuracy) == ("fedcm", 0.66)
    assert (second.best, second.best_accuracy) == ("fedsam", 0.68)
    assert (second.fixed, second.fixed_accuracy) == ("fedcm", 0.66) and second.default_accuracy == 0.55
    assert first.best == first.recommended == "fedcm" and first.default_accuracy is None
    assert regrets(SMALL, raced(FIRST, dict.fromkeys(METHODS, 0.7))) == []
    text = summary([first, second])
    assert "mean regret is 1.0 points" in text
    assert "step size as given the recommendation is better on 1 and worse on 0 of 1 tasks: +11.0" in text
    # On the first task the fixed choice is fedsam, the best of the second: 80 beside 75 %.
    assert "fixed choice the recommendation is better on 1 and worse on 0 of 2 tasks: +2.5 points" in text


def test_tuned_fedavg_and_the_default_run_beside_the_finalists():
    # Three others are better in tuning; by the final runs' validation accuracies FedAvg is, or its default.
    others = dict.fromkeys(("fedcm", "fedsam", "scaffold"), 0.7)
    rows = raced(FIRST, {"fedavg": 0.6, **others}) + raced(SECOND, others)
    rows += [
        *made_up(SECOND, "fedavg", 0.5, phase="tuning"),
        *made_up(SECOND, "fedavg", 0.69, validation=0.9),
    ]
    assert regrets(SMALL, rows)[1].recommended == "fedavg"
    rows += made_up(SECOND, "fedavg (step size as given)", 0.68, validation=0.95)
    assert regrets(SMALL, rows)[1].recommended == "fedavg (step size as given)"


def test_what_was_made_under_other_settings_counts_nowhere():
    accuracies = {"fedavg": 0.7, "fedcm": 0.8, "fedsam": 0.75, "fedprox": 0.6}
    now = raced(FIRST, accuracies) + raced(SECOND, accuracies)
    # An earlier tuning, a seed that is no longer in the race, and a method that has left it.
    earlier = [
        row.model_copy(update={"setting": "earlier", "test_accuracy": 0.9, "validation_accuracy": 0.9})
        for row in now
    ]
    earlier += [row.model_copy(update={"seed": 77}) for row in now]
    earlier += [row.model_copy(update={"method": "left"}) for row in now]
    assert preset().current([*earlier, *now]) == now
    flat = [
        Measured(
            task=FIRST, method="fedcm", seed=0, sharpness=1.0, top_eigenvalue=1.0, gradient_norm=1.0,
            samples=1, commit="", setting="earlier",
        )
    ]  # fmt: skip
    page = race_page(SMALL, [*earlier, *now], flat, "ranks.svg")
    assert f"{len(earlier)} more rows of the file were made under other settings" in page.replace("\n", " ")
    alone = race_page(SMALL, now, [], "ranks.svg")
    cut = [text.partition("numbers of gradients.")[2].partition("##")[2] for text in (page, alone)]
    assert cut[0] == cut[1] != "" and "more rows" not in alone
    assert portfolio_of(SMALL, [*earlier, *now]) == portfolio_of(SMALL, now)
    assert regrets(SMALL, [*earlier, *now]) == regrets(SMALL, now)
    assert portfolio_of(SMALL, earlier) == {"tasks": [], "methods": []}


def test_a_task_that_has_hardly_begun_is_not_ranked():
    rows = raced(FIRST, dict.fromkeys(METHODS, 0.7)) + raced(SECOND, {"fedavg": 0.6, "fedcm": 0.66})
    tasks = all_standings(rows, preset().tasks)
    assert [task.task for task in tasks] == [FIRST, SECOND]
    assert [task.task for task in ranked(tasks)] == [FIRST]
    # The best of two is not yet the best of seven; of a list of three it counts.
    assert [task.task for task in judged_tasks(SMALL, rows)] == [FIRST]
    second = SMALL.tasks[SECOND]
    short = replace(second, entries=[one for one in second.entries if one.label in METHODS[:3]])
    listed = replace(SMALL, tasks={**SMALL.tasks, SECOND: short})
    assert [task.task for task in judged_tasks(listed, rows)] == [FIRST, SECOND]
    assert len(portfolio_of(SMALL, rows)["tasks"]) == 1
    page = " ".join(race_page(SMALL, rows, [], "ranks.svg").split())
    assert f"Few methods have run on `{SECOND}`: no ranks there." in page


def test_correlations_have_the_sign_and_size_that_was_put_in():
    rows, measured = [], []
    for place, method in enumerate(METHODS):
        accuracy = 0.6 + place / 100
        rows += made_up(FIRST, method, accuracy, phase="tuning")
        rows += made_up(FIRST, method, accuracy, client_drift=float(place), train_accuracy=0.9)
        for seed in (0, 1):
            measured.append(
                Measured(
                    task=FIRST, method=method, seed=seed, sharpness=1.0 / (1 + place), top_eigenvalue=1.0,
                    gradient_norm=float(place), samples=1, commit="", setting=setting_of(FIRST, method),
                )
            )  # fmt: skip
    task = TaskStandings.of(FIRST, rows)
    correlations = within_task(task, measured)
    assert correlations["client_drift"].value == pytest.approx(1)
    assert correlations["sharpness"].value == pytest.approx(-1)
    assert correlations["gap"].value == pytest.approx(-1)
    # What is the same for all methods, or was not measured, says nothing.
    assert correlations["top_eigenvalue"] is None and correlations["update_norm"] is None
    assert correlations["gradient_norm"].value == pytest.approx(1)
    assert across_tasks([task], measured)["sharpness"].value == pytest.approx(-1)
    # What was measured of other models says nothing about these.
    others = [row.model_copy(update={"setting": "earlier"}) for row in measured]
    assert within_task(task, others)["sharpness"] is None
    assert within_task(task, [])["sharpness"] is None


def named(left, right):
    return {str(number): pair for number, pair in enumerate(zip(left, right, strict=True))}


def test_intervals_of_correlations_are_those_of_the_textbook():
    left = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    right = [2.0, 1.0, 4.0, 3.0, 7.0, 5.0, 6.0, 10.0, 8.0, 9.0]
    correlation = Correlation.of(named(left, right))
    # 1 − 6 Σd²/(n (n² − 1)) with Σd² = 16.
    assert correlation.value == pytest.approx(1 - 6 * 16 / 990)
    assert correlation.low < correlation.value < correlation.high < 1 and correlation.methods == 10
    assert Correlation.of(named(left[:4], right[:4])) is None


def test_ties_share_a_rank():
    # Ranks 1.5, 1.5, 3, 4, 5 and 1, 2, 3.5, 3.5, 5: Pearson's correlation of those.
    correlation = Correlation.of(named([1.0, 1.0, 2.0, 3.0, 4.0], [1.0, 2.0, 3.0, 3.0, 4.0]))
    ranks = np.array([1.5, 1.5, 3, 4, 5]), np.array([1, 2, 3.5, 3.5, 5])
    assert correlation.value == pytest.approx(np.corrcoef(*ranks)[0, 1])


@pytest.mark.parametrize(("tasks", "shared"), [(1, 0.0), (3, 0.8), (3, 0.0)])
def test_intervals_of_correlations_cover_the_truth(tasks, shared):
    """Methods are alike from task to task, as far as is `shared`; 20 of them, and a known correlation."""
    generator, methods, correlation, repeats, hits = np.random.default_rng(3), 20, 0.5, 120, 0
    truth = 6 / math.pi * math.asin(correlation / 2)

    def draws():
        own, common = generator.standard_normal((tasks, methods)), generator.standard_normal(methods)
        return math.sqrt(shared) * common + math.sqrt(1 - shared) * own

    for _ in range(repeats):
        left = draws()
        right = correlation * left + math.sqrt(1 - correlation**2) * draws()
        pairs = [named(one.tolist(), other.tolist()) for one, other in zip(left, right, strict=True)]
        estimate = Correlation.of(pairs[0]) if tasks == 1 else Correlation.of_tasks(pairs)
        hits += estimate.low <= truth <= estimate.high
    # 95 %, give or take three standard errors.
    assert hits / repeats >= 0.89


COMPOSED = preset().compositions[0].label


def screened(task, accuracies):
    rows = []
    for method, accuracy in accuracies.items():
        rows += [
            row.model_copy(update={"phase": "screening", "test_accuracy": None})
            for row in made_up(task, method, accuracy, phase="tuning")
        ]
    return rows


@pytest.mark.parametrize(
    ("accuracy", "sentence"),
    [
        (0.9, f"{COMPOSED} is the best method on 1 of 1 (beyond its interval on 1)."),
        (0.7005, f"{COMPOSED} is the best method on 1 of 1 (beyond its interval on 0)."),
        (0.65, "None of them is the best method on a task that it was not chosen on."),
    ],
)
def test_the_page_says_whether_a_composition_wins_where_it_was_not_chosen(accuracy, sentence):
    rows = screened(FIRST, {COMPOSED: 0.8}) + raced(FIRST, {"fedavg": 0.6, "fedcm": 0.5, COMPOSED: 0.99})
    page = race_page(SMALL, rows, [], "ranks.svg")
    assert "They have not run on other tasks yet." in page
    assert "2 of 7 methods and 1 composition under 2 seeds" in page
    rows += raced(SECOND, {"fedavg": 0.6, "fedcm": 0.7, COMPOSED: accuracy})
    page = race_page(SMALL, rows, [], "ranks.svg").replace("\n", " ")
    place = 1 if accuracy > 0.7 else 2
    assert f"| {SECOND} | {COMPOSED} | {100 * accuracy:.1f}" in page and f"| {place} of 3 |" in page
    assert sentence in page
    # No place among what `flatfed recommend` tries: it has no name there.
    rows += raced(SECOND, {"fedsam": 0.6, "fedprox": 0.5})
    assert COMPOSED not in {row["label"] for row in portfolio_of(SMALL, rows)["methods"]} >= {"fedavg"}
