"""What is said about the race's results, on made-up results whose answers are known."""

from __future__ import annotations

import pytest

from flatfed.race.flatness import Correlation, across_tasks, within_task
from flatfed.race.preset import preset
from flatfed.race.regret import regrets
from flatfed.race.results import Measured, Result
from flatfed.race.standings import TaskStandings, all_standings, ranked

METHODS = ("fedavg", "fedcm", "fedsam", "scaffold", "fedacg", "fedprox")
FIRST, SECOND = list(preset().tasks)[:2]


def made_up(task, method, test, validation=None, phase="final", **changes):
    values = {
        "settings": "training.lr=0.1", "chosen": True, "state": "complete", "rounds": 1, "gradients": 1,
        "bytes_up": 1, "bytes_down": 1, "test_samples": 10_000, "seconds": 1.0, "commit": "", "setting": "",
        "validation_accuracy": test if validation is None else validation, **changes,
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
    rows = raced(FIRST, {"fedavg": 0.70, "fedcm": 0.80, "fedsam": 0.75})
    rows += raced(SECOND, {"fedavg": 0.60, "fedcm": 0.66})
    rows += [
        *made_up(SECOND, "fedsam", 0.5, phase="tuning"),
        *made_up(SECOND, "fedsam", 0.68, validation=0.5),
        *made_up(SECOND, "fedavg (step size as given)", 0.55),
    ]
    first, second = regrets(preset(), rows)
    assert (first.task, second.task) == (FIRST, SECOND)
    assert (second.recommended, second.accuracy) == ("fedcm", 0.66)
    assert (second.best, second.best_accuracy) == ("fedsam", 0.68)
    assert (second.fixed, second.fixed_accuracy) == ("fedcm", 0.66) and second.default_accuracy == 0.55
    assert first.best == first.recommended == "fedcm" and first.default_accuracy is None
    assert regrets(preset(), raced(FIRST, {"fedavg": 0.7, "fedcm": 0.8})) == []


def test_a_task_that_has_hardly_begun_is_not_ranked():
    rows = raced(FIRST, dict.fromkeys(METHODS, 0.7)) + raced(SECOND, {"fedavg": 0.6, "fedcm": 0.66})
    tasks = all_standings(rows, preset().tasks)
    assert [task.task for task in tasks] == [FIRST, SECOND]
    assert [task.task for task in ranked(tasks)] == [FIRST]


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
                    samples=1, commit="",
                )
            )  # fmt: skip
    task = TaskStandings.of(FIRST, rows)
    found = within_task(task, measured)
    assert found["client_drift"].value == pytest.approx(1) and found["sharpness"].value == pytest.approx(-1)
    assert found["gap"].value == pytest.approx(-1)
    # What is the same for all methods, or was not measured, says nothing.
    assert found["top_eigenvalue"] is None and found["update_norm"] is None
    assert across_tasks([task], measured)["sharpness"].value == pytest.approx(-1)
    assert within_task(task, [])["sharpness"] is None


def test_intervals_of_correlations_are_those_of_the_textbook():
    left = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    right = [2.0, 1.0, 4.0, 3.0, 7.0, 5.0, 6.0, 10.0, 8.0, 9.0]
    found = Correlation.of(left, right)
    # 1 − 6 Σd²/(n (n² − 1)) with Σd² = 16.
    assert found.value == pytest.approx(1 - 6 * 16 / 990)
    assert found.low < found.value < found.high < 1 and found.pairs == 10
    assert Correlation.of(left[:4], right[:4]) is None
