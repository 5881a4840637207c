"""Literal numpy versions of the federated methods, one client loop each, for checking the library against.

Everything is float64 and written out per method; the repetition is deliberate, so that each function can be
held next to the algorithm box it implements. Notation shared by all functions:

* ``x`` is the server model, ``y`` the local iterate, ``delta`` a client's total displacement,
  ``eta`` the local step size of the round, ``wd`` the weight decay;
* ``h`` are dual variables in model units, ``c`` control variates in gradient units, ``m`` momenta, whose unit
  is that of the model ("momentum") or of a gradient ("momentum_gradient");
* a client without stored state has zero state;
* weight decay acts at the local iterate and is added after all other terms;
* ``problem.optimized`` stands where a local optimizer acts: on gradients and what corrects them, but before
  what is measured in steps (control variates and momenta that are made of displacements).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
Moments = tuple[Vector, Vector, Vector, float, float]
"""AdamW's step, both moments, and the weights that they have not yet filled."""


class Problem(Protocol):
    """What a method may ask of the simulated federation."""

    start: Vector
    clients: int
    cohorts: list[list[int]]
    weight_mask: npt.NDArray[np.bool_]
    weight_decay: float
    inputs: int
    shapes: list[tuple[int, ...]]
    """Of the model's parameters, whose concatenation a model vector is."""

    def steps(self, round: int, client: int) -> int:
        """Number of local steps of the client in that round."""
        ...

    def rate(self, round: int) -> float:
        """Local step size of the round, with any decay applied."""
        ...

    def gradient(self, round: int, client: int, step: int, point: Vector) -> Vector:
        """Gradient of the minibatch that belongs to (round, client, step), at any point."""
        ...

    def optimized(self, round: int, client: int, step: int, point: Vector, gradient: Vector) -> Vector:
        """What a local optimizer makes of the gradient at that step; the gradient itself if there is none."""
        ...

    def full_gradient(self, client: int, point: Vector) -> Vector:
        """Gradient over all data of the client."""
        ...

    def shifted_gradient(
        self, round: int, client: int, step: int, point: Vector, scale: Vector, offset: Vector
    ) -> tuple[Vector, Vector, Vector]:
        """Gradients with respect to point, scale and offset of the loss at inputs ``scale * z + offset``."""
        ...

    def made_up(self, per_class: int, soft: bool) -> tuple[Vector, Vector]:
        """The server's own samples at first: inputs (one a row) and labels, as logits if they are soft."""
        ...

    def made_up_gradient(self, point: Vector, inputs: Vector, labels: Vector) -> Vector:
        """Gradient on such samples."""
        ...

    def made_up_slopes(
        self, point: Vector, inputs: Vector, labels: Vector, along: Vector
    ) -> tuple[Vector, Vector, Vector]:
        """Gradients of ``along @ made_up_gradient(...)`` with respect to point, inputs and labels."""
        ...


@dataclass
class Trace:
    """Server models x_0 ... x_T and the states left after the last round."""

    models: list[Vector]
    server: dict[str, Vector] = field(default_factory=dict)
    clients: dict[str, dict[int, Vector]] = field(default_factory=dict)


Option = Literal["I", "II"]
Memory = Literal["client", "server"]


def unit(vector: Vector) -> Vector:
    """The vector scaled to Euclidean length one; zero stays zero."""
    return vector / max(float(np.sqrt(np.sum(vector * vector))), 1e-12)


def mean(vectors: Sequence[Vector]) -> Vector:
    """Unweighted mean."""
    total: Vector = np.sum(np.stack(list(vectors)), axis=0)
    return total / len(vectors)


# ---------------------------------------------------------------------------------------------------------
# Averaging and proximal methods


def fedavg(problem: Problem, *, server_rate: float = 1.0) -> Trace:
    """FedAvg: local SGD, then a server step along the mean displacement."""
    x = problem.start
    wd = problem.weight_decay
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                y = y - eta * (problem.optimized(t, i, k, y, g) + wd * y)
            deltas.append(y - x)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models)


def fedprox(problem: Problem, *, proximal_weight: float, server_rate: float = 1.0) -> Trace:
    """FedProx: FedAvg with a quadratic pull towards the received model."""
    x = problem.start
    wd = problem.weight_decay
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y) + proximal_weight * (y - x)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - x)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models)


def fedexp(problem: Problem, *, stability: float, stability_decay: float = 1.0) -> Trace:
    """FedExP: FedAvg whose server step grows with the disagreement of the displacements."""
    x = problem.start
    wd = problem.weight_decay
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                y = y - eta * (problem.optimized(t, i, k, y, g) + wd * y)
            deltas.append(y - x)
        lengths = sum(float(np.sum(delta * delta)) for delta in deltas)
        average = mean(deltas)
        epsilon = stability * stability_decay**t
        rate = max(1.0, lengths / (2 * len(cohort) * (float(np.sum(average * average)) + epsilon)))
        x = x + rate * average
        models.append(x)
    return Trace(models)


# ---------------------------------------------------------------------------------------------------------
# Dual variables and control variates


def feddyn(problem: Problem, *, regularisation: float) -> Trace:
    """FedDyn, with the duals kept in model units (the gradient-unit dual is ``-regularisation * h``)."""
    x = problem.start
    wd = problem.weight_decay
    h = np.zeros_like(x)
    h_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            h_i = h_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y) + regularisation * (y - x + h_i)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            h_client[i] = h_i + (y - x)
            deltas.append(y - x)
        h = h + len(cohort) / problem.clients * mean(deltas)
        x = x + mean(deltas) + h
        models.append(x)
    return Trace(models, {"dual": h}, {"dual": h_client})


def scaffold(problem: Problem, *, option: Option = "II", server_rate: float = 1.0) -> Trace:
    """SCAFFOLD. Option I takes the client's full gradient at the received model as its control variate."""
    x = problem.start
    wd = problem.weight_decay
    c = np.zeros_like(x)
    c_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        changes = []
        for i in cohort:
            c_i = c_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                if option == "I":
                    d = problem.optimized(t, i, k, y, g - c_i + c)
                else:
                    d = problem.optimized(t, i, k, y, g) - c_i + c
                y = y - eta * (d + wd * y)
            if option == "I":
                c_plus = problem.full_gradient(i, x)
            else:
                c_plus = c_i - c + (x - y) / (problem.steps(t, i) * eta)
            deltas.append(y - x)
            changes.append(c_plus - c_i)
            c_client[i] = c_plus
        x = x + server_rate * mean(deltas)
        c = c + len(cohort) / problem.clients * mean(changes)
        models.append(x)
    return Trace(models, {"control": c}, {"control": c_client})


# ---------------------------------------------------------------------------------------------------------
# Server optimizers


def fedavgm(problem: Problem, *, momentum_decay: float, server_rate: float = 1.0) -> Trace:
    """FedAvgM: heavy-ball momentum on the server."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                y = y - eta * (problem.optimized(t, i, k, y, g) + wd * y)
            deltas.append(y - x)
        m = momentum_decay * m + mean(deltas)
        x = x + server_rate * m
        models.append(x)
    return Trace(models, {"momentum": m})


def fedadam(
    problem: Problem, *, first_decay: float, second_decay: float, stability: float, server_rate: float = 1.0
) -> Trace:
    """FedAdam: Adam on the server, without bias correction, second moment started at ``stability ** 2``."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    v = np.full_like(x, stability**2)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                y = y - eta * (problem.optimized(t, i, k, y, g) + wd * y)
            deltas.append(y - x)
        delta = mean(deltas)
        m = first_decay * m + (1 - first_decay) * delta
        v = second_decay * v + (1 - second_decay) * delta**2
        x = x + server_rate * m / (np.sqrt(v) + stability)
        models.append(x)
    return Trace(models, {"momentum": m, "second_moment": v})


# ---------------------------------------------------------------------------------------------------------
# Momentum inside the local steps


def fedcm(problem: Problem, *, fresh_weight: float, server_rate: float = 1.0) -> Trace:
    """FedCM: every local step mixes the fresh gradient with last round's mean direction."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        lengths = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                step = problem.optimized(t, i, k, y, problem.gradient(t, i, k, y))
                d = fresh_weight * step + (1 - fresh_weight) * m
                y = y - eta * (d + wd * y)
            deltas.append(y - x)
            lengths.append(problem.steps(t, i) * eta)
        m = -mean(deltas) / (sum(lengths) / len(lengths))
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, {"momentum_gradient": m})


def mimelite(problem: Problem, *, momentum_decay: float, server_rate: float = 1.0) -> Trace:
    """MimeLite with SGD momentum: frozen during the round, refreshed from full gradients at the old model."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        full_gradients = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                d = (1 - momentum_decay) * problem.gradient(t, i, k, y) + momentum_decay * m
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - x)
            full_gradients.append(problem.full_gradient(i, x))
        m = (1 - momentum_decay) * mean(full_gradients) + momentum_decay * m
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, {"momentum_gradient": m})


def fedacg(problem: Problem, *, lookahead: float, proximal_weight: float) -> Trace:
    """FedACG: clients start from, and are pulled back to, the look-ahead model."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        phi = x + lookahead * m
        deltas = []
        for i in cohort:
            y = phi
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y) + proximal_weight * (y - phi)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - phi)
        m = lookahead * m + mean(deltas)
        x = x + m
        models.append(x)
    return Trace(models, {"momentum": m})


def fedanag(problem: Problem, *, momentum_decay: float, server_rate: float = 1.0) -> Trace:
    """FedANAG: Nesterov's step with the server momentum held fixed during the round."""
    beta = momentum_decay
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        lengths = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                step = problem.optimized(t, i, k, y, problem.gradient(t, i, k, y))
                d = (1 + beta) * step + beta**2 * m
                y = y - eta * (d + wd * y)
            deltas.append(y - x)
            lengths.append(problem.steps(t, i) * eta)
        length = sum(lengths) / len(lengths)
        m = beta / (1 + beta) * m - mean(deltas) / ((1 + beta) * length)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, {"momentum_gradient": m})


def fedlnag(
    problem: Problem,
    *,
    momentum_decay: float,
    communicate: bool = True,
    server_rate: float = 1.0,
    damped: bool = False,
) -> Trace:
    """FedLNAG: local Nesterov momentum, averaged by the server or, without communication, reset every round.

    Weight decay is part of the gradient that enters the buffer. A server that does not average keeps nothing.
    """
    beta = momentum_decay
    x = problem.start
    wd = problem.weight_decay
    u = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        buffers = []
        for i in cohort:
            y = x
            u_i = u if communicate else np.zeros_like(x)
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y) + wd * y
                if damped:
                    u_i = beta * u_i + (1 - beta) * g
                    y = y - eta * ((1 - beta) * g + beta * u_i)
                else:
                    u_i = beta * u_i + g
                    y = y - eta * (g + beta * u_i)
            deltas.append(y - x)
            buffers.append(u_i)
        u = mean(buffers)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, {"buffer": u} if communicate else {})


def fedsagd(
    problem: Problem,
    *,
    momentum_decay: float,
    proximal_weight: float,
    decay_weight: float,
    server_rate: float = 1.0,
) -> Trace:
    """FedSAGD: server momentum, proximal pull and shrinkage in every local step."""
    beta = momentum_decay
    x = problem.start
    wd = problem.weight_decay
    v = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        lengths = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                g = g + (proximal_weight + decay_weight) * y - proximal_weight * x
                d = problem.optimized(t, i, k, y, g) + beta * v
                y = y - eta * (d + wd * y)
            deltas.append(y - x)
            lengths.append(problem.steps(t, i) * eta)
        length = sum(lengths) / len(lengths)
        v = beta / (1 + beta) * v - mean(deltas) / ((1 + beta) * length)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, {"momentum_gradient": v})


# ---------------------------------------------------------------------------------------------------------
# Local optimizers


def adamw(
    m: Vector, v: Vector, w1: float, w2: float, g: Vector, betas: tuple[float, float, float]
) -> Moments:
    """AdamW's step and its moments after it; ``w`` are the weights that the means have not yet filled."""
    beta1, beta2, eps = betas
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    w1 = beta1 * w1
    w2 = beta2 * w2
    return (m / (1 - w1)) / (np.sqrt(v / (1 - w2)) + eps), m, v, w1, w2


def orthogonal(matrix: Vector) -> Vector:
    """Muon's five Newton-Schulz steps, by the singular values that they are a polynomial of."""
    left, values, right = np.linalg.svd(matrix, full_matrices=False)
    values = values / max(float(np.sqrt(np.sum(values**2))), 1e-7)
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    return left @ np.diag(values) @ right


def muon(
    shapes: list[tuple[int, ...]], g: Vector, momentum: Vector, beta: float, moments: dict[int, Moments]
) -> tuple[Vector, Vector]:
    """Muon's step and momentum; ``moments`` belong to parameters that are no matrices, and change."""
    momentum = beta * momentum + (1 - beta) * g
    smooth = (1 - beta) * g + beta * momentum
    step = np.zeros_like(g)
    begin = 0
    for shape in shapes:
        here = slice(begin, begin + int(np.prod(shape)))
        if len(shape) > 1:
            scale = max(1.0, shape[0] / np.prod(shape[1:])) ** 0.5
            step[here] = scale * orthogonal(smooth[here].reshape(shape[0], -1)).ravel()
        else:
            zeros = np.zeros(shape)
            _, *old = moments.get(begin, (zeros, zeros, zeros, 1.0, 1.0))
            moments[begin] = adamw(*old, g[here], (0.9, 0.95, 1e-10))
            step[here] = moments[begin][0]
        begin = here.stop
    return step, momentum


def fedadamw(problem: Problem, *, global_weight: float, beta1: float, beta2: float, eps: float) -> Trace:
    """FedAdamW: the second moment's means over the tensors are averaged, the first starts at zero."""
    x = problem.start
    wd = problem.weight_decay
    sizes = [int(np.prod(shape)) for shape in problem.shapes]
    ends = np.cumsum(sizes)[:-1]
    v_server = np.zeros(len(sizes))
    w_server = 1.0
    direction = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        lengths = []
        moments = []
        unfilled = []
        for i in cohort:
            y = x
            m = np.zeros_like(x)
            v = np.repeat(v_server, sizes)
            w1 = 1.0
            w2 = w_server
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                step, m, v, w1, w2 = adamw(m, v, w1, w2, g, (beta1, beta2, eps))
                y = y - eta * (step + global_weight * direction + wd * y)
            deltas.append(y - x)
            lengths.append(problem.steps(t, i) * eta)
            moments.append(np.array([np.mean(piece) for piece in np.split(v, ends)]))
            unfilled.append(w2)
        v_server = mean(moments)
        w_server = sum(unfilled) / len(unfilled)
        direction = -mean(deltas) / (sum(lengths) / len(lengths))
        x = x + mean(deltas)
        models.append(x)
    filled = np.array([1 - w_server])
    return Trace(models, {"second_moment": v_server, "second_filled": filled, "momentum_gradient": direction})


def fedmuon(problem: Problem, *, global_weight: float, momentum: float, ratio: float) -> Trace:
    """FedMuon of Liu et al.: the momentum is averaged, steps are mixed with the last mean step."""
    x = problem.start
    wd = problem.weight_decay
    matrix = np.concatenate([np.full(np.prod(shape), len(shape) > 1) for shape in problem.shapes])
    m_server = np.zeros_like(x)
    direction = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        lengths = []
        momenta = []
        for i in cohort:
            y = x
            m = m_server
            moments: dict[int, Moments] = {}
            for k in range(problem.steps(t, i)):
                step, m = muon(problem.shapes, problem.gradient(t, i, k, y), m, momentum, moments)
                step = np.where(matrix, ratio * step, step)
                y = y - eta * ((1 - global_weight) * step + global_weight * direction + wd * y)
            deltas.append(y - x)
            lengths.append(problem.steps(t, i) * eta)
            momenta.append(m)
        m_server = mean(momenta)
        direction = -mean(deltas) / (sum(lengths) / len(lengths))
        x = x + mean(deltas)
        models.append(x)
    return Trace(models, {"momentum": m_server, "momentum_gradient": direction})


# ---------------------------------------------------------------------------------------------------------
# Sharpness-aware local steps


def fedsam(problem: Problem, *, radius: float, server_rate: float = 1.0) -> Trace:
    """FedSAM: each local step uses the gradient at the worst nearby point, on the same minibatch."""
    x = problem.start
    wd = problem.weight_decay
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                epsilon = radius * unit(problem.gradient(t, i, k, y))
                d = problem.gradient(t, i, k, y + epsilon)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - x)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models)


def mofedsam(problem: Problem, *, radius: float, fresh_weight: float, server_rate: float = 1.0) -> Trace:
    """MoFedSAM: FedSAM's gradient mixed with last round's mean direction."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        lengths = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                epsilon = radius * unit(problem.gradient(t, i, k, y))
                step = problem.optimized(t, i, k, y, problem.gradient(t, i, k, y + epsilon))
                d = fresh_weight * step + (1 - fresh_weight) * m
                y = y - eta * (d + wd * y)
            deltas.append(y - x)
            lengths.append(problem.steps(t, i) * eta)
        m = -mean(deltas) / (sum(lengths) / len(lengths))
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, {"momentum_gradient": m})


def fedasam(problem: Problem, *, radius: float, offset: float, server_rate: float = 1.0) -> Trace:
    """FedASAM: the ascent step is scaled by ``|weight| + offset`` on weights and left alone elsewhere."""
    x = problem.start
    wd = problem.weight_decay
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                scale = np.where(problem.weight_mask, np.abs(y) + offset, 1.0)
                scaled = scale * problem.gradient(t, i, k, y)
                epsilon = radius * scale * unit(scaled)
                d = problem.gradient(t, i, k, y + epsilon)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - x)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models)


def fedgamma(problem: Problem, *, radius: float, server_rate: float = 1.0) -> Trace:
    """FedGAMMA: SCAFFOLD's correction around FedSAM's gradient; the ascent direction is not corrected."""
    x = problem.start
    wd = problem.weight_decay
    c = np.zeros_like(x)
    c_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        changes = []
        for i in cohort:
            c_i = c_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                epsilon = radius * unit(problem.gradient(t, i, k, y))
                g = problem.gradient(t, i, k, y + epsilon)
                d = problem.optimized(t, i, k, y, g) - c_i + c
                y = y - eta * (d + wd * y)
            c_plus = c_i - c + (x - y) / (problem.steps(t, i) * eta)
            deltas.append(y - x)
            changes.append(c_plus - c_i)
            c_client[i] = c_plus
        x = x + server_rate * mean(deltas)
        c = c + len(cohort) / problem.clients * mean(changes)
        models.append(x)
    return Trace(models, {"control": c}, {"control": c_client})


def fedspeed(
    problem: Problem,
    *,
    radius: float,
    mix: float,
    proximal_weight: float,
    duals: Literal["participants", "server"] = "participants",
    normalize: bool = True,
) -> Trace:
    """FedSpeed: a mix of plain and ascended gradient, proximal pull corrected by a client dual.

    ``duals="participants"`` averages the corrected models of the participants, ``"server"`` averages their
    plain models and adds the mean dual of all clients.
    """
    x = problem.start
    wd = problem.weight_decay
    h_client: dict[int, Vector] = {}
    h = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        locals_ = []
        corrected = []
        for i in cohort:
            h_i = h_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                g1 = problem.gradient(t, i, k, y)
                epsilon = radius * unit(g1) if normalize else radius * g1
                g2 = problem.gradient(t, i, k, y + epsilon)
                d = (1 - mix) * g1 + mix * g2 + proximal_weight * (y - x + h_i)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            h_i = h_i + (y - x)
            h_client[i] = h_i
            locals_.append(y)
            corrected.append(y + h_i)
        if duals == "participants":
            x = mean(corrected)
        else:
            h = np.sum(np.stack(list(h_client.values())), axis=0) / problem.clients
            x = mean(locals_) + h
        models.append(x)
    server = {"dual": h} if duals == "server" else {}
    return Trace(models, server, {"dual": h_client})


def fedsmoo(
    problem: Problem,
    *,
    radius: float,
    regularisation: float,
    upload: Literal["residual", "dual"] = "residual",
) -> Trace:
    """FedSMOO: FedDyn with a perturbation that is itself driven to agree between clients."""
    x = problem.start
    wd = problem.weight_decay
    h = np.zeros_like(x)
    s = np.zeros_like(x)
    h_client: dict[int, Vector] = {}
    mu_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        uploads = []
        for i in cohort:
            h_i = h_client.get(i, np.zeros_like(x))
            mu_i = mu_client.get(i, np.zeros_like(x))
            s_hat = np.zeros_like(x)
            y = x
            for k in range(problem.steps(t, i)):
                s_hat = radius * unit(problem.gradient(t, i, k, y) - mu_i - s)
                mu_i = mu_i + s_hat - s
                d = problem.gradient(t, i, k, y + s_hat) + regularisation * (y - x + h_i)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            h_client[i] = h_i + (y - x)
            mu_client[i] = mu_i
            deltas.append(y - x)
            uploads.append(mu_i - s_hat if upload == "residual" else mu_i)
        s = radius * unit(mean(uploads))
        h = h + len(cohort) / problem.clients * mean(deltas)
        x = x + mean(deltas) + h
        models.append(x)
    return Trace(models, {"dual": h, "perturbation": s}, {"dual": h_client, "perturbation_dual": mu_client})


def fedlesam(
    problem: Problem, *, radius: float, memory: Memory = "client", server_rate: float = 1.0
) -> Trace:
    """FedLESAM: one fixed perturbation per round, along the way the global model has come.

    ``memory="client"`` measures from the model the client received last time, ``"server"`` from the previous
    global model.
    """
    x = problem.start
    wd = problem.weight_decay
    received: dict[int, Vector] = {}
    previous: Vector | None = None
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            old = received.get(i) if memory == "client" else previous
            perturbation = np.zeros_like(x) if old is None else radius * unit(old - x)
            received[i] = x
            y = x
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y + perturbation)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - x)
        previous = x
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models)


def fedgloss(problem: Problem, *, server_radius: float, radius: float, regularisation: float) -> Trace:
    """FedGloSS: clients start uphill of the model, against its last way, and regularise as in FedDyn."""
    x = problem.start
    wd = problem.weight_decay
    h = np.zeros_like(x)
    last = np.zeros_like(x)
    h_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        start = x - server_radius * unit(last)
        deltas = []
        for i in cohort:
            h_i = h_client.get(i, np.zeros_like(x))
            y = start
            for k in range(problem.steps(t, i)):
                ascent = radius * unit(problem.gradient(t, i, k, y))
                d = problem.gradient(t, i, k, y + ascent) + regularisation * (y - start + h_i)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            h_client[i] = h_i + (y - start)
            deltas.append(y - start)
        last = mean(deltas)
        h = h + len(cohort) / problem.clients * last
        x = x + last + h
        models.append(x)
    return Trace(models, {"dual": h, "last_displacement": last}, {"dual": h_client})


def fedlesam_s(
    problem: Problem, *, radius: float, memory: Memory = "client", server_rate: float = 1.0
) -> Trace:
    """FedLESAM-S: FedLESAM's gradient with SCAFFOLD's correction."""
    x = problem.start
    wd = problem.weight_decay
    c = np.zeros_like(x)
    c_client: dict[int, Vector] = {}
    received: dict[int, Vector] = {}
    previous: Vector | None = None
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        changes = []
        for i in cohort:
            old = received.get(i) if memory == "client" else previous
            perturbation = np.zeros_like(x) if old is None else radius * unit(old - x)
            received[i] = x
            c_i = c_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y + perturbation)
                d = problem.optimized(t, i, k, y, g) - c_i + c
                y = y - eta * (d + wd * y)
            c_plus = c_i - c + (x - y) / (problem.steps(t, i) * eta)
            deltas.append(y - x)
            changes.append(c_plus - c_i)
            c_client[i] = c_plus
        previous = x
        x = x + server_rate * mean(deltas)
        c = c + len(cohort) / problem.clients * mean(changes)
        models.append(x)
    return Trace(models, {"control": c}, {"control": c_client})


def fedlesam_d(problem: Problem, *, radius: float, regularisation: float, memory: Memory = "client") -> Trace:
    """FedLESAM-D: FedLESAM's gradient with FedDyn's correction."""
    x = problem.start
    wd = problem.weight_decay
    h = np.zeros_like(x)
    h_client: dict[int, Vector] = {}
    received: dict[int, Vector] = {}
    previous: Vector | None = None
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            old = received.get(i) if memory == "client" else previous
            perturbation = np.zeros_like(x) if old is None else radius * unit(old - x)
            received[i] = x
            h_i = h_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y + perturbation) + regularisation * (y - x + h_i)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            h_client[i] = h_i + (y - x)
            deltas.append(y - x)
        previous = x
        h = h + len(cohort) / problem.clients * mean(deltas)
        x = x + mean(deltas) + h
        models.append(x)
    return Trace(models, {"dual": h}, {"dual": h_client})


# ---------------------------------------------------------------------------------------------------------
# Adversarial input shifts


def fedrobust(
    problem: Problem,
    *,
    scale_rate: float,
    offset_rate: float,
    scale_penalty: float,
    offset_penalty: float,
) -> Trace:
    """FedRobust with a diagonal shift: descent on the model, simultaneous ascent on the client's shift."""
    x = problem.start
    wd = problem.weight_decay
    excess_client: dict[int, Vector] = {}
    offset_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        locals_ = []
        for i in cohort:
            scale = 1.0 + excess_client.get(i, np.zeros(problem.inputs))
            offset = offset_client.get(i, np.zeros(problem.inputs))
            y = x
            for k in range(problem.steps(t, i)):
                g, g_scale, g_offset = problem.shifted_gradient(t, i, k, y, scale, offset)
                g_scale = g_scale - 2 * scale_penalty * (scale - 1.0)
                g_offset = g_offset - 2 * offset_penalty * offset
                y = y - eta * (problem.optimized(t, i, k, y, g) + wd * y)
                scale = scale + scale_rate * g_scale
                offset = offset + offset_rate * g_offset
            excess_client[i] = scale - 1.0
            offset_client[i] = offset
            locals_.append(y)
        x = mean(locals_)
        models.append(x)
    return Trace(models, {}, {"scale": excess_client, "offset": offset_client})


# ---------------------------------------------------------------------------------------------------------
# Stochastic weight averaging


def fedswa(problem: Problem, *, final_rate: float, server_rate: float = 1.0) -> Trace:
    """FedSWA: the step size falls linearly within each round, the server extrapolates."""
    x = problem.start
    wd = problem.weight_decay
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        for i in cohort:
            y = x
            steps = problem.steps(t, i)
            for k in range(steps):
                eta_k = eta * ((1 - k / steps) + final_rate * k / steps)
                g = problem.gradient(t, i, k, y)
                y = y - eta_k * (problem.optimized(t, i, k, y, g) + wd * y)
            deltas.append(y - x)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models)


def fedmo(problem: Problem, *, momentum_rate: float, option: Option = "II") -> Trace:
    """FedMo: FedMoSWA without the falling step size and without extrapolation."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    c_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        changes = []
        for i in cohort:
            c_i = c_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                if option == "I":
                    d = problem.optimized(t, i, k, y, g - c_i + m)
                else:
                    d = problem.optimized(t, i, k, y, g) - c_i + m
                y = y - eta * (d + wd * y)
            if option == "I":
                c_plus = problem.full_gradient(i, x)
            else:
                c_plus = c_i - m - (y - x) / (problem.steps(t, i) * eta)
            deltas.append(y - x)
            changes.append(c_plus - m)
            c_client[i] = c_plus
        m = m + momentum_rate * mean(changes)
        x = x + mean(deltas)
        models.append(x)
    return Trace(models, {"control": m}, {"control": c_client})


def fedmoswa(
    problem: Problem,
    *,
    final_rate: float,
    momentum_rate: float,
    server_rate: float = 1.0,
    option: Option = "II",
    warm_start: bool = False,
) -> Trace:
    """FedMoSWA: FedSWA with variance reduction against a moving average of the control variates.

    ``warm_start`` sets the average to the plain mean of the first cohort's control variates.
    """
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    c_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        deltas = []
        changes = []
        for i in cohort:
            c_i = c_client.get(i, np.zeros_like(x))
            y = x
            steps = problem.steps(t, i)
            length = 0.0
            for k in range(steps):
                eta_k = eta * ((1 - k / steps) + final_rate * k / steps)
                g = problem.gradient(t, i, k, y)
                if option == "I":
                    d = problem.optimized(t, i, k, y, g - c_i + m)
                else:
                    d = problem.optimized(t, i, k, y, g) - c_i + m
                y = y - eta_k * (d + wd * y)
                length = length + eta_k
            c_plus = problem.full_gradient(i, x) if option == "I" else c_i - m - (y - x) / length
            deltas.append(y - x)
            changes.append(c_plus - m)
            c_client[i] = c_plus
        gamma = 1.0 if warm_start and t == 0 else momentum_rate
        m = m + gamma * mean(changes)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, {"control": m}, {"control": c_client})


# ---------------------------------------------------------------------------------------------------------
# Nesterov look-ahead with a perturbation along the server momentum


def fednsam(problem: Problem, *, lookahead: float, radius: float, single_vector: bool = False) -> Trace:
    """FedNSAM: gradients at the look-ahead point, pushed back against the server momentum.

    With a single vector, clients are sent that point alone and start there.
    """
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        shift = lookahead * m - radius * unit(m)
        start = x + shift if single_vector else x
        deltas = []
        for i in cohort:
            y = start
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y if single_vector else y + shift)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - start)
        m = lookahead * m + mean(deltas)
        x = x + m
        models.append(x)
    return Trace(models, {"momentum": m})


def fednsam_s(problem: Problem, *, lookahead: float, radius: float) -> Trace:
    """FedNSAM-S: FedNSAM's gradient with SCAFFOLD's correction."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    c = np.zeros_like(x)
    c_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        perturbation = -radius * unit(m)
        deltas = []
        changes = []
        for i in cohort:
            c_i = c_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y + lookahead * m + perturbation)
                d = problem.optimized(t, i, k, y, g) - c_i + c
                y = y - eta * (d + wd * y)
            c_plus = c_i - c + (x - y) / (problem.steps(t, i) * eta)
            deltas.append(y - x)
            changes.append(c_plus - c_i)
            c_client[i] = c_plus
        m = lookahead * m + mean(deltas)
        x = x + m
        c = c + len(cohort) / problem.clients * mean(changes)
        models.append(x)
    return Trace(models, {"momentum": m, "control": c}, {"control": c_client})


def fednsam_d(
    problem: Problem,
    *,
    lookahead: float,
    radius: float,
    regularisation: float,
    dual_in_momentum: bool = False,
) -> Trace:
    """FedNSAM-D: FedNSAM's gradient with FedDyn's correction, the dual outside the momentum by default."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    h = np.zeros_like(x)
    h_client: dict[int, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        perturbation = -radius * unit(m)
        deltas = []
        for i in cohort:
            h_i = h_client.get(i, np.zeros_like(x))
            y = x
            for k in range(problem.steps(t, i)):
                d = problem.gradient(t, i, k, y + lookahead * m + perturbation)
                d = d + regularisation * (y - x + h_i)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            h_client[i] = h_i + (y - x)
            deltas.append(y - x)
        h = h + len(cohort) / problem.clients * mean(deltas)
        if dual_in_momentum:
            m = lookahead * m + mean(deltas) + h
            x = x + m
        else:
            m = lookahead * m + mean(deltas)
            x = x + m + h
        models.append(x)
    return Trace(models, {"momentum": m, "dual": h}, {"dual": h_client})


def nesterov_sam(problem: Problem, *, lookahead: float, radius: float) -> Trace:
    """FedSAM + Nesterov, an ablation of FedNSAM: two-gradient steps that start at the look-ahead model."""
    x = problem.start
    wd = problem.weight_decay
    m = np.zeros_like(x)
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        phi = x + lookahead * m
        deltas = []
        for i in cohort:
            y = phi
            for k in range(problem.steps(t, i)):
                epsilon = radius * unit(problem.gradient(t, i, k, y))
                d = problem.gradient(t, i, k, y + epsilon)
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - phi)
        m = lookahead * m + mean(deltas)
        x = x + m
        models.append(x)
    return Trace(models, {"momentum": m})


# ---------------------------------------------------------------------------------------------------------
# Synthetic samples


def adam(
    value: Vector, slope: Vector, m: Vector, v: Vector, rate: float, count: int
) -> tuple[Vector, Vector, Vector]:
    """The ``count``-th step of Adam and its new moments."""
    m = 0.9 * m + 0.1 * slope
    v = 0.999 * v + 0.001 * slope**2
    return value - rate * (m / (1 - 0.9**count)) / (np.sqrt(v / (1 - 0.999**count)) + 1e-8), m, v


def distil(
    problem: Problem,
    models: list[Vector],
    target: Vector,
    *,
    samples_per_class: int,
    iterations: int,
    steps: int,
    sample_rate: float,
    inner_rate: float,
    inner_rate_rate: float,
    optimizer: str = "adam",
    soft: bool = False,
    halve: bool = False,
) -> dict[str, Vector]:
    """Samples on which gradient descent from the first model leads to the target, and all that is kept.

    The derivatives of the matching loss are carried back through the inner steps by hand.
    """
    start = models[0]
    inputs, labels = problem.made_up(samples_per_class, soft)
    while halve:
        point = start
        for _ in range(steps):
            point = point - inner_rate * problem.made_up_gradient(point, inputs, labels)
        if np.sum((point - target) ** 2) <= 1.1 * np.sum((start - target) ** 2):
            break
        inner_rate = inner_rate / 2
    learned = {
        "synthetic_inputs": inputs,
        "synthetic_labels": labels,
        "synthetic_step": np.array([inner_rate]),
    }
    moved = [name for name in learned if soft or name != "synthetic_labels"]
    first = {name: np.zeros_like(learned[name]) for name in moved}
    second = {name: np.zeros_like(learned[name]) for name in moved}
    losses = []
    for count in range(1, iterations + 1):
        x, y, a = learned["synthetic_inputs"], learned["synthetic_labels"], learned["synthetic_step"]
        path = [start]
        for _ in range(steps):
            path.append(path[-1] - a * problem.made_up_gradient(path[-1], x, y))
        scale = np.sum((start - target) ** 2)
        losses.append(np.sum((path[-1] - target) ** 2) / scale)
        back = 2 * (path[-1] - target) / scale
        slopes = {name: np.zeros_like(value) for name, value in learned.items()}
        for theta in reversed(path[:-1]):
            by_theta, by_inputs, by_labels = problem.made_up_slopes(theta, x, y, back)
            slopes["synthetic_step"] -= back @ problem.made_up_gradient(theta, x, y)
            slopes["synthetic_inputs"] -= a * by_inputs
            slopes["synthetic_labels"] -= a * by_labels
            back = back - a * by_theta
        for name in moved:
            rate = inner_rate_rate if name == "synthetic_step" else sample_rate
            if optimizer == "sgd":
                first[name] = slopes[name]
                learned[name] = learned[name] - rate * slopes[name]
            else:
                learned[name], first[name], second[name] = adam(
                    learned[name], slopes[name], first[name], second[name], rate, count
                )
        learned["synthetic_step"] = np.maximum(learned["synthetic_step"], 1e-6)
    kept = {
        "trajectory": np.concatenate(models),
        "matching_losses": np.array(losses),
        "synthetic_ready": np.ones(1),
        **learned,
        **{f"{name}_first": value for name, value in first.items()},
        **({f"{name}_second": value for name, value in second.items()} if optimizer == "adam" else {}),
    }
    return {name: value.ravel() for name, value in kept.items()}


def fine_tuned(
    problem: Problem, x: Vector, made: dict[str, Vector], soft_labels: Vector, epochs: int, rate: float
) -> Vector:
    """Adam from zero moments, every epoch one step on all samples."""
    inputs = made["synthetic_inputs"].reshape(-1, problem.inputs)
    labels = made["synthetic_labels"].reshape(soft_labels.shape)
    m = np.zeros_like(x)
    v = np.zeros_like(x)
    for count in range(1, epochs + 1):
        x, m, v = adam(x, problem.made_up_gradient(x, inputs, labels), m, v, rate, count)
    return x


def fedsynsam(
    problem: Problem,
    *,
    radius: float,
    local_weight: float,
    warm_rounds: int,
    samples_per_class: int,
    iterations: int,
    span: int,
    sample_rate: float,
    inner_rate_rate: float,
    synthetic_batch: int,
    inner_rate: float | None = None,
    sample_optimizer: str = "adam",
    descent_mix: float = 0.0,
    server_rate: float = 1.0,
) -> Trace:
    """FedSynSAM, matching from the first model to the last so that there is nothing to draw."""
    assert span == warm_rounds + 1
    x = problem.start
    wd = problem.weight_decay
    made: dict[str, Vector] = {}
    models = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        if t == warm_rounds + 1:
            made = distil(
                problem,
                models,
                models[-1],
                samples_per_class=samples_per_class,
                iterations=iterations,
                steps=span,
                sample_rate=sample_rate,
                inner_rate=problem.steps(t, 0) * eta if inner_rate is None else inner_rate,
                inner_rate_rate=inner_rate_rate,
                optimizer=sample_optimizer,
                halve=inner_rate is None,
            )
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                ascent = problem.gradient(t, i, k, y)
                if t > warm_rounds:
                    inputs = made["synthetic_inputs"].reshape(-1, problem.inputs)
                    labels = made["synthetic_labels"]
                    size = min(synthetic_batch, len(inputs))
                    begin = (t * problem.steps(t, i) + k) * size
                    batch = [j % len(inputs) for j in range(begin, begin + size)]
                    there = problem.made_up_gradient(y, inputs[batch], labels[batch])
                    ascent = local_weight * ascent + (1 - local_weight) * there
                above = y + radius * unit(ascent)
                d = problem.gradient(t, i, k, above)
                if t > warm_rounds:
                    there = problem.made_up_gradient(above, inputs[batch], labels[batch])
                    d = (1 - descent_mix) * d + descent_mix * there
                y = y - eta * (problem.optimized(t, i, k, y, d) + wd * y)
            deltas.append(y - x)
        x = x + server_rate * mean(deltas)
        models.append(x)
    return Trace(models, made)


def dynafed(
    problem: Problem,
    *,
    models: int,
    samples_per_class: int,
    iterations: int,
    steps: int,
    span: int,
    sample_rate: float,
    inner_rate: float,
    inner_rate_rate: float,
    epochs: int,
    fine_tuning_rate: float,
) -> Trace:
    """DynaFed with a window of two models, whose mean is the only target there can be."""
    assert span == 2 and models == 3
    x = problem.start
    wd = problem.weight_decay
    made: dict[str, Vector] = {}
    visited = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        if t == models - 1:
            made = distil(
                problem,
                visited,
                (visited[1] + visited[2]) / 2,
                samples_per_class=samples_per_class,
                iterations=iterations,
                steps=steps,
                sample_rate=sample_rate,
                inner_rate=inner_rate,
                inner_rate_rate=inner_rate_rate,
                soft=True,
            )
        deltas = []
        for i in cohort:
            y = x
            for k in range(problem.steps(t, i)):
                g = problem.gradient(t, i, k, y)
                y = y - eta * (problem.optimized(t, i, k, y, g) + wd * y)
            deltas.append(y - x)
        x = x + mean(deltas)
        if t >= models - 1:
            labels = problem.made_up(samples_per_class, soft=True)[1]
            x = fine_tuned(problem, x, made, labels, epochs, fine_tuning_rate)
        visited.append(x)
    return Trace(visited, made)


def dynafed_syn_only(
    problem: Problem,
    *,
    models: int,
    samples_per_class: int,
    iterations: int,
    steps: int,
    span: int,
    sample_rate: float,
    inner_rate: float,
    inner_rate_rate: float,
    epochs: int,
    fine_tuning_rate: float,
) -> Trace:
    """DynaFed whose server does not listen any more once it has its own samples."""
    assert span == 2 and models == 3
    x = problem.start
    wd = problem.weight_decay
    made: dict[str, Vector] = {}
    visited = [x]
    for t, cohort in enumerate(problem.cohorts):
        eta = problem.rate(t)
        if t == models - 1:
            made = distil(
                problem,
                visited,
                (visited[1] + visited[2]) / 2,
                samples_per_class=samples_per_class,
                iterations=iterations,
                steps=steps,
                sample_rate=sample_rate,
                inner_rate=inner_rate,
                inner_rate_rate=inner_rate_rate,
                soft=True,
            )
        if t >= models - 1:
            labels = problem.made_up(samples_per_class, soft=True)[1]
            x = fine_tuned(problem, x, made, labels, epochs, fine_tuning_rate)
        else:
            deltas = []
            for i in cohort:
                y = x
                for k in range(problem.steps(t, i)):
                    g = problem.gradient(t, i, k, y)
                    y = y - eta * (problem.optimized(t, i, k, y, g) + wd * y)
                deltas.append(y - x)
            x = x + mean(deltas)
        visited.append(x)
    return Trace(visited, made)
