"""How the model does on data that it was not trained on."""

from typing import Any

from flatfed.core.errors import FlatfedError
from flatfed.core.sampling import cohort
from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent


def seen_clients(subject: Subject) -> list[int]:
    """The clients that have taken part so far: participation depends on the seed and the round alone."""
    population = len(subject.federation)
    rounds = range(subject.round)
    return sorted({client for number in rounds for client in cohort(subject.training, population, number)})


COLUMNS = {
    "training": ("train", ""),
    "test": ("test", ""),
    "unseen clients": ("unseen_clients", ""),
    "gap to test": ("gap", ""),
    "gap to unseen clients": ("gap", "unseen_"),
}
"""The report's columns: the part of a result, and what stands before the names of its numbers."""


def summary(result: figures.Result) -> str:
    return ", ".join(f"{name} gap {figures.brief(value)}" for name, value in result["gap"].items())


def show(measured: figures.Measurements) -> figures.Content:
    columns = {}
    for title, (part, prefix) in COLUMNS.items():
        columns[f"{title}: loss"] = figures.column(figures.significant, part, f"{prefix}loss")
        columns[f"{title}: accuracy %"] = figures.column(figures.percent, part, f"{prefix}accuracy")
    return [figures.method_table("generalization", "Generalisation", measured["generalization"], columns)]


@diagnostic("generalisation", summary, show, cheap=True)
def generalization(subject: Subject, *, samples: Count | None = None, tick: Tick = silent) -> dict[str, Any]:
    """Loss and metrics on the participants' training data, on the test data and on unseen clients' data.

    "train" pools the clients that have taken part (all of them before the first round), "unseen_clients"
    those that never have. Gaps are losses above, and metrics below, those on "train".
    """
    if subject.federation.test is None:
        raise FlatfedError("generalization: the federation has no test data; give it some")
    seen = seen_clients(subject) or list(range(len(subject.federation)))
    unseen = sorted(set(range(len(subject.federation))) - set(seen))
    train = subject.evaluate(subject.model, subject.training_data(samples, seen))
    tick(0.4)
    test = subject.evaluate(subject.model, subject.test_data(samples) or subject.federation.test)
    tick(0.6)
    others = subject.evaluate(subject.model, subject.training_data(samples, unseen)) if unseen else None
    tick(1.0)

    def gap(numbers: dict[str, float]) -> dict[str, float]:
        return {
            name: value - train[name] if name == "loss" else train[name] - value
            for name, value in numbers.items()
        }

    gaps = gap(test) | {f"unseen_{name}": value for name, value in gap(others or {}).items()}
    return {"train": train, "test": test, "unseen_clients": others, "gap": gaps}
