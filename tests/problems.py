"""Small float64 problems that tests train on, and ways to look into a training.

Two federations: a stochastic, non-convex classification whose clients disagree, and quadratics whose optimum
is known. `run` trains on the first with settings at which mistakes show: few participants, several local
steps, batches smaller than a client's data, and a rate that decays from round to round.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import flatfed as ff
from flatfed.core.algorithm import short_names
from flatfed.core.context import Carry, ClientContext, Finish, Oracle

# At this size the threads inside an operation only wait for each other.
torch.set_num_threads(1)

CLIENTS, FEATURES, HIDDEN, CLASSES = 8, 4, 5, 3

DEFAULTS: dict[str, Any] = {
    "rounds": 5,
    "participants": 3,
    "local_steps": 3,
    "batch_size": 5,
    "lr": 0.2,
    "lr_decay": 0.9,
    "weight_decay": 0.01,
    "workers": 1,
}

MADE_UP: dict[str, Any] = {
    "samples_per_class": 2,
    "iterations": 4,
    "span": 2,
    "sample_rate": 0.2,
    "inner_rate_rate": 0.05,
}
"""A short distillation that moves everything it can move."""

GENERIC: dict[str, dict[str, Any]] = {
    "dynafed": {
        **MADE_UP,
        "models": 3,
        "steps": 3,
        "inner_rate": 0.3,
        "epochs": 3,
        "fine_tuning_rate": 0.01,
    },
    "dynafed_syn_only": {
        **MADE_UP,
        "models": 3,
        "steps": 3,
        "inner_rate": 0.3,
        "epochs": 3,
        "fine_tuning_rate": 0.01,
    },
    "fedacg": {"lookahead": 0.6, "proximal_weight": 0.3},
    "fedadam": {"server_rate": 0.05, "first_decay": 0.7, "second_decay": 0.95, "stability": 0.01},
    "fedadamw": {"global_weight": 0.4, "beta1": 0.8, "beta2": 0.95, "eps": 0.01},
    "fedanag": {"momentum_decay": 0.5, "server_rate": 1.3},
    "fedasam": {"radius": 0.3, "offset": 0.2, "server_rate": 1.3},
    "fedavg": {"server_rate": 1.3},
    "fedavgm": {"momentum_decay": 0.6, "server_rate": 0.8},
    "fedcm": {"fresh_weight": 0.4, "server_rate": 1.3},
    "feddyn": {"regularisation": 0.2},
    "fedexp": {"stability": 0.05, "stability_decay": 0.9},
    "fedgamma": {"radius": 0.15, "server_rate": 1.3},
    "fedgloss": {"server_radius": 0.3, "radius": 0.2, "regularisation": 0.2},
    "fedlesam": {"radius": 0.3, "server_rate": 1.3},
    "fedlesam_d": {"radius": 0.3, "regularisation": 0.2},
    "fedlesam_s": {"radius": 0.3},
    "fedlnag": {"momentum_decay": 0.6, "server_rate": 1.3},
    "fedmo": {"momentum_rate": 0.4},
    "fedmoswa": {"final_rate": 0.3, "server_rate": 1.3, "momentum_rate": 0.4},
    "fedmuon": {"global_weight": 0.4, "momentum": 0.8, "ratio": 0.7},
    "fednsam": {"lookahead": 0.6, "radius": 0.3},
    "fednsam_d": {"lookahead": 0.6, "radius": 0.3, "regularisation": 0.2},
    "fednsam_s": {"lookahead": 0.6, "radius": 0.3},
    "fedprox": {"proximal_weight": 0.5},
    "fedrobust": {"scale_rate": 0.3, "offset_rate": 0.2, "scale_penalty": 0.1, "offset_penalty": 0.3},
    "fedsagd": {"momentum_decay": 0.5, "proximal_weight": 0.3, "decay_weight": 0.05, "server_rate": 1.3},
    "fedsam": {"radius": 0.2, "server_rate": 1.3},
    "fedsmoo": {"radius": 0.2, "regularisation": 0.2},
    "fedspeed": {"radius": 0.2, "mix": 0.7, "proximal_weight": 0.2},
    "fedswa": {"final_rate": 0.3, "server_rate": 1.3},
    "fedsynsam": {
        **MADE_UP,
        "radius": 0.2,
        "local_weight": 0.6,
        "warm_rounds": 1,
        "synthetic_batch": 4,
        "server_rate": 1.3,
    },
    "mimelite": {"momentum_decay": 0.6},
    "mofedsam": {"radius": 0.2, "fresh_weight": 0.4, "server_rate": 1.3},
    "scaffold": {"server_rate": 1.3},
}
"""For every algorithm, options at which all of its ingredients act."""


def generic(name: str, **options: Any) -> ff.Algorithm:
    """A named algorithm at its generic options, some of them replaced."""
    return ff.ALGORITHMS[name](**{**GENERIC.get(name, {}), **options})


# -- the classification ------------------------------------------------------------------------------------


def network() -> nn.Sequential:
    """Two linear layers, so that the flat vector is the plain concatenation of the parameters."""
    model = nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, CLASSES)).double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.6, generator=generator)
    return model


def federation(clients: int = CLIENTS, *, unequal: bool = False, alike: bool = False) -> ff.Federation:
    """Clients with their own inputs and their own labelling; `unequal` in size, or all `alike`."""
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    samples = []
    for number in range(clients):
        size = 5 + 3 * (number % 4) if unequal else 12
        inputs = draw(size, FEATURES) + 0.8 * draw(FEATURES)
        samples.append((inputs, (inputs @ draw(FEATURES, CLASSES) + 0.5 * draw(CLASSES)).argmax(1)))
    return ff.Federation.from_tensors([samples[0]] * clients if alike else samples)


def in_float32() -> tuple[nn.Module, ff.Federation]:
    """The same network and clients in single precision."""
    data = federation()
    clients = [data.client(number).whole() for number in range(len(data))]
    return network().float(), ff.Federation.from_tensors([(inputs.float(), own) for inputs, own in clients])


def flat(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def gradient_of(model: nn.Module, point: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
    """The gradient of the mean cross-entropy by plain autograd; the model is overwritten."""
    nn.utils.vector_to_parameters(point, model.parameters())
    loss = F.cross_entropy(model(inputs), targets)
    return torch.cat([piece.flatten() for piece in torch.autograd.grad(loss, list(model.parameters()))])


def pooled_gradient(data: ff.Federation, point: Tensor) -> Tensor:
    """The mean of the clients' full gradients."""
    model = network()
    pieces = []
    for number in range(len(data)):
        own = data.client(number)
        pieces.append(gradient_of(model, point, *own.batch(torch.arange(len(own)))))
    return torch.stack(pieces).mean(0)


# -- training ----------------------------------------------------------------------------------------------


@dataclass
class Recorder:
    """A callback that keeps x_1 … x_T, the server's vectors and the participants of every round."""

    servers: list[dict[str, Tensor]] = field(default_factory=list)
    cohorts: list[list[int]] = field(default_factory=list)

    def __call__(self, progress: ff.Progress) -> None:
        self.servers.append({name: value.clone() for name, value in named(progress.server).items()})
        self.cohorts.append(list(progress.cohort))

    @property
    def models(self) -> Tensor:
        """[T, P]"""
        return torch.stack([server["model"] for server in self.servers])


def train(
    model: nn.Module,
    federation: ff.Federation,
    algorithm: ff.Algorithm,
    *,
    callbacks: Sequence[Any] = (),
    folder: Any = None,
    evaluate_on_clients: bool = False,
    config: Any = None,
    **options: Any,
) -> ff.Run:
    """`ff.train` with the fields of its task, its training and its execution as plain arguments."""

    def taken(names: Iterable[str]) -> dict[str, Any]:
        return {name: options.pop(name) for name in names if name in options}

    task = ff.Task(model, federation, **taken(("loss", "metrics", "name", "version")))
    execution = ff.Execution(**taken(ff.Execution.model_fields))
    return ff.train(
        task,
        algorithm,
        ff.Training(**options),
        execution,
        callbacks=callbacks,
        folder=folder,
        evaluate_on_clients=evaluate_on_clients,
        config=config,
    )


def named(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Vectors by their own names, without their owners'."""
    names = short_names(state)
    return {names[key]: value for key, value in state.items()}


def run(
    algorithm: ff.Algorithm,
    *,
    data: ff.Federation | None = None,
    model: nn.Module | None = None,
    recorder: Recorder | None = None,
    **settings: Any,
) -> ff.Run:
    """A training on the classification; the defaults give way to the settings."""
    chosen = {**DEFAULTS, **settings}
    for own, other in (("participants", "participation"), ("local_steps", "local_epochs")):
        if chosen.get(other) is not None:
            chosen[own] = None
    return train(
        network() if model is None else model,
        federation() if data is None else data,
        algorithm,
        metrics={},
        callbacks=[] if recorder is None else [recorder],
        **chosen,
    )


def trajectory(algorithm: ff.Algorithm, **settings: Any) -> Tensor:
    """The global models x_1 … x_T, [T, P]."""
    recorder = Recorder()
    run(algorithm, recorder=recorder, **settings)
    return recorder.models


def distance(left: Tensor, right: Tensor) -> float:
    """The largest difference, relative to the largest entry of `right` where that is above 1."""
    assert left.shape == right.shape
    return float((left - right).abs().max() / right.abs().max().clamp(min=1.0))


# -- looking into the local steps --------------------------------------------------------------------------


@dataclass
class Step:
    """One local step of all participants (the matrix path) or of one (the client path)."""

    round: int
    rate: float
    point: Tensor
    """The local model, [S, P] or [P]."""
    evaluated: list[Tensor]
    """Where the gradient part evaluated gradients."""
    gradients: list[Tensor]
    """What it found there."""
    direction: Tensor
    """What it gave, before corrections."""


@dataclass
class Log:
    """What happened inside the rounds, in order."""

    steps: list[Step] = field(default_factory=list)
    ends: list[Tensor] = field(default_factory=list)
    """For every round the final local models, [S, P] or [P]."""
    starts: list[Tensor] = field(default_factory=list)
    """For every round the model that was received, [P]."""

    def of_round(self, number: int) -> list[Step]:
        return [step for step in self.steps if step.round == number]


def spied(algorithm: ff.Algorithm) -> tuple[ff.Algorithm, Log]:
    """The same algorithm with a gradient part that also writes a log; for one worker."""
    log = Log()
    kind = type(algorithm.gradient)

    class Spied(kind):  # type: ignore[misc,valid-type]
        def gradient(
            self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry
        ) -> tuple[Tensor, Carry]:
            evaluated: list[Tensor] = []
            found: list[Tensor] = []

            def watched(at: Tensor) -> Tensor:
                evaluated.append(at.clone())
                found.append(oracle(at).clone())
                return found[-1].clone()

            direction, carry = super().gradient(point, watched, context, carry)
            local = (
                point.clone()
                if self.constant_shift(context) is None
                else context.origin + context.displacement
            )
            number = sum(step.round == context.round for step in log.steps) % len(context.rates)
            log.steps.append(
                Step(
                    context.round,
                    context.rates[number],
                    local,
                    evaluated,
                    found,
                    direction.clone(),
                )
            )
            return direction, carry

        def finish(self, context: ClientContext, carry: Carry, displacement: Tensor) -> Finish:
            log.starts.append(context.origin.clone())
            log.ends.append(context.origin + displacement)
            return super().finish(context, carry, displacement)

    part = copy.copy(algorithm.gradient)
    object.__setattr__(part, "__class__", Spied)
    return replace(algorithm, gradient=part), log


# -- quadratics --------------------------------------------------------------------------------------------


class Point(nn.Module):
    """One parameter vector; the inputs are rows [H | a] and the output is ½ (x − a)ᵀ H (x − a)."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.position = nn.Parameter(start.clone())

    def forward(self, inputs: Tensor) -> Tensor:
        gap = self.position - inputs[..., -1]
        return 0.5 * ((inputs[..., :-1] * gap[:, None]).sum(2) * gap).sum(1)


def mean_output(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.mean()


@dataclass(frozen=True)
class Quadratics:
    """Client i has the loss ½ (x − a_i)ᵀ H_i (x − a_i), with curvatures and minima of its own."""

    curvatures: Tensor
    """[N, d, d]"""
    minima: Tensor
    """[N, d]"""

    @staticmethod
    def random(clients: int = 6, size: int = 3, weakest: float = 0.4, strongest: float = 2.0) -> Quadratics:
        generator = torch.Generator().manual_seed(11)
        raw = torch.randn(clients, size, size, generator=generator, dtype=torch.float64)
        bases = torch.linalg.qr(raw).Q
        spread = torch.rand(clients, size, generator=generator, dtype=torch.float64)
        spectra = weakest + (strongest - weakest) * spread
        curvatures = bases @ torch.diag_embed(spectra) @ bases.mT
        minima = 2 * torch.randn(clients, size, generator=generator, dtype=torch.float64)
        return Quadratics((curvatures + curvatures.mT) / 2, minima)

    @property
    def optimum(self) -> Tensor:
        """The minimum of the mean loss."""
        weighted = torch.einsum("nij,nj->i", self.curvatures, self.minima)
        return torch.linalg.solve(self.curvatures.sum(0), weighted)

    @property
    def federation(self) -> ff.Federation:
        nothing = torch.zeros(1)
        return ff.Federation.from_tensors(
            [
                (torch.cat([curvature, minimum[:, None]], 1)[None], nothing)
                for curvature, minimum in zip(self.curvatures, self.minima, strict=True)
            ]
        )

    def train(self, algorithm: ff.Algorithm, **settings: Any) -> ff.Run:
        """A training with full-batch gradients from a point away from the optimum."""
        defaults: dict[str, Any] = {"rounds": 35, "local_steps": 5, "lr": 0.2, "workers": 1}
        start = torch.full_like(self.minima[0], 3.0)
        return train(
            Point(start),
            self.federation,
            algorithm,
            loss=mean_output,
            batch_size=None,
            **{**defaults, **settings},
        )

    def error(self, algorithm: ff.Algorithm, **settings: Any) -> float:
        """How far the final model is from the optimum."""
        found = self.train(algorithm, **settings).server["model"]
        return float(torch.linalg.vector_norm(found - self.optimum))


def mean_over_clients(
    result: ff.Run, name: str, clients: int, weights: Sequence[float] | None = None
) -> Tensor:
    """The mean of a client vector over the whole population; who never took part has zero."""
    shares = [1.0] * clients if weights is None else list(weights)
    total = torch.zeros_like(result.server["model"])
    for client in result.clients.clients():
        total += shares[client] * named(result.clients.read(client, result.server["model"]))[name]
    return total / sum(shares)


class Shared(Sequence[Any]):
    """A list that all copies of a module append to, in whatever process they are."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile(mode="a+b", buffering=0)  # noqa: SIM115

    def __deepcopy__(self, memo: object) -> Shared:
        return self

    def append(self, item: Any) -> None:
        # One write to the end of a file is never mixed with another.
        self._file.write(pickle.dumps(item))

    def _items(self) -> list[Any]:
        size = os.fstat(self._file.fileno()).st_size
        written, items = io.BytesIO(os.pread(self._file.fileno(), size, 0)), []
        while written.tell() < size:
            items.append(pickle.load(written))
        return items

    def __len__(self) -> int:
        return len(self._items())

    def __getitem__(self, place: Any) -> Any:
        return self._items()[place]
