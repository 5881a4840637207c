"""How much a client's own ascent direction changes during a round: what theorems about FedSAM call E_δ."""

import statistics
from typing import Any

from torch import Tensor

from flatfed.core.flat import unit
from flatfed.core.sampling import batches, local_steps
from flatfed.core.types import Count, Positive
from flatfed.diagnostics import figures
from flatfed.diagnostics.local_stability import evenly_spaced
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent


def summary(result: figures.Result) -> str:
    first, whole = figures.brief(result["from_first"][-1]), figures.brief(result["from_global"][-1])
    radius, steps = figures.brief(result["radius"]), result["steps"][-1]
    return (
        f"after {steps} steps {first} from the client's first one, {whole} from the global one, ρ = {radius}"
    )


def show(measured: figures.Measurements) -> figures.Content:
    methods = measured["perturbation_difference"]
    note = "Mean square distance of a client's perturbation to its first one of the round; at most 4ρ²."
    lines = [method.mean_line("steps", "from_first") for method in methods]
    name, labels = "perturbation-difference", ("local step", "E_δ")
    columns = {
        "radius": figures.column(figures.significant, "radius"),
        "from the first, last step": figures.column(figures.significant, "from_first", -1),
        "from the global one, first step": figures.column(figures.significant, "from_global", 0),
        "from the global one, last step": figures.column(figures.significant, "from_global", -1),
    }
    return [
        figures.method_table(name, "Perturbation difference", methods, columns),
        figures.chart(name, "Perturbation difference during a round", lines, *labels, note),
    ]


@diagnostic("stability", summary, show)
def perturbation_difference(
    subject: Subject,
    *,
    radius: Positive | None = None,
    samples: Count | None = 5000,
    clients: Count | None = 10,
    points: Count = 10,
    tick: Tick = silent,
) -> dict[str, Any]:
    """Mean square change of the perturbation ρ u(g) of a client's batches over the next round.

    At most `points` of the local steps; `from_global` is the distance to ρ u(∇F) at the received model. The
    `radius` is that of the algorithm unless given, or 0.1.
    """
    radius = radius or getattr(subject.algorithm.gradient, "radius", None) or 0.1
    members = subject.some_clients(clients)
    sizes = {client: len(subject.federation.client(client)) for client in members}
    steps = min(local_steps(subject.training, size) for size in sizes.values())
    looked_at = evenly_spaced(steps - 1, points)
    chosen = {client: batches(subject.training, sizes[client], subject.round, client) for client in members}
    whole = radius * unit(subject.gradient(subject.received["model"], subject.training_data(samples)))
    first: dict[int, Tensor] = {}
    from_first: dict[int, list[float]] = {step: [] for step in looked_at}
    from_global: dict[int, list[float]] = {step: [] for step in looked_at}

    def visit(client: int, step: int, model: Tensor) -> None:
        if step in from_first:
            own = subject.federation.client(client)
            gradient = subject.gradient(model, own.batch(chosen[client][step].to(own.device)))
            perturbation = radius * unit(gradient)
            distance = perturbation - first.setdefault(client, perturbation)
            from_first[step].append(float(distance.square().sum()))
            from_global[step].append(float((perturbation - whole).square().sum()))

    subject.local_models(members, visit, tick)
    return {
        "radius": radius,
        "steps": looked_at,
        "from_first": [statistics.fmean(from_first[step]) for step in looked_at],
        "from_global": [statistics.fmean(from_global[step]) for step in looked_at],
    }
