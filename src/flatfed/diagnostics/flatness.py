"""How sharp the loss is around the model, and how well ascent directions are guessed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from flatfed.core.flat import unit
from flatfed.core.sampling import batches
from flatfed.core.types import Count, Positive
from flatfed.data.federation import Samples
from flatfed.diagnostics.subject import Subject, Tick, silent
from flatfed.parts.synthetic import SyntheticMix, samples_of


def one_step_sharpness(subject: Subject, samples: Samples, radius: float) -> float:
    """F(x + ρ ∇F/‖∇F‖) − F(x): the first-order estimate of the largest rise within the radius."""
    ascent = unit(subject.gradient(subject.model, samples))
    raised = subject.evaluate(subject.model + radius * ascent, samples)["loss"]
    return raised - subject.evaluate(subject.model, samples)["loss"]


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
    members = subject.some_clients(clients)
    whole = one_step_sharpness(subject, subject.training_data(samples), radius)
    found = []
    for number, client in enumerate(members):
        own = one_step_sharpness(subject, subject.data(client), radius)
        found.append({"client": client, "sharpness": own})
        tick((number + 1) / len(members))
    return {"radius": radius, "global": whole, "clients": found}


Estimate = Callable[[Subject, int], Tensor | None]
"""Where a client would climb from the received model, or None if it cannot say."""


def _from_own_batch(subject: Subject, client: int) -> Tensor:
    own = subject.federation.client(client)
    first = batches(subject.settings, len(own), subject.round, client)[0]
    return subject.gradient(subject.received["model"], own.batch(first.to(own.inputs.device)))


def _from_last_model(subject: Subject, client: int) -> Tensor | None:
    received = subject.received["model"]
    if "previous_model" in subject.server:
        return subject.server["previous_model"] - received
    state = subject.clients.read(client, received)
    return state["last_model"] - received if "last_model" in state else None


def _from_momentum(subject: Subject, client: int) -> Tensor | None:
    if "momentum" in subject.server:  # a sum of displacements, which point downhill
        return -subject.server["momentum"]
    return subject.server.get("momentum_gradient")


def _from_synthetic_samples(subject: Subject, client: int) -> Tensor | None:
    rule, received = subject.algorithm.gradient, subject.received
    if not isinstance(rule, SyntheticMix) or not bool(received["synthetic_ready"][0]):
        return None
    inputs, targets = samples_of(received, subject.engine.plan.dimensions.input_shape)
    point = received["model"].detach().requires_grad_()
    with torch.enable_grad():
        loss = subject.seen_loss(point, inputs[: rule.batch], targets[: rule.batch])
    (there,) = torch.autograd.grad(loss, point)
    return torch.lerp(there, _from_own_batch(subject, client), rule.local_weight)


ESTIMATES: Mapping[str, Estimate] = {
    "local": _from_own_batch,
    "lesam": _from_last_model,
    "momentum": _from_momentum,
    "synthetic": _from_synthetic_samples,
}
"""FedSAM's, FedLESAM's, FedNSAM's (the same for all clients) and FedSynSAM's; one more is one more line."""


def perturbation(
    subject: Subject, *, samples: Count | None = 5000, clients: Count | None = 10, tick: Tick = silent
) -> dict[str, Any]:
    """The cosine of each estimated ascent direction to the true gradient of the global loss.

    At the model that the next round's participants receive. An estimate is None for a client that has
    none (FedLESAM's before its second round), and is left out if nobody has one.
    """
    members = subject.some_clients(clients)
    truth = unit(subject.gradient(subject.received["model"], subject.training_data(samples)))
    cosines: dict[str, list[float | None]] = {name: [] for name in ESTIMATES}
    for number, client in enumerate(members):
        for name, estimate in ESTIMATES.items():
            guess = estimate(subject, client)
            known = guess is not None and bool(torch.linalg.vector_norm(guess) > 0)
            cosine = float(unit(guess) @ truth) if guess is not None and known else None
            cosines[name].append(None if cosine is None or not math.isfinite(cosine) else cosine)
        tick((number + 1) / len(members))
    kept = {name: found for name, found in cosines.items() if any(each is not None for each in found)}
    return {"clients": members, "cosine": kept}
