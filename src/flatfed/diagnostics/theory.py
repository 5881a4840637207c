"""Bounds on stability and generalization, and estimates of the constants in them.

The stability bound follows from the update rules and one assumption: no gradient used in training, with or
without weight decay, is longer than Θ. With a local direction g + λ (y − x) + μ y and step sizes η_k, let

    c = Π_k (1 − η_k (λ + μ)),   A = (1 − c)/(λ + μ)  (= Σ η_k if λ = μ = 0),   Γ = μ A

Then y_K = (1 − Γ) x − Σ_k w_k g_k with Σ w_k = A, and two trainings, whatever their clients, are at most D
apart:

    D ← (1 − α Γ) D + 2 α G A Θ

where α is the server's rate and G says how much longer than one gradient the method's step can be. For
constant steps and α = 1 that is 2 G Θ (1 − (1 − Γ)^T)/μ after T rounds, or 2 G Θ η K T when μ = 0. All of
these are properties of the algorithm's parts (`Part.step_bound`), so that compositions without a name have a
bound, too. G is

    1             FedAvg, FedProx, FedSAM, FedASAM, FedLESAM, FedSynSAM, FedSWA; and FedCM, MoFedSAM,
                  MimeLite, whose steps are means of bounded vectors
    1 + β         FedSAGD under its paper's own assumption ‖v‖ ≤ Θ; from its rule alone v may reach Θ/(1 − β)
    1/(1 − β)     FedAvgM, FedANAG, FedLNAG, FedACG, FedNSAM: a geometric sum of past steps
    1/τ           FedAdam

The last two rows get no contraction (Γ = 0) from weight decay. There is no bound for methods with duals or
control variates, whose sums this argument cannot limit, none with AdamW or Muon, none under compression, and
none under weight decay for those that weigh gradient and momentum. The FedSAGD paper's bounds are of this
kind: for FedSAGD it has the factor 1 − (1 − Γ)^T with 2 + 2β in front, as here. Because μ is ordinary weight
decay, FedAvg with the same decay has a smaller bound.

A bound is about the worst case. The constants are estimated at two models (the first and the present one) and
some batches, so they are lower than the true ones: a curve drawn with them is a yardstick, no guarantee.
"""

import math
import statistics
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatfed.core.algorithm import Algorithm
from flatfed.core.sampling import batches, local_steps
from flatfed.core.settings import Training
from flatfed.core.types import Count
from flatfed.diagnostics import figures
from flatfed.diagnostics.hessian import products, top_eigenvalues
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, silent, ticked
from flatfed.parts.correct import MomentumControlVariate
from flatfed.parts.schedule import LinearDecay
from flatfed.runs.statistics import finite


def stability_bound(
    algorithm: Algorithm, training: Training, steps: int, gradient_bound: float, rounds: int
) -> list[float] | None:
    """The bound on ‖x_t − x'_t‖ after each of `rounds` rounds; None if a part of the algorithm has none."""
    bounds = [part.step_bound for part in algorithm.parts]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds) or algorithm.compressed or not algorithm.aggregate.streams:
        return None
    decay = training.weight_decay + sum(bound.decay for bound in known)
    if decay and not all(bound.allows_decay for bound in known):
        return None
    if not all(bound.contracts for bound in known):
        decay = 0.0
    rate, gain = (math.prod(values) for values in zip(*((b.rate, b.gain) for b in known), strict=True))
    pull = decay + sum(bound.spring for bound in known)
    longest = gradient_bound if training.clip is None else min(gradient_bound, training.clip)
    curve, apart = [], 0.0
    for number in range(rounds):
        rates = algorithm.schedule.rates(training.rate(number), steps)
        length = (1 - math.prod(1 - rate_k * pull for rate_k in rates)) / pull if pull else sum(rates)
        apart = (1 - rate * decay * length) * apart + 2 * rate * gain * length * longest
        curve.append(apart)
    return curve


def fedswa_generalization_order(
    constants: Mapping[str, float], *, clients: int, samples: float, steps: int, rounds: int, momentum: bool
) -> float:
    """How the FedSWA paper's generalization bound (Theorem 5.1) grows, without its constant factor.

        L/(N n β) e^(1 + 1/T) (c L + c' σ_g + c σ),   c = 1 + (2 + 1/(KT))^(K−1)/T

    with c' = c for FedSWA and 1 for FedMoSWA (`momentum`); N clients of n samples; as `constants` L-Lipschitz
    and β-smooth losses, heterogeneity σ_g and gradient deviation σ. Since c doubles with every local step it
    says nothing about the size of a gap, only how the two methods compare.
    """
    try:
        factor = 1 + (2 + 1 / (steps * rounds)) ** (steps - 1) / rounds
    except OverflowError:
        factor = math.inf
    lipschitz, deviation = constants["lipschitz"], constants["gradient_deviation"]
    spread = (1.0 if momentum else factor) * constants["heterogeneity"]
    inner = factor * lipschitz + spread + factor * deviation
    return lipschitz / (clients * samples * constants["smoothness"]) * math.exp(1 + 1 / rounds) * inner


def examined_sizes(subject: Subject) -> list[int]:
    """How many samples some clients have."""
    return [len(subject.federation.client(client)) for client in subject.some_clients(20)]


def most_steps(subject: Subject) -> int:
    """The most local steps that an examined client takes in a round."""
    return max(local_steps(subject.training, size) for size in examined_sizes(subject))


def batch_gradients(subject: Subject, model: Tensor, client: int, count: int) -> Tensor:
    """The gradients [B, P] of the first batches that a client's next round would use, with weight decay."""
    own = subject.federation.client(client)
    chosen = batches(subject.training, len(own), subject.round, client)[:count]
    decay = subject.training.weight_decay * model
    return torch.stack([subject.gradient(model, own.batch(batch.to(own.device))) + decay for batch in chosen])


def gradient_bound(subject: Subject, clients: int = 10, count: int = 3) -> float:
    """Θ: the longest of some clients' batch gradients at the first and at the present model."""
    initial_model = subject.plan.layout.vector(subject.task.model).to(subject.model)
    return max(
        float(torch.linalg.vector_norm(batch_gradients(subject, model, client, count), dim=1).max())
        for model in (initial_model, subject.model)
        for client in subject.some_clients(clients)
    )


def estimated_constants(
    subject: Subject, clients: int | None = 10, count: int = 5, tick: Tick = silent
) -> dict[str, float]:
    """Θ, and at the present model: smoothness, σ, σ_g (root mean squares) and the largest client gradient."""
    model = subject.model
    whole, deviations, curvatures = [], [], []
    for client in ticked(subject.some_clients(clients), tick):
        data = subject.data(client)
        whole.append(subject.gradient(model, data))
        own = whole[-1] + subject.training.weight_decay * model
        spread = batch_gradients(subject, model, client, count) - own
        deviations.append(float(spread.square().sum(1).mean()))
        curvatures.append(top_eigenvalues(products(subject, data), len(model), 1)[0])
    gradients = torch.stack(whole)
    apart = (gradients - gradients.mean(0)).square().sum(1)
    return {
        "gradient_bound": gradient_bound(subject),
        "smoothness": max(curvatures),
        "lipschitz": float(torch.linalg.vector_norm(gradients, dim=1).max()),
        "gradient_deviation": math.sqrt(statistics.fmean(deviations)),
        "heterogeneity": math.sqrt(float(apart.mean())),
    }


def summary(result: figures.Result) -> str:
    return ", ".join(f"{name} {figures.brief(value)}" for name, value in result["constants"].items())


def show(measured: figures.Measurements) -> figures.Content:
    """The constants, and the bounds beside the discrepancies that global_stability measured."""
    methods = measured["theory"]
    constants = dict.fromkeys(name for method in methods for name in method.first["constants"])
    columns = {
        name: lambda method, name=name: figures.significant(finite(method.first["constants"].get(name)))
        for name in constants
    }
    table = figures.method_table("constants", "Measured constants", methods, columns)
    content: list[figures.Figure | figures.Table] = [table]
    names = dict.fromkeys(name for method in methods for name in method.first["bounds"])
    for index, name in enumerate(names):
        bounds = [(method, method.first["bounds"].get(name)) for method in methods]
        lines = [figures.bound_line(method, bound["x"], bound["y"]) for method, bound in bounds if bound]
        note = "Dotted: the bound."
        discrepancies = measured.get("global_stability", []) if name == "stability" else []
        if discrepancies:
            lines += [method.mean_line("rounds", "discrepancy") for method in discrepancies]
            note += " Full: measured, with one client replaced."
        labels = f"theory-{index}", name.replace("_", " ").capitalize()
        content.append(figures.chart(*labels, lines, "rounds", name, note, titled=False, decades=math.inf))
    return content


@diagnostic("generalisation", summary, show)
def theory(
    subject: Subject, *, clients: Count | None = 10, rounds: Count | None = None, tick: Tick = silent
) -> dict[str, Any]:
    """Estimated constants and the bounds that they give; the measured discrepancy is global_stability's."""
    constants = estimated_constants(subject, clients, tick=tick)
    settings, rounds = subject.training, rounds or subject.training.rounds
    steps = most_steps(subject)
    bounds: dict[str, Any] = {}
    stability = stability_bound(subject.algorithm, settings, steps, constants["gradient_bound"], rounds)
    if stability is not None:
        bounds["stability"] = {"x": list(range(1, rounds + 1)), "y": stability}
    # The theorem is about step sizes that fall within a round, with or without momentum control variates.
    if isinstance(subject.algorithm.schedule, LinearDecay) and constants["smoothness"] > 0:
        x = sorted({max(1, rounds * part // 20) for part in range(1, 21)})
        order = partial(
            fedswa_generalization_order,
            constants,
            clients=len(subject.federation),
            samples=statistics.fmean(examined_sizes(subject)),
            steps=steps,
            momentum=any(isinstance(part, MomentumControlVariate) for part in subject.algorithm.corrections),
        )
        y = [order(rounds=number) for number in x]
        bounds["generalization (order of growth)"] = {"x": x, "y": y}
    return {"constants": constants, "bounds": bounds}
