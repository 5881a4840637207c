"""Which theorems are about a composition, by its parts, at measured constants."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from flatfed.core.algorithm import Algorithm
from flatfed.core.part import SLOTS, Gradient, Server
from flatfed.parts import (
    AlongMomentum,
    Average,
    GlobalMomentum,
    HybridProximal,
    LinearDecay,
    Momentum,
    MomentumControlVariate,
    Quantize,
    SharpnessAware,
    SyntheticMix,
)
from flatfed.theory import fednsam, fedsagd, fedsam, fedswa, fedsynsam
from flatfed.theory.statement import Setting, Statement

LARGEST = 1e30
"""Powers of larger constants are not finite."""


@dataclass(frozen=True)
class Constants:
    """What theorems need to know of a problem, as estimated: lower than the suprema that they mean."""

    smoothness: float
    """L, the largest curvature of a client's loss."""
    batch_deviation: float
    """σ_b, of minibatch gradients."""
    unit_deviation: float
    """σ_u, of minibatch gradients scaled to length 1."""
    sample_deviation: float
    """σ_1, of single samples' gradients."""
    largest_sample_gradient: float
    """Z, over single samples."""
    largest_client_gradient: float
    """Z, over clients."""
    largest_spread: float
    """σ_g, over clients."""
    root_mean_square_spread: float
    mean_spread: float
    gradient: float
    """‖∇F(x)‖."""
    first_loss: float
    """F(x_0), which is at least F(x_0) − inf F."""
    samples: float
    """Of a client."""
    misalignment: float = 2.0
    """1 − cos θ of the ascent directions to the global gradient."""


class Applied(NamedTuple):
    """A statement about a composition, whose paper it is from, and what it is about."""

    paper: str
    statement: Statement
    measure: str = ""
    """The measurement that belongs to it, such as "drift", if there is one."""


def applicable(algorithm: Algorithm, s: Setting, constants: Constants) -> list[Applied]:
    """The statements about an algorithm; `s` has the sizes and step sizes, constants have the rest.

    None are made with constants that are not finite, as those of a diverged model.
    """
    if not all(0 <= value < LARGEST for value in vars(constants).values()) or constants.smoothness == 0:
        return []
    server_rate = algorithm.server.rate if isinstance(algorithm.server, Average | Momentum) else 1.0
    radius = getattr(algorithm.gradient, "radius", 0.0)
    s = replace(s, L=constants.smoothness, F0=constants.first_loss, eta_g=server_rate, rho=radius)
    if type(algorithm.optimizer) is not SLOTS["optimizer"]:
        return []
    return [
        *_perturbed(algorithm, s, constants),
        *_with_look_ahead(algorithm, s, constants),
        *_mixed(algorithm, s, constants),
        *_averaged(algorithm, s, constants),
        *_hybrid(algorithm, s, constants),
    ]


def _is_mean(server: Server) -> bool:
    return type(server) is Server or (isinstance(server, Average) and server.units == "model")


def _unit_noise(s: Setting, constants: Constants) -> Setting:
    return replace(s, noise=constants.unit_deviation**2, spread=constants.largest_spread**2)


def _batch_noise(s: Setting, constants: Constants) -> Setting:
    return replace(s, noise=constants.batch_deviation**2, spread=constants.largest_spread**2)


def _perturbed(algorithm: Algorithm, s: Setting, constants: Constants) -> Iterator[Applied]:
    rule, corrections = algorithm.gradient, algorithm.corrections
    if not isinstance(rule, SharpnessAware) or rule.mix < 1 or not rule.normalize:
        return
    if not _is_mean(algorithm.server):
        return
    s, gradient = _unit_noise(s, constants), constants.gradient**2
    if not corrections:
        yield Applied("fedsam", fedsam.perturbation_difference(s), "perturbation difference")
        yield Applied("fedsam", fedsam.drift(s, gradient), "drift")
        yield Applied("fedsam", fedsam.convergence(s), "squared gradient")
        yield Applied("fedsam", fedsam.order(s))
        yield Applied("fednsam", fednsam.flatness_distance(s, gradient), "flatness distance")
        yield Applied("fednsam", fednsam.flatness_order(s))
    elif (
        len(corrections) == 1
        and isinstance(momentum := corrections[0], GlobalMomentum)
        and not momentum.memory
    ):
        fresh = momentum.gradient_weight
        yield Applied("fedsam", fedsam.momentum_drift(s, fresh, gradient), "drift")
        yield Applied("fedsam", fedsam.momentum_convergence(s, fresh), "squared gradient")
        yield Applied("fedsam", fedsam.momentum_order(s, fresh))


def _with_look_ahead(algorithm: Algorithm, s: Setting, constants: Constants) -> Iterator[Applied]:
    server = algorithm.server
    if not isinstance(algorithm.gradient, AlongMomentum) or algorithm.corrections:
        return
    if not isinstance(server, Momentum):
        return
    s, gradient = _batch_noise(s, constants), constants.gradient**2
    yield Applied("fednsam", fednsam.drift(s, gradient), "drift")
    yield Applied("fednsam", fednsam.nesterov_flatness_distance(s, gradient), "flatness distance")
    yield Applied("fednsam", fednsam.convergence(s, server.decay), "squared gradient")
    yield Applied("fednsam", fednsam.order(s, server.decay))
    yield Applied("fednsam", fednsam.nesterov_flatness_order(s, server.decay))


def _mixed(algorithm: Algorithm, s: Setting, constants: Constants) -> Iterator[Applied]:
    if not isinstance(algorithm.gradient, SyntheticMix) or algorithm.corrections:
        return
    q, compress = 0.0, algorithm.compress
    if algorithm.compressed:
        if not isinstance(compress, Quantize) or compress.norm != "l2" or compress.bucket is None:
            return
        q = fedsynsam.quantization_variance(compress.bucket, compress.magnitudes)
    s = _unit_noise(s, constants)
    gamma = fedsynsam.perturbation_disagreement(s, 1 - constants.misalignment)
    yield Applied("fedsynsam", gamma)
    yield Applied("fedsynsam", fedsynsam.convergence(s, gamma.value, q), "squared gradient")
    yield Applied("fedsynsam", fedsynsam.order(s, gamma.value, q))


def _averaged(algorithm: Algorithm, s: Setting, constants: Constants) -> Iterator[Applied]:
    """Gradients at the local model, with or without momentum control variates."""
    corrections, falling = algorithm.corrections, isinstance(algorithm.schedule, LinearDecay)
    controlled = len(corrections) == 1 and isinstance(corrections[0], MomentumControlVariate)
    plain = type(algorithm.gradient) is Gradient and _is_mean(algorithm.server)
    if not plain or (corrections and not controlled):
        return
    per_sample = replace(s, noise=constants.sample_deviation**2, spread=constants.mean_spread**2)
    losses = fedswa.Losses(constants.largest_sample_gradient, constants.samples)
    length = math.fsum(algorithm.schedule.rates(s.eta, s.K))
    drift = fedswa.drift(
        replace(s, noise=constants.batch_deviation**2, spread=constants.largest_spread**2),
        length,
        constants.gradient,
        controlled,
        constants.largest_client_gradient,
    )
    yield Applied("fedswa", drift, "distance")
    if falling or controlled:
        yield Applied("fedswa", fedswa.generalization(per_sample, losses, controlled))
    if not controlled:
        gradients = [constants.gradient] * s.T
        yield Applied(
            "fedswa", fedswa.sample_stability([length] * s.T, gradients, per_sample, losses, s.eta_g)
        )
    batch = replace(s, noise=constants.batch_deviation**2, spread=constants.root_mean_square_spread**2)
    if controlled:
        yield Applied("fedswa", fedswa.explicit_convergence(batch), "squared gradient")
        yield Applied("fedswa", fedswa.convergence_order(batch))
    elif falling:
        yield Applied("fedswa", fedswa.averaging_order(batch))


def _hybrid(algorithm: Algorithm, s: Setting, constants: Constants) -> Iterator[Applied]:
    corrections = algorithm.corrections
    momentum = next((part for part in corrections if isinstance(part, GlobalMomentum)), None)
    hybrid = next((part for part in corrections if isinstance(part, HybridProximal)), None)
    if momentum is None or hybrid is None or len(corrections) > 2 or type(algorithm.gradient) is not Gradient:
        return
    s = _batch_noise(s, constants)
    yield Applied(
        "fedsagd", fedsagd.convergence(s, momentum.momentum_weight, hybrid.weight), "squared gradient"
    )
    yield Applied("fedsagd", fedsagd.order(s))


def averaging_row(
    algorithm: Algorithm, s: Setting, losses: fedswa.Losses
) -> tuple[Statement, Statement] | None:
    """The FedSWA paper's Table 1 about these parts: generalisation and optimisation; None if it has no such
    row.

    `spread` in s is σ_g², which both sides take for one number.
    """
    corrections = algorithm.corrections
    first = corrections[0] if len(corrections) == 1 else None
    if isinstance(algorithm.gradient, SharpnessAware):
        generalization = fedswa.generalization_order(s, losses, factor=fedswa.constant_growth(s))
        if not corrections:
            return generalization, fedswa.perturbed_order(s, losses.Z)
        if isinstance(first, GlobalMomentum) and first.memory == 0:
            order = fedsam.momentum_order(s, first.gradient_weight)
            return generalization, replace(order, name="Table 1, optimisation")
        return None
    if isinstance(first, MomentumControlVariate):
        order = fedswa.convergence_order(s)
        as_printed = replace(order, name="Table 1, optimisation", value=order.terms["Table 1"])
        return fedswa.generalization_order(s, losses, controlled=True), as_printed
    if not corrections and isinstance(algorithm.schedule, LinearDecay):
        return fedswa.generalization_order(s, losses), fedswa.averaging_order(s)
    return None
