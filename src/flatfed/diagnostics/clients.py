"""How evenly the model serves the clients."""

from typing import Any

from flatfed.core.errors import FlatfedError
from flatfed.core.tree import first_leaf
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.training.evaluation import ClientSpread


def summary(result: figures.Result) -> str:
    return (
        f"accuracy {result['mean']:.1%} ± {result['deviation']:.1%} between clients "
        f"({result['binomial_floor']:.1%} by chance)"
    )


def show(measured: figures.Measurements) -> figures.Content:
    columns = {
        "mean accuracy %": figures.column(figures.percent, "mean"),
        "deviation between clients %": figures.column(figures.percent, "deviation"),
        "by chance alone %": figures.column(figures.percent, "binomial_floor"),
    }
    title = "Differences between clients"
    note = "By chance alone: the deviation that equally good clients of these sizes would show."
    return [figures.method_table("fairness", title, measured["clients"], columns, note)]


@diagnostic("generalisation", summary, show, cheap=True)
def clients(subject: Subject, *, tick: Tick = silent) -> dict[str, Any]:
    """The global model's accuracy on each client's own data, and how much of its deviation is chance."""
    if "accuracy" not in subject.plan.metrics:
        raise FlatfedError("clients: needs a metric named accuracy; give one in metrics")
    accuracy, sizes = [], []
    for client in ticked(range(len(subject.federation)), tick):
        data = subject.data(client)
        accuracy.append(subject.evaluate(subject.model, data)["accuracy"])
        sizes.append(len(first_leaf(data[0])))
    spread = ClientSpread.of(accuracy, sizes)
    numbers = {"mean": spread.mean, "deviation": spread.deviation, "binomial_floor": spread.chance}
    return {"accuracy": accuracy, **numbers, "samples": sizes}
