"""Every part with options at which it acts, and a small federation on which any composition can be tried."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from problems import GENERIC
from torch import Tensor, nn

import flatfed as ff
from flatfed import parts
from flatfed.core.algorithm import Algorithm, ImpossibleComposition
from flatfed.core.context import ClientContext, MergeContext
from flatfed.core.flat import Layout
from flatfed.core.part import Compressor, Part
from flatfed.core.rounds import ClientResult, broadcast, client_round, encode_uploads, server_round
from flatfed.core.state import Dimensions, State, initial_state

MATCHING = parts.TrajectoryMatching(models=3, samples_per_class=1, iterations=2, steps=1, span=1)
VARIANTS: tuple[Part, ...] = (
    parts.LookAhead(0.6),
    parts.PerturbedLookAhead(0.6, 0.3),
    parts.PerturbedStart(0.3),
    parts.SharpnessAware(0.2),
    parts.SharpnessAware(0.2, 0.7, normalize=False),
    parts.AdaptiveSharpnessAware(0.3),
    parts.AdaptiveSharpnessAware(0.3, scale_norms=False),
    parts.LastModel(0.3),
    parts.LastModel(0.3, "server"),
    parts.AlongMomentum(0.3, 0.6),
    parts.ConsensusPerturbation(0.2),
    parts.ConsensusPerturbation(0.2, "dual"),
    parts.ShiftedInputs(0.3, 0.2, 0.1, 0.3),
    parts.ShiftedInputs(0.3, 0.2, 0.1, 0.3, "full"),
    parts.ShiftedInputs(0.3, 0.2, 0.1, 0.3, "channel"),
    parts.SyntheticMix(0.2, 0.6, 2),
    parts.Proximal(0.3),
    parts.HybridProximal(0.2, 0.1),
    parts.ControlVariate(),
    parts.ControlVariate("I", 0.7),
    parts.MomentumControlVariate(),
    parts.MomentumControlVariate("I", warm_start=True),
    parts.DynamicRegulariser(0.2),
    parts.DynamicRegulariser(0.2, "participants"),
    parts.GlobalMomentum(0.6, 0.3, 0.4),
    parts.FullGradientMomentum(0.6),
    parts.LocalMomentum(0.6, nesterov=True, state="averaged"),
    parts.LocalMomentum(0.6, nesterov=True),
    parts.LocalMomentum(0.6, damped=True),
    parts.LocalMomentum(0.6, state="kept"),
    parts.AdamW(eps=0.1),
    parts.AdamW(eps=0.1, state="kept"),
    parts.AdamW(eps=0.1, state="averaged"),
    parts.AdamW(eps=0.1, state="blocks"),
    parts.Muon(),
    parts.Muon(state="kept"),
    parts.Muon(0.8, nesterov=False, scale="match_rms_adamw", state="averaged"),
    parts.LinearDecay(0.3),
    parts.Average(1.3),
    parts.Average(0.1, "gradient"),
    parts.Momentum(0.6),
    parts.Momentum(0.6, absorb_shift=True),
    parts.Adam(0.05),
    parts.Extrapolate(0.05, 0.9),
    parts.LateAverage(2, of=parts.Momentum(0.6)),
    parts.Unaveraged(),
    MATCHING,
    parts.FineTune(epochs=1, batch=2),
    parts.FineTune(epochs=1, batch=2, aggregate=False),
    parts.TrimmedMean(0.25),
    *(
        wrapped
        for inner in (parts.Quantize(), parts.TopK(0.4), parts.Sign())
        for wrapped in (inner, parts.ErrorFeedback(inner), parts.ErrorFeedback21(inner))
    ),
    parts.ErrorFeedback(Compressor()),
)


OWNERS: dict[type[Part], Part] = {
    parts.TrajectoryMatching: MATCHING,
    parts.Momentum: parts.Momentum(0.6),
    parts.LateAverage: parts.LateAverage(2),
}
"""Parts whose vectors others read."""


def composed(*chosen: Part, **others: Any) -> Algorithm:
    """An algorithm of these parts, and of those that they cannot do without where that slot is free."""
    slots: dict[str, Any] = dict(others)
    for part in chosen:
        if part.slot == "correct":
            slots["correct"] = (*slots.get("correct", ()), part)
        elif part.slot in slots:
            raise ImpossibleComposition(f"two parts for {part.slot}")
        else:
            slots[part.slot] = part
    for reads in [reads for part in chosen for reads in part.reads]:
        needed = OWNERS[reads.owner]
        slots.setdefault(needed.slot, needed)
    return Algorithm(**slots)


def pairs() -> Iterator[tuple[str, Algorithm]]:
    """All pairs of parts that can be put together, by name."""
    for first, second in itertools.combinations(VARIANTS, 2):
        try:
            yield f"{first} with {second}", composed(first, second)
        except ImpossibleComposition:
            continue


def transported() -> Iterator[tuple[str, Algorithm]]:
    """All named algorithms under all compressors."""
    compressors = [part for part in VARIANTS if isinstance(part, Compressor)]
    for name, compressor in itertools.product(ff.ALGORITHMS, compressors):
        try:
            algorithm = ff.ALGORITHMS[name](**GENERIC.get(name, {}))
            yield f"{name} with {compressor}", Algorithm(**_slots(algorithm) | {"compress": compressor})
        except ImpossibleComposition:
            continue


def _slots(algorithm: Algorithm) -> dict[str, Any]:
    names = ("start", "gradient", "correct", "optimizer", "schedule", "aggregate", "server", "synthetic")
    return {name: getattr(algorithm, name) for name in names}


class Linear(nn.Module):
    """Three parameters and two classes, without anything random."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.3, -0.2]], dtype=torch.float64))
        self.offset = nn.Parameter(torch.tensor([0.1], dtype=torch.float64))

    def forward(self, inputs: Tensor) -> Tensor:
        score = inputs @ self.weight.T + self.offset
        return torch.cat([score, -score], 1)


LAYOUT = Layout(Linear())
DIMENSIONS = Dimensions(LAYOUT.size, (2,), 2, len(LAYOUT.entries))


class QuadraticOracle:
    """The gradient of ½ ‖y − a_i‖², with slopes for maps of inputs that are made up."""

    def __init__(self, minima: Tensor) -> None:
        self.minima = minima

    def __call__(self, point: Tensor) -> Tensor:
        return point - self.minima

    def shifted(
        self, point: Tensor, shift: Callable[..., Tensor], parameters: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        return self(point), tuple(0.1 + parameter for parameter in parameters)

    def on_samples(self, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        return point - inputs.mean()


@dataclass
class Round:
    """What went into a round of a chunk of clients, and what came out."""

    server: State
    sent: State
    clients: State
    result: ClientResult
    memories: list[dict[str, Tensor]]
    uploads: State
    """The mean uploads."""
    merged: State


def small_round(
    algorithm: Algorithm, server: State, clients: State, number: int, training: ff.Training, rows: bool = True
) -> Round:
    """A round of three clients as a matrix, or of the first of them as vectors, by the core alone."""
    minima = torch.tensor([[1.0, 2, -1], [0, 1, 1], [-2, 0.5, 3]], dtype=torch.float64)
    minima = minima if rows else minima[0]
    sent = broadcast(algorithm, server, {}).vectors
    point = sent["model"].expand_as(minima).clone()
    oracle = QuadraticOracle(minima)
    gradient = oracle(point)
    context = ClientContext(
        round=number,
        received=sent,
        client=clients,
        rates=algorithm.schedule.rates(0.2, 2),
        layout=LAYOUT,
        input_shape=(2,),
        full_gradient=lambda: gradient,
        displacement=torch.zeros_like(point),
    )
    result = client_round(algorithm, context, [oracle, oracle], training, point)
    uploads, memories = dict(result.upload), []
    if rows and algorithm.compressed:
        encoded = []
        for index in range(len(minima)):
            own = {key: value[index] for key, value in result.upload.items()}
            memory = {key: value[index] for key, value in clients.items()}
            kept = {key: value[index] for key, value in result.client.items() if value.dim() > 1}
            encoded.append(encode_uploads(algorithm, own, memory, kept, 0, number, index))
        uploads = {key: torch.stack([sent.decoded[key] for sent in encoded]) for key in uploads}
        memories = [sent.memory for sent in encoded]
    mean = {}
    for key, upload in algorithm.declared_uploads.items():
        reduced = upload.reduce(uploads[upload.of or key])
        mean[key] = reduced.mean(0) if rows else reduced
    merged = server_round(algorithm, server, mean, MergeContext(number, 0.5, context.total_rate))
    return Round(server, sent, clients, result, memories, mean, merged)


def first_server(algorithm: Algorithm) -> dict[str, Tensor]:
    model = LAYOUT.vector(Linear())
    return {"model": model, **initial_state(algorithm.server_vectors, DIMENSIONS, model)}


def first_clients(algorithm: Algorithm, rows: bool = True) -> dict[str, Tensor]:
    model = LAYOUT.vector(Linear())
    state = initial_state(algorithm.client_vectors, DIMENSIONS, model)
    return {key: value.expand(3, -1).clone() if rows else value for key, value in state.items()}
