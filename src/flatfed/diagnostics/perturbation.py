"""How well clients guess the direction in which the global loss rises."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flatfed.core.flat import unit
from flatfed.core.sampling import batches, local_steps
from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.local_stability import evenly_spaced
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.parts.correct import FullGradientMomentum, GlobalMomentum
from flatfed.parts.perturb import LastModel
from flatfed.parts.server import Momentum
from flatfed.parts.synthetic import SyntheticMix, TrajectoryMatching, samples_of
from flatfed.runs.statistics import finite, mean

Estimate = Callable[[Subject, int, int, Tensor], Tensor | None]
"""The direction in which a client would climb from a local model after k steps; None without an estimate."""


def _from_own_batch(subject: Subject, client: int, step: int, point: Tensor) -> Tensor:
    own = subject.federation.client(client)
    chosen = batches(subject.training, len(own), subject.round, client)[step]
    return subject.gradient(point, own.batch(chosen.to(own.device)))


def _from_last_model(subject: Subject, client: int, step: int, point: Tensor) -> Tensor | None:
    vectors = subject.vectors_of(LastModel, client)
    if vectors is None:
        # What it would be under another algorithm, in the course of whose training this is measured.
        return None if subject.model_before is None else subject.model_before - subject.model
    (name,) = vectors.keys() - {"model"}
    return vectors[name] - subject.received["model"]


def _from_momentum(subject: Subject, client: int, step: int, point: Tensor) -> Tensor | None:
    if (vectors := subject.vectors_of(Momentum, client)) is not None:
        return -vectors["momentum"]  # a sum of displacements, which point downhill
    vectors = subject.vectors_of(GlobalMomentum, client) or subject.vectors_of(FullGradientMomentum, client)
    return None if vectors is None else vectors["momentum_gradient"]


def _from_synthetic_samples(subject: Subject, client: int, step: int, point: Tensor) -> Tensor | None:
    rule = subject.algorithm.gradient
    samples = subject.vectors_of(TrajectoryMatching, client)
    if not isinstance(rule, SyntheticMix) or samples is None or not bool(samples["synthetic_ready"][0]):
        return None
    inputs, targets = samples_of(samples, subject.plan.dimensions.input_shape)
    place = point.detach().requires_grad_()
    with torch.enable_grad():
        loss = subject.seen_loss(place, inputs[: rule.batch], targets[: rule.batch])
    (there,) = torch.autograd.grad(loss, place)
    return torch.lerp(there, _from_own_batch(subject, client, step, point), rule.local_weight)


ESTIMATES: Mapping[str, Estimate] = {
    "local": _from_own_batch,
    "lesam": _from_last_model,
    "momentum": _from_momentum,
    "synthetic": _from_synthetic_samples,
}
"""FedSAM's, FedLESAM's, FedNSAM's (the same for all clients) and FedSynSAM's."""


def summary(result: figures.Result) -> str:
    means = {name: mean(cosines) for name, cosines in result["cosine"].items()}
    known = (f"cosine of {name} {value:.2f}" for name, value in means.items() if value is not None)
    return ", ".join(known) or "no estimate"


def show(measured: figures.Measurements) -> figures.Content:
    """For each method, how well each estimate agrees with the gradient on all data."""
    note = "The cosine between a client's estimate and the gradient of the whole loss."
    content = []
    for method in measured["perturbation"]:
        clients, cosines = method.first["clients"], method.first["cosine"]
        # Clients have no order that a line could follow.
        points = [
            figures.line(method, clients, values, name=name, mode="markers", meta={"series": index})
            for index, (name, values) in enumerate(cosines.items())
        ]
        name, title = f"perturbation-{method.number}", f"Perturbations under {method.label}"
        layout, columns = figures.axes("client", "", showlegend=True), ("rule", "client", "cosine")
        content.append(figures.Figure(name, title, points, layout, note, columns, method.number))
    return content


@diagnostic("stability", summary, show, cheap=True)
def perturbation(
    subject: Subject,
    *,
    samples: Count | None = 5000,
    clients: Count | None = 10,
    points: Count = 1,
    tick: Tick = silent,
) -> dict[str, Any]:
    """The cosine of each estimated ascent direction to the true gradient of the global loss.

    At the model that the next round's participants receive; with more `points`, the mean over so many of a
    client's local steps, first and last included, each time to the true gradient at its local model there.
    An estimate is None for a client that has none (FedLESAM's before its second round), and is left out if no
    client has one.
    """
    members, pooled = subject.some_clients(clients), subject.training_data(samples)
    own_cosines: dict[str, dict[int, list[float]]] = {
        name: {client: [] for client in members} for name in ESTIMATES
    }

    def compare(client: int, step: int, point: Tensor, truth: Tensor) -> None:
        for name, estimate in ESTIMATES.items():
            guess = estimate(subject, client, step, point)
            if guess is not None and bool(torch.linalg.vector_norm(guess) > 0):
                own_cosines[name][client].append(float(unit(guess) @ truth))

    def visit(client: int, step: int, model: Tensor) -> None:
        steps = local_steps(subject.training, len(subject.federation.client(client)))
        if step in evenly_spaced(steps - 1, points):
            compare(client, step, model, unit(subject.gradient(model, pooled)))

    if points == 1:
        received = subject.received["model"]
        truth = unit(subject.gradient(received, pooled))
        for client in ticked(members, tick):
            compare(client, 0, received, truth)
    else:
        subject.local_models(members, visit, tick)
    cosines = {name: [finite(mean(own[client])) for client in members] for name, own in own_cosines.items()}
    kept = {name: values for name, values in cosines.items() if any(value is not None for value in values)}
    return {"clients": members, "cosine": kept}
