"""How sharp the loss is around the model: how far it rises within a small radius."""

from typing import Any

from flatfed.core.flat import unit
from flatfed.core.types import Count, Positive
from flatfed.data.samples import Samples
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.runs.statistics import mean


def one_step_sharpness(subject: Subject, samples: Samples, radius: float) -> float:
    """F(x + ρ ∇F/‖∇F‖) − F(x): the first-order estimate of the largest rise within the radius."""
    ascent = unit(subject.gradient(subject.model, samples))
    raised = subject.evaluate(subject.model + radius * ascent, samples)["loss"]
    return raised - subject.evaluate(subject.model, samples)["loss"]


def summary(result: figures.Result) -> str:
    own = mean(client["sharpness"] for client in result["clients"])
    return f"global {figures.brief(result['global'])}, clients' mean {figures.brief(own)}"


def show(measured: figures.Measurements) -> figures.Content:
    methods, number = measured["sharpness"], figures.significant
    note = "By how much the loss rises after one step as long as the radius along its gradient."
    if len({number(method.spread("radius")).text for method in methods}) > 1:
        note += " The radii differ, so compare with care; flatfed diagnose RUN sharpness --set radius=0.1."
    columns = {
        "radius": figures.column(number, "radius"),
        "global loss": figures.column(number, "global"),
        "clients' losses, mean": lambda method: number(mean(method.of_clients("sharpness"))),
        "clients' losses, largest": lambda method: number(max(method.of_clients("sharpness"), default=None)),
    }
    return [figures.method_table("sharpness", "Sharpness", methods, columns, note)]


@diagnostic("flatness", summary, show, cheap=True)
def sharpness(
    subject: Subject,
    *,
    radius: Positive = 0.1,
    samples: Count | None = 5000,
    clients: Count | None = 10,
    tick: Tick = silent,
) -> dict[str, Any]:
    """The sharpness of the global loss and of some clients' own losses, at the global model.

    The `radius` is the same for all algorithms, whatever their own is, so that they can be compared.
    """
    whole = one_step_sharpness(subject, subject.training_data(samples), radius)
    of_clients = [
        {"client": client, "sharpness": one_step_sharpness(subject, subject.data(client), radius)}
        for client in ticked(subject.some_clients(clients), tick)
    ]
    return {"radius": radius, "global": whole, "clients": of_clients}
