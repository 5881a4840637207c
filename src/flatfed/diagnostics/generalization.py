"""How the model does on data that it was not trained on, and on every single client."""

from __future__ import annotations

from typing import Any

from flatfed.core.errors import FlatfedError
from flatfed.core.sampling import cohort
from flatfed.core.types import Count
from flatfed.diagnostics.subject import Subject, Tick, silent
from flatfed.training.evaluation import ClientSpread


def seen_clients(subject: Subject) -> list[int]:
    """The clients that have taken part so far: participation depends on the seed and the round alone."""
    population = len(subject.federation)
    rounds = range(subject.round)
    return sorted({client for number in rounds for client in cohort(subject.settings, population, number)})


def generalization(subject: Subject, *, samples: Count | None = None, tick: Tick = silent) -> dict[str, Any]:
    """Loss and metrics on the participants' training data, on the test data and on unseen clients' data.

    "train" pools the clients that have taken part (everybody's before the first round), "unseen_clients"
    those that never have. Gaps are losses minus, and metrics below, those on "train".
    """
    if subject.federation.test is None:
        raise FlatfedError("generalization: the federation has no test data; give it some")
    seen = seen_clients(subject) or list(range(len(subject.federation)))
    unseen = sorted(set(range(len(subject.federation))) - set(seen))
    train = subject.evaluate(subject.model, subject.training_data(samples, seen))
    tick(0.4)
    test = subject.evaluate(subject.model, subject.test_data(samples) or subject.federation.test)
    tick(0.6)
    others = None
    if unseen:
        others = subject.evaluate(subject.model, subject.training_data(samples, unseen))
    tick(1.0)

    def gap(found: dict[str, float]) -> dict[str, float]:
        return {
            name: value - train[name] if name == "loss" else train[name] - value
            for name, value in found.items()
        }

    gaps = gap(test) | {f"unseen_{name}": value for name, value in gap(others or {}).items()}
    return {"train": train, "test": test, "unseen_clients": others, "gap": gaps}


def clients(subject: Subject, *, tick: Tick = silent) -> dict[str, Any]:
    """The global model's accuracy on each client's own data, and how much of its deviation is chance."""
    if "accuracy" not in subject.engine.plan.metrics:
        raise FlatfedError("clients: needs a metric named accuracy; give one in metrics")
    population = len(subject.federation)
    accuracy, sizes = [], []
    for client in range(population):
        data = subject.data(client)
        accuracy.append(subject.evaluate(subject.model, data)["accuracy"])
        sizes.append(len(data[0]))
        tick((client + 1) / population)
    spread = ClientSpread.of(accuracy, sizes)
    return {
        "accuracy": accuracy,
        "mean": spread.mean,
        "deviation": spread.deviation,
        "binomial_floor": spread.chance,
        "samples": sizes,
    }
