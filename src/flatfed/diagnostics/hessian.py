"""The curvature of the loss: largest eigenvalues, trace and spectral density of its Hessian.

Only products H v are needed: eigenvalues come from scipy's Lanczos solver, the largest in the sense of the
real line, so that a large negative one is never taken for sharpness; the trace (Hutchinson) and the density
(stochastic Lanczos quadrature) from random vectors of signs.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.linalg import eigh_tridiagonal
from scipy.sparse.linalg import ArpackError, ArpackNoConvergence, LinearOperator, eigsh

from flatfed.core import random
from flatfed.core.errors import FlatfedError
from flatfed.core.types import Count, Seed
from flatfed.data.samples import Samples
from flatfed.diagnostics import figures
from flatfed.diagnostics.registry import diagnostic
from flatfed.diagnostics.subject import Subject, Tick, part_of, silent
from flatfed.runs.statistics import mean

Array = NDArray[np.float64]
Product = Callable[[Array], Array]
"""v ↦ H v."""

DENSE = 64
"""Up to this size all eigenvalues are computed from the matrix itself."""
GRID = 200
TOLERANCE = 1e-4


def top_eigenvalues(product: Product, size: int, count: int, seed: int = 0) -> list[float]:
    """The `count` largest eigenvalues of a symmetric operator, largest first."""
    if size <= DENSE:
        matrix = np.stack([product(row) for row in np.eye(size)])
        return np.linalg.eigvalsh((matrix + matrix.T) / 2)[::-1][:count].tolist()
    start = random.numpy_generator(seed, "hessian start").standard_normal(size)
    count = min(count, size - 1)  # Lanczos finds no more
    if not product(start).any():  # it would stop at once; a random vector shows that all is zero
        return [0.0] * count
    operator = LinearOperator((size, size), matvec=product, dtype=np.float64)
    try:
        values = eigsh(
            operator, count, which="LA", v0=start, tol=TOLERANCE, maxiter=300, return_eigenvectors=False
        )
    except ArpackError as error:
        values = error.eigenvalues if isinstance(error, ArpackNoConvergence) else []
        if not len(values):
            raise FlatfedError("hessian: no eigenvalue converged; try samples = more") from None
    return sorted(map(float, values), reverse=True)


def lanczos(product: Product, start: Array, steps: int) -> tuple[Array, Array]:
    """Diagonal and off-diagonal of the operator on the Krylov space of `start`, fully orthogonalised."""
    basis = [start / np.linalg.norm(start)]
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(steps):
        image = product(basis[-1])
        diagonal.append(float(image @ basis[-1]))
        for _ in range(2):  # once leaves rounding errors that grow into ghost eigenvalues
            for known in basis:
                image = image - (image @ known) * known
        length = float(np.linalg.norm(image))
        if length <= 1e-6 * max(map(abs, diagonal)) or len(basis) == min(steps, len(start)):
            break
        beside.append(length)
        basis.append(image / length)
    return np.array(diagonal), np.array(beside)


def spectral_density(rules: list[tuple[Array, Array]]) -> dict[str, list[float]]:
    """Eigenvalue nodes and weights, one pair a random vector, as one smooth density of area 1."""
    nodes = np.concatenate([values for values, _ in rules])
    width = max(float(np.ptp(nodes)) / 100, 1e-6 * float(np.abs(nodes).max()), 1e-12)
    grid = np.linspace(nodes.min() - 4 * width, nodes.max() + 4 * width, GRID)
    total = np.zeros_like(grid)
    for values, weights in rules:
        bumps = np.exp(-(((grid[:, None] - values) / width) ** 2) / 2) / (width * np.sqrt(2 * np.pi))
        total += bumps @ weights / len(rules)
    return {"values": grid.tolist(), "density": total.tolist()}


def spectrum(
    product: Product, size: int, eigenvalues: int, probes: int, steps: int, seed: int = 0, tick: Tick = silent
) -> dict[str, Any]:
    """Eigenvalues, trace with its standard error and, for steps > 1, the density of a symmetric operator."""
    top = top_eigenvalues(product, size, eigenvalues, seed)
    tick(0.3)
    traces, rules = [], []
    for probe in range(probes):
        signs = random.numpy_generator(seed, "hessian signs", probe).choice([-1.0, 1.0], size)
        diagonal, beside = lanczos(product, signs, steps)
        traces.append(size * diagonal[0])  # vᵀHv, since ‖v‖² = size
        values, vectors = eigh_tridiagonal(diagonal, beside)
        rules.append((values, vectors[0] ** 2))
        tick(0.3 + 0.7 * (probe + 1) / probes)
    return {
        "eigenvalues": top,
        "trace": float(np.mean(traces)),
        "trace_error": float(np.std(traces, ddof=1) / np.sqrt(probes)) if probes > 1 else None,
        "density": spectral_density(rules) if steps > 1 else None,
    }


def products(subject: Subject, samples: Samples) -> Product:
    """The Hessian of the mean loss on some samples at the global model, as a map of numpy vectors."""
    model = subject.model

    def product(vector: Array) -> Array:
        direction = torch.from_numpy(np.asarray(vector)).reshape(-1).to(model)
        image: Array = subject.hessian_product(model, samples, direction).double().cpu().numpy()
        if not np.isfinite(image).all():
            raise FlatfedError(
                "model: the curvature of its loss is not finite; if its training diverged, lower lr and run "
                "it again"
            )
        return image

    return product


def summary(result: figures.Result) -> str:
    whole = result["global"]
    largest = max(client["eigenvalues"][0] for client in result["clients"])
    top, of_clients, trace, error = map(
        figures.brief, (whole["eigenvalues"][0], largest, whole["trace"], whole["trace_error"])
    )
    return f"top eigenvalue {top} (clients up to {of_clients}), trace {trace} ± {error}"


def show(measured: figures.Measurements) -> figures.Content:
    methods, number = measured["hessian"], figures.significant
    tops, densities, boxes = [], [], []
    for method in methods:
        values, density = method.first["global"]["eigenvalues"], method.first["global"].get("density")
        tops.append(figures.line(method, range(1, len(values) + 1), values, mode="lines+markers"))
        if density:
            densities.append(figures.line(method, density["values"], density["density"]))
        if of_clients := method.of_clients("eigenvalues", 0):
            boxes.append(figures.box(method, of_clients))
    columns = {
        "largest eigenvalue": figures.column(number, "global", "eigenvalues", 0),
        "trace": figures.column(number, "global", "trace"),
        "standard error of the trace": figures.column(number, "global", "trace_error"),
        "clients' largest, mean": lambda method: number(mean(method.of_clients("eigenvalues", 0))),
    }
    table, density_title = "Curvature of the training loss", "Spectral density of the Hessian"
    box_title = "Largest eigenvalue on each client's data"
    return [
        figures.method_table("hessian", table, methods, columns, "Smaller is flatter."),
        figures.chart("eigenvalues", "Largest eigenvalues of the Hessian", tops, "rank", "eigenvalue"),
        figures.chart("density", density_title, densities, "eigenvalue", "density", decades=6),
        figures.box_chart("client-eigenvalues", box_title, boxes, "eigenvalue"),
    ]


@diagnostic("flatness", summary, show)
def hessian(
    subject: Subject,
    *,
    samples: Count | None = 2000,
    clients: Count | None = 5,
    eigenvalues: Count = 3,
    probes: Count = 10,
    steps: Count = 40,
    client_steps: Count = 1,
    seed: Seed = 0,
    tick: Tick = silent,
) -> dict[str, Any]:
    """Spectra of the global loss and of some clients' losses, at the global model.

    `samples` limits the pooled training data; clients use all of theirs. `steps` of Lanczos resolve the
    density of the global spectrum, `client_steps` those of the clients; 1 leaves a density out.
    """
    size, members = len(subject.model), subject.some_clients(clients)
    pooled = products(subject, subject.training_data(samples))
    whole = spectrum(pooled, size, eigenvalues, probes, steps, seed, part_of(tick, 0, 0.6))
    of_clients = []
    for index, client in enumerate(members):
        own = products(subject, subject.data(client))
        watch = part_of(tick, 0.6 + 0.4 * index / len(members), 0.6 + 0.4 * (index + 1) / len(members))
        values = spectrum(own, size, eigenvalues, probes, client_steps, seed, watch)
        of_clients.append({"client": client, **values})
    return {"global": whole, "clients": of_clients}
