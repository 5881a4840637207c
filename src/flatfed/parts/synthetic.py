"""Samples that the server makes up from its own models, by matching their trajectory, and their uses.

Inputs are as the model sees them: normalised floats. Sample j has the class j modulo the number of classes,
so any run of consecutive samples is balanced.
"""

import math
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from pydantic.dataclasses import dataclass
from torch import Tensor

from flatfed.core import random
from flatfed.core.context import Carry, ClientContext, MergeContext, Oracle, ServerContext, Stepped, TaskStep
from flatfed.core.errors import DivergedError, FlatfedError, FlatfedWarning, first_line
from flatfed.core.flat import all_finite, divisor
from flatfed.core.part import Server, ServerTask, Synthetic, plus_shift
from flatfed.core.state import Dimensions, Reads, Size, State, Vector, Vectors
from flatfed.core.types import Count, Decay, NonNegative, Positive, Share
from flatfed.parts import ranges
from flatfed.parts.augment import augmented
from flatfed.parts.perturb import PerturbedGradient

FIRST_DECAY, SECOND_DECAY, STABILITY = 0.9, 0.999, 1e-8
"""Adam's usual constants."""
SMALLEST_STEP = 1e-6
RECENT = 20
"""Iterations over which the recorded matching loss is a mean."""
LARGEST_FIRST_LOSS = 1.1
"""How far the first samples may lead astray: 1 is where training began."""
WINDOWS = 4
"""On how many stretches of the trajectory a first inner step size is tried."""
LITTLE_LEARNT = 0.95
"""A matching loss from which a run says that the samples stand for little."""


@dataclass(frozen=True)
class TrajectoryMatching(Synthetic, ServerTask):
    """Samples on which training from x_r leads to x_{r+span}, for the first `models` global models.

    Once the last of them is known, `iterations` times: θ_0 = x_r for a random r; `steps` times
    θ ← θ − a ∇ℓ(θ; samples); then a step down the gradient of L = ‖θ − x_{r+span}‖²/‖θ_0 − x_{r+span}‖²
    for the samples and for a. One such step stands for a round, so a starts at Σ η_k unless `inner_rate` is
    given; halved until the first samples have a mean L of at most 1.1, for a longer step leads away, and
    from there nothing is learnt.

    `average_targets` matches the mean of at least two random models of the span; `soft_labels` also learns
    the labels; `initial` is an .npz file with `inputs` and `targets` (0, 1, …, 0, 1, …) to start from in
    place of noise.
    """

    models: Count = 32
    samples_per_class: Count = 20
    iterations: Count = 200
    steps: Count = 3
    span: Count | None = None
    sample_rate: NonNegative = 0.05
    inner_rate: Positive | None = None
    inner_rate_rate: NonNegative = 1e-5
    optimizer: Literal["adam", "sgd"] = "adam"
    momentum: Decay = 0.0
    inner_batch: Count | None = None
    normalise: bool = True
    soft_labels: bool = False
    average_targets: bool = False
    augment: bool = False
    initial: str | None = None

    needs_float_inputs = True
    needs_classes = True

    def __post_init__(self) -> None:
        if self.models <= self.reach:
            raise FlatfedError(
                f"models = {self.models}: matching over {self.reach} rounds needs at least {self.reach + 1}; "
                "use more models or a smaller span"
            )

    @property
    def reach(self) -> int:
        return self.span or self.steps

    @property
    def server_vectors(self) -> tuple[Vector, ...]:
        learned = self._learned
        labels = self._per_sample("synthetic_labels", "one")
        return (
            Vector("trajectory", count=self.models),
            *learned,
            *(() if self.soft_labels else (labels,)),
            *(
                replace(vector, name=f"{vector.name}_{moment}", sent_once=False)
                for vector in learned
                for moment in (("first", "second") if self.optimizer == "adam" else ("first",))
            ),
            # Below zero: not yet.
            Vector("matching_losses", "one", initial=-1.0, count=self.iterations),
            Vector("synthetic_ready", "one", sent_once=True),
        )

    @property
    def _learned(self) -> tuple[Vector, ...]:
        labels = self._per_sample("synthetic_labels", "classes")
        return (
            self._per_sample("synthetic_inputs", "inputs"),
            *((labels,) if self.soft_labels else ()),
            Vector("synthetic_step", "one"),
        )

    def _per_sample(self, name: str, size: Size) -> Vector:
        return Vector(name, size, count=self.samples_per_class, per_class=True, sent_once=True)

    @property
    def first_round(self) -> int:
        return self.models

    first_round_hint = ", or for fewer models"

    def before_round(self, server: State, context: ServerContext) -> Iterator[TaskStep]:
        if context.round >= self.models:
            return
        trajectory = server["trajectory"].clone().view(self.models, -1)
        trajectory[context.round] = server["model"]
        state = {**server, "trajectory": trajectory.flatten()}
        if context.round == 0:
            self._try(state, context)
        if context.round < self.models - 1:
            yield TaskStep({"trajectory": state["trajectory"]})
            return
        done = int((server["matching_losses"] >= 0).sum())
        if done == 0:
            state |= self._first(state, context)
            if self.inner_rate is None:
                state |= self._bearable_step(state, context)
        for iteration in range(done, self.iterations):
            state |= self._iteration(state, iteration, context)
            kept = {vector.name: state[vector.name] for vector in self.server_vectors}
            yield TaskStep(kept, _recent(state, iteration + 1), iteration + 1, self.iterations)
        ready = {"synthetic_ready": torch.ones_like(server["synthetic_ready"])}
        # The record once more, for a run that is resumed when only this is left.
        record = _recent(state, self.iterations)
        learns = self.normalise and self.sample_rate > 0
        if learns and record["matching_loss"] >= LITTLE_LEARNT:
            warnings.warn(
                f"synthetic: the matching loss is {record['matching_loss']:.2f} after {self.iterations} "
                "iterations, where 1 is nothing learnt; lower inner_rate (now "
                f"{float(state['synthetic_step']):g}) or change sample_rate (now {self.sample_rate:g})",
                FlatfedWarning,
                stacklevel=2,
            )
        yield TaskStep(ready, record, self.iterations, self.iterations, publishes=True)

    def _try(self, server: State, context: ServerContext) -> None:
        """One matching step before the first round: what cannot work must not show after the last."""
        generator = random.torch_generator(context.seed, "distillation", 0)
        first = self._first(server, context)
        try:
            with torch.enable_grad():
                inputs = first["synthetic_inputs"].requires_grad_()
                reached = self._trained(server["model"], {**server, **first}, context, generator)
                torch.autograd.grad(reached.sum(), inputs)
        except Exception as error:
            # Whatever a user's model or loss raises.
            labels = "probabilities" if self.soft_labels else "class labels"
            raise FlatfedError(
                f"synthetic: the loss on made-up inputs and {labels} cannot be differentiated twice "
                f"({first_line(error)}); use another model or loss"
            ) from error

    def _first(self, server: State, context: ServerContext) -> Vectors:
        """Noise or the user's samples, their labels, and the first inner step size."""
        dimensions, like = context.dimensions, server["synthetic_inputs"]
        classes = torch.arange(self.samples_per_class * dimensions.classes) % dimensions.classes
        if self.initial is None:
            generator = random.torch_generator(context.seed, "synthetic noise")
            inputs = torch.randn(like.shape, generator=generator)
        else:
            inputs = _user_samples(Path(self.initial), classes, dimensions).flatten()
        # Soft labels are logits; a margin of a few units is a confident, still movable start.
        labels = 5.0 * F.one_hot(classes).flatten() if self.soft_labels else classes
        rate = context.total_rate if self.inner_rate is None else self.inner_rate
        return {
            "synthetic_inputs": inputs.to(like),
            "synthetic_labels": labels.to(like),
            "synthetic_step": like.new_tensor([rate]),
        }

    def _bearable_step(self, server: State, context: ServerContext) -> Vectors:
        """The first inner step size, halved until the first samples do not lead far away."""
        generator = random.torch_generator(context.seed, "first inner step")
        trajectory, rate = server["trajectory"].view(self.models, -1), server["synthetic_step"]
        last = self.models - self.reach - 1
        starts = sorted({round(last * place / (WINDOWS - 1)) for place in range(WINDOWS)})
        while rate > SMALLEST_STEP:
            losses = []
            for start in starts:
                origin, target = trajectory[start], trajectory[start + self.reach]
                with torch.enable_grad():
                    tried = {**server, "synthetic_step": rate}
                    reached = self._trained(origin, tried, context, generator).detach()
                losses.append(_matching_loss(reached, origin, target, normalise=True))
            # Not a number is no small one.
            if float(torch.stack(losses).mean()) <= LARGEST_FIRST_LOSS:
                break
            rate = rate / 2
        return {"synthetic_step": rate.clamp(min=SMALLEST_STEP)}

    def _iteration(self, server: State, iteration: int, context: ServerContext) -> Vectors:
        generator = random.torch_generator(context.seed, "distillation", iteration)
        trajectory = server["trajectory"].view(self.models, -1)
        first = int(torch.randint(self.models - self.reach, (), generator=generator))
        target = self._target(trajectory[first + 1 : first + self.reach + 1], generator)
        names = [vector.name for vector in self._learned]
        with torch.enable_grad():
            learned = {name: server[name].detach().requires_grad_() for name in names}
            reached = self._trained(trajectory[first], {**server, **learned}, context, generator)
            loss = _matching_loss(reached, trajectory[first], target, self.normalise)
            slopes = torch.autograd.grad(loss, list(learned.values()))
        losses = server["matching_losses"].clone()
        losses[iteration] = loss.detach()
        changed = {"matching_losses": losses}
        for name, slope in zip(names, slopes, strict=True):
            rate = self.inner_rate_rate if name == "synthetic_step" else self.sample_rate
            changed |= self._descended(name, server, slope, rate, iteration + 1)
        changed["synthetic_step"] = changed["synthetic_step"].clamp(min=SMALLEST_STEP)
        if not all(all_finite(value) for value in changed.values()):
            raise DivergedError(
                f"synthetic: iteration {iteration + 1} of the distillation is not finite (matching loss "
                f"{float(losses[iteration]):g}); lower sample_rate (now {self.sample_rate:g}) or inner_rate "
                f"(now {float(server['synthetic_step']):g})"
            )
        return changed

    def _target(self, window: Tensor, generator: torch.Generator) -> Tensor:
        """The last model of the window [span, P], or the mean of at least two of it."""
        if not self.average_targets or len(window) == 1:
            return window[-1]
        several = int(torch.randint(2, len(window) + 1, (), generator=generator))
        return window[torch.randperm(len(window), generator=generator)[:several].to(window.device)].mean(0)

    def _trained(
        self, start: Tensor, server: State, context: ServerContext, generator: torch.Generator
    ) -> Tensor:
        """θ after the inner steps, as a differentiable function of what is learned."""
        inputs, targets = samples_of(server, context.dimensions.input_shape)
        point = start.detach().requires_grad_()
        order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
        for step in range(self.steps):
            batch, labels = inputs, targets
            if self.inner_batch is not None and self.inner_batch < len(inputs):
                chosen = order[_window(step, self.inner_batch, order)]
                batch, labels = inputs[chosen], targets[chosen]
            if self.augment:
                batch = augmented(batch, generator)
            loss = context.loss(point, batch, labels)
            (slope,) = torch.autograd.grad(loss, point, create_graph=True)
            point = point - server["synthetic_step"] * slope
        return point

    def _descended(self, name: str, server: State, slope: Tensor, rate: float, count: int) -> Vectors:
        """One step of the optimizer and its moments."""
        if self.optimizer == "sgd":
            first = self.momentum * server[f"{name}_first"] + slope
            return {name: server[name] - rate * first, f"{name}_first": first}
        first = torch.lerp(slope, server[f"{name}_first"], FIRST_DECAY)
        second = torch.lerp(slope.square(), server[f"{name}_second"], SECOND_DECAY)
        size = (second / (1 - SECOND_DECAY**count)).sqrt() + STABILITY
        step = rate * first / (1 - FIRST_DECAY**count) / size
        return {name: server[name] - step, f"{name}_first": first, f"{name}_second": second}


def _matching_loss(reached: Tensor, origin: Tensor, target: Tensor, normalise: bool) -> Tensor:
    loss = (reached - target).square().sum()
    return loss / (origin - target).square().sum().clamp(min=1e-30) if normalise else loss


def _samples_read(broadcast: bool) -> tuple[Reads, ...]:
    names = ("synthetic_inputs", "synthetic_labels", "synthetic_ready")
    return tuple(Reads(TrajectoryMatching, name, broadcast) for name in names)


@dataclass(frozen=True)
class SyntheticMix(PerturbedGradient):
    """g(y + ε) with ε = ρ u(β g(y) + (1 − β) ∇ℓ(y; synthetic batch)); until there are samples, β = 1.

    `descent_mix` is the share of ∇ℓ(y + ε; the same batch) in the descent. Each step takes the next `batch`
    synthetic samples, in a circle that goes on from round to round.
    """

    radius: ranges.Radius
    local_weight: Share = 0.9
    batch: Count = 128
    descent_mix: Share = 0.0

    @property
    def evaluations(self) -> int:
        return 2 + (self.local_weight < 1) + (self.descent_mix > 0)

    @property
    def uses_samples(self) -> bool:
        return self.local_weight < 1 or self.descent_mix > 0

    @property
    def reads(self) -> tuple[Reads, ...]:
        return _samples_read(broadcast=True) if self.uses_samples else ()

    def begin(self, context: ClientContext) -> Carry:
        if not self.uses_samples or not bool(context.received["synthetic_ready"][0]):
            return {}
        return {"step": torch.tensor(context.round * len(context.rates))}

    def gradient(self, point: Tensor, oracle: Oracle, context: ClientContext, carry: Carry) -> Stepped:
        ascent, radius = oracle(point), self.radius * context.radius_factor
        if "step" not in carry:
            return oracle(torch.addcdiv(point, ascent, divisor(ascent), value=radius)), carry
        inputs, targets = samples_of(context.received, context.input_shape)
        chosen = _window(int(carry["step"]), min(self.batch, len(inputs)), inputs)
        inputs, targets = inputs[chosen], targets[chosen]
        if self.local_weight < 1:
            ascent = torch.lerp(oracle.on_samples(point, inputs, targets), ascent, self.local_weight)
        there = torch.addcdiv(point, ascent, divisor(ascent), value=radius)
        descent = oracle(there)
        if self.descent_mix > 0:
            descent = torch.lerp(descent, oracle.on_samples(there, inputs, targets), self.descent_mix)
        return descent, {"step": carry["step"] + 1}


@dataclass(frozen=True)
class FineTune(Server, ServerTask):
    """x + Δ̄, then `epochs` passes of Adam over the synthetic samples; until there are any, x + Δ̄ alone.

    With `aggregate=False` the clients' displacement is ignored once there are samples.
    """

    epochs: Count = 20
    rate: ranges.FineTuningRate = 1e-4
    batch: Count = 256
    augment: bool = True
    aggregate: bool = True

    reads = _samples_read(broadcast=False)

    def update(self, server: State, mean: State, shift: Tensor | None, context: MergeContext) -> Vectors:
        ignored = not self.aggregate and bool(server["synthetic_ready"][0])
        model = server["model"] if ignored else server["model"] + mean["displacement"]
        return {"model": plus_shift(model, shift)}

    def after_round(self, server: State, context: ServerContext) -> Vectors:
        if not bool(server["synthetic_ready"][0]):
            return {}
        inputs, targets = samples_of(server, context.dimensions.input_shape)
        generator = random.torch_generator(context.seed, "fine tuning", context.round)
        point = server["model"].clone().requires_grad_()
        optimizer = torch.optim.Adam([point], lr=self.rate)
        with torch.enable_grad():
            for _ in range(self.epochs):
                order = torch.randperm(len(inputs), generator=generator).to(inputs.device)
                for chosen in order.split(self.batch):
                    batch = augmented(inputs[chosen], generator) if self.augment else inputs[chosen]
                    optimizer.zero_grad()
                    context.loss(point, batch, targets[chosen]).backward()
                    optimizer.step()
        return {"model": point.detach()}


def samples_of(vectors: Mapping[str, Tensor], input_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Synthetic inputs [n, …] and labels [n], or probabilities [n, classes] where these were learned."""
    inputs = vectors["synthetic_inputs"].view(-1, *input_shape)
    labels = vectors["synthetic_labels"]
    hard = len(labels) == len(inputs)
    return inputs, labels.long() if hard else labels.view(len(inputs), -1).softmax(1)


def _recent(server: State, done: int) -> dict[str, float]:
    """The mean matching loss of the last iterations."""
    return {"matching_loss": float(server["matching_losses"][max(0, done - RECENT) : done].mean())}


def _window(step: int, size: int, samples: Tensor) -> Tensor:
    """The positions of the step's batch of the samples when batches follow each other in a circle."""
    return (step * size + torch.arange(size, device=samples.device)) % len(samples)


def _user_samples(path: Path, classes: Tensor, dimensions: Dimensions) -> Tensor:
    """The samples of an .npz file, which must fit in number, shape and order."""
    where = f"synthetic.initial = {str(path)!r}"
    expected = (len(classes), *dimensions.input_shape)
    most = 16 * math.prod(expected) + 2**16
    try:
        # A pipe would be waited for, and a small archive may hold a great deal.
        if path.exists() and not (path.is_file() and zipfile.is_zipfile(path)):
            raise ValueError("it is no archive")
        with np.load(path, allow_pickle=False) as stored:
            largest = max(member.file_size for member in stored.zip.infolist())
            if largest > most:
                raise ValueError(f"it holds {largest:,} bytes where at most {most:,} belong")
            inputs, targets = stored["inputs"], stored["targets"]
    except Exception as error:
        # A damaged or foreign file makes numpy raise errors of many kinds.
        reason = first_line(error)
        raise FlatfedError(f"{where}: cannot be read as .npz with inputs and targets ({reason})") from None
    floats = np.issubdtype(inputs.dtype, np.floating)
    if inputs.shape != expected or not floats or not np.isfinite(inputs).all():
        raise FlatfedError(
            f"{where}: its inputs are {list(inputs.shape)} {inputs.dtype}; give finite floats "
            f"{list(expected)}, normalised as the model sees them"
        )
    if not np.array_equal(targets, classes.numpy()):
        raise FlatfedError(f"{where}: its targets must run 0, 1, …, {dimensions.classes - 1}, 0, 1, …")
    return torch.from_numpy(np.asarray(inputs, np.float64))
